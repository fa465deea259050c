"""Stable-Baselines3: PPO whose update and acting take less time.

    model = TritonPPO("MlpPolicy", "CartPole-v1")

A drop-in for `PPO`: the same arguments and one more, the same minibatches, logs and checkpoints. Loss and gradient are
computed in one pass, actions are drawn without distribution objects, and on a GPU both steps are captured in CUDA
graphs. With state-dependent exploration, a rollout buffer that makes minibatches of its own, and on a GPU an optimizer
that `rl_triton_core.capture` does not know, it is `PPO`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from rl_triton_adapters._optimizers import clip_gradients, fuse_optimizer
from rl_triton_adapters._sb3_policies import apply_policy, compile_loss, compute_loss
from rl_triton_adapters.sb3 import rollout_buffer_class_for
from rl_triton_adapters.sb3_device import DeviceStorageMixin, map_arrays
from rl_triton_core.capture import CapturedStep

# isort: split
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.utils import explained_variance

__all__ = ["TritonPPO"]

STATISTICS = {
    "policy_gradient_loss": "policy_loss",
    "value_loss": "value_loss",
    "entropy_loss": "entropy",
    "clip_fraction": "clip_fraction",
    "approx_kl": "approx_kl",
    "loss": "loss",
}
"""What a step returns: names in the logs, and in `PPOLoss`."""
ACCELERATIONS = ("auto", "off")


class TritonPPO(PPO):
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

    def __init__(self, *args: Any, acceleration: str = "auto", **kwargs: Any) -> None:
        if acceleration not in ACCELERATIONS:
            raise ValueError(f"acceleration: got {acceleration!r}, expected one of {', '.join(ACCELERATIONS)}")
        self.acceleration = acceleration
        self._update: CapturedStep | None = None
        self._acting: CapturedStep | None = None
        self._rollout: dict[str, Any] = {}
        self._parameters: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def _setup_model(self) -> None:
        """Choose the buffer, where none was asked for, for the model's life only: checkpoints are those of `PPO`."""
        chosen = self.rollout_buffer_class
        if chosen is None and self.acceleration == "auto":
            self.rollout_buffer_class = rollout_buffer_class_for(self.observation_space, PPO, verbose=0)
        super()._setup_model()
        self.rollout_buffer_class = chosen
        if self._is_supported() and self.device.type == "cpu":
            value_clip = None if self.clip_range_vf is None else 1.0
            compile_loss(self.policy, value_clip=value_clip, normalize_advantages=self.normalize_advantage)

    def _excluded_save_params(self) -> list[str]:
        """What belongs to this process."""
        return [*super()._excluded_save_params(), "_update", "_acting", "_rollout", "_parameters"]

    @property
    def is_captured(self) -> bool:
        """Whether updates are captured, as far as is known."""
        return self._find_update().reason == ""

    @property
    def is_accelerated(self) -> bool:
        """Whether updates and acting are other than those of `PPO`: captured, or on a CPU."""
        captured = self.is_captured
        return captured or (self._is_supported() and self.device.type == "cpu")

    def _is_supported(self) -> bool:
        return self.acceleration == "auto" and not self.use_sde and has_plain_minibatches(self.rollout_buffer)

    def _find_update(self) -> CapturedStep:
        policy, optimizer = self.policy, self.policy.optimizer
        known = self._update
        if known is None or known.modules != [policy] or known.optimizers != [optimizer]:
            enabled = None if self._is_supported() else False
            self._rollout = {}
            self._update = known = CapturedStep(self._step, modules=[policy], optimizers=[optimizer], enabled=enabled)
            self._acting = CapturedStep(self._act, modules=[policy], enabled=enabled)
        return known

    # -- the update ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Update the policy, as `PPO.train` does."""
        update, progress = self._find_update(), self._current_progress_remaining
        clip_range = float(self.clip_range(progress))  # type: ignore[operator]
        clip_range_vf = None if self.clip_range_vf is None else float(self.clip_range_vf(progress))  # type: ignore[operator]
        # Where schedules end, or the last rollout goes beyond their end, a clip range is 0 or less.
        has_range = clip_range > 0 and (clip_range_vf is None or clip_range_vf > 0)
        if not (has_range and self.is_accelerated):
            update.reset()
            super().train()
            return
        if update.reason:
            fuse_optimizer(self.policy.optimizer)
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        self._parameters = list(self.policy.parameters())
        self._copy_rollout()
        update.resume()
        history = self._make_epochs(update, clip_range, clip_range_vf)
        self._log(history, clip_range, clip_range_vf)

    def _make_epochs(self, update: CapturedStep, clip_range: float, clip_range_vf: float | None) -> Any:
        """The statistics of all minibatches up to the one at which `target_kl` was passed, by epoch."""
        count = self.rollout_buffer.buffer_size * self.rollout_buffer.n_envs
        # An eager step that never stops needs nothing of what CapturedStep does around it.
        step = self._step if update.reason and self.target_kl is None else update
        epochs = []
        for epoch in range(self.n_epochs):
            indices = torch.from_numpy(np.random.permutation(count)).to(self.device)  # noqa: NPY002
            rows = []
            for part in torch.split(indices, self.batch_size):
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
        return [rows.cpu().numpy() for rows in epochs]

    def _step(self, indices: torch.Tensor, clip_range: Any, clip_range_vf: Any) -> torch.Tensor:
        """Update the policy with one minibatch. Returns its statistics, and whether it stopped."""
        batch = {name: map_arrays(lambda x: x.index_select(0, indices), x) for name, x in self._rollout.items()}
        result = compute_loss(
            self.policy,
            batch["observations"],
            batch["actions"],
            old_log_probs=batch["log_probs"],
            advantages=batch["advantages"],
            returns=batch["returns"],
            old_values=batch["values"],
            clip=clip_range,
            value_clip=clip_range_vf,
            value_coef=self.vf_coef,
            entropy_coef=self.ent_coef,
            normalize_advantages=self.normalize_advantage and len(indices) > 1,
        )
        assert self._update is not None
        if self.target_kl is not None:
            self._update.stop_if(result.approx_kl > 1.5 * self.target_kl)
        self.policy.optimizer.zero_grad()
        result.loss.backward()  # type: ignore[no-untyped-call]
        clip_gradients(self._parameters, self.max_grad_norm)
        self.policy.optimizer.step()
        statistics = [getattr(result, name) for name in STATISTICS.values()]
        return torch.stack([*statistics, self._update.stop]).detach()

    def _copy_rollout(self) -> None:
        """Flatten the rollout as `RolloutBuffer.get` does, and copy it to the device; for graphs, to the same place."""
        buffer: Any = self.rollout_buffer
        if not buffer.generator_ready:
            for name in DeviceStorageMixin.fields:
                setattr(buffer, name, map_arrays(buffer.swap_and_flatten, getattr(buffer, name)))
            buffer.generator_ready = True
        for name in DeviceStorageMixin.fields:
            self._rollout[name] = self._copy_field(self._rollout.get(name), getattr(buffer, name), name)

    def _copy_field(self, known: Any, arrays: Any, name: str) -> Any:
        if isinstance(arrays, dict):
            return {key: self._copy_field((known or {}).get(key), x, name) for key, x in arrays.items()}
        source = torch.from_numpy(arrays)
        source = source if name in ("observations", "actions") else source.flatten()
        if name == "actions":
            source = source.long().flatten() if isinstance(self.action_space, spaces.Discrete) else source.float()
        if not self.is_captured:
            return source
        if known is None or known.shape != source.shape:
            return source.to(self.device, copy=True)
        return known.copy_(source)

    def _log(self, epochs: list[Any], clip_range: float, clip_range_vf: float | None) -> None:
        """What `PPO.train` logs."""
        history = np.concatenate(epochs)
        if np.isnan(history[:, 5]).any():
            raise ValueError("train/loss: got nan, expected a number; the policy's parameters may be nan now")
        means = {name: np.mean(history[:, i]) for i, name in enumerate(STATISTICS)}
        means["entropy_loss"] = -means["entropy_loss"]
        means |= {"approx_kl": np.mean(epochs[-1][:, 4]), "loss": float(history[-1, 5])}
        buffer: Any = self.rollout_buffer
        means["explained_variance"] = explained_variance(buffer.values.flatten(), buffer.returns.flatten())
        for name in ("entropy_loss", "policy_gradient_loss", "value_loss", "approx_kl", "clip_fraction", "loss"):
            self.logger.record(f"train/{name}", means[name])
        self.logger.record("train/explained_variance", means["explained_variance"])
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", torch.exp(self.policy.log_std).mean().item())
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/clip_range", clip_range)
        if clip_range_vf is not None:
            self.logger.record("train/clip_range_vf", clip_range_vf)

    # -- acting --------------------------------------------------------------------------------------------------------

    def collect_rollouts(self, env: Any, callback: Any, rollout_buffer: RolloutBuffer, n_rollout_steps: int) -> bool:
        """Collect a rollout, as `PPO` does, with the policy's steps replaced."""
        if not self.is_accelerated or "forward" in vars(self.policy):
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        assert self._acting is not None
        forward = partial(apply_policy, self.policy) if self._acting.reason else self._act_once
        with replace_forward(self.policy, forward):
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)

    def _act(self, observations: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions, and everything as one row of floats per environment: actions, value, log-probability."""
        actions, values, log_probs = apply_policy(self.policy, observations)
        columns = [actions.flatten(1) if actions.ndim > 1 else actions[:, None], values, log_probs[:, None]]
        return actions, torch.cat([x.float() for x in columns], dim=1)

    def _act_once(self, observations: Any, deterministic: bool = False) -> tuple[torch.Tensor, ...]:
        """The policy's results in host memory, by one copy."""
        if deterministic:
            return apply_policy(self.policy, observations, deterministic)
        assert self._acting is not None
        actions, packed = self._acting(observations)
        rows = packed.cpu()
        chosen = rows[:, :-2].reshape(actions.shape).to(actions.dtype)
        return chosen, rows[:, -2:-1], rows[:, -1]


@contextmanager
def replace_forward(policy: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Let a policy answer by this function."""
    policy.forward = function
    try:
        yield
    finally:
        del policy.forward


def has_plain_minibatches(buffer: Any) -> bool:
    """Whether a buffer makes minibatches as those of Stable-Baselines3 do, or on the device."""
    kinds = (RolloutBuffer, DictRolloutBuffer, DeviceStorageMixin)
    return any(
        all(getattr(type(buffer), name) is getattr(kind, name) for name in ("get", "_get_samples", "swap_and_flatten"))
        for kind in kinds
    )
