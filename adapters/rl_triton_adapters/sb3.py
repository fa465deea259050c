"""Stable-Baselines3: rollout buffers that compute advantages and returns with `rl_triton_core`.

One line turns them on, and the trained agent stays the same, bit for bit:

    PPO("MlpPolicy", env, rollout_buffer_class=TritonRolloutBuffer)

The storage of Stable-Baselines3 is NumPy, in host memory; the compiled CPU backend reads and writes it in place.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_triton_core import compute_gae
from rl_triton_core.conventions import from_episode_starts

try:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
except ImportError as error:
    raise ImportError(
        "rl_triton_adapters.sb3 needs Stable-Baselines3, which could not be imported: pip install rl-triton-core[sb3]"
    ) from error

__all__ = ["TritonDictRolloutBuffer", "TritonGAEMixin", "TritonRolloutBuffer", "rollout_buffer_class_for"]

_FLAT_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


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
        """Create the buffer.

        Args:
            buffer_size: Steps per environment, `n_steps` of the algorithm.
            observation_space: Observation space of the environment.
            *args: Passed on to the Stable-Baselines3 buffer.
            backend: Name of a backend of `rl_triton_core`; None leaves the choice to the core.
            **kwargs: Passed on to the Stable-Baselines3 buffer.

        Raises:
            TypeError: If the buffer cannot store observations of that space.
        """
        self._check_space(observation_space)
        self.backend = backend
        super().__init__(buffer_size, observation_space, *args, **kwargs)

    def reset(self) -> None:
        """Make room for a new rollout."""
        super().reset()
        # One row more: whether a step ended its episode is whether the next one starts one.
        self._starts = np.zeros((self.buffer_size + 1, self.n_envs), np.float32)
        self.episode_starts = self._starts[:-1]

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: npt.NDArray[np.bool_]) -> None:
        """Fill `advantages` and `returns` by generalised advantage estimation, GAE(gamma, gae_lambda).

        Args:
            last_values: Value of the observation after the last step, one per environment.
            dones: Whether the last step of each environment ended an episode, `[n_envs]`.

        Raises:
            ValueError: If `last_values` or `dones` does not hold one entry per environment, or the buffer has already
                been flattened into minibatches by `get()`.
        """
        self._check_shapes(last_values, dones)
        compute_gae(
            torch.from_numpy(self.rewards),
            torch.from_numpy(self.values),
            self._departures(dones),
            bootstrap_values=last_values.detach().to("cpu", torch.float32).flatten(),
            gamma=self.gamma,
            lambda_=self.gae_lambda,
            time_dim=0,
            out=(torch.from_numpy(self.advantages), torch.from_numpy(self.returns)),
            backend=self.backend,
        )

    def _departures(self, dones: npt.NDArray[np.bool_]) -> torch.Tensor:
        """Whether each step ended its episode, `[n_steps, n_envs]`."""
        if self.episode_starts.base is self._starts:
            self._starts[-1] = dones
            return torch.from_numpy(self._starts[1:])
        # Somebody gave the buffer another array.
        starts, ends = torch.from_numpy(self.episode_starts), torch.as_tensor(dones)
        return from_episode_starts(starts, ends, torch.zeros(self.n_envs)).terminated

    def _check_shapes(self, last_values: torch.Tensor, dones: npt.NDArray[np.bool_]) -> None:
        if last_values.numel() != self.n_envs:
            raise ValueError(
                f"last_values must hold one value per environment ({self.n_envs}), got shape {tuple(last_values.shape)}"
            )
        if np.shape(dones) != (self.n_envs,):
            raise ValueError(f"dones must have shape ({self.n_envs},), got {np.shape(dones)}")
        if self.values.shape != (self.buffer_size, self.n_envs):
            raise ValueError(
                f"values must have shape ({self.buffer_size}, {self.n_envs}), got {self.values.shape}: "
                "compute the advantages before get() flattens the buffer, or after reset()"
            )

    def _check_space(self, space: spaces.Space[Any]) -> None:
        name = type(self).__name__
        stores_dicts = isinstance(self, DictRolloutBuffer)
        if isinstance(space, spaces.Dict) and not stores_dicts:
            raise TypeError(f"{name} cannot store dictionary observations, got {space}: use TritonDictRolloutBuffer")
        if stores_dicts and not isinstance(space, spaces.Dict):
            raise TypeError(f"{name} stores dictionary observations only, got {space}: use TritonRolloutBuffer")


class TritonRolloutBuffer(TritonGAEMixin, RolloutBuffer):
    """`RolloutBuffer` of Stable-Baselines3 with the advantages of `rl_triton_core`."""


class TritonDictRolloutBuffer(TritonGAEMixin, DictRolloutBuffer):
    """`DictRolloutBuffer` of Stable-Baselines3 with the advantages of `rl_triton_core`."""


def rollout_buffer_class_for(observation_space: spaces.Space[Any]) -> type[TritonGAEMixin]:
    """Choose the rollout buffer that stores observations of a space.

    Args:
        observation_space: Observation space of the environment.

    Returns:
        `TritonDictRolloutBuffer` for a Dict space, `TritonRolloutBuffer` for any other that Stable-Baselines3 supports.

    Raises:
        TypeError: If Stable-Baselines3 has no rollout buffer for the space (Tuple, nested Dict, ...).
    """
    is_dict = isinstance(observation_space, spaces.Dict)
    parts = observation_space.spaces.values() if isinstance(observation_space, spaces.Dict) else [observation_space]
    for part in parts:
        if not isinstance(part, _FLAT_SPACES):
            raise TypeError(
                f"Stable-Baselines3 has no rollout buffer for the observation space {observation_space}: "
                f"{part} is none of Box, Discrete, MultiDiscrete, MultiBinary, nor a Dict of these"
            )
    return TritonDictRolloutBuffer if is_dict else TritonRolloutBuffer
