"""Stable-Baselines3: the rollout of on-policy algorithms, as steps read it."""

from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import explained_variance
from torch.utils import _pytree as pytree

from rl_triton_adapters.sb3.base import AcceleratedAlgorithm


class RolloutMixin(AcceleratedAlgorithm, OnPolicyAlgorithm):
    """Copy the rollout to the device, draw minibatches of it as `RolloutBuffer.get` does, and say how it went."""

    fields: ClassVar[tuple[str, ...]] = ("observations", "actions", "values", "log_probs", "advantages", "returns")
    """The attributes of the rollout buffer that a step reads."""
    _rollout: dict[str, Any]
    _chooses_buffer = False

    def _excluded_save_params(self) -> list[str]:
        """A buffer class that was chosen here, too."""
        return [*super()._excluded_save_params(), *["rollout_buffer_class"] * self._chooses_buffer]

    def _copy_rollout(self) -> None:
        """Flatten the rollout as `RolloutBuffer.get` does, and copy it to the device; for graphs, to the same place."""
        buffer: Any = self.rollout_buffer
        assert buffer.full, f"the rollout is not complete: {buffer.pos} of {buffer.buffer_size} steps were added"
        for name in self.fields:
            self._rollout[name] = self._copy_field(self._rollout.get(name), self._flatten_field(name), name)
        buffer.generator_ready = True

    def _flatten_field(self, name: str) -> Any:
        """A field of the buffer, flattened there."""
        buffer: Any = self.rollout_buffer
        stored = getattr(buffer, name)
        if not buffer.generator_ready and isinstance(stored, dict):
            for key, x in stored.items():  # one after the other: each takes as much memory again
                stored[key] = buffer.swap_and_flatten(x)
        elif not buffer.generator_ready:
            setattr(buffer, name, buffer.swap_and_flatten(stored))
        return getattr(buffer, name)

    def _copy_field(self, known: Any, arrays: Any, name: str) -> Any:
        if isinstance(arrays, dict):
            return {key: self._copy_field((known or {}).get(key), x, name) for key, x in arrays.items()}
        tensor = arrays if isinstance(arrays, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(arrays))
        source = self._convert_field(tensor, name)
        if self.device.type == "cpu" and not self._update.is_captured:
            return source
        if known is None or known.shape != source.shape:
            self._update.reset()  # its graphs read the tensor that was there
            return source.to(self.device, copy=True)
        return known.copy_(source)

    def _convert_field(self, source: torch.Tensor, name: str) -> torch.Tensor:
        """Return a flattened field of the buffer as a step reads it."""
        if name == "action_masks":
            return source.bool()
        if name == "actions":
            return source.long().flatten() if isinstance(self.action_space, spaces.Discrete) else source.float()
        return source if name == "observations" else source.flatten()

    def _draw_permutation(self) -> torch.Tensor:
        """Return the order of the rollout's samples, from the draw of `RolloutBuffer.get`."""
        count = self.rollout_buffer.buffer_size * self.rollout_buffer.n_envs
        return torch.from_numpy(np.random.permutation(count)).to(self.device)  # noqa: NPY002

    def _gather_minibatch(self, indices: torch.Tensor) -> dict[str, Any]:
        """Return these samples of the rollout, by the names of `fields`."""
        return pytree.tree_map(lambda x: x.index_select(0, indices), self._rollout)  # type: ignore[no-any-return]

    def _describe_rollout(self) -> dict[str, Any]:
        """What all algorithms log besides: how good the values were, and the deviation of actions, if it is learned."""
        buffer: Any = self.rollout_buffer
        found = {"explained_variance": explained_variance(buffer.values.flatten(), buffer.returns.flatten())}
        known = hasattr(self.policy, "log_std")
        return found | ({"std": torch.exp(self.policy.log_std).mean().item()} if known else {})
