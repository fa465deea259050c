"""UPGO, the upgoing policy update of AlphaStar (Vinyals et al. 2019, https://doi.org/10.1038/s41586-019-1724-z)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_triton_core import FinalValues
from rl_triton_core._internal import validation as check
from rl_triton_core._internal.primitives import select
from rl_triton_core._internal.recurrence import Recurrence, Step
from rl_triton_core._internal.solve import solve


class UPGOOutput(NamedTuple):
    """Results of `compute_upgo`, each shaped like `rewards`."""

    advantages: torch.Tensor
    returns: torch.Tensor


def coefficients(step: Step) -> tuple[Any, Any]:
    """α = δ,  β = γ while the trajectory continues; both 0 where δ < 0."""
    value, reward = step.inputs
    delta = reward + step.gamma * step.next_value - value
    worse = delta < 0
    return select(worse, 0, delta), select(worse | (step.continues == 0), 0, step.gamma)


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
    r"""Advantages and returns that follow the trajectory for as long as it does no worse than expected.

        δ[t] = r[t] + γ·NV[t] − V[t]
        A[t] = δ[t] + γ·A[t+1]      where the trajectory continues and δ[t+1] >= 0, else δ[t]
        returns[t] = A[t] + V[t]

    NV as in `compute_gae`. The return is r[t] + γ·returns[t+1] where r[t+1] + γ·NV[t+1] >= V[t+1], else r[t] + γ·NV[t].
    The comparison is made in the precision of the arithmetic. NaN does not close it.

    Args:
        rewards: r of the transition t → t+1. [num_envs, num_steps], or [num_steps, num_envs] with ``time_dim=0``.
        values: V(s_t), shaped like `rewards`.
        terminated: As in `compute_gae`, like all arguments that follow.
        truncated: .
        gamma: .
        bootstrap_values: .
        next_values: .
        mask: .
        mask_mode: .
        cu_seqlens: .
        time_dim: .
        out: Preallocated (advantages, returns).
        backend: .

    Returns:
        UPGOOutput(advantages, returns), shaped like `rewards`; dtype and gradient as in `compute_gae`.

    Raises:
        TypeError: As in `compute_gae`.
        ValueError: As in `compute_gae`.
        BackendUnavailableError: As in `compute_gae`.

    Example:
        >>> rewards, values = torch.tensor([[1.0, -2.0, 3.0]]), torch.zeros(1, 3)
        >>> compute_upgo(rewards, values, bootstrap_values=0.0).returns  # step 0 is not blamed for the loss at step 1
        tensor([[1., 1., 3.]])
    """
    layout = check.check_layout("rewards", rewards, time_dim, cu_seqlens=cu_seqlens)
    results = solve(
        UPGO,
        {"rewards": rewards, "values": values},
        layout,
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
