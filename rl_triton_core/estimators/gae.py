"""Generalized Advantage Estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_triton_core._internal import validation as check
from rl_triton_core._internal.fast_path import with_fast_path
from rl_triton_core._internal.primitives import select
from rl_triton_core._internal.recurrence import Recurrence, Step
from rl_triton_core._internal.solve import solve
from rl_triton_core.boundaries import FinalValues


class GAEOutput(NamedTuple):
    """Results of `compute_gae`, each shaped like `rewards`."""

    advantages: torch.Tensor | None
    returns: torch.Tensor | None


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
    r"""Advantages and value targets of every step of a rollout.

        δ[t] = r[t] + γ·NV[t] − V[t]
        A[t] = δ[t] + γλ·A[t+1]      where the trajectory continues, else δ[t]
        returns[t] = A[t] + V[t]

    NV[t] is 0 where step t terminated, the bootstrap value where it was truncated or the window ends, V[t+1] elsewhere.
    λ = 0 is the one-step TD error; λ = 1 the Monte Carlo return minus the value.

    Args:
        rewards: r, reward of the transition t → t+1. [num_envs, num_steps], or [num_steps, num_envs] with
            ``time_dim=0``; float32, bfloat16, float16, or float64 (CPU only). Any strides.
        values: V(s_t), shaped like `rewards`.
        terminated: Departure flags, shaped like `rewards`: the transition ended in a terminal state. bool, uint8 or
            floating point (nonzero is true). None: none did. Wins over `truncated` where both are set.
        truncated: Departure flags, likewise: the episode was cut although the state has a future (time limits).
        gamma: Discount γ per step, finite and >= 0; or one per step, shaped like `rewards`, 0 ending the trajectory.
        lambda_: λ in [0, 1].
        bootstrap_values: The true continuation V(s_{t+1}), before any reset, at every truncated step and at the
            window's end: shaped like `rewards` (read there only), [num_envs] for the window's end alone (without
            `truncated`), one float for all, or sparse `FinalValues`. Never assumed: pass 0.0 to mean zero.
        next_values: V(s_{t+1}) of every step, before any reset, shaped like `rewards`, instead of `bootstrap_values`.
        mask: Nonzero where a step is part of the trajectory, shaped like `rewards`. Masked cells are never read and
            yield 0.
        mask_mode: ``"skip"``, as if the masked steps were deleted; ``"reset"``, a masked step ends the trajectory
            before it as a terminal state would.
        cu_seqlens: For sequences of any lengths that lie end to end: where each starts, and the end of the last,
            [num_sequences + 1], int32 or int64, rising from 0 to num_steps. Every per-step tensor is then [num_steps],
            and [num_envs] is [num_sequences]. Each sequence is a window of its own. Where num_sequences equals
            num_steps, bootstrap values are taken to be per step.
        time_dim: The time dimension of all per-step tensors: -1 or 1, 0 or -2.
        compute_returns: Whether to compute `returns` too.
        out: Preallocated (advantages, returns), shaped like `rewards`, floating point, any strides; what is None is
            allocated. Must not overlap an input. Where an input requires grad `out` does afterwards, and is refused by
            a second call.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        GAEOutput(advantages, returns), float32 (float64 if an input is); returns is None unless computed.
        Differentiable with respect to every real-valued tensor if one of them requires grad. The gradient is 0 where a
        clip holds a ratio, and by a discount per step that is 0 and ends the trajectory.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, or no continuation was given for the window's end.
        BackendUnavailableError: The backend asked for cannot run here.

    Example:
        >>> rewards, values = torch.ones(1, 3), torch.zeros(1, 3)
        >>> compute_gae(rewards, values, gamma=1.0, lambda_=1.0, bootstrap_values=0.0).advantages
        tensor([[3., 2., 1.]])
    """
    layout = check.check_layout("rewards", rewards, time_dim, cu_seqlens=cu_seqlens)
    results = solve(
        GAE,
        {"rewards": rewards, "values": values},
        layout,
        terminated=terminated,
        truncated=truncated,
        gamma=gamma,
        lambda_=lambda_,
        bootstrap_values=bootstrap_values,
        next_values=next_values,
        mask=mask,
        mask_mode=mask_mode,
        wanted=(True, compute_returns),
        out=out,
        backend=backend,
    )
    return GAEOutput(*results)
