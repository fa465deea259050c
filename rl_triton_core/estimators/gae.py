"""Generalized Advantage Estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core.extending import FinalValues, Recurrence, Step, select, solve, with_fast_path


class GAEOutput(NamedTuple):
    """Results of `compute_gae`, each shaped like `rewards`."""

    advantages: torch.Tensor
    """A[t]."""
    returns: torch.Tensor
    """Value targets A[t] + V[t]; None if ``compute_returns=False``."""


def coefficients(step: Step) -> tuple[Any, Any]:
    """α = r + γ·NV − V,  β = γλ while the trajectory continues."""
    value, reward = step.inputs
    delta = reward + step.gamma * step.next_value - value
    return delta, select(step.continues, step.decay, 0)


def readout(step: Step, advantage: Any, after: Any) -> tuple[Any, ...]:
    """Advantage and value target A + V."""
    return advantage, advantage + step.inputs[0]


GAE = Recurrence(
    name="gae",
    inputs=("values", "rewards"),
    num_lookahead=1,
    outputs=("advantages", "returns"),
    coefficients=coefficients,
    readout=readout,
)


@with_fast_path
def compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
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
    compute_returns: bool = True,
    out: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    backend: str | None = None,
) -> GAEOutput:
    r"""Compute advantages and value targets of every step of a rollout.

        δ[t] = r[t] + γ·NV[t] − V[t]
        A[t] = δ[t] + γλ·A[t+1]      where the trajectory continues, else δ[t]
        returns[t] = A[t] + V[t]

    NV[t] is 0 where step t terminated, the bootstrap value where it was truncated or the rollout ends, V[t+1]
    elsewhere. λ = 0 is the one-step TD error; λ = 1 the Monte Carlo return minus the value.

    Args:
        rewards: Reward r of the transition t → t+1, [num_envs, num_steps], or [num_steps, num_envs] with
            ``time_dim=0``; float32, bfloat16, float16, or float64 (not on the triton backend). Any strides.
        values: Value estimates V(s_t), shaped like `rewards`, floating point.
        terminated: Nonzero where the transition ended in a terminal state, shaped like `rewards`; bool, integer, or
            floating point 0 and 1. None: nowhere. Where both flags are set, termination wins.
        truncated: The same where the episode was cut although its state has a future (a time limit).
        gamma: Discount γ: a finite number >= 0, or one per step, shaped like `rewards`, where 0 ends the trajectory.
        lambda_: λ, a number in [0, 1].
        bootstrap_values: V(s_{t+1}), before any reset, at truncated steps and at the rollout's end: one number,
            [num_envs] for the rollout's end alone (without `truncated`), shaped like `rewards` (read there only), or
            sparse `FinalValues`. It has no default: pass 0.0 to mean zero.
        next_values: V(s_{t+1}) of every step, before any reset, shaped like `rewards`; replaces `bootstrap_values`.
        mask: Flags, as `terminated`, of the steps that count; other cells are never read and yield 0. None: all count.
        mask_mode: ``"skip"``: as if the masked steps were deleted. ``"reset"``: a masked step ends the trajectory
            before it as a terminal state would.
        cu_seqlens: For packed rows, sequences of any lengths end to end: where each starts, and where the last ends,
            [num_sequences + 1], int32 or int64, rising from 0 to num_steps. Per-step tensors are then [num_steps], and
            [num_envs] is [num_sequences]. Each sequence is a rollout of its own. Bootstrap values per sequence may be
            [num_sequences, 1], those per step [1, num_steps], and have to be where the two numbers are equal.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.
        compute_returns: Whether to compute `returns` as well.
        out: Preallocated (advantages, returns), shaped like `rewards`, floating point, any strides, apart from every
            input; None in it is allocated.
        backend: ``"triton"``, ``"cpu"`` or ``"reference"``; None chooses by the tensors' device.

    Returns:
        GAEOutput(advantages, returns) in the unit of the rewards, float32 (float64 if an input is). If an input
        requires grad, so do they (and `out`, which a second call then refuses): differentiable with respect to every
        real-valued tensor. By a discount of 0 in `gamma`, which ends the trajectory, the gradient is 0.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape, device or value is wrong, or neither `bootstrap_values` nor `next_values` was given.
        BackendUnavailableError: The backend asked for cannot run here.

    Source:
        Schulman et al. 2016, equations 11 and 16, https://arxiv.org/abs/1506.02438

    Example:
        >>> rewards, values = torch.ones(1, 3), torch.zeros(1, 3)
        >>> compute_gae(rewards, values, gamma=1.0, lambda_=1.0, bootstrap_values=0.0).advantages
        tensor([[3., 2., 1.]])
    """
    results = solve(
        GAE,
        {"rewards": rewards, "values": values},
        check.check_layout("rewards", rewards, time_dim, cu_seqlens=cu_seqlens),
        terminated=terminated,
        truncated=truncated,
        gamma=gamma,
        lambda_=lambda_,
        bootstrap_values=bootstrap_values,
        next_values=next_values,
        mask=mask,
        mask_mode=mask_mode,
        wanted=(True, check.check_bool("compute_returns", compute_returns)),
        out=out,
        backend=backend,
    )
    return GAEOutput(*results)
