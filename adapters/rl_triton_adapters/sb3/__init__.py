"""Stable-Baselines3: rollout buffers with the advantages of `rl_triton_core`, and algorithms that take less time.

    PPO("MlpPolicy", env, rollout_buffer_class=TritonRolloutBuffer)
    TritonPPO("MlpPolicy", "CartPole-v1")

`buffers` has the former, `captured` the latter, `enabling` the call that puts ours in the place of
Stable-Baselines3's, and `contrib` all of it for sb3-contrib.
"""

from rl_triton_adapters.sb3.buffers import (
    TritonDictRolloutBuffer,
    TritonGAEMixin,
    TritonRolloutBuffer,
    rollout_buffer_class_for,
)
from rl_triton_adapters.sb3.captured import PPOUpdateMixin, TritonA2C, TritonPPO
from rl_triton_adapters.sb3.enabling import disable, enable

__all__ = [
    "PPOUpdateMixin",
    "TritonA2C",
    "TritonDictRolloutBuffer",
    "TritonGAEMixin",
    "TritonPPO",
    "TritonRolloutBuffer",
    "disable",
    "enable",
    "rollout_buffer_class_for",
]
