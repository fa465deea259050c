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

__all__ = [
    "Boundaries",
    "approximate_rsl_rl",
    "from_brax",
    "from_cleanrl",
    "from_episode_starts",
    "from_gymnasium_next_step",
    "from_gymnasium_same_step",
    "from_pufferlib",
    "from_rllib",
]


class Boundaries(NamedTuple):
    """Where trajectories end and what follows: arguments for the estimators, by name (`**boundaries._asdict()`)."""

    terminated: torch.Tensor
    """Departure flags, bool: the step ended in a terminal state."""
    truncated: torch.Tensor | None
    """Departure flags, bool: the step was cut off although its state has a future."""
    bootstrap_values: torch.Tensor | FinalValues
    """V(s_{t+1}), before any reset, at truncations and at the rollout's end."""
    mask: torch.Tensor | None
    """False where a step is no transition of any episode. Leave these out of the loss too."""
    time_dim: int
    """The layout they are in."""


# -- Gymnasium --------------------------------------------------------------------------------------------------------


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
    cut = convert_flags("truncated", truncated, layout)
    edge = check_per_env("next_value", next_value, layout)
    check_final_values(final_values, layout)
    return Boundaries(terminated.bool(), cut, merge_cut_values(final_values, cut, edge, layout), None, time_dim)


def from_gymnasium_next_step(
    values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    next_value: torch.Tensor,
    previous_done: torch.Tensor | None,
    *,
    time_dim: int = -1,
) -> Boundaries:
    """Convert rollouts of Gymnasium's autoreset mode NEXT_STEP, its default since 1.0, and of EnvPool.

        NV[t]   = V[t+1],           V[T] = next_value
        mask[t] = not done[t−1],    done[−1] = previous_done

    The observation that a done step returns is the episode's final one, so V[t+1] is the continuation and no further
    critic call is needed. The step after it resets: its action is ignored and its reward is 0. It is masked.

    Args:
        values: V(s_t), [num_envs, num_steps] or, with ``time_dim=0``, [num_steps, num_envs].
        terminated: The flags that `step` returned, shaped like `values`.
        truncated: The flags that `step` returned beside them, shaped like `values`.
        next_value: V of the observation after the rollout, one per environment.
        previous_done: Whether the step before the rollout was done, one per environment; None if the rollout begins
            with `reset`. Without it, a rollout that begins with a resetting step would take that for a transition.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.

    Returns:
        Boundaries, with a mask.

    Source:
        https://farama.org/Vector-Autoreset-Mode
    """
    layout = check.check_layout("values", values, time_dim)
    ended = convert_flags("terminated", terminated, layout)
    cut = convert_flags("truncated", truncated, layout)
    if previous_done is None:
        first = torch.zeros(layout.num_envs, dtype=torch.bool, device=layout.device)
    else:
        first = check_per_env("previous_done", previous_done, layout, FLAG_DTYPES).bool()
    next_values = shift_left(values, check_per_env("next_value", next_value, layout), layout)
    return Boundaries(ended, cut, next_values, ~shift_right(ended | cut, first, layout), time_dim)


# -- arrival flags ----------------------------------------------------------------------------------------------------


def from_episode_starts(
    episode_starts: torch.Tensor, dones: torch.Tensor, last_values: torch.Tensor, *, time_dim: int = 0
) -> Boundaries:
    """Convert Stable-Baselines3's `RolloutBuffer`: arrival flags, truncations folded into the rewards.

        done[t] = episode_starts[t+1],    done[T−1] = dones

    `collect_rollouts` has added γ·V(terminal_observation) to the reward of a truncated step before the buffer saw it.
    So each done is a termination here; with raw rewards, use `from_gymnasium_same_step`.

    Args:
        episode_starts: Whether s_t is an episode's first observation, [num_steps, num_envs] (or as `time_dim` says).
        dones: Whether the last step ended an episode, one per environment.
        last_values: V of the observation after the rollout, one per environment.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.

    Returns:
        Boundaries, without truncations or a mask.

    Source:
        `OnPolicyAlgorithm.collect_rollouts` and `RolloutBuffer.compute_returns_and_advantage` of Stable-Baselines3.
    """
    layout = check_flag_layout("episode_starts", episode_starts, time_dim)
    last = check_per_env("dones", dones, layout, FLAG_DTYPES)
    ended = shift_left(episode_starts.bool(), last.bool(), layout)
    return Boundaries(ended, None, check_per_env("last_values", last_values, layout), None, time_dim)


def from_cleanrl(
    dones: torch.Tensor, next_done: torch.Tensor, next_value: torch.Tensor, *, time_dim: int = 0
) -> Boundaries:
    """Convert rollouts of CleanRL's scripts: arrival flags, truncations counted as terminations.

        done[t] = dones[t+1],    done[T−1] = next_done

    This is for environments in mode SAME_STEP. In mode NEXT_STEP a step with dones[t] only resets, which the scripts
    take for a transition; `boundaries._replace(mask=dones == 0)` leaves these steps out.

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
    last = check_per_env("next_done", next_done, layout, FLAG_DTYPES)
    ended = shift_left(dones.bool(), last.bool(), layout)
    return Boundaries(ended, None, check_per_env("next_value", next_value, layout), None, time_dim)


def from_pufferlib(
    rewards: torch.Tensor,
    terminals: torch.Tensor,
    next_reward: torch.Tensor,
    next_terminal: torch.Tensor,
    next_value: torch.Tensor,
    *,
    time_dim: int = -1,
) -> tuple[torch.Tensor, Boundaries]:
    """Convert PufferLib's buffers: rewards and flags stand at the step at which they arrive, with the next observation.

        r[t] = rewards[t+1],  done[t] = terminals[t+1];    at T−1 next_reward and next_terminal

    PufferLib's kernel has no arrivals after the rollout and leaves its last column at 0; here it is a real one. For
    PufferLib's own numbers pass the last column as the arrivals: `rewards[:, :-1]`, `terminals[:, :-1]`,
    `rewards[:, -1]`, `terminals[:, -1]`, `values[:, -1]`. Its `terminals` hold no truncations: to end trajectories
    there, pass `terminals + truncations`. The final observations are gone, so they count as terminations.

    Args:
        rewards: The reward received with s_t, [segments, horizon] (or as `time_dim` says).
        terminals: The flag received with s_t, shaped like `rewards`.
        next_reward: The reward received after the rollout, one per segment.
        next_terminal: The flag received after the rollout, one per segment.
        next_value: V of the observation received after the rollout, one per segment.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.

    Returns:
        The rewards of departing steps, and Boundaries, without truncations or a mask.

    Source:
        `PuffeRL.evaluate` in pufferlib/pufferl.py and `puff_advantage_row` in pufferlib/extensions/pufferlib.cpp, 3.0.
    """
    layout = check.check_layout("rewards", rewards, time_dim)
    arrived = convert_flags("terminals", terminals, layout)
    last = check_per_env("next_terminal", next_terminal, layout, FLAG_DTYPES)
    edge = check_per_env("next_value", next_value, layout)
    departing = shift_left(rewards, check_per_env("next_reward", next_reward, layout), layout)
    return departing, Boundaries(shift_left(arrived, last.bool(), layout), None, edge, None, time_dim)


# -- others -----------------------------------------------------------------------------------------------------------


def from_rllib(
    values: torch.Tensor, terminateds: torch.Tensor, loss_mask: torch.Tensor, *, time_dim: int = -1
) -> Boundaries:
    """Convert batches of RLlib's new API stack: episodes end to end, each with an extra slot for its bootstrap value.

        NV[t] = V[t+1],    truncated[t] = not loss_mask[t+1],    mask = loss_mask

    An episode that neither terminated nor was truncated was cut by the end of sampling: the slot after it says so, in
    all releases. So the column `truncateds`, whose meaning changed with Ray 2.56, is not needed.

    Args:
        values: The critic's output over all slots, [rows, slots]. The flat batch is one row: `values[None]`. Rows of
            stateful modules continue each other and have to be put end to end first.
        terminateds: Column "terminateds", shaped like `values`.
        loss_mask: Column "loss_mask" of `AddOneTsToEpisodesAndTruncate`, shaped like `values`: False in extra slots.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.

    Returns:
        Boundaries, with a mask. A row that does not end in an extra slot has no continuation: NaN.

    Source:
        `AddOneTsToEpisodesAndTruncate` and `compute_value_targets` in Ray 2.56 to 2.60.
    """
    layout = check.check_layout("values", values, time_dim)
    ended = convert_flags("terminateds", terminateds, layout)
    mask = convert_flags("loss_mask", loss_mask, layout)
    nothing = values.new_full((layout.num_envs,), math.nan)
    ends = shift_left(~mask, torch.ones_like(nothing, dtype=torch.bool), layout)
    return Boundaries(ended, ends, shift_left(values, nothing, layout), mask, time_dim)


def from_brax(
    values: torch.Tensor,
    dones: torch.Tensor,
    truncations: torch.Tensor,
    next_value: torch.Tensor,
    *,
    time_dim: int = 0,
) -> Boundaries:
    """Convert rollouts whose final observations are lost, as Brax does: also of MuJoCo Playground and other MJX code.

        mask[t] = not truncations[t],    truncated[t] = truncations[t+1],    NV[t] = V[t+1],    V[T] = next_value

    What follows a truncated step is not known, since `step` returned the next episode's first observation. Such a step
    is left out; the one before it is truncated, with V of the state that it led to. Where steps are left, the returns
    of `compute_gae` are Brax's `vs`; Brax's advantages, with no λ at the step itself, are those of `compute_vtrace`
    with equal log-probabilities.

    Args:
        values: V(s_t), [num_steps, num_envs] (or as `time_dim` says).
        dones: `state.done`, or 1 − `discount` of Brax's transitions, shaped like `values`; not read at truncations.
        truncations: `state.info["truncation"]`, shaped like `values`.
        next_value: V of the observation after the rollout, one per environment; not read where the last step is done.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.

    Returns:
        Boundaries, with a mask.

    Source:
        `EpisodeWrapper`, `AutoResetWrapper` and `ppo.losses.compute_gae` of Brax 0.14.
    """
    layout = check.check_layout("values", values, time_dim)
    cut = convert_flags("truncations", truncations, layout)
    ended = convert_flags("dones", dones, layout) & ~cut
    edge = check_per_env("next_value", next_value, layout)
    before = shift_left(cut, torch.zeros_like(edge, dtype=torch.bool), layout)
    return Boundaries(ended, before & ~ended, shift_left(values, edge, layout), ~cut, time_dim)


def approximate_rsl_rl(
    values: torch.Tensor,
    dones: torch.Tensor,
    time_outs: torch.Tensor | None,
    last_values: torch.Tensor,
    *,
    time_dim: int = 0,
) -> Boundaries:
    """Convert RSL-RL and Sample Factory, bias included: a time-out continues with V of the state *before* the step.

        r[t] + γ·V(s_t)·time_outs[t]  and a termination:    NV[t] = V(s_t), where V(s_{t+1}) would be right

    It reproduces their numbers. Where the final observation can be had, `from_gymnasium_same_step` is exact.

    Args:
        values: V(s_t), [num_steps, num_envs] (or as `time_dim` says); of RSL-RL's storage, `values[..., 0]`.
        dones: The flags that `step` returned, time-outs included, shaped like `values`.
        time_outs: `extras["time_outs"]`, shaped like `values`, read where `dones` are set; None if the rewards are
            those of the storage, which hold γ·V(s_t) already.
        last_values: V of the observation after the rollout, one per environment.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.

    Returns:
        Boundaries, without a mask.

    Source:
        `PPO.process_env_step` and `PPO.compute_returns` of RSL-RL 5.5.
    """
    layout = check.check_layout("values", values, time_dim)
    done = convert_flags("dones", dones, layout)
    edge = check_per_env("last_values", last_values, layout)
    if time_outs is None:
        return Boundaries(done, None, edge, None, time_dim)
    cut = done & convert_flags("time_outs", time_outs, layout)
    return Boundaries(done & ~cut, cut, merge_cut_values(values, cut, edge, layout), None, time_dim)


# -- tools ------------------------------------------------------------------------------------------------------------


def check_flag_layout(name: str, flags: Any, time_dim: int) -> RolloutLayout:
    """Check flags and return the layout that they set, where no real-valued tensor sets it."""
    check.check_tensor(name, flags, FLAG_DTYPES)
    frame = flags if flags.is_floating_point() else torch.empty((), device=flags.device).expand(flags.shape)
    return check.check_layout(name, frame, time_dim)


def convert_flags(name: str, flags: torch.Tensor, layout: RolloutLayout) -> torch.Tensor:
    """Check the flags of each step and return them as bool."""
    check.check_per_step(name, flags, layout, FLAG_DTYPES)
    return flags.bool()


def check_per_env(
    name: str, tensor: Any, layout: RolloutLayout, dtypes: Sequence[torch.dtype] = REAL_DTYPES
) -> torch.Tensor:
    """Check one entry per environment and return it as [num_envs]."""
    check.check_tensor(name, tensor, dtypes)
    flat: torch.Tensor = tensor.flatten() if tensor.ndim == 2 and 1 in tensor.shape else tensor
    check.check_shape(name, flat, (layout.num_envs,), "[num_envs]", layout.device)
    return flat


def shift_left(tensor: torch.Tensor, last: torch.Tensor, layout: RolloutLayout) -> torch.Tensor:
    """Shift left: x[t+1], and `last` at the rollout's end."""
    if layout.num_steps == 0:
        return tensor
    dim = layout.time_dim
    return torch.cat([tensor.narrow(dim, 1, layout.num_steps - 1), last.unsqueeze(dim)], dim)


def shift_right(tensor: torch.Tensor, first: torch.Tensor, layout: RolloutLayout) -> torch.Tensor:
    """Shift right: x[t−1], and `first` at the rollout's start."""
    if layout.num_steps == 0:
        return tensor
    dim = layout.time_dim
    return torch.cat([first.unsqueeze(dim), tensor.narrow(dim, 0, layout.num_steps - 1)], dim)


def check_final_values(final: Any, layout: RolloutLayout) -> None:
    """Check values of final observations: per step, or sparse ones that leave the rollout's end open."""
    if not isinstance(final, (FinalValues, torch.Tensor)):
        raise TypeError(f"final_values: got {type(final).__name__}, expected a torch.Tensor or FinalValues")
    if isinstance(final, torch.Tensor):
        check.check_per_step("final_values", final, layout)
    elif final.last_value is not None:
        got = check.describe_type(final.last_value)
        raise ValueError(f"final_values.last_value: got {got}, expected None, since next_value is the last value")


def merge_cut_values(
    final: torch.Tensor | FinalValues, truncated: torch.Tensor, last_value: torch.Tensor, layout: RolloutLayout
) -> torch.Tensor | FinalValues:
    """Take `final` where truncated, `last_value` at the rollout's end otherwise."""
    dim = layout.time_dim
    at_end = (torch.arange(layout.num_steps, device=layout.device) == layout.num_steps - 1).unsqueeze(1 - dim)
    if isinstance(final, FinalValues):
        return replace(final, last_value=torch.where((at_end & truncated).any(dim), math.nan, last_value))
    return torch.where(at_end & ~truncated, last_value.unsqueeze(dim), final)
