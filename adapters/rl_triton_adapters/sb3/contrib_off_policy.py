"""sb3-contrib: TQC, QR-DQN and CrossQ that take less time on a GPU, and on a CPU but for CrossQ."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rl_triton_adapters.common.versions import explained_import
from rl_triton_adapters.sb3.compiled_off_policy import Networks
from rl_triton_adapters.sb3.dqn import ValueUpdateMixin
from rl_triton_adapters.sb3.sac import CompiledEntropyMixin, EntropyMixin

with explained_import(__name__, "sb3-contrib", "2.9"):
    from sb3_contrib import QRDQN, TQC, CrossQ
    from sb3_contrib.common.torch_layers import BatchRenorm
    from sb3_contrib.common.utils import quantile_huber_loss

__all__ = ["TritonCrossQ", "TritonQRDQN", "TritonTQC"]


class TritonTQC(CompiledEntropyMixin, TQC):
    """`TQC` with gradient steps and acting that take less time. All that is said of `TritonSAC` holds."""

    read_settings: ClassVar[tuple[str, ...]] = (*EntropyMixin.read_settings, "top_quantiles_to_drop_per_net")

    def _list_networks(self) -> Any:
        critic, dropped, networks = self.critic, self.top_quantiles_to_drop_per_net, super()._list_networks()
        sizes = {(x.quantiles_total, len(x.q_networks)) for x in (critic, self.critic_target)}
        whole = critic.n_quantiles * critic.n_critics, critic.n_critics
        if sizes != {whole} or dropped not in range(critic.n_quantiles):
            return None
        networks.options.update(quantiles=critic.n_quantiles, dropped_quantiles=dropped)
        return networks

    def _list_numbers(self, choices: list[tuple[Any, ...]]) -> dict[str, Any]:
        own = {"huber_delta": 1.0, "critic_coef": 1.0 / self.critic.quantiles_total}
        return super()._list_numbers(choices) | own

    def _evaluate_targets(self, batch: Any, next_actions: Tensor, next_terms: Tensor) -> Tensor:
        quantiles = self.critic_target(batch.next_observations, next_actions).flatten(1).sort()[0]
        count = self.critic.quantiles_total - self.top_quantiles_to_drop_per_net * self.critic.n_critics
        return self._evaluate_next(batch, quantiles[:, :count] - next_terms)

    def _evaluate_critic(self, values: Any, targets: Tensor) -> Tensor:
        loss: Tensor = quantile_huber_loss(values, targets.unsqueeze(1), sum_over_quantiles=False)
        return loss  # of values [batch_size, n_critics, n_quantiles]

    def _evaluate_actions(self, batch: Any, actions: Tensor) -> Tensor:
        """The mean of all quantiles."""
        return torch.mean(self.critic(batch.observations, actions).mean(dim=2), dim=1, keepdim=True)


class TritonQRDQN(ValueUpdateMixin, QRDQN):
    """`QRDQN` with gradient steps and acting that take less time. All that is said of `TritonSAC` holds."""

    def _list_networks(self) -> Networks | None:
        owners = [self.quantile_net, self.quantile_net_target]
        if {x.n_quantiles for x in owners} != {self.n_quantiles}:
            return None
        options = {"optimizer": self.policy.optimizer, "quantiles": self.n_quantiles}
        return Networks(owners, [owners[0].quantile_net], [owners[1].quantile_net], [], options)

    def _choose_actions(self, outputs: np.ndarray, deterministic: bool) -> np.ndarray:
        return np.asarray(outputs.reshape(len(outputs), self.n_quantiles, -1).mean(axis=1).argmax(axis=1))

    def _learn(self, batch: Any, *parts: bool) -> dict[str, Tensor]:
        def choose(quantiles: Tensor, actions: Tensor) -> Tensor:
            """Those of an action, [batch_size, 1]."""
            return quantiles.gather(2, actions[..., None].expand(-1, quantiles.shape[1], 1)).squeeze(2)

        with torch.no_grad():
            quantiles = self.quantile_net_target(batch.next_observations)  # [batch_size, n_quantiles, n_actions]
            best = quantiles.mean(dim=1).argmax(dim=1, keepdim=True)
            targets = self._evaluate_next(batch, choose(quantiles, best))
        current = choose(self.quantile_net(batch.observations), batch.actions.long())
        loss = quantile_huber_loss(current, targets, sum_over_quantiles=True)
        self._step_optimizer(self.policy.optimizer, loss, self.max_grad_norm)
        return {"loss": loss.detach()}


class TritonCrossQ(EntropyMixin, CrossQ):
    """`CrossQ` that takes less time on a GPU; on a CPU it is `CrossQ`. All that is said of `TritonSAC` holds."""

    read_settings: ClassVar[tuple[str, ...]] = ("gamma", "target_entropy")
    transient: ClassVar[tuple[str, ...]] = (*EntropyMixin.transient, "_renorm_steps")
    counts_each: ClassVar[int] = 1

    @property
    def _learns_entropy(self) -> bool:
        return self.log_ent_coef is not None

    def _choose_parts(self, index: int) -> tuple[Any, ...]:
        """Whether the actor learns, too, and of which layers of the critic and the actor the warm-up is over."""
        if index == 0:
            for network in (self.actor, self.critic) if self._update.is_captured else ():
                network.set_bn_training_mode(False)  # as every gradient step leaves it
            self._renorm_steps = [count_renorm_steps(x) for x in (self.critic, self.actor)]
        before = self._n_updates - 1
        actor_index = before // self.policy_delay - (before - index) // self.policy_delay
        of_critic, of_actor = self._renorm_steps
        warm = tuple(seen + index > warm_up for seen, warm_up in of_critic)
        actor_warm = tuple(seen + actor_index > warm_up for seen, warm_up in of_actor)
        return self._n_updates % self.policy_delay == 0, warm, actor_warm

    def _learn(self, batch: Any, *parts: Any) -> dict[str, Tensor]:
        updates_actor, is_warm, is_actor_warm = parts
        ent_coef = self._find_entropy_coefficient()
        self.actor.set_bn_training_mode(False)
        with torch.no_grad():
            next_actions, next_log_probs = self.actor.action_log_prob(batch.next_observations)
        observations = torch.cat([batch.observations, batch.next_observations])  # their statistics are of both
        with learn_statistics(self.critic, is_warm):
            both = torch.cat(self.critic(observations, torch.cat([batch.actions, next_actions])), dim=1)
        current, following = both.chunk(2)  # [batch_size, n_critics]
        with torch.no_grad():
            next_values = following.min(dim=1, keepdim=True)[0] - ent_coef * next_log_probs.reshape(-1, 1)
            targets = self._evaluate_next(batch, next_values)
        critic_loss = self._evaluate_critic(current.T[..., None], targets)
        self._step_optimizer(self.critic.optimizer, critic_loss)
        statistics = {"ent_coef": ent_coef.reshape(()), "critic_loss": critic_loss.detach()}
        if not updates_actor:
            return statistics
        with learn_statistics(self.actor, is_actor_warm):
            actions, log_probs = self.actor.action_log_prob(batch.observations)
        log_probs = log_probs.reshape(-1, 1)
        statistics |= self._update_entropy_coefficient(log_probs)
        return statistics | self._update_actor(self._evaluate_actions(batch, actions), log_probs, ent_coef)


def list_renorms(network: nn.Module) -> list[Any]:
    """The layers of a network that normalise batches."""
    return [x for x in network.modules() if isinstance(x, BatchRenorm)]


def count_renorm_steps(network: nn.Module) -> list[tuple[int, int]]:
    """How many batches each of these layers of a network has seen, and how many are its warm-up."""
    layers = list_renorms(network)
    seen = torch.stack([x.steps for x in layers]).tolist() if layers else []
    return [(steps, x.warmup_steps) for steps, x in zip(seen, layers, strict=True)]


@contextmanager
def learn_statistics(network: Any, is_warm: tuple[bool, ...]) -> Iterator[None]:
    """Inside, the layers that normalise batches learn their statistics, and need not ask the device how many they saw.

    What is known is whether the warm-up of each is over.
    """
    network.set_bn_training_mode(True)
    with KnownSteps(list_renorms(network), is_warm):
        yield
    network.set_bn_training_mode(False)


class KnownSteps(TorchFunctionMode):
    """Inside, the question whether a layer has seen more batches than its warm-up has its answer."""

    def __init__(self, layers: list[Any], answers: tuple[bool, ...]) -> None:
        super().__init__()
        self.answers = {id(x.steps): answer for x, answer in zip(layers, answers, strict=True)}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer, or go on."""
        if function in (torch.Tensor.__gt__, torch.Tensor.gt) and id(args[0]) in self.answers:
            return self.answers[id(args[0])]
        return function(*args, **(kwargs or {}))
