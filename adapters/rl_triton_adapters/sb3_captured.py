"""Stable-Baselines3: PPO whose update and whose policy, while acting, are captured in CUDA graphs.

    model = TritonPPO("MlpPolicy", "CartPole-v1", device="cuda")

A drop-in for `PPO`: the same arguments and one more, the same minibatches, logs and checkpoints. On a CPU, where
nothing can be captured, it makes the same steps with less work around them. With state-dependent exploration, and on a
GPU with an optimizer that `rl_triton_core.capture` does not know, it is `PPO`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributions import Distribution
from torch.nn.functional import mse_loss

from rl_triton_adapters._optimizers import fuse_optimizer
from rl_triton_adapters.sb3 import rollout_buffer_class_for
from rl_triton_adapters.sb3_device import DeviceStorageMixin, map_arrays
from rl_triton_core.capture import CapturedStep

# isort: split
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.utils import explained_variance

__all__ = ["TritonPPO"]

STATISTICS = ("policy_gradient_loss", "value_loss", "entropy_loss", "clip_fraction", "approx_kl", "loss")
"""What a step tells of itself."""
ACCELERATIONS = ("auto", "off")


class TritonPPO(PPO):
    """`PPO` with captured updates and captured acting; on a CPU, with steps that cost less.

    The rollout is copied to the device once per update, minibatches are gathered there by Stable-Baselines3's own
    permutations, and statistics are read once per update; the step's operations are those of Stable-Baselines3 in its
    order. With `target_kl`, the update stops at the same minibatch as `PPO`'s, and the host waits once per epoch.

    While a rollout is collected, the policy's results are tensors in host memory.

    On a CPU the steps are made one by one: distributions do not check their arguments, the optimizer steps all
    parameters in one kernel, and statistics are read once per epoch.

    Args:
        acceleration: ``"auto"`` captures where possible, ``"off"`` is `PPO`.
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
        super().__init__(*args, **kwargs)

    def _setup_model(self) -> None:
        """Choose the buffer, where none was asked for, for the model's life only: checkpoints are those of `PPO`."""
        chosen = self.rollout_buffer_class
        if chosen is None and self.acceleration == "auto":
            self.rollout_buffer_class = rollout_buffer_class_for(self.observation_space, PPO, verbose=0)
        super()._setup_model()
        self.rollout_buffer_class = chosen

    def _excluded_save_params(self) -> list[str]:
        """What belongs to this process."""
        return [*super()._excluded_save_params(), "_update", "_acting", "_rollout"]

    @property
    def is_captured(self) -> bool:
        """Whether updates are captured, as far as is known."""
        return self._find_update().reason == ""

    @property
    def makes_own_steps(self) -> bool:
        """Whether updates and acting are not those of `PPO`: they are captured, or on a CPU."""
        captured = self.is_captured
        return captured or (self.acceleration == "auto" and not self.use_sde and self.device.type == "cpu")

    def _find_update(self) -> CapturedStep:
        if self._update is None or self._update.modules != [self.policy]:
            enabled = None if self.acceleration == "auto" and not self.use_sde else False
            policy, optimizer = self.policy, self.policy.optimizer
            self._rollout = {}
            self._update = CapturedStep(self._step, modules=[policy], optimizers=[optimizer], enabled=enabled)
            self._acting = CapturedStep(self._act, modules=[policy], enabled=enabled)
            if self._update.reason and self.makes_own_steps:
                fuse_optimizer(optimizer)
        return self._update

    # -- the update ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Update the policy, as `PPO.train` does."""
        if not self.makes_own_steps:
            super().train()
            return
        update = self._find_update()
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        progress = self._current_progress_remaining
        clip_range = float(self.clip_range(progress))  # type: ignore[operator]
        clip_range_vf = None if self.clip_range_vf is None else float(self.clip_range_vf(progress))  # type: ignore[operator]
        self._copy_rollout()
        update.resume()
        history = self._make_epochs(update, clip_range, clip_range_vf)
        self._log(history, clip_range, clip_range_vf)

    def _make_epochs(self, update: CapturedStep, clip_range: float, clip_range_vf: float | None) -> Any:
        """The statistics of all minibatches up to the one at which `target_kl` was passed, by epoch."""
        count = self.rollout_buffer.buffer_size * self.rollout_buffer.n_envs
        epochs = []
        for epoch in range(self.n_epochs):
            indices = torch.from_numpy(np.random.permutation(count)).to(self.device)  # noqa: NPY002
            rows = []
            for part in torch.split(indices, self.batch_size):
                rows.append(update(part, clip_range, clip_range_vf).clone())
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
        """One minibatch: the operations of `PPO.train` in their order. Returns its statistics, and if it stopped."""
        batch = {name: map_arrays(lambda x: x.index_select(0, indices), x) for name, x in self._rollout.items()}
        actions = batch["actions"]
        if isinstance(self.action_space, spaces.Discrete):
            actions = actions.long().flatten()
        with _unvalidated():
            values, log_prob, entropy = self.policy.evaluate_actions(batch["observations"], actions)
        values, advantages = values.flatten(), batch["advantages"]
        if self.normalize_advantage and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        log_ratio = log_prob - batch["log_probs"]
        ratio = torch.exp(log_ratio)
        clipped = advantages * torch.clamp(ratio, 1 - clip_range, 1 + clip_range)
        policy_loss = -torch.min(advantages * ratio, clipped).mean()
        if clip_range_vf is not None:
            values = batch["values"] + torch.clamp(values - batch["values"], -clip_range_vf, clip_range_vf)
        value_loss = mse_loss(batch["returns"], values)
        entropy_loss = -torch.mean(-log_prob if entropy is None else entropy)
        loss = policy_loss + self.ent_coef * entropy_loss + self.vf_coef * value_loss
        with torch.no_grad():
            approx_kl = torch.mean((torch.exp(log_ratio) - 1) - log_ratio)
            clip_fraction = torch.mean((torch.abs(ratio - 1) > clip_range).float())
        assert self._update is not None
        if self.target_kl is not None:
            self._update.stop_if(approx_kl > 1.5 * self.target_kl)
        self.policy.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
        self.policy.optimizer.step()
        found = (policy_loss, value_loss, entropy_loss, clip_fraction, approx_kl, loss, self._update.stop)
        return torch.stack([x.detach() for x in found])

    def _copy_rollout(self) -> None:
        """The rollout on the device, flattened as `RolloutBuffer.get` does it, always in the same tensors."""
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
        source = source.float() if name == "actions" else source
        if known is None or known.shape != source.shape:
            return source.to(self.device)
        return known.copy_(source)

    def _log(self, epochs: list[Any], clip_range: float, clip_range_vf: float | None) -> None:
        """What `PPO.train` logs."""
        history = np.concatenate(epochs)
        means = {name: np.mean(history[:, i]) for i, name in enumerate(STATISTICS)}
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
        """Collect a rollout, as `PPO` does, with the policy captured."""
        if not self.makes_own_steps:
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        assert self._acting is not None
        with _forward(self.policy, self._act_eagerly if self._acting.reason else self._act_once):
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)

    def _act_eagerly(self, observations: Any, deterministic: bool = False) -> Any:
        """What the policy's own `forward` returns."""
        with _unvalidated():
            return type(self.policy).forward(self.policy, observations, deterministic)

    def _act(self, observations: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions, and everything as one row of floats per environment: actions, value, log-probability."""
        with _unvalidated():
            actions, values, log_probs = type(self.policy).forward(self.policy, observations)
        columns = [actions.flatten(1) if actions.ndim > 1 else actions[:, None], values, log_probs[:, None]]
        return actions, torch.cat([x.float() for x in columns], dim=1)

    def _act_once(self, observations: Any, deterministic: bool = False) -> tuple[torch.Tensor, ...]:
        """The policy's results in host memory, by one copy."""
        assert self._acting is not None
        actions, packed = self._acting(observations)
        rows = packed.cpu()
        chosen = rows[:, :-2].reshape(actions.shape).to(actions.dtype)
        return chosen, rows[:, -2:-1], rows[:, -1]


@contextmanager
def _forward(policy: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Let a policy answer by this function."""
    policy.forward = function
    try:
        yield
    finally:
        del policy.forward


@contextmanager
def _unvalidated() -> Iterator[None]:
    """Distributions do not check their arguments, for which they would wait for the device."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
