"""UPGO, the upgoing policy update of AlphaStar, see `compute_upgo`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_triton_core.extending import (
    FinalValues,
    Recurrence,
    Step,
    check_layout,
    select,
    solve,
    with_fast_path,
)


class UPGOOutput(NamedTuple):
    """Results of `compute_upgo`, each shaped like `rewards`."""

    advantages: torch.Tensor
    """A[t]."""
    returns: torch.Tensor
    """A[t] + V[t]."""


def coefficients(step: Step) -> tuple[Any, Any]:
    """α = δ,  β = γ while the trajectory continues; both 0 where δ < 0."""
    value, reward = step.inputs
    delta = reward + step.gamma * step.next_value - value
    worse = delta < 0
    ends = worse | (step.continues == 0)
    return select(worse, 0, delta), select(ends, 0, step.gamma)


def readout(step: Step, passed: Any, after: Any) -> tuple[Any, ...]:
    """Advantage A = δ + γ·P_after and return A + V."""
    value, reward = step.inputs
    advantage = reward + step.gamma * (step.next_value + after) - value
    return advantage, advantage + value


UPGO = Recurrence(
    name="upgo",
    inputs=("values", "rewards"),
    num_lookahead=1,
    outputs=("advantages", "returns"),
    coefficients=coefficients,
    readout=readout,
)


@with_fast_path
def compute_upgo(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminated: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    *,
    gamma: float | torch.Tensor = 1.0,
    bootstrap_values: float | torch.Tensor | FinalValues | None = None,
    next_values: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    mask_mode: str = "skip",
    cu_seqlens: torch.Tensor | None = None,
    time_dim: int = -1,
    out: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    backend: str | None = None,
) -> UPGOOutput:
    r"""Follow the trajectory for as long as it does no worse than expected.

        δ[t] = r[t] + γ·NV[t] − V[t]
        A[t] = δ[t] + γ·A[t+1]  where it continues and δ[t+1] >= 0, else δ[t]
        returns[t] = A[t] + V[t]

    NV[t] is 0 where step t terminated, the bootstrap value where it was
    truncated or the rollout ends, V[t+1] elsewhere. The return is r[t] +
    γ·returns[t+1] where r[t+1] + γ·NV[t+1] >= V[t+1], else r[t] + γ·NV[t]. The
    comparison is made in the precision of the arithmetic. NaN does not close
    it.

    Args:
        rewards: Reward r of the transition t → t+1, [num_envs, num_steps], or
            [num_steps, num_envs] with ``time_dim=0``; float32, bfloat16,
            float16, or float64 (not on the triton backend). Any strides.
        values: Value estimates V(s_t), shaped like `rewards`, floating point.
        terminated: Nonzero where the transition ended in a terminal state,
            shaped like `rewards`; bool, integer, or floating point 0 and 1.
            None: nowhere. Where both flags are set, termination wins.
        truncated: Nonzero where the episode was cut although its state has a
            future (a time limit), shaped like `rewards`; bool, integer, or
            floating point 0 and 1. None: nowhere.
        gamma: Discount γ: a finite number >= 0, or one per step, shaped like
            `rewards`, where 0 ends the trajectory.
        bootstrap_values: V(s_{t+1}), before any reset, at truncated steps and
            at the rollout's end: one number, [num_envs] for the rollout's end
            alone (without `truncated`), shaped like `rewards` (read there
            only), or sparse `FinalValues`. It has no default: pass 0.0 to mean
            zero.
        next_values: V(s_{t+1}) of every step, before any reset, shaped like
            `rewards`; replaces `bootstrap_values`.
        mask: Nonzero where a step belongs to the trajectory, shaped like
            `rewards`; bool, integer, or floating point 0 and 1. Masked cells
            are never read and yield 0. None: everywhere.
        mask_mode: ``"skip"``: as if the masked steps were deleted. ``"reset"``:
            a masked step ends the trajectory before it as a terminal state
            would.
        cu_seqlens: For packed rows, sequences of any lengths end to end: where
            each starts, and where the last ends, [num_sequences + 1], int32 or
            int64, rising from 0 to num_steps. Per-step tensors are then
            [num_steps], and [num_envs] is [num_sequences]. Each sequence is a
            rollout of its own. Bootstrap values per sequence may be
            [num_sequences, 1], those per step [1, num_steps], and have to be
            where the two numbers are equal.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.
        out: Preallocated (advantages, returns), shaped like `rewards`, floating
            point, any strides, apart from every input; None in it is allocated.
        backend: ``"triton"``, ``"cpu"`` or ``"reference"``; None chooses by the
            tensors' device.

    Returns:
        UPGOOutput(advantages, returns) in the unit of the rewards, float32
        (float64 if an input is). Differentiable with respect to every
        real-valued tensor if one of them requires grad.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape, device or value is wrong, or neither
            `bootstrap_values` nor `next_values` was given.
        BackendUnavailableError: The backend asked for cannot run here.

    Source:
        Vinyals et al. 2019, https://doi.org/10.1038/s41586-019-1724-z, methods,
        "Upgoing policy update"

    Example:
        Step 0 is not blamed for the loss at step 1:

        >>> rewards = torch.tensor([[1.0, -2.0, 3.0]])
        >>> values = torch.zeros(1, 3)
        >>> compute_upgo(rewards, values, bootstrap_values=0.0).returns
        tensor([[1., 1., 3.]])
    """
    results = solve(
        UPGO,
        {"rewards": rewards, "values": values},
        check_layout("rewards", rewards, time_dim, cu_seqlens=cu_seqlens),
        terminated=terminated,
        truncated=truncated,
        gamma=gamma,
        bootstrap_values=bootstrap_values,
        next_values=next_values,
        mask=mask,
        mask_mode=mask_mode,
        wanted=(True, True),
        out=out,
        backend=backend,
    )
    return UPGOOutput(*results)
