"""Stable-Baselines3: rollouts that stay on the device, of environments that take and give tensors.

Such a `VecEnv` has, besides all that one has, a method of its class

    def step_tensors(self, actions):
        ...
        return observations, rewards, terminated, truncated, final_observations

Tensors are on the model's device, with a row for each environment. An episode that ends starts anew in the same step:
`observations` are those after a reset, `final_observations` those before it, and as good as anything elsewhere.
"""

from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor
from torch.utils import _pytree as pytree

from rl_triton_adapters.common.overrides import find_override
from rl_triton_adapters.sb3.base import PACKAGES
from rl_triton_core.capture import CapturedStep


class TensorRollouts:
    """What a model that acts by captured steps keeps on the device between rollouts."""

    def __init__(self, model: Any, env: Any) -> None:
        self.policy, self.env, self.acting = model.policy, env, model._acting
        self.finishing = CapturedStep(self.finish_step, modules=model._list_actors())
        self.episodes = torch.zeros(env.num_envs, 2, device=model.device)  # returns and lengths until now
        space = model.action_space
        self.bounds: list[Tensor] = []
        if isinstance(space, spaces.Box):
            self.bounds = [torch.as_tensor(x, device=model.device) for x in (space.low, space.high)]

    def finish_step(
        self, final: Any, rewards: Tensor, terminated: Tensor, truncated: Tensor, episodes: Tensor, gamma: Any
    ) -> tuple[Tensor, Tensor]:
        """[reward, done, return, length] of each environment, and the latter two of the episodes that go on.

        Where a time limit cut an episode, the reward is r + γ·V(final observation), as in Stable-Baselines3.
        """
        done = terminated | truncated
        ahead = self.policy.predict_values(final).flatten()
        episodes = episodes + torch.stack([rewards, torch.ones_like(rewards)], dim=1)
        rewards = rewards + gamma * torch.where(truncated & ~terminated, ahead, 0.0)
        rows = torch.cat([rewards[:, None], done[:, None], episodes], dim=1)
        return rows, torch.where(done[:, None], 0.0, episodes)

    def collect(self, model: Any, callback: Any, rollout_buffer: Any, n_rollout_steps: int) -> bool:
        """As `OnPolicyAlgorithm.collect_rollouts`; of what a callback finds, `infos` is empty, others are tensors."""
        model._modes.set_mode(False)
        rollout_buffer.reset()
        callback.on_rollout_start()
        new_obs = obs_as_tensor(model._last_obs, model.device)
        observations = pytree.tree_map(lambda x: x.new_empty(n_rollout_steps, *x.shape), new_obs)
        acted: list[Tensor] = []
        rows: list[Tensor] = []
        infos: list[Any] = []
        for step in range(n_rollout_steps):
            pytree.tree_map(lambda kept, x, step=step: kept[step].copy_(x), observations, new_obs)
            obs_tensor = pytree.tree_map(lambda kept, step=step: kept[step], observations)
            with torch.no_grad():
                chosen, packed = self.acting(obs_tensor, {})
                acted.append(packed.clone())  # the graph writes to the same memory again
                actions = acted[-1][:, :-2].reshape(chosen.shape).to(chosen.dtype)
                clipped_actions = actions.clamp(*self.bounds) if self.bounds else actions
                new_obs, rewards, *ends, final = self.env.step_tensors(clipped_actions)
                found, episodes = self.finishing(final, rewards.float(), *ends, self.episodes, model.gamma)
                rows.append(found.clone())
                self.episodes.copy_(episodes)
            dones = rows[-1][:, 1] > 0
            model.num_timesteps += self.env.num_envs
            callback.update_locals(locals())
            if not callback.on_step():
                return False
        self.fill(model, rollout_buffer, observations, torch.stack(acted), torch.stack(rows))
        model._last_obs = pytree.tree_map(lambda x: x.cpu().numpy(), new_obs)
        model._last_episode_starts = dones.cpu().numpy()
        with torch.no_grad():
            values = model.policy.predict_values(new_obs)
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=model._last_episode_starts)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def fill(self, model: Any, buffer: Any, observations: Any, acted: Tensor, rows: Tensor) -> None:
        """Put a rollout in the place of the buffer's arrays, and its episodes among those that are logged."""
        values, log_probs = acted[..., -2:].unbind(dim=2)
        refused = log_probs.isnan().any(dim=1).nonzero().flatten()
        for step in refused.tolist():  # with the policy's own error, if it raises one
            type(self.policy).forward(self.policy, pytree.tree_map(lambda x, step=step: x[step], observations))
        rewards, dones = rows[..., :2].unbind(dim=2)
        first = torch.as_tensor(model._last_episode_starts, device=model.device)[None]
        fields = {"values": values, "log_probs": log_probs, "rewards": rewards}
        fields |= {"episode_starts": torch.cat([first.float(), dones[:-1]])}
        fields |= {name: torch.empty_like(rewards) for name in ("advantages", "returns")}
        vars(buffer).update({name: x.contiguous() for name, x in fields.items()})
        vars(buffer).update(observations=observations, actions=acted[..., :-2], pos=len(rows), full=True)
        ended = rows[dones > 0][-model._stats_window_size :, 2:]
        model.ep_info_buffer.extend({"r": x, "l": int(length)} for x, length in ended.tolist())


def find_rollouts(model: Any, env: Any, known: TensorRollouts | None, stock: Any) -> TensorRollouts | None:
    """Those of a model that acts by captured steps in such environments; None where `stock`, its method, collects them.

    Wrappers do not hand on the method, since they would not see what goes through it.
    """
    own = find_override(model.rollout_buffer, ["add"], (*PACKAGES, "rl_triton_adapters"))
    is_stock = stock.__func__ is OnPolicyAlgorithm.collect_rollouts and not own
    if not hasattr(type(env), "step_tensors") or not is_stock or model._acting.reason:
        return None
    if known is not None and known.acting is model._acting and known.env is env:
        return known
    return TensorRollouts(model, env)
