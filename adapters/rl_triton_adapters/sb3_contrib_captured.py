"""sb3-contrib: MaskablePPO whose update and acting take less time.

    model = TritonMaskablePPO("MlpPolicy", masked_env)

A drop-in for `MaskablePPO`, as `sb3_captured.TritonPPO` is one for `PPO`.
"""

from typing import Any, ClassVar

import numpy as np

from rl_triton_adapters._sb3_policies import find_head, list_sizes
from rl_triton_adapters.sb3_captured import PPOUpdateMixin
from rl_triton_adapters.sb3_device import DeviceStorageMixin

try:
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
except ImportError as error:
    raise ImportError(
        "rl_triton_adapters.sb3_contrib_captured needs sb3-contrib, which could not be imported: "
        "pip install rl-triton-core[sb3-contrib]"
    ) from error

__all__ = ["TritonMaskablePPO"]


class TritonMaskablePPO(PPOUpdateMixin, MaskablePPO):
    """`MaskablePPO` with a fused loss and fewer operations around it; on a GPU, with captured updates and acting.

    All that is said of `TritonPPO` holds, masks included. An update is that of `MaskablePPO` if a sample of its rollout
    has no allowed action at all. With a policy that has methods or a distribution of its own, all is `MaskablePPO`.

    Args:
        acceleration: ``"auto"``, or True, does less work than `MaskablePPO`, and captures it where possible; ``"off"``,
            or False, is `MaskablePPO`.
        args: As of `MaskablePPO`.
        kwargs: As of `MaskablePPO`. Without `rollout_buffer_class`, the buffer is that of `rollout_buffer_class_for`.

    Raises:
        ValueError: `acceleration` is none of these.
    """

    fields: ClassVar = (*DeviceStorageMixin.fields, "action_masks")
    buffer_classes: ClassVar = (MaskableRolloutBuffer, MaskableDictRolloutBuffer, DeviceStorageMixin)

    def find_obstacle(self) -> str:
        """As for other algorithms; a distribution that is not known may have masks of another form, too."""
        unknown = f"{type(self.policy).__name__} has methods or a distribution of its own"
        return super().find_obstacle() or (unknown if find_head(self.policy) is None else "")

    def _can_update(self) -> bool:
        """Not where nothing is allowed, which sb3-contrib gives an entropy of 0."""
        buffer: Any = self.rollout_buffer
        sizes = list_sizes(self.policy.action_dist)
        starts = np.cumsum([0, *sizes[:-1]])
        return super()._can_update() and bool(np.logical_or.reduceat(buffer.action_masks, starts, axis=-1).all())
