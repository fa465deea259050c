"""Stable-Baselines3: rollouts that stay on the device, of environments that take and give tensors.

The class of such a `VecEnv` has one method more:

    def step_tensors(self, actions):
        return observations, rewards, terminated, truncated, final_observations

with a row for each environment, on the model's device. Where an episode ends, the next starts in the same step:
`observations` are those after a reset, `final_observations` those before it, or else any that are valid.
"""

from collections import UserDict
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor
from torch.utils import _pytree as pytree

from rl_triton_adapters.common.overrides import find_override, find_own
from rl_triton_adapters.sb3.base import PACKAGES
from rl_triton_adapters.sb3.buffers import TritonGAEMixin, to_arrays
from rl_triton_adapters.sb3.off_policy import list_callbacks
from rl_triton_core.capture import CapturedStep

STEPS = {"step", "step_async", "step_wait", "step_tensors"}


class StepLocals(UserDict[str, Any]):
    """What callbacks find in their `locals`; what Stable-Baselines3 has as arrays is one when somebody asks for it."""

    later: dict[str, Any]
    made: dict[str, Any]

    def __contains__(self, name: object) -> bool:
        return name in self.data or name in self.later

    def __missing__(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = self["env"].infos if name == "infos" else to_arrays(self.later[name])
        return self.made[name]


class TensorRollouts:
    """What a model that acts by captured steps keeps on the device between rollouts."""

    def __init__(self, model: Any, env: Any, known: "TensorRollouts | None") -> None:
        self.policy, self.env, self.acting = model.policy, env, model._acting
        self.finishing = CapturedStep(self.finish_step, modules=model._list_actors())
        self.left, self.row = None, torch.zeros(env.num_envs, 4, device=model.device)
        """The observations and the last step, of the rollout before."""
        if known is not None and known.env is env:
            self.left, self.row = known.left, known.row
        bounds = [getattr(model.action_space, x, None) for x in ("low", "high")]
        self.bounds = [torch.as_tensor(x, device=model.device) for x in bounds if x is not None]

    def finish_step(
        self, final: Any, rewards: Tensor, terminated: Tensor, truncated: Tensor, before: Tensor, gamma: Any
    ) -> Tensor:
        """[reward, done, return, length] of each environment, after those of the step before.

        Where a time limit cut an episode, the reward is r + γ·V(final observation), as in Stable-Baselines3.
        """
        ahead = torch.where(truncated & ~terminated, self.policy.predict_values(final).flatten(), 0.0)
        done = (terminated | truncated).to(rewards)
        episodes = torch.where(before[:, 1:2] > 0, 0.0, before[:, 2:])
        episodes = episodes + torch.stack([rewards, torch.ones_like(rewards)], dim=1)
        return torch.cat([torch.stack([rewards + gamma * ahead, done], dim=1), episodes], dim=1)

    def collect(self, model: Any, callback: Any, rollout_buffer: Any, n_rollout_steps: int) -> bool:
        """As `OnPolicyAlgorithm.collect_rollouts`."""
        known, found = locals() | {"self": model, "env": self.env}, StepLocals()
        model._modes.set_mode(False)
        rollout_buffer.reset()
        callback.on_rollout_start()
        env, new_obs = self.env, obs_as_tensor(model._last_obs, model.device)
        if model._last_obs is not self.left:  # a reset has ended all episodes
            self.row.zero_()
        first = torch.as_tensor(model._last_episode_starts, device=model.device).float()
        observations = pytree.tree_map(lambda x: x.new_empty(n_rollout_steps, *x.shape), new_obs)
        acted: list[Tensor] = []
        rows: list[Tensor] = []
        for x in list_callbacks(callback):
            x.locals = found
        try:
            for step in range(n_rollout_steps):
                pytree.tree_map(lambda kept, x, step=step: kept[step].copy_(x), observations, new_obs)
                model._last_obs = pytree.tree_map(lambda kept, step=step: kept[step], observations)
                actions, outputs = self.act(model._last_obs)
                clipped = actions.clamp(*self.bounds) if self.bounds else actions
                new_obs, rewards, *ends, final = env.step_tensors(clipped)
                with torch.no_grad():  # a graph writes to the same memory again
                    row = self.finishing(final, rewards.float(), *ends, self.row, model.gamma).clone()
                self.row = row
                model.num_timesteps += env.num_envs
                found.data = known | {"n_steps": step, "values": outputs[:, -2:-1], "log_probs": outputs[:, -1]}
                found.later = {"actions": actions, "clipped_actions": clipped, "new_obs": new_obs, "rewards": rewards}
                found.later, found.made = found.later | {"dones": row[:, 1] > 0, "infos": None}, {}
                if not callback.on_step():
                    return False
                if "rewards" in found.made:  # a callback may have changed them
                    row[:, 0] += torch.as_tensor(found.made["rewards"], device=model.device) - rewards
                acted.append(outputs)
                rows.append(row)
                model._last_obs, model._last_episode_starts = new_obs, row[:, 1] > 0
        finally:
            self.leave(model, rows)
        self.fill(rollout_buffer, observations, torch.stack(acted), torch.stack(rows), first)
        with torch.no_grad():
            values = model.policy.predict_values(new_obs)
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=model._last_episode_starts)
        callback.on_rollout_end()
        return True

    def leave(self, model: Any, rows: list[Tensor]) -> None:
        """End a rollout after these steps: the state is what environments return, and episodes are logged."""
        self.left = model._last_obs = to_arrays(model._last_obs)
        model._last_episode_starts = to_arrays(model._last_episode_starts)
        ended = torch.cat([self.row[:0], *rows])
        episodes = ended[ended[:, 1] > 0, 2:].tolist()
        model.ep_info_buffer.extend({"r": x, "l": int(length)} for x, length in episodes)

    @torch.no_grad()
    def act(self, obs: Any) -> tuple[Tensor, Tensor]:
        """Actions, and a row of them, the value and the log-probability for each environment."""
        chosen, packed = self.acting(obs, {})
        outputs = packed.clone()
        return outputs[:, :-2].reshape(chosen.shape).to(chosen.dtype).contiguous(), outputs

    def fill(self, buffer: Any, observations: Any, acted: Tensor, rows: Tensor, first: Tensor) -> None:
        """Put a rollout in the place of the buffer's arrays."""
        values, log_probs = acted[..., -2:].unbind(dim=2)
        rewards, dones = rows[..., :2].unbind(dim=2)
        fields = {"values": values, "log_probs": log_probs, "rewards": rewards}
        fields |= {"episode_starts": torch.cat([first[None], dones[:-1]])}
        fields |= {name: torch.empty_like(rewards) for name in ("advantages", "returns")}
        vars(buffer).update({name: x.contiguous() for name, x in fields.items()})
        vars(buffer).update(observations=observations, actions=acted[..., :-2], pos=len(rows), full=True)


def find_rollouts(model: Any, env: Any, known: TensorRollouts | None, stock: Any) -> TensorRollouts | None:
    """Those of a model in such environments; None where it collects arrays, by its stock method.

    That is where something of a user's would not see them: a wrapper, which does not hand `step_tensors` on, a method
    in front of it, or what else the stock method calls.
    """
    owner = next(x for x in (env, *type(env).__mro__) if STEPS & vars(x).keys())
    if vars(owner).get("step_tensors") is None:  # most of them, which need no more questions
        return None
    buffer, function = model.rollout_buffer, OnPolicyAlgorithm.collect_rollouts
    own = find_own([model, buffer], [function], PACKAGES) or find_override(
        OnPolicyAlgorithm, [function.__name__], PACKAGES
    )
    is_ours = isinstance(buffer, TritonGAEMixin) and buffer.backend is None
    is_rounded = isinstance(model.action_space, spaces.Box) and not np.issubdtype(model.action_space.dtype, np.floating)
    if own or stock.__func__ is not function or not is_ours or is_rounded or model.policy.squash_output:
        return None
    if known is not None and known.env is env and known.acting is model._acting:
        return known
    return None if model._acting.reason else TensorRollouts(model, env, known)
