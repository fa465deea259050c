"""The one boundary rule, the end of a rollout is a truncation, and `FinalValues`, bootstrap values of single steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_triton_core._internal.equations.primitives import select


def apply_boundary_rule(
    terminated: Any, truncated: Any, is_last: Any, next_is_masked: Any, next_value: Any, bootstrap: Any
) -> tuple[Any, Any]:
    """Decide what follows a step.

        cut = truncated or is_last
        NV  = 0 if terminated, the bootstrap value if cut, V[t+1] elsewhere
        the trajectory continues unless terminated or cut

    Args:
        terminated: The step ended its episode in a terminal state; it wins over `truncated`.
        truncated: The step ended its episode although the state has a future.
        is_last: No step of the trajectory follows in the rollout.
        next_is_masked: The next step is masked in mask mode ``reset``, which ends the episode unless truncated.
        next_value: V[t+1], the value of the next step.
        bootstrap: V(s_{t+1}) where cut, before any reset.

    Returns:
        (NV, continues).
    """
    cut = truncated | is_last
    ended = terminated | (next_is_masked & (cut == 0))
    return select(ended, 0.0, select(cut, bootstrap, next_value)), (ended | cut) == 0


@dataclass(frozen=True)
class FinalValues:
    """Sparse bootstrap values: the critic's V(s_{t+1}), before any reset, for single steps of single environments.

    Only truncated steps need a critic call of their own, and this passes these few values on. A truncated step (or a
    rollout's end without termination) that has neither an entry nor a `last_value` yields NaN in its own episode: a
    missing value is never replaced by 0.

    Attributes:
        env: Environment indices, [num_values], integers in [0, num_envs).
        time: Step indices, [num_values], integers in [0, num_steps).
        value: V(s_{t+1}) of these steps, [num_values], floating point.
        last_value: V(s_T) at the rollout's end: [num_envs], or one float for all. Entries win over it.
    """

    env: torch.Tensor | Sequence[int]
    time: torch.Tensor | Sequence[int]
    value: torch.Tensor | Sequence[float]
    last_value: torch.Tensor | float | None = None
