"""Stable-Baselines3: DQN whose gradient steps and acting take less time."""

from typing import Any, ClassVar

import numpy as np
import torch
from stable_baselines3 import DQN
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from rl_triton_adapters.sb3.compiled_off_policy import Networks
from rl_triton_adapters.sb3.off_policy import OffPolicyMixin

__all__ = ["TritonDQN"]


class ValueUpdateMixin(OffPolicyMixin):
    """Algorithms with values of actions alone: one optimizer, whose gradients are clipped."""

    read_settings: ClassVar[tuple[str, ...]] = ("gamma", "max_grad_norm")

    max_grad_norm: Any

    def _list_numbers(self, choices: list[tuple[Any, ...]]) -> dict[str, Any]:
        return {"huber_delta": 1.0, "max_grad_norm": self.max_grad_norm}

    def _name_statistics(self, row: list[float], *parts: Any) -> dict[str, float]:
        return {"loss": row[0]}


class TritonDQN(ValueUpdateMixin, DQN):
    """`DQN` with gradient steps and acting that take less time. All that is said of `TritonSAC` holds."""

    def _list_networks(self) -> Networks:
        owners = [self.q_net, self.q_net_target]
        return Networks(owners, [owners[0].q_net], [owners[1].q_net], [], {"optimizer": self.policy.optimizer})

    def _choose_actions(self, outputs: np.ndarray, deterministic: bool) -> np.ndarray:
        return np.asarray(outputs.argmax(axis=1))

    def _learn(self, batch: Any, *parts: bool) -> dict[str, Tensor]:
        with torch.no_grad():
            next_values = self.q_net_target(batch.next_observations).max(dim=1, keepdim=True)[0]
            targets = self._evaluate_next(batch, next_values)
        values = self.q_net(batch.observations).gather(1, batch.actions.long())
        loss = smooth_l1_loss(values, targets)
        self._step_optimizer(self.policy.optimizer, loss, self.max_grad_norm)
        return {"loss": loss.detach()}
