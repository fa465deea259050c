"""Stable-Baselines3: minibatches that are made on the training device, and terminal values in one policy call.

    PPO("CnnPolicy", env, rollout_buffer_class=DeviceRolloutBuffer, device="cuda")
    model.learn(1_000_000, callback=BatchedTerminalValues())

Stable-Baselines3 gathers every minibatch of every epoch on the CPU and copies it to the device. Here each rollout is
copied once, as a whole, when it is complete.
"""

from collections.abc import Callable, Generator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from rl_triton_adapters._switch import find_off_switch
from rl_triton_adapters.sb3.buffers import TritonGAEMixin, check_on_policy

# isort: split
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, RolloutBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

__all__ = ["BatchedTerminalValues", "DeviceDictRolloutBuffer", "DeviceRolloutBuffer", "DeviceStorageMixin"]


class DeviceStorageMixin(TritonGAEMixin):
    """Copy each complete rollout to the buffer's device, and make all of its minibatches there.

    Put it in front of a rollout buffer, and say what its minibatches are. Steps are collected and advantages are
    computed in the NumPy arrays of Stable-Baselines3, so a step costs no copy to the device. Minibatches are the same,
    draw by draw of NumPy's random state.
    """

    samples: ClassVar[Callable[..., Any]]
    """The type of a minibatch."""
    fields: ClassVar[tuple[str, ...]] = ("observations", "actions", "values", "log_probs", "advantages", "returns")
    """The attributes that a minibatch is made of, in order."""
    flattened: ClassVar[tuple[str, ...]] = ("values", "returns")
    """Those that `get` flattens in host memory too, where `train()` reads them."""
    action_dtype: ClassVar[torch.dtype | None] = torch.float32
    """The dtype of actions in a minibatch; None keeps that of the action space."""

    def reset(self) -> None:
        """Make room for a new rollout, in host memory and on the device."""
        super().reset()
        self._rollout: list[Any] = []
        """Each of `fields` on the device, [n_steps * n_envs, ...], one step after the other."""

    def get(self, batch_size: int | None = None) -> Generator[Any, None, None]:
        """Yield the rollout in minibatches, in random order. The first call copies it to the device.

        That call also flattens `values` and `returns` to [n_steps * n_envs, 1], as Stable-Baselines3 does with all of
        its arrays: `train()` logs their explained variance.

        Args:
            batch_size: Samples per minibatch; None for all of them.

        Raises:
            RuntimeError: If the rollout is not complete.
        """
        if find_off_switch():
            yield from super().get(batch_size)
            return
        if not self.full:
            raise RuntimeError(f"the rollout is not complete: {self.pos} of {self.buffer_size} steps were added")
        count = self.buffer_size * self.n_envs
        indices = self._copy_to_device(np.random.permutation(count))  # noqa: NPY002
        if not self.generator_ready:
            self._rollout = [self._copy_field(name) for name in self.fields]
            for name in self.flattened:
                setattr(self, name, self.swap_and_flatten(getattr(self, name)))
            self.generator_ready = True
        # Samples are counted environment by environment, but stored step by step.
        places = indices % self.buffer_size * self.n_envs + indices // self.buffer_size
        for start in range(0, count, batch_size or count):
            yield self._get_samples(places[start:][:batch_size])

    def _get_samples(self, batch_inds: Any, env: VecNormalize | None = None) -> Any:
        if find_off_switch():
            return super()._get_samples(batch_inds, env)
        return self.samples(*(map_arrays(lambda x: x.index_select(0, batch_inds), stored) for stored in self._rollout))

    def _copy_field(self, name: str) -> Any:
        dtype = self.action_dtype if name == "actions" else None

        def copy(array: npt.NDArray[Any]) -> torch.Tensor:
            return self._copy_to_device(array).to(dtype).flatten(0, 1)

        return map_arrays(copy, getattr(self, name))

    def _copy_to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Every copy from the host to the device is made here."""
        return torch.from_numpy(array).to(self.device)


class DeviceRolloutBuffer(DeviceStorageMixin, RolloutBuffer):
    """`RolloutBuffer` with the advantages of `rl_triton_core`; minibatches are made on the training device."""

    samples = RolloutBufferSamples


class DeviceDictRolloutBuffer(DeviceStorageMixin, DictRolloutBuffer):
    """`DictRolloutBuffer` with the advantages of `rl_triton_core`; minibatches are made on the training device."""

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
        ended = [(index, infos[index]) for index, done in enumerate(self.locals["dones"]) if done]
        cut = [i for i, x in ended if x.get("TimeLimit.truncated") and x.get("terminal_observation") is not None]
        if cut and not find_off_switch():
            observations = [infos[index].pop("terminal_observation") for index in cut]
            self.locals["rewards"][cut] += self.model.gamma * self._values(observations, cut)
        return True

    @torch.no_grad()
    def _values(self, observations: list[Any], cut: list[int]) -> npt.NDArray[np.float32]:
        """Values of these environments' observations, `[len(cut)]`."""
        policy: Any = self.model.policy
        batch, _ = policy.obs_to_tensor(map_arrays(lambda *rows: np.stack(rows), *observations))
        recurrent: tuple[Any, ...] = ()
        if "lstm_states" in self.locals:
            states = tuple(state[:, cut].contiguous() for state in self.locals["lstm_states"].vf)
            recurrent = (states, torch.zeros(len(cut), device=self.model.device))
        values: npt.NDArray[np.float32] = policy.predict_values(batch, *recurrent).flatten().numpy(force=True)
        return values


def map_arrays(function: Callable[..., Any], stored: Any, *others: Any) -> Any:
    """Apply a function to an array or tensor, or to each of a dictionary."""
    if isinstance(stored, dict):
        return {key: function(array, *(other[key] for other in others)) for key, array in stored.items()}
    return function(stored, *others)
