"""Stable-Baselines3: TD3 and DDPG whose gradient steps and acting take less time."""

from typing import Any, ClassVar

import numpy as np
import torch
from stable_baselines3 import DDPG, TD3
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from rl_triton_adapters.sb3.compiled_off_policy import Networks
from rl_triton_adapters.sb3.off_policy import OffPolicyMixin, average_parameters

__all__ = ["TritonDDPG", "TritonTD3"]


class TritonTD3(OffPolicyMixin, TD3):
    """`TD3` with gradient steps and acting that take less time. All that is said of `TritonSAC` holds."""

    read_settings: ClassVar[tuple[str, ...]] = ("gamma", "tau", "target_policy_noise", "target_noise_clip")
    counts_each: ClassVar[int] = 1

    def _list_optimizers(self) -> list[Optimizer]:
        return [self.actor.optimizer, self.critic.optimizer]

    def _choose_parts(self, index: int) -> tuple[bool, ...]:
        """Whether the actor learns, too."""
        return (self._n_updates % self.policy_delay == 0,)

    def _list_networks(self) -> Networks:
        owners = [self.actor, self.actor_target, self.critic, self.critic_target]
        options = {"optimizer": self.critic.optimizer, "actor_optimizer": self.actor.optimizer}
        critics = self.critic.q_networks, self.critic_target.q_networks
        return Networks(owners, *critics, [[self.actor.mu]], options | {"actor_target": self.actor_target.mu})

    def _choose_actions(self, outputs: np.ndarray, deterministic: bool) -> np.ndarray:
        return self.policy.unscale_action(outputs)

    def _draw_noise(self, count: int, size: int, width: int) -> dict[str, Tensor]:
        noise = torch.empty(count, size, width)
        for x in noise:
            x.normal_(0, self.target_policy_noise)
        return {"next_noise": noise.flatten(0, 1).clamp_(-self.target_noise_clip, self.target_noise_clip)}

    def _list_numbers(self, choices: list[tuple[Any, ...]]) -> dict[str, Any]:
        learns = [x for (x,) in choices]
        return {"critic_coef": 2.0, "tau": self.tau, "updates_actor": learns, "updates_targets": learns}

    def _name_statistics(self, row: list[float], *parts: Any) -> dict[str, float]:
        return dict(zip(("critic_loss", "actor_loss"), row[: 1 + parts[0]], strict=False))

    def _learn(self, batch: Any, *parts: bool) -> dict[str, Tensor]:
        (updates_actor,) = parts
        fork = self._fork()
        with fork.branch("targets"), torch.no_grad():
            noise = torch.empty_like(batch.actions).normal_(0, self.target_policy_noise)
            noise = noise.clamp(-self.target_noise_clip, self.target_noise_clip)
            next_actions = (self.actor_target(batch.next_observations) + noise).clamp(-1, 1)
            next_values = torch.cat(self.critic_target(batch.next_observations, next_actions), dim=1)
            targets = self._evaluate_next(batch, next_values.min(dim=1, keepdim=True)[0])
        values = self.critic(batch.observations, batch.actions)
        fork.join(targets)
        critic_loss = torch.stack([mse_loss(x, targets) for x in values]).sum()
        self._step_optimizer(self.critic.optimizer, critic_loss)
        statistics = {"critic_loss": critic_loss.detach()}
        if updates_actor:
            actor_loss = -self.critic.q1_forward(batch.observations, self.actor(batch.observations)).mean()
            self._step_optimizer(self.actor.optimizer, actor_loss)
            statistics["actor_loss"] = actor_loss.detach()
            average_parameters(self.critic.parameters(), self.critic_target.parameters(), self.tau)
            average_parameters(self.actor.parameters(), self.actor_target.parameters(), self.tau)
            average_parameters(self.critic_batch_norm_stats, self.critic_batch_norm_stats_target, 1.0)
            average_parameters(self.actor_batch_norm_stats, self.actor_batch_norm_stats_target, 1.0)
        return statistics


class TritonDDPG(TritonTD3, DDPG):
    """`DDPG` with gradient steps and acting that take less time. All that is said of `TritonSAC` holds."""
