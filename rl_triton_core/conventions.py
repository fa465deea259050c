"""The frameworks' records of a rollout, turned into the arguments of this library.

Each function takes what a framework stores and returns `Boundaries`, the arguments that say where trajectories end:

    boundaries = from_cleanrl(dones, next_done, next_value)
    compute_gae(rewards, values, **boundaries._asdict(), gamma=0.99, lambda_=0.95)

Tensors may live on any device; nothing waits for it. Flags are bool, integer or floating point, nonzero is true. A
tensor of one entry per environment is [num_envs], [1, num_envs] or [num_envs, 1]. `time_dim` defaults to the
framework's own layout, to -1 where it has none. No framework is imported.

Raises, all of them: TypeError where an argument's type or dtype is wrong, ValueError where a shape or device is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.arguments.validation import FLAG_DTYPES, REAL_DTYPES, RolloutLayout
from rl_triton_core.boundaries import FinalValues

__all__ = ["Boundaries", "from_cleanrl", "from_gymnasium_same_step"]


class Boundaries(NamedTuple):
    """Where trajectories end and what follows: arguments for the estimators, by name (`**boundaries._asdict()`)."""

    terminated: torch.Tensor
    """Done flags, bool: the step ended in a terminal state."""
    truncated: torch.Tensor | None
    """Done flags, bool: the step was cut off although its state has a future."""
    bootstrap_values: torch.Tensor | FinalValues
    """V(s_{t+1}), before any reset, at truncations and at the rollout's end."""
    mask: torch.Tensor | None
    """False where a step is no transition of any episode. Leave these out of the loss too."""
    time_dim: int
    """The layout they are in."""


def from_gymnasium_same_step(
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    final_values: torch.Tensor | FinalValues,
    next_value: torch.Tensor,
    *,
    time_dim: int = -1,
) -> Boundaries:
    """Convert rollouts of Gymnasium's autoreset modes SAME_STEP and DISABLED; of Isaac Lab, and Gymnasium before 1.0.

        NV[t] = V(final_obs[t])  where truncated[t]
                next_value       at t = T−1 otherwise

    In SAME_STEP, the observation that a done step returns is the next episode's first. The final one is in the infos:
    "final_obs", or "final_observation" before 1.0; in Isaac Lab in `extras["final_obs"]` if its `compute_final_obs` is
    set. In DISABLED, `step` returns the final observation, before the reset.

    Args:
        terminated: The flags that `step` returned, [num_envs, num_steps], or [num_steps, num_envs] with ``time_dim=0``.
        truncated: The flags that `step` returned beside them, shaped like `terminated`.
        final_values: V(final observation) at truncated steps: shaped like `terminated` (read there only), or
            `FinalValues` without a `last_value`. A truncated step left out of these yields NaN.
        next_value: V of the observation after the rollout, one per environment; not read where the last step is done.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.

    Returns:
        Boundaries, without a mask.

    Source:
        https://farama.org/Vector-Autoreset-Mode
    """
    layout = check_flag_layout("terminated", terminated, time_dim)
    check.check_per_step("truncated", truncated, layout, FLAG_DTYPES)
    cut, edge = truncated.bool(), check_per_env("next_value", next_value, layout)
    given: Any = final_values
    if isinstance(given, torch.Tensor):
        check.check_per_step("final_values", given, layout)
    elif not isinstance(given, FinalValues):
        got = type(given).__name__
        raise TypeError(f"final_values: got {got}, expected a torch.Tensor or FinalValues")
    elif given.last_value is not None:
        got = check.describe_type(given.last_value)
        raise ValueError(f"final_values.last_value: got {got}, expected None, since next_value is the last value")
    return Boundaries(terminated.bool(), cut, merge_cut_values(final_values, cut, edge, layout), None, time_dim)


def from_cleanrl(
    dones: torch.Tensor, next_done: torch.Tensor, next_value: torch.Tensor, *, time_dim: int = 0
) -> Boundaries:
    """Convert done flags that come with the next observation, truncations counted as terminations: CleanRL's scripts.

        done[t] = dones[t+1],    done[T−1] = next_done

    This is for environments in mode SAME_STEP. In mode NEXT_STEP a step with dones[t] only resets, which the scripts
    count as a transition; `boundaries._replace(mask=dones == 0)` leaves these steps out.

    Stable-Baselines3's `RolloutBuffer` has the same flags, `episode_starts`, and γ·V(terminal_observation) in the
    reward of a truncated step, so that each done is a termination there.

    Args:
        dones: What `step` returned along with s_t, [num_steps, num_envs] (or as `time_dim` says).
        next_done: What `step` returned last, after the rollout, one per environment.
        next_value: V of the observation after the rollout, one per environment.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.

    Returns:
        Boundaries, without truncations or a mask.

    Source:
        https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo.py
    """
    layout = check_flag_layout("dones", dones, time_dim)
    ended, last_ended = dones.bool(), check_per_env("next_done", next_done, layout, FLAG_DTYPES).bool()
    if layout.num_steps:
        dim = layout.time_dim
        ended = torch.cat([ended.narrow(dim, 1, layout.num_steps - 1), last_ended.unsqueeze(dim)], dim)
    return Boundaries(ended, None, check_per_env("next_value", next_value, layout), None, time_dim)


def check_flag_layout(name: str, flags: Any, time_dim: int) -> RolloutLayout:
    """Check flags and return the layout that they set, where no real-valued tensor sets it."""
    check.check_tensor(name, flags, FLAG_DTYPES)
    frame = flags if flags.is_floating_point() else torch.empty((), device=flags.device).expand(flags.shape)
    return check.check_layout(name, frame, time_dim)


def check_per_env(
    name: str, tensor: Any, layout: RolloutLayout, dtypes: Sequence[torch.dtype] = REAL_DTYPES
) -> torch.Tensor:
    """Check one entry per environment and return it as [num_envs]."""
    check.check_tensor(name, tensor, dtypes)
    flat: torch.Tensor = tensor.flatten() if tensor.ndim == 2 and 1 in tensor.shape else tensor
    check.check_shape(name, flat, (layout.num_envs,), "[num_envs]", layout.device)
    return flat


def merge_cut_values(
    final: torch.Tensor | FinalValues, truncated: torch.Tensor, last_value: torch.Tensor, layout: RolloutLayout
) -> torch.Tensor | FinalValues:
    """Take `final` where truncated, `last_value` at the rollout's end otherwise."""
    dim = layout.time_dim
    at_end = (torch.arange(layout.num_steps, device=layout.device) == layout.num_steps - 1).unsqueeze(1 - dim)
    if isinstance(final, FinalValues):
        return replace(final, last_value=torch.where((at_end & truncated).any(dim), math.nan, last_value))
    return torch.where(at_end & ~truncated, last_value.unsqueeze(dim), final)
