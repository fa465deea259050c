"""Stable-Baselines3: PPO and A2C whose update and acting take less time.

    model = TritonPPO("MlpPolicy", "CartPole-v1")

Drop-ins for `PPO` and `A2C`: the same arguments and one more, the same minibatches, logs and checkpoints. There is less
work in a step and in acting; on a GPU, both are captured in CUDA graphs. With a buffer that makes minibatches of its
own, they are `PPO` and `A2C`. `sb3.contrib` has MaskablePPO.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from stable_baselines3 import A2C, PPO
from torch.nn.functional import mse_loss

from rl_triton_adapters.sb3.acceleration import AcceleratedMixin
from rl_triton_adapters.sb3.compiled import run_compiled
from rl_triton_adapters.sb3.policies import compute_loss, evaluate_actions
from rl_triton_core.capture import CapturedStep
from rl_triton_core.extending import say

__all__ = ["PPOUpdateMixin", "TritonA2C", "TritonPPO"]

STATISTICS = {"policy_gradient_loss": "policy_loss", "value_loss": "value_loss", "entropy_loss": "entropy"}
STATISTICS |= {name: name for name in ("clip_fraction", "approx_kl", "loss")}
"""What a step of PPO returns: names in the logs, and in `PPOLoss`."""
APPROX_KL = [*STATISTICS].index("approx_kl")


class PPOUpdateMixin(AcceleratedMixin):
    """The update of PPO with a fused loss. Put it in front of `PPO`, or of an algorithm with the same loss and logs."""

    read_settings: ClassVar[tuple[str, ...]] = (*AcceleratedMixin.read_settings, "target_kl")

    batch_size: Any
    n_epochs: int
    target_kl: float | None
    normalize_advantage: bool
    clip_range: Any
    clip_range_vf: Any

    def _ask_schedules(self) -> dict[str, Any]:
        """A clip range is 0 or less where schedules end, or the last rollout goes beyond their end."""
        self._clip_ranges = {"clip_range": self.clip_range(self._current_progress_remaining)}
        if self.clip_range_vf is not None:
            self._clip_ranges["clip_range_vf"] = self.clip_range_vf(self._current_progress_remaining)
        is_positive = all(float(x) > 0 for x in self._clip_ranges.values())
        return {} if is_positive else {name: lambda _, x=x: x for name, x in self._clip_ranges.items()}

    def _make_updates(self, update: CapturedStep) -> None:
        clip_range, clip_range_vf = [*map(float, self._clip_ranges.values()), None][:2]
        size = int(self.batch_size or self.rollout_buffer.buffer_size * self.rollout_buffer.n_envs)
        if self._compiled is None:
            with update.held():
                minibatches, epochs = self._run_steps(update, size, clip_range, clip_range_vf)
        else:
            clips = {"clip": clip_range, "value_clip": clip_range_vf}
            minibatches, epochs = run_compiled(self, size, self.n_epochs, max_kl=self._max_kl, **clips)
        self._n_updates -= len(minibatches) - 1  # those that count are counted with their statistics
        found = self._read_statistics(minibatches, epochs)
        history = np.concatenate(found)
        means = {name: history[:, i].mean() for i, name in enumerate(STATISTICS)}
        means["entropy_loss"] = -means["entropy_loss"]
        means |= {"approx_kl": np.float32(found[-1][:, APPROX_KL].mean()), "loss": float(history[-1, 5])}
        names = "entropy_loss", "policy_gradient_loss", "value_loss", "approx_kl", "clip_fraction", "loss"
        first = {name: means[name] for name in names} | self._describe_rollout()
        self._log_update(**first, n_updates=self._n_updates, **self._clip_ranges)

    def _run_steps(self, update: CapturedStep, size: int, *inputs: Any) -> tuple[list[Any], list[torch.Tensor]]:
        """Make one step after the other, with these inputs; the minibatches of each epoch, and their statistics."""
        step = self._make_step if update.reason else update  # which waits for nothing within an epoch
        minibatches, epochs = [], []
        for epoch in range(self.n_epochs):
            self._n_updates += bool(epoch)  # the one before is over
            minibatches.append(torch.split(self._draw_permutation(), size))
            rows = []
            for indices in minibatches[-1]:
                rows.append(step(indices, *inputs).clone())
                if update.reason and rows[-1][-1]:
                    break
            epochs.append(torch.stack(rows))
            if (update.reason or self.target_kl is not None) and rows[-1][-1]:
                break
        return minibatches, epochs

    @property
    def _max_kl(self) -> float:
        """Where an update stops, at the latest where it is not finite, since the policy refuses the minibatch."""
        return torch.finfo(torch.float32).max if self.target_kl is None else 1.5 * self.target_kl

    def _read_statistics(self, minibatches: list[Any], epochs: list[torch.Tensor]) -> list[Any]:
        """The statistics of all minibatches up to the one at which the update stopped, by epoch."""
        found = []
        for epoch, (parts, rows) in enumerate(zip(minibatches, epochs, strict=True)):
            history = rows.cpu().double().numpy()  # PPO's numbers are Python's
            count = int((history[:, -1] == 0).sum())
            has_stopped = count < len(history)
            found.append(history[: count + 1])
            approx_kl = found[-1][-1, APPROX_KL]
            if has_stopped and not np.isfinite(approx_kl):
                self._check_minibatch(parts[count])
                if self.target_kl is None or np.isnan(approx_kl):
                    raise ValueError(f"train/approx_kl: got {approx_kl}, expected a finite number")
            self._n_updates += 1
            if has_stopped:
                if self.verbose >= 1:
                    say(f"Early stopping at step {epoch} due to reaching max kl: {approx_kl:.2f}")
                break
        return found

    def _make_step(self, indices: torch.Tensor, clip_range: Any, clip_range_vf: Any) -> torch.Tensor:
        """Update the policy with one minibatch. Returns its statistics, and whether the update has stopped."""
        batch = self._gather_minibatch(indices)
        result = compute_loss(
            self.policy,
            batch["observations"],
            batch["actions"],
            batch.get("action_masks"),
            defers_checks=self._update.is_captured,
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
        has_stopped = self._step_optimizer(result.loss, ~(result.approx_kl <= self._max_kl))
        return torch.stack([*(getattr(result, name) for name in STATISTICS.values()), has_stopped.float()]).detach()


class TritonPPO(PPOUpdateMixin, PPO):
    """`PPO` with updates and acting in CUDA graphs on a GPU; on a CPU, without Triton, in code compiled by Numba.

    The rollout is copied to the device once per update, minibatches are gathered there by Stable-Baselines3's own
    permutations, and statistics are read once per update. Parameters are those of `PPO` up to rounding. With
    `target_kl`, the update stops at the same minibatch as `PPO`'s, and the host waits once per epoch.

    While a rollout is collected, the policy's results are tensors in host memory. On a CPU, what it returns with equal
    parameters is up to rounding what it returns in `PPO`, and bit for bit if `acts_exactly` is True.

    Arguments are those of `PPO` and `enabled`, with which all this may be switched off. Without `rollout_buffer_class`,
    the buffer is that of `rollout_buffer_class_for`.

    Raises:
        TypeError: `enabled` is no bool.
    """


class TritonA2C(AcceleratedMixin, A2C):
    """`A2C` with fewer operations around its loss; on a GPU, with captured updates and captured acting.

    Parameters are those of `A2C` up to rounding. What is said of acting, arguments and errors in `TritonPPO` holds.
    """

    sde_devices: ClassVar[tuple[str, ...]] = ("cuda",)  # on a CPU, nothing is gained

    def _make_updates(self, update: CapturedStep) -> None:
        count = self.rollout_buffer.buffer_size * self.rollout_buffer.n_envs
        if self._compiled is None or count == 1:
            step, indices = self._make_step if update.reason else update, self._draw_permutation()
            entropy_loss, policy_loss, value_loss, has_stopped = step(indices).tolist()
        else:
            ((indices,),), (rows,) = run_compiled(self, count, 1)
            policy_loss, value_loss, entropy = rows[0, :3].tolist()
            entropy_loss, has_stopped = -entropy, bool(rows[0, -1])
        if has_stopped:
            self._check_minibatch(indices)
            raise ValueError("log_probs: got NaN for the actions of the rollout, expected numbers")
        self._n_updates += 1
        first = {"n_updates": self._n_updates, "explained_variance": 0}
        losses = {"entropy_loss": entropy_loss, "policy_loss": policy_loss, "value_loss": value_loss}
        self._log_update(**(first | losses | self._describe_rollout()))

    def _make_step(self, indices: torch.Tensor) -> torch.Tensor:
        """Update the policy with the rollout. Returns the parts of the loss, and whether it was refused."""
        batch = self._gather_minibatch(indices)
        values, log_probs, entropy = evaluate_actions(
            self.policy, batch["observations"], batch["actions"], defers_checks=self._update.is_captured
        )
        advantages = batch["advantages"]
        if self.normalize_advantage:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -(advantages * log_probs).mean()
        value_loss = mse_loss(batch["returns"], values.flatten())
        entropy_loss = log_probs.mean() if entropy is None else -entropy.mean()
        loss = policy_loss + self.ent_coef * entropy_loss + self.vf_coef * value_loss
        is_refused = self._step_optimizer(loss, log_probs.isnan().any())
        return torch.stack([entropy_loss, policy_loss, value_loss, is_refused.float()]).detach()
