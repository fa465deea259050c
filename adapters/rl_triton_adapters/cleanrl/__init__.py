"""CleanRL: advantages and returns for single-file scripts.

One call stands in the place of the loop that follows ``# bootstrap value if not done``:

    advantages, returns = gae(rewards, values, dones, next_value, next_done, args.gamma, args.gae_lambda)

Tensors are [num_steps, num_envs], on any device; nothing waits for it. Flags are bool, integer or floating point,
nonzero is true. Numbers may be tensors of one number in host memory, γ on any device. Environments reset in the step
that ends an episode, as in the releases of Gym that the scripts were written for; for Gymnasium's NEXT_STEP and for
EnvPool pass ``autoreset="next_step"``. CleanRL is not needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import rl_triton_core.extending as check
from rl_triton_adapters.common.switch import find_off_switch
from rl_triton_core import compute_gae
from rl_triton_core.conventions import Boundaries, from_cleanrl, from_gymnasium_same_step

__all__ = ["AdvantagesAndReturns", "gae"]


class AdvantagesAndReturns(NamedTuple):
    """Results in CleanRL's order, each [num_steps, num_envs]."""

    advantages: torch.Tensor
    returns: torch.Tensor


@torch.no_grad()
def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    dones: torch.Tensor,
    next_value: torch.Tensor,
    next_done: torch.Tensor,
    gamma: float,
    gae_lambda: float,
    *,
    truncations: torch.Tensor | None = None,
    final_values: torch.Tensor | None = None,
    autoreset: str = "same_step",
    backend: str | None = None,
) -> AdvantagesAndReturns:
    """Compute generalised advantage estimates of a rollout as CleanRL's scripts store it.

        δ[t] = r[t] + γ·NV[t] − V[t]
        A[t] = δ[t] + γλ·A[t+1]      where the episode continues, else δ[t]
        returns[t] = A[t] + V[t]

        done[t] = dones[t+1],  done[T−1] = next_done
        NV[t]   = final_values[t]  where truncations[t],  else 0 where done[t],  else V[t+1],  V[T] = next_value

    Without `truncations` time limits count as terminations, as in CleanRL's own loop, whose numbers these are.

    With ``autoreset="next_step"``, V[t+1] is the value of an episode's last observation, and a step with dones[t] only
    resets: its advantage is 0. Learn from the steps ``dones == 0``.

    Args:
        rewards: r, reward of the transition t → t+1. [num_steps, num_envs], float32, bfloat16, float16, or float64 (CPU
            only).
        values: V(s_t), shaped like `rewards`.
        dones: Whether s_t is the first observation of an episode, stored before `envs.step`, shaped like `rewards`.
        next_value: V of the observation after the last step, [1, num_envs], [num_envs, 1] or [num_envs].
        next_done: Whether that observation is the first of an episode, [1, num_envs], [num_envs, 1] or [num_envs].
        gamma: Discount γ per step, finite and >= 0.
        gae_lambda: λ in [0, 1].
        truncations: Whether step t was cut by a time limit and did not terminate, stored after `envs.step`, shaped like
            `rewards`. `dones` hold these episode ends too: a truncation without its done (flags one step late)
            yields NaN in its episode.
        final_values: V of the episode's last observation, before the reset, shaped like `rewards`; read where
            `truncations` are set. Goes together with `truncations`; None with ``autoreset="next_step"``.
        autoreset: When the environments reset: ``"same_step"``, in the step that ends an episode; ``"next_step"``, in
            the step after it, whose action is ignored.
        backend: Name of a backend of `rl_triton_core`; None chooses by the tensors' device.

    Returns:
        AdvantagesAndReturns(advantages, returns), float32 (float64 if an input is), without a graph.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, or one of `truncations` and `final_values` came alone.

    Source:
        https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo.py
    """
    lambda_ = check.check_number("gae_lambda", gae_lambda, 0.0, 1.0)
    layout = check.check_layout("rewards", rewards, time_dim=0)
    check.check_per_step("values", values, layout)
    boundaries = _build_boundaries(layout, values, dones, next_value, next_done, truncations, final_values, autoreset)
    if find_off_switch():
        if truncations is None and autoreset == "same_step":
            return _run_loop(rewards, values, boundaries.terminated, next_value, gamma, gae_lambda)
        backend = "reference"
    results = compute_gae(rewards, values, **boundaries._asdict(), gamma=gamma, lambda_=lambda_, backend=backend)
    return AdvantagesAndReturns(*results)


def _run_loop(
    rewards: torch.Tensor, values: torch.Tensor, done: torch.Tensor, next_value: torch.Tensor, gamma: Any, lambda_: Any
) -> AdvantagesAndReturns:
    """Compute `gae` by CleanRL's own loop."""
    next_values = torch.cat([values[1:], next_value.reshape(1, -1)])
    goes_on = (~done).to(values.dtype)
    advantages, last = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] * goes_on[t] - values[t]
        advantages[t] = last = delta + gamma * lambda_ * goes_on[t] * last
    return AdvantagesAndReturns(advantages, advantages + values)


def _build_boundaries(
    layout: check.RolloutLayout,
    values: torch.Tensor,
    dones: torch.Tensor,
    next_value: torch.Tensor,
    next_done: torch.Tensor,
    truncations: torch.Tensor | None,
    final_values: torch.Tensor | None,
    autoreset: str,
) -> Boundaries:
    """Convert flags and values to where episodes end and what follows."""
    next_step = check.check_choice("autoreset", autoreset, ("same_step", "next_step")) == "next_step"
    check.check_flags("dones", dones, layout)
    boundaries = from_cleanrl(dones, next_done, next_value)
    if next_step and final_values is not None:
        raise ValueError(f"final_values: got {type(final_values).__name__}, expected None with autoreset='next_step'")
    if truncations is None and final_values is None:
        return boundaries._replace(mask=dones == 0) if next_step else boundaries
    if truncations is None:
        raise ValueError("truncations: got None together with final_values, expected both or neither")
    if final_values is None and not next_step:
        raise ValueError("final_values: got None together with truncations, expected both or neither")
    check.check_flags("truncations", truncations, layout)
    done, cut = boundaries.terminated, truncations.bool()
    ended = done & ~cut
    if final_values is None:
        without = cut & ~done
        without |= torch.cat([without[1:], without[:1]])  # it may belong to the step before, whose flag came late
        following = torch.cat([values[1:], next_value.reshape(1, -1)])
        final = torch.where(without, torch.nan, following)
        return Boundaries(ended & ~without, cut | without, final, dones == 0, 0)
    check.check_per_step("final_values", final_values, layout)
    final = torch.where(done, final_values, torch.nan)
    return from_gymnasium_same_step(ended, cut, final, next_value, time_dim=0)
