"""Stable-Baselines3: rollouts that stay on the training device, and terminal values in one policy call.

    PPO("CnnPolicy", env, rollout_buffer_class=DeviceRolloutBuffer, device="cuda")
    model.learn(1_000_000, callback=BatchedTerminalValues())

Stable-Baselines3 keeps rollouts in NumPy arrays; every minibatch of every epoch is gathered on the CPU and copied to
the device. Here each step is copied once, when it is added.
"""

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from rl_triton_adapters.sb3 import TritonGAEMixin, check_on_policy

# isort: split
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

__all__ = ["BatchedTerminalValues", "DeviceDictRolloutBuffer", "DeviceRolloutBuffer", "DeviceStorageMixin"]


class DeviceStorageMixin(TritonGAEMixin):
    """Store rollouts as tensors on the buffer's device: advantages and minibatches are made there.

    Put it in front of a rollout buffer, and say what its minibatches are. Attributes have the names and shapes of
    Stable-Baselines3. Minibatches are the same, draw by draw of NumPy's random state.
    """

    samples: ClassVar[Callable[..., Any]]
    """The type of a minibatch."""
    fields: ClassVar[tuple[str, ...]] = ("observations", "actions", "values", "log_probs", "advantages", "returns")
    """The attributes it is made of, in order."""
    flattened: ClassVar[tuple[str, ...]] = ("actions",)
    """Attributes that are stored with one dimension per environment, however many they come with."""
    action_dtype: ClassVar[torch.dtype | None] = torch.float32
    """That of the actions in it; None for that of the action space."""

    def reset(self) -> None:
        """Make room for a new rollout."""
        self._flat: list[Any] = []  # or the last rollout's memory would be held while the next one's is taken
        super(TritonGAEMixin, self).reset()  # for the shapes: NumPy's zeros take no memory before they are touched
        for name in ("rewards", "episode_starts", *self.fields):
            zeros = partial(self._zeros, dtype=self.action_dtype if name == "actions" else None)
            setattr(self, name, _each(zeros, getattr(self, name)))

    def add(
        self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any, **others: Any
    ) -> None:
        """Store one step of every environment.

        Args:
            obs: Observations, array or tensor; a dictionary of these for a Dict space.
            action: Actions.
            reward: Rewards, `[n_envs]`.
            episode_start: Whether `obs` is the first of an episode, `[n_envs]`.
            value: Values of `obs`, one per environment.
            log_prob: Log probabilities of the actions, one per environment.
            **others: More attributes, by name. None leaves the step as `reset()` made it.

        Raises:
            ValueError: If one of them has another shape.
        """
        step = {
            "observations": obs,
            "actions": action,
            "rewards": reward,
            "episode_starts": episode_start,
            "values": value,
            "log_probs": log_prob,
        }
        for name, data in (step | others).items():
            if data is not None:
                _each(partial(self._write, name), getattr(self, name), data)
        self.pos += 1
        self.full = self.pos == self.buffer_size

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Yield the rollout in minibatches, in random order.

        From then on `values` and `returns` are NumPy arrays, `[n_steps * n_envs, 1]`: `train()` logs their explained
        variance with NumPy.

        Args:
            batch_size: Samples per minibatch; None for all of them.

        Raises:
            RuntimeError: If the rollout is not complete.
        """
        if not self.full:
            raise RuntimeError(f"the rollout is not complete: {self.pos} of {self.buffer_size} steps were added")
        count = self.buffer_size * self.n_envs
        indices = torch.from_numpy(np.random.permutation(count)).to(self.device)  # noqa: NPY002
        if not self.generator_ready:
            self._flat = [_each(lambda tensor: tensor.flatten(0, 1), getattr(self, name)) for name in self.fields]
            for name in ("values", "returns"):
                setattr(self, name, self.swap_and_flatten(getattr(self, name).numpy(force=True)))
            self.generator_ready = True
        # Samples are counted environment by environment, but stored step by step.
        places = indices % self.buffer_size * self.n_envs + indices // self.buffer_size
        for start in range(0, count, batch_size or count):
            yield self._get_samples(places[start:][:batch_size])

    def _get_samples(self, batch_inds: Any, env: VecNormalize | None = None) -> Any:
        return self.samples(
            *(_each(lambda tensor: tensor.index_select(0, batch_inds), stored) for stored in self._flat)
        )

    def _zeros(self, array: npt.NDArray[Any], dtype: torch.dtype | None) -> torch.Tensor:
        return torch.zeros_like(torch.from_numpy(array), dtype=dtype, device=self.device)

    def _write(self, name: str, stored: torch.Tensor, data: Any) -> None:
        if not isinstance(data, torch.Tensor):
            data = torch.from_numpy(np.require(data, requirements=["C", "W"]))
        step = stored[self.pos]
        try:
            fits = name in self.flattened or _without_ones(data) == _without_ones(step)
            data = data.reshape(step.shape) if fits else data.expand(step.shape)
        except RuntimeError as error:
            raise ValueError(f"{name}: got shape {tuple(data.shape)}, expected {tuple(step.shape)}") from error
        step.copy_(data.detach())


class DeviceRolloutBuffer(DeviceStorageMixin, RolloutBuffer):
    """`RolloutBuffer` of Stable-Baselines3 on the training device, with the advantages of `rl_triton_core`."""

    samples = RolloutBufferSamples


class DeviceDictRolloutBuffer(DeviceStorageMixin, DictRolloutBuffer):
    """`DictRolloutBuffer` of Stable-Baselines3 on the training device, with the advantages of `rl_triton_core`."""

    samples = DictRolloutBufferSamples


class BatchedTerminalValues(BaseCallback):
    """Evaluate the terminal observations of all environments truncated at a step in one policy call.

    Stable-Baselines3 makes one call, and one copy to the host, for each. Between `env.step` and that loop it calls the
    callbacks. This one adds `gamma * V(terminal observation)` to the rewards and takes `"terminal_observation"` out of
    the infos, by which the loop passes over them. Put it last in a list: callbacks after it miss that entry.
    """

    model: OnPolicyAlgorithm

    def _init_callback(self) -> None:
        check_on_policy(type(self.model))

    def _on_step(self) -> bool:
        infos = self.locals["infos"]
        cut = [
            index
            for index, done in enumerate(self.locals["dones"])
            if done
            and infos[index].get("terminal_observation") is not None
            and infos[index].get("TimeLimit.truncated", False)
        ]
        if cut:
            observations = [infos[index].pop("terminal_observation") for index in cut]
            self.locals["rewards"][cut] += self.model.gamma * self._values(observations, cut)
        return True

    @torch.no_grad()
    def _values(self, observations: list[Any], cut: list[int]) -> npt.NDArray[np.float32]:
        """Values of these environments' observations, `[len(cut)]`."""
        policy: Any = self.model.policy
        batch, _ = policy.obs_to_tensor(_each(lambda *rows: np.stack(rows), *observations))
        recurrent: tuple[Any, ...] = ()
        if "lstm_states" in self.locals:
            states = tuple(state[:, cut].contiguous() for state in self.locals["lstm_states"].vf)
            recurrent = (states, torch.zeros(len(cut), device=self.model.device))
        values: npt.NDArray[np.float32] = policy.predict_values(batch, *recurrent).flatten().numpy(force=True)
        return values


def _without_ones(tensor: torch.Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]


def _each(function: Callable[..., Any], stored: Any, *others: Any) -> Any:
    """Apply a function to arrays, or to those of dictionaries, key by key."""
    if isinstance(stored, dict):
        return {key: function(array, *(other[key] for other in others)) for key, array in stored.items()}
    return function(stored, *others)
