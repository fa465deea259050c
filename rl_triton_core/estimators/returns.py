"""TD(λ) returns and discounted returns (Sutton & Barto 2018, chapters 3 and 12)."""

from __future__ import annotations

from typing import Any

import torch

from rl_triton_core._internal import validation as check
from rl_triton_core._internal.fast_path import with_fast_path
from rl_triton_core._internal.linear import readout
from rl_triton_core._internal.primitives import select
from rl_triton_core._internal.recurrence import Recurrence, Step
from rl_triton_core._internal.solve import solve
from rl_triton_core.boundaries import FinalValues


def coefficients(step: Step) -> tuple[Any, Any]:
    """α = r + (γ − β)·NV,  β = γλ while the trajectory continues: γ·(1 − λ)·NV inside, all of γ·NV at a cut."""
    _, reward = step.inputs
    beta = select(step.continues, step.decay, 0)
    return reward + (step.gamma - beta) * step.next_value, beta


LAMBDA_RETURNS = Recurrence(
    name="lambda_returns",
    inputs=("values", "rewards"),
    num_lookahead=1,
    outputs=("returns",),
    coefficients=coefficients,
    readout=readout,
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
    r"""TD(λ) returns: the mixture of all n-step returns.

        G[t] = r[t] + γ·((1 − λ)·V[t+1] + λ·G[t+1])      inside
        G[t] = r[t] + γ·NV[t]                            where step t terminated (NV = 0) or was cut

    Equals the GAE advantages of the same λ plus V. λ = 0 is the one-step target; λ = 1 the discounted return.

    Args:
        rewards: r, as in `compute_gae`.
        values: V(s_t), shaped like `rewards`. Not with `next_values`.
        terminated: As in `compute_gae`.
        truncated: As in `compute_gae`.
        gamma: As in `compute_gae`.
        lambda_: λ in [0, 1].
        bootstrap_values: As in `compute_gae`, with `values`.
        next_values: V(s_{t+1}) of every step, before any reset, in the place of `values` and `bootstrap_values`.
        mask: As in `compute_gae`.
        mask_mode: As in `compute_gae`.
        cu_seqlens: As in `compute_gae`.
        time_dim: As in `compute_gae`.
        out: Preallocated result, as in `compute_gae`.
        backend: As in `compute_gae`.

    Returns:
        G, shaped like `rewards`; dtype and gradient as in `compute_gae`.

    Raises:
        TypeError: As in `compute_gae`.
        ValueError: As in `compute_gae`, or both or neither of `values` and `next_values` were given.
        BackendUnavailableError: As in `compute_gae`.

    Example:
        >>> rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 10.0]])
        >>> compute_lambda_returns(rewards, values, gamma=0.9, lambda_=0.5, bootstrap_values=20.0)
        tensor([[14.5000, 20.0000]])
    """
    if (values is None) == (next_values is None):
        given = "None" if values is None else "both it and next_values"
        raise ValueError(f"values: got {given}, expected either values (with bootstrap_values) or next_values")
    layout = check.check_layout("rewards", rewards, time_dim, cu_seqlens=cu_seqlens)
    return single(
        {"rewards": rewards} | ({} if values is None else {"values": values}),
        layout,
        terminated=terminated,
        truncated=truncated,
        gamma=gamma,
        lambda_=lambda_,
        bootstrap_values=bootstrap_values,
        next_values=next_values,
        mask=mask,
        mask_mode=mask_mode,
        out=out,
        backend=backend,
    )


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
    r"""Discounted returns, or rewards to go.

        G[t] = r[t] + γ·G[t+1]      inside
        G[t] = r[t] + γ·NV[t]       where step t terminated (NV = 0) or was cut

    Args:
        rewards: r, as in `compute_gae`.
        terminated: As in `compute_gae`.
        truncated: As in `compute_gae`.
        gamma: As in `compute_gae`.
        bootstrap_values: As in `compute_gae`; 0.0 for the plain sum of the rewards seen.
        mask: As in `compute_gae`.
        mask_mode: As in `compute_gae`.
        cu_seqlens: As in `compute_gae`.
        time_dim: As in `compute_gae`.
        out: Preallocated result, as in `compute_gae`.
        backend: As in `compute_gae`.

    Returns:
        G, shaped like `rewards`; dtype and gradient as in `compute_gae`.

    Raises:
        TypeError: As in `compute_gae`.
        ValueError: As in `compute_gae`.
        BackendUnavailableError: As in `compute_gae`.

    Example:
        >>> compute_discounted_returns(torch.tensor([[1.0, 1.0, 1.0]]), gamma=0.5, bootstrap_values=0.0)
        tensor([[1.7500, 1.5000, 1.0000]])
    """
    layout = check.check_layout("rewards", rewards, time_dim, cu_seqlens=cu_seqlens)
    return single(
        {"rewards": rewards},
        layout,
        terminated=terminated,
        truncated=truncated,
        gamma=gamma,
        bootstrap_values=bootstrap_values,
        mask=mask,
        mask_mode=mask_mode,
        out=out,
        backend=backend,
    )


def single(inputs: dict[str, Any], layout: check.RolloutLayout, *, out: Any, **arguments: Any) -> torch.Tensor:
    """`solve` for one result, which is given and returned by itself."""
    (result,) = solve(LAMBDA_RETURNS, inputs, layout, out=None if out is None else (out,), **arguments)
    assert result is not None
    return result
