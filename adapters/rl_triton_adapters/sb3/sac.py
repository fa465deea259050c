"""Stable-Baselines3: SAC whose gradient steps and acting take less time."""

from typing import Any, ClassVar

import numpy as np
import torch
from stable_baselines3 import SAC
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from rl_triton_adapters.sb3.compiled_off_policy import Networks
from rl_triton_adapters.sb3.off_policy import OffPolicyMixin, average_parameters

__all__ = ["TritonSAC"]


class EntropyMixin(OffPolicyMixin):
    """The gradient step of SAC, whatever its critics are. Put it in front of an algorithm that has its other parts."""

    read_settings: ClassVar[tuple[str, ...]] = (*OffPolicyMixin.read_settings, "target_entropy")

    ent_coef_optimizer: Any
    log_ent_coef: Any
    ent_coef_tensor: Tensor
    target_entropy: Any
    target_update_interval: int
    batch_norm_stats: Any
    batch_norm_stats_target: Any

    def _list_optimizers(self) -> list[Optimizer]:
        optimizers = [self.actor.optimizer, self.critic.optimizer]
        return optimizers if self.ent_coef_optimizer is None else [*optimizers, self.ent_coef_optimizer]

    def _list_settings(self) -> list[Any]:
        """The entropy coefficient is a tensor, which may be replaced."""
        source = self.log_ent_coef if self._learns_entropy else self.ent_coef_tensor
        return [*super()._list_settings(), source.data_ptr()]

    def _choose_parts(self, index: int) -> tuple[bool, ...]:
        """Whether the targets follow."""
        return (index % self.target_update_interval == 0,)

    @property
    def _learns_entropy(self) -> bool:
        """Whether the stock algorithm reads the entropy coefficient that is learned, not the fixed one."""
        return self.ent_coef_optimizer is not None and self.log_ent_coef is not None

    def _find_entropy_coefficient(self) -> Tensor:
        return self.log_ent_coef.detach().exp() if self._learns_entropy else self.ent_coef_tensor

    def _update_entropy_coefficient(self, log_probs: Tensor) -> dict[str, Tensor]:
        """Learn the entropy coefficient, if it is learned: L = -log(alpha) mean(log pi + target)."""
        if self.ent_coef_optimizer is None or self.log_ent_coef is None:
            return {}
        loss = -(self.log_ent_coef * (log_probs + self.target_entropy).detach()).mean()
        self._step_optimizer(self.ent_coef_optimizer, loss)
        return {"ent_coef_loss": loss.detach()}

    def _update_actor(self, values: Tensor, log_probs: Tensor, ent_coef: Tensor) -> dict[str, Tensor]:
        """Learn the policy: L = mean(alpha log pi - Q)."""
        loss = (ent_coef * log_probs - values).mean()
        self._step_optimizer(self.actor.optimizer, loss)
        return {"actor_loss": loss.detach()}

    def _learn(self, batch: Any, *parts: bool) -> dict[str, Tensor]:
        (updates_targets,) = parts
        ent_coef, fork = self._find_entropy_coefficient(), self._fork()
        with fork.branch("actor"):
            actions, log_probs = self.actor.action_log_prob(batch.observations)
            log_probs = log_probs.reshape(-1, 1)
            statistics = self._update_entropy_coefficient(log_probs)
        with fork.branch("targets"), torch.no_grad():
            next_actions, next_log_probs = self.actor.action_log_prob(batch.next_observations)
            targets = self._evaluate_targets(batch, next_actions, ent_coef * next_log_probs.reshape(-1, 1))
        values = self.critic(batch.observations, batch.actions)
        fork.join(actions, log_probs, targets, *statistics.values())
        critic_loss = self._evaluate_critic(values, targets)
        self._step_optimizer(self.critic.optimizer, critic_loss)
        statistics |= self._update_actor(self._evaluate_actions(batch, actions), log_probs, ent_coef)
        if updates_targets:
            average_parameters(self.critic.parameters(), self.critic_target.parameters(), self.tau)
            average_parameters(self.batch_norm_stats, self.batch_norm_stats_target, 1.0)
        return {"ent_coef": ent_coef.reshape(())} | statistics | {"critic_loss": critic_loss.detach()}

    def _evaluate_targets(self, batch: Any, next_actions: Tensor, next_terms: Tensor) -> Tensor:
        """What the critics learn of the policy's next actions, whose alpha log pi are `next_terms`, [batch_size, 1]."""
        next_values = torch.cat(self.critic_target(batch.next_observations, next_actions), dim=1)
        return self._evaluate_next(batch, next_values.min(dim=1, keepdim=True)[0] - next_terms)

    def _evaluate_critic(self, values: Any, targets: Tensor) -> Tensor:
        """The loss of what the critics return."""
        return 0.5 * torch.stack([mse_loss(x, targets) for x in values]).sum()

    def _evaluate_actions(self, batch: Any, actions: Tensor) -> Tensor:
        """The critic's values of the policy's actions, [batch_size, 1]: the least of all critics."""
        return torch.cat(self.critic(batch.observations, actions), dim=1).min(dim=1, keepdim=True)[0]


class CompiledEntropyMixin(EntropyMixin):
    """The same where networks are MLPs, whose gradient steps and acting can be compiled."""

    def _list_networks(self) -> Any:
        actor, options = self.actor, {"optimizer": self.critic.optimizer, "actor_optimizer": self.actor.optimizer}
        if self._learns_entropy:
            options |= {"log_entropy_coef": self.log_ent_coef, "entropy_optimizer": self.ent_coef_optimizer}
        owners = [actor, self.critic, self.critic_target]
        critics = self.critic.q_networks, self.critic_target.q_networks
        return Networks(owners, *critics, [[actor.latent_pi, x] for x in (actor.mu, actor.log_std)], options)

    def _choose_actions(self, outputs: np.ndarray, deterministic: bool) -> np.ndarray | None:
        width = outputs.shape[1] // 2
        mean, log_std = outputs[:, :width], outputs[:, width:]
        if np.isnan(outputs).any():  # the distribution refuses it
            return None
        if not deterministic:
            mean = mean + torch.empty(mean.shape).normal_().numpy() * np.exp(log_std.clip(-20, 2))
        return np.asarray(self.policy.unscale_action(np.tanh(mean)))

    def _draw_noise(self, count: int, size: int, width: int) -> dict[str, Tensor]:
        noise = torch.empty(count, 2, size, width)
        for x in noise.flatten(0, 1):
            x.normal_()
        return dict(zip(("noise", "next_noise"), noise.transpose(0, 1).flatten(1, 2), strict=True))

    def _list_numbers(self, choices: list[tuple[Any, ...]]) -> dict[str, Any]:
        own = {"entropy_coef": 0.0 if self._learns_entropy else float(self.ent_coef_tensor), "tau": self.tau}
        return own | {"target_entropy": self.target_entropy, "updates_targets": [x for (x,) in choices]}

    def _name_statistics(self, row: list[float], *parts: Any) -> dict[str, float]:
        found = dict(zip(("critic_loss", "actor_loss", "ent_coef", "ent_coef_loss"), row[:4], strict=True))
        return found if self._learns_entropy else {name: x for name, x in found.items() if name != "ent_coef_loss"}


class TritonSAC(CompiledEntropyMixin, SAC):
    """`SAC` whose gradient steps and acting are captured on a GPU, and compiled on a CPU where they can be.

    Minibatches are those of `SAC`, drawn by the same random numbers and copied to the device at once; targets follow in
    a few kernels, and what is logged is read once per update. Parameters are those of `SAC` up to rounding.

    Arguments are those of `SAC`, and `enabled` as of `TritonPPO`: with False it is `SAC`.
    """
