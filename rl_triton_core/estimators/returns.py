"""TD(λ) returns and discounted returns (Sutton & Barto 2018, chapters 3 and 12)."""

from __future__ import annotations

from typing import Any

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core.extending import FinalValues, Recurrence, Step, read_state, select, solve, with_fast_path


def coefficients(step: Step) -> tuple[Any, Any]:
    """α = r + (γ − β)·NV,  β = γλ while the trajectory continues: γ·(1 − λ)·NV inside, γ·NV at its end."""
    _, reward = step.inputs
    beta = select(step.continues, step.decay, 0)
    return reward + (step.gamma - beta) * step.next_value, beta


LAMBDA_RETURNS = Recurrence(
    name="lambda_returns",
    inputs=("values", "rewards"),
    num_lookahead=1,
    outputs=("returns",),
    coefficients=coefficients,
    readout=read_state,
)


@with_fast_path
def compute_lambda_returns(
    rewards: torch.Tensor,
    values: torch.Tensor | None = None,
    terminated: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    *,
    gamma: float | torch.Tensor = 0.99,
    lambda_: float = 0.95,
    bootstrap_values: float | torch.Tensor | FinalValues | None = None,
    next_values: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    mask_mode: str = "skip",
    cu_seqlens: torch.Tensor | None = None,
    time_dim: int = -1,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    r"""Compute TD(λ) returns, the mixture of all n-step returns.

        G[t] = r[t] + γ·((1 − λ)·V[t+1] + λ·G[t+1])      inside
        G[t] = r[t] + γ·NV[t]                            where step t terminated (NV = 0), was truncated, or the
                                                         rollout ends

    Equals the GAE advantages of the same λ plus V. λ = 0 is the one-step target; λ = 1 the discounted return.

    Args:
        rewards: Reward r of the transition t → t+1, as of `compute_gae`.
        values: Value estimates V(s_t), shaped like `rewards`, floating point. Not together with `next_values`.
        terminated: Flags of steps that ended in a terminal state, as of `compute_gae`.
        truncated: Flags of steps whose episode was cut, as of `compute_gae`.
        gamma: Discount γ: a finite number >= 0, or one per step, shaped like `rewards`, where 0 ends the trajectory.
        lambda_: λ, a number in [0, 1].
        bootstrap_values: With `values`: V(s_{t+1}) at truncated steps and at the end, as of `compute_gae`.
        next_values: V(s_{t+1}) of every step, before any reset, shaped like `rewards`; replaces `values` and
            `bootstrap_values`.
        mask: Flags of the steps that count, as of `compute_gae`.
        mask_mode: ``"skip"`` or ``"reset"``, as of `compute_gae`.
        cu_seqlens: For packed rows: where sequences start and end, as of `compute_gae`.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.
        out: Preallocated result, shaped like `rewards`, floating point, any strides, apart from every input.
        backend: ``"triton"``, ``"cpu"`` or ``"reference"``; None chooses by the tensors' device.

    Returns:
        G, shaped like `rewards`, otherwise as of `compute_gae`.

    Raises:
        ValueError: Both or neither of `values` and `next_values` were given; other errors are those of `compute_gae`.

    Source:
        Sutton & Barto 2018, section 12.1, http://incompleteideas.net/book/the-book-2nd.html

    Example:
        >>> rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 10.0]])
        >>> compute_lambda_returns(rewards, values, gamma=0.9, lambda_=0.5, bootstrap_values=20.0)
        tensor([[14.5000, 20.0000]])
    """
    if (values is None) == (next_values is None):
        given = "None" if values is None else "both it and next_values"
        raise ValueError(f"values: got {given}, expected either values (with bootstrap_values) or next_values")
    streams = {"terminated": terminated, "truncated": truncated, "next_values": next_values, "mask": mask}
    numbers = {"gamma": gamma, "lambda_": lambda_, "bootstrap_values": bootstrap_values, "mask_mode": mask_mode}
    return solve_returns(rewards, values, time_dim, cu_seqlens, out, backend=backend, **streams, **numbers)


@with_fast_path
def compute_discounted_returns(
    rewards: torch.Tensor,
    terminated: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    *,
    gamma: float | torch.Tensor = 0.99,
    bootstrap_values: float | torch.Tensor | FinalValues | None = None,
    mask: torch.Tensor | None = None,
    mask_mode: str = "skip",
    cu_seqlens: torch.Tensor | None = None,
    time_dim: int = -1,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    r"""Compute discounted returns, or rewards to go.

        G[t] = r[t] + γ·G[t+1]      inside
        G[t] = r[t] + γ·NV[t]       where step t terminated (NV = 0), was truncated, or the rollout ends

    Args:
        rewards: Reward r of the transition t → t+1, as of `compute_gae`.
        terminated: Flags of steps that ended in a terminal state, as of `compute_gae`.
        truncated: Flags of steps whose episode was cut, as of `compute_gae`.
        gamma: Discount γ: a finite number >= 0, or one per step, shaped like `rewards`, where 0 ends the trajectory.
        bootstrap_values: As of `compute_gae`; 0.0 for the plain sum of the rewards seen.
        mask: Flags of the steps that count, as of `compute_gae`.
        mask_mode: ``"skip"`` or ``"reset"``, as of `compute_gae`.
        cu_seqlens: For packed rows: where sequences start and end, as of `compute_gae`.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.
        out: Preallocated result, shaped like `rewards`, floating point, any strides, apart from every input.
        backend: ``"triton"``, ``"cpu"`` or ``"reference"``; None chooses by the tensors' device.

    Returns:
        G, shaped like `rewards`, otherwise as of `compute_gae`.

    Raises:
        ValueError: `bootstrap_values` are missing; other errors are those of `compute_gae`.

    Source:
        Sutton & Barto 2018, section 3.3, http://incompleteideas.net/book/the-book-2nd.html

    Example:
        >>> compute_discounted_returns(torch.tensor([[1.0, 1.0, 1.0]]), gamma=0.5, bootstrap_values=0.0)
        tensor([[1.7500, 1.5000, 1.0000]])
    """
    streams = {"terminated": terminated, "truncated": truncated, "mask": mask}
    numbers = {"gamma": gamma, "bootstrap_values": bootstrap_values, "mask_mode": mask_mode}
    return solve_returns(rewards, None, time_dim, cu_seqlens, out, backend=backend, **streams, **numbers)


def solve_returns(
    rewards: torch.Tensor, values: torch.Tensor | None, time_dim: int, cu_seqlens: Any, out: Any, **options: Any
) -> torch.Tensor:
    """What `solve` returns of the only output; options are as it takes them."""
    layout = check.check_layout("rewards", rewards, time_dim, cu_seqlens=cu_seqlens)
    inputs = {"rewards": rewards} | ({} if values is None else {"values": values})
    return solve(LAMBDA_RETURNS, inputs, layout, out=None if out is None else (out,), **options)[0]  # type: ignore[no-any-return]
