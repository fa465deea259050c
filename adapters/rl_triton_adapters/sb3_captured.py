"""Stable-Baselines3: PPO and A2C whose update and acting take less time.

    model = TritonPPO("MlpPolicy", "CartPole-v1")

Drop-ins for `PPO` and `A2C`: the same arguments and one more, the same minibatches, logs and checkpoints. There is less
work in a step, actions are drawn without distribution objects, and on a GPU both are captured in CUDA graphs. With
state-dependent exploration, or a rollout buffer that makes minibatches of its own, they are `PPO` and `A2C`.
`sb3_contrib_captured` has MaskablePPO.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import mse_loss

from rl_triton_adapters._sb3_acceleration import AcceleratedMixin
from rl_triton_adapters._sb3_policies import compile_loss, compute_loss, evaluate_policy
from rl_triton_core.capture import CapturedStep

# isort: split
from stable_baselines3 import A2C, PPO

__all__ = ["PPOUpdateMixin", "TritonA2C", "TritonPPO"]

STATISTICS = {
    "policy_gradient_loss": "policy_loss",
    "value_loss": "value_loss",
    "entropy_loss": "entropy",
    "clip_fraction": "clip_fraction",
    "approx_kl": "approx_kl",
    "loss": "loss",
}
"""What a step of PPO returns: names in the logs, and in `PPOLoss`."""


class PPOUpdateMixin(AcceleratedMixin):
    """The update of PPO with a fused loss. Put it in front of `PPO`, or of an algorithm with the same loss and logs."""

    settings: ClassVar[tuple[str, ...]] = (*AcceleratedMixin.settings, "target_kl")

    batch_size: Any
    n_epochs: int
    target_kl: float | None
    normalize_advantage: bool
    clip_range: Any
    clip_range_vf: Any

    def _setup_model(self) -> None:
        """Compile the loss, too."""
        super()._setup_model()
        if not self.find_obstacle() and self.device.type == "cpu":
            value_clip = None if self.clip_range_vf is None else 1.0
            compile_loss(self.policy, value_clip=value_clip, normalize_advantages=bool(self.normalize_advantage))

    def _find_clip_ranges(self) -> tuple[float, float | None]:
        """Those of ratios and of values, of this update."""
        progress = self._current_progress_remaining
        clip_range_vf = None if self.clip_range_vf is None else float(self.clip_range_vf(progress))
        return float(self.clip_range(progress)), clip_range_vf

    def _can_update(self) -> bool:
        """Not where schedules end, or the last rollout goes beyond their end: a clip range is 0 or less there."""
        self._clip_ranges = self._find_clip_ranges()
        return all(x is None or x > 0 for x in self._clip_ranges)

    def _make_updates(self, update: CapturedStep) -> None:
        clip_range, clip_range_vf = self._clip_ranges
        self._log_statistics(self._make_epochs(update, clip_range, clip_range_vf), clip_range, clip_range_vf)

    def _make_epochs(self, update: CapturedStep, clip_range: float, clip_range_vf: float | None) -> Any:
        """The statistics of all minibatches up to the one at which `target_kl` was passed, by epoch."""
        # An eager step that never stops needs nothing of what CapturedStep does around it.
        step = self._make_step if update.reason and self.target_kl is None else update
        epochs = []
        for epoch in range(self.n_epochs):
            rows = []
            indices = self._draw_permutation()
            for part in torch.split(indices, int(self.batch_size or len(indices))):
                rows.append(step(part, clip_range, clip_range_vf).clone())
                if self.target_kl is not None and update.reason and update.stop.item():
                    break
            self._n_updates += 1
            epochs.append(torch.stack(rows))
            if self.target_kl is not None and update.stop.item():
                steps = int((epochs[-1][:, -1] == 0).sum()) + 1
                epochs[-1] = epochs[-1][:steps]
                if self.verbose >= 1:
                    print(f"Early stopping at step {epoch} due to reaching max kl: {epochs[-1][-1, 4]:.2f}")
                break
        return [rows.cpu().double().numpy() for rows in epochs]  # PPO's numbers are Python's

    def _make_step(self, indices: torch.Tensor, clip_range: Any, clip_range_vf: Any) -> torch.Tensor:
        """Update the policy with one minibatch. Returns its statistics, and whether it stopped."""
        batch = self._gather_minibatch(indices)
        result = compute_loss(
            self.policy,
            batch["observations"],
            batch["actions"],
            batch.get("action_masks"),
            old_log_probs=batch["log_probs"],
            advantages=batch["advantages"],
            returns=batch["returns"],
            old_values=batch["values"],
            clip=clip_range,
            value_clip=clip_range_vf,
            value_coef=self.vf_coef,
            entropy_coef=self.ent_coef,
            normalize_advantages=bool(self.normalize_advantage) and len(indices) > 1,
        )
        assert self._update is not None
        if self.target_kl is not None:
            self._update.stop_if(result.approx_kl > 1.5 * self.target_kl)
        if self.target_kl is None or not self._update.reason or not self._update.stop.item():
            self._step_optimizer(result.loss)
        statistics = [getattr(result, name) for name in STATISTICS.values()]
        return torch.stack([*statistics, self._update.stop]).detach()

    def _log_statistics(self, epochs: list[Any], clip_range: float, clip_range_vf: float | None) -> None:
        """Log what `PPO.train` logs."""
        history = np.concatenate(epochs)
        check_losses(history[:, 5], self._parameters)
        means = {name: history[:, i].mean() for i, name in enumerate(STATISTICS)}
        means["entropy_loss"] = -means["entropy_loss"]
        means |= {"approx_kl": np.float32(epochs[-1][:, 4].mean()), "loss": float(history[-1, 5])}
        for name in ("entropy_loss", "policy_gradient_loss", "value_loss", "approx_kl", "clip_fraction", "loss"):
            self.logger.record(f"train/{name}", means[name])
        self._log_update()
        self.logger.record("train/clip_range", clip_range)
        if clip_range_vf is not None:
            self.logger.record("train/clip_range_vf", clip_range_vf)


class TritonPPO(PPOUpdateMixin, PPO):
    """`PPO` with a fused loss and fewer operations around it; on a GPU, with captured updates and captured acting.

    The rollout is copied to the device once per update, minibatches are gathered there by Stable-Baselines3's own
    permutations, and statistics are read once per update. Parameters are those of `PPO` up to rounding. With
    `target_kl`, the update stops at the same minibatch as `PPO`'s, and the host waits once per epoch.

    While a rollout is collected, the policy's results are tensors in host memory. On a CPU, actions, values and
    log-probabilities of equal parameters are those of `PPO`, bit for bit.

    Args:
        acceleration: ``"auto"`` does less work than `PPO`, and captures it where possible; ``"off"`` is `PPO`.
        args: As of `PPO`.
        kwargs: As of `PPO`. Without `rollout_buffer_class`, the buffer is that of `rollout_buffer_class_for`.

    Raises:
        ValueError: `acceleration` is neither of the two.
    """


class TritonA2C(AcceleratedMixin, A2C):
    """`A2C` with fewer operations around its loss; on a GPU, with captured updates and captured acting.

    Parameters are those of `A2C` up to rounding. While a rollout is collected, the policy's results are tensors in host
    memory. On a CPU, actions, values and log-probabilities of equal parameters are those of `A2C`, bit for bit.

    Args:
        acceleration: ``"auto"`` does less work than `A2C`, and captures it where possible; ``"off"`` is `A2C`.
        args: As of `A2C`.
        kwargs: As of `A2C`. Without `rollout_buffer_class`, the buffer is that of `rollout_buffer_class_for`.

    Raises:
        ValueError: `acceleration` is neither of the two.
    """

    def _make_updates(self, update: CapturedStep) -> None:
        step = self._make_step if update.reason else update
        entropy_loss, policy_loss, value_loss, loss = step(self._draw_permutation()).tolist()
        check_losses(loss, self._parameters)
        self._n_updates += 1
        self.logger.record("train/entropy_loss", entropy_loss)
        self.logger.record("train/policy_loss", policy_loss)
        self.logger.record("train/value_loss", value_loss)
        self._log_update()

    def _make_step(self, indices: torch.Tensor) -> torch.Tensor:
        """Update the policy with the rollout. Returns the parts of the loss, and the loss."""
        batch = self._gather_minibatch(indices)
        values, log_probs, entropy = evaluate_policy(self.policy, batch["observations"], batch["actions"])
        advantages = batch["advantages"]
        if self.normalize_advantage:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -(advantages * log_probs).mean()
        value_loss = mse_loss(batch["returns"], values.flatten())
        entropy_loss = log_probs.mean() if entropy is None else -entropy.mean()
        loss = policy_loss + self.ent_coef * entropy_loss + self.vf_coef * value_loss
        self._step_optimizer(loss)
        return torch.stack([entropy_loss, policy_loss, value_loss, loss]).detach()


def check_losses(losses: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Raise ValueError if this loss, or one of these, is not finite and has made parameters such."""
    wrong = np.atleast_1d(losses)[~np.isfinite(np.atleast_1d(losses))]
    if wrong.size and not all(x.isfinite().all() for x in parameters):
        raise ValueError(f"train/loss: got {wrong[0]}, expected a number; the policy's parameters are not finite now")
