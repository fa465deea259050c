"""Stable-Baselines3: rollout buffers that compute advantages and returns with `rl_triton_core`.

One line turns them on, and the trained agent stays the same, bit for bit:

    PPO("MlpPolicy", env, rollout_buffer_class=TritonRolloutBuffer)

The storage of Stable-Baselines3 is NumPy, in host memory; the compiled CPU backend reads and writes it in place.
`contrib` serves MaskablePPO, and `rollout_buffer_class_for` chooses the class.
"""

from contextlib import suppress
from importlib import import_module
from inspect import getsource
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch.utils import _pytree as pytree

from rl_triton_adapters.common.switch import find_off_switch
from rl_triton_adapters.common.versions import explained_import
from rl_triton_core import compute_gae
from rl_triton_core.extending import check_number, say

with explained_import(__package__, "stable-baselines3", "2.9", "sb3"):
    from gymnasium import spaces
    from stable_baselines3 import PPO
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
    from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

__all__ = ["TritonDictRolloutBuffer", "TritonGAEMixin", "TritonRolloutBuffer", "rollout_buffer_class_for"]

KNOWN_ADD: Any = ""
with suppress(AttributeError, OSError, TypeError):  # without its source, which is that of 2.9
    KNOWN_ADD = RolloutBuffer.add.__code__ if crc32(getsource(RolloutBuffer.add).encode()) == 1135542286 else ""


class TritonGAEMixin(RolloutBuffer):
    """Compute advantages and returns with `rl_triton_core`, in the place of the Stable-Baselines3 loop.

    Put it in front of any rollout buffer that stores `rewards`, `values` and `episode_starts` as `[n_steps, n_envs]`.

    Truncation needs nothing here: Stable-Baselines3 adds `gamma * V(terminal observation)` to the reward before the
    buffer sees it, so every done step counts as terminal.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        *args: Any,
        backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the buffer. `backend` names one of `rl_triton_core`; None leaves the choice to the core.

        Raises:
            TypeError: If the observation space is a Dict and the buffer stores plain arrays.
            AssertionError: If the buffer stores dictionaries and the observation space is no Dict.
            ValueError: If there is no backend of that name, or `gamma` or `gae_lambda` is out of range.
            BackendUnavailableError: If the backend cannot run on the CPU, where rollouts are stored.
        """
        if isinstance(observation_space, spaces.Dict) and not isinstance(self, DictRolloutBuffer):
            name = type(self).__name__
            other = f"use {name.replace('RolloutBuffer', 'DictRolloutBuffer')} (rollout_buffer_class_for chooses)"
            raise TypeError(f"{name} cannot store dictionary observations, got {observation_space}: {other}")
        self.backend = backend
        super().__init__(buffer_size, observation_space, *args, **kwargs)
        if not find_off_switch():  # so that nothing is compiled when a rollout is over
            none = torch.zeros(self.n_envs, 1), np.zeros(self.n_envs, bool)
            TritonGAEMixin.compute_returns_and_advantage(self, *none)

    def reset(self) -> None:
        """Make room for a new rollout."""
        super().reset()
        # One row more: whether a step ended its episode is whether the next one starts one.
        self._starts = np.zeros((self.buffer_size + 1, self.n_envs), np.float32)
        self.episode_starts = self._starts[:-1]

    def get(self, batch_size: int | None = None) -> Any:
        """As of Stable-Baselines3, also of a rollout on the device."""
        fields = vars(self)
        if isinstance(fields["rewards"], torch.Tensor):
            fields.update(to_arrays(dict(fields)))
        return super().get(batch_size)

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: npt.NDArray[np.bool_]) -> None:
        """Fill `advantages` and `returns` by generalised advantage estimation, GAE(gamma, gae_lambda).

        Of each environment, `last_values` has the value after the last step, on any device, and `dones` whether that
        ended an episode. A wrong shape is a ValueError; a class without arrays of a rollout buffer, a TypeError.
        """
        if find_off_switch():
            super().compute_returns_and_advantage(last_values, dones)
            return
        rewards, values, advantages, returns = map(self._get_tensor, ("rewards", "values", "advantages", "returns"))
        if not isinstance(last_values, torch.Tensor):
            raise TypeError(f"last_values: got {type(last_values).__name__}, expected a torch.Tensor")
        if last_values.numel() != self.n_envs:
            got = tuple(last_values.shape)
            raise ValueError(f"last_values: got shape {got}, expected one value per environment ({self.n_envs})")
        if np.shape(dones) != (self.n_envs,):
            raise ValueError(f"dones: got shape {np.shape(dones)}, expected ({self.n_envs},)")
        compute_gae(
            rewards,
            values,
            self._get_dones(dones),
            bootstrap_values=last_values.detach().to(values).flatten(),
            gamma=self.gamma,
            lambda_=check_number("gae_lambda", self.gae_lambda, 0.0, 1.0),
            time_dim=0,
            out=(advantages, returns),
            backend=self.backend,
        )

    def _get_dones(self, last_dones: npt.NDArray[np.bool_]) -> torch.Tensor:
        """Whether each step ended its episode, [n_steps, n_envs]; `last_dones` are those of the last step."""
        starts = self._get_tensor("episode_starts")
        if getattr(self.episode_starts, "base", None) is self._starts:
            self._starts[-1] = last_dones
            return torch.from_numpy(self._starts[1:])
        ends = torch.as_tensor(np.asarray(last_dones, bool), device=starts.device)
        return torch.cat([starts[1:].bool(), ends[None]])  # somebody gave the buffer another array, or a tensor

    def _get_tensor(self, name: str) -> torch.Tensor:
        """Wrap an array of the buffer as a tensor over the same memory."""
        array = getattr(self, name, None)
        if not isinstance(array, (np.ndarray, torch.Tensor)):
            got = type(array).__name__
            raise TypeError(f"{type(self).__name__}.{name}: got {got}, expected the array of a rollout buffer")
        shape, expected = tuple(array.shape), (self.buffer_size, self.n_envs)
        if shape != expected:
            raise ValueError(
                f"{name}: got shape {shape}, expected {expected}: compute the advantages before get() flattens the "
                "buffer, or after reset()"
            )
        return torch.as_tensor(array)


def to_arrays(tree: Any) -> Any:
    """Copy the tensors in it to NumPy arrays."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu().numpy().copy(), tree)


class TritonRolloutBuffer(TritonGAEMixin, RolloutBuffer):
    """`RolloutBuffer` of Stable-Baselines3 with the advantages of `rl_triton_core`."""

    def add(self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any) -> None:
        """Keep a step as Stable-Baselines3 does, each array copied once."""
        is_plain = type(value) is type(log_prob) is torch.Tensor and value.is_cpu and log_prob.is_cpu
        has_rows = not isinstance(self.observation_space, spaces.Discrete)
        if not (is_plain and has_rows and getattr(super().add, "__code__", None) is KNOWN_ADD):
            return super().add(obs, action, reward, episode_start, value, log_prob)
        names = "observations", "actions", "rewards", "episode_starts", "values", "log_probs"
        rows = obs, action.reshape((self.n_envs, self.action_dim)), reward, episode_start
        for name, x in zip(names, (*rows, value.numpy().ravel(), log_prob.numpy()), strict=True):
            getattr(self, name)[self.pos] = x
        self.pos += 1
        self.full |= self.pos == self.buffer_size


class TritonDictRolloutBuffer(TritonGAEMixin, DictRolloutBuffer):
    """`DictRolloutBuffer` of Stable-Baselines3 with the advantages of `rl_triton_core`."""


def rollout_buffer_class_for(
    observation_space: spaces.Space[Any], algorithm: type[BaseAlgorithm] = PPO, *, verbose: int = 1
) -> type[TritonGAEMixin]:
    """Choose the `rollout_buffer_class` of an algorithm for the environment's observation space.

    The algorithm is PPO, A2C, TRPO, MaskablePPO, or a class derived from these. Unless `verbose` is 0, the choice is
    printed, as Stable-Baselines3 prints its device.

    Raises:
        TypeError: If Stable-Baselines3 has no rollout buffer for the space (Tuple, nested Dict, ...), or the algorithm
            keeps no rollouts (DQN, SAC, ...) or takes no buffer class (RecurrentPPO).
        ImportError: If the algorithm needs sb3-contrib and it cannot be imported.
    """
    if not (isinstance(algorithm, type) and issubclass(algorithm, OnPolicyAlgorithm)):
        raise TypeError(
            f"{getattr(algorithm, '__name__', algorithm)} keeps no rollouts, so it has no advantages to compute: "
            "use an algorithm class such as PPO, A2C, TRPO, MaskablePPO"
        )
    parts = observation_space.spaces.values() if isinstance(observation_space, spaces.Dict) else [observation_space]
    for part in parts:
        if not isinstance(part, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            raise TypeError(
                f"Stable-Baselines3 has no rollout buffer for the observation space {observation_space}: "
                f"{part} is none of Box, Discrete, MultiDiscrete, MultiBinary, nor a Dict of these"
            )
    bases = {base.__name__ for base in algorithm.__mro__}
    if "RecurrentPPO" in bases:
        raise TypeError(f"{algorithm.__name__} takes no rollout_buffer_class")
    family = "Maskable" * ("MaskablePPO" in bases)
    module = import_module(f"{__package__}.{'contrib' if family else 'buffers'}")
    name = f"Triton{family}{'Dict' * isinstance(observation_space, spaces.Dict)}RolloutBuffer"
    if verbose:
        say(f"Using {name} for {algorithm.__name__} on {observation_space}")
    return getattr(module, name)  # type: ignore[no-any-return]
