"""Stable-Baselines3: `PPO.learn` on Gymnasium's environments, with its buffer, ours, and ours on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.end_to_end.frameworks import Arm, Setting
from benchmarks.end_to_end.stopwatch import ADVANTAGES, Stopwatch

TITLE = "Stable-Baselines3"
ITERATION = """\
An iteration is one of `PPO.learn`: `collect_rollouts` on environments of Gymnasium in a `DummyVecEnv`, then `train`.
The advantage step is `compute_returns_and_advantage` of the buffer. *Drawn*: a wrapper draws CartPole as four frames of
84x84 pixels for `CnnPolicy`, where *hidden* has no meaning. Pendulum ends only at its time limit, after 200 steps. If
rollouts have 200 steps, all environments end at once."""
ARMS = {
    "stock": "`RolloutBuffer`",
    "ours": "`TritonRolloutBuffer`, in host memory",
    "device": "`DeviceRolloutBuffer`, on the policy's device, and `BatchedTerminalValues`",
    "captured": "`TritonPPO`: less work per step, on a GPU captured in CUDA graphs, and `BatchedTerminalValues`",
}
OURS = ("ours", "device", "captured")
MORE = {"captured": "with `TritonPPO`"}
DRAWN = "CartPole-v1, drawn"
DEFAULTS = Setting(1, 2048, 64, 10, 32, env="CartPole-v1")
"""Those of Stable-Baselines3."""
SEVERAL = Setting(8, 256, 64, 10, 32, env="CartPole-v1")
WIDE = Setting(64, 128, 64, env="CartPole-v1")
CONTINUOUS = Setting(8, 256, 64, 10, 32, env="Pendulum-v1")
LIMITED = Setting(64, 200, 64, env="Pendulum-v1")
SETTINGS = {
    "cuda": (
        SEVERAL,
        WIDE,
        Setting(16, 128, 64, 10, 32, env="Pendulum-v1"),
        Setting(8, 128, env=DRAWN),
        DEFAULTS._replace(num_steps=512, minibatches=8),
    ),
    "cpu": tuple(setting._replace(device="cpu") for setting in (DEFAULTS, SEVERAL, WIDE, CONTINUOUS, LIMITED)),
    "quick": (Setting(2, 8, 8, 1, 2, env="CartPole-v1"), Setting(1, 8, 8, 1, 2, env=DRAWN)),
}
PIXELS, FRAMES = 84, 4


def make_arm(name: str, setting: Setting, watch: Stopwatch) -> Arm:
    """One arm in one setting, as it is before training."""
    model = make_ppo(setting, choose_buffer(name), choose_algorithm(name))
    buffer, steps = model.rollout_buffer, setting.num_envs * setting.num_steps
    buffer.compute_returns_and_advantage = watch.around(ADVANTAGES, buffer.compute_returns_and_advantage)
    callback = make_callback(name)
    return Arm(lambda: model.learn(steps, callback, reset_num_timesteps=False), lambda: compute_results(buffer))


def choose_buffer(name: str) -> Any:
    """The rollout buffer of an arm."""
    if name in ("ours", "captured"):
        from rl_triton_adapters.sb3 import TritonRolloutBuffer as chosen
    elif name == "device":
        from rl_triton_adapters.sb3_device import DeviceRolloutBuffer as chosen
    else:
        from stable_baselines3.common.buffers import RolloutBuffer as chosen
    return chosen


def choose_algorithm(name: str) -> Any:
    """The class of an arm's algorithm."""
    if name == "captured":
        from rl_triton_adapters.sb3_captured import TritonPPO as chosen
    else:
        from stable_baselines3 import PPO as chosen
    return chosen


def make_callback(name: str) -> Any:
    """What `learn` is given besides, if anything."""
    if name not in ("device", "captured"):
        return None
    from rl_triton_adapters.sb3_device import BatchedTerminalValues

    return BatchedTerminalValues()


def make_ppo(setting: Setting, buffer: Any, algorithm: Any) -> Any:
    """The algorithm; every arm starts with the same weights and environments."""
    return algorithm(
        *make_task(setting.env, setting.num_envs, seed=0),
        n_steps=setting.num_steps,
        batch_size=setting.batch_size,
        n_epochs=setting.epochs,
        policy_kwargs=None if setting.env == DRAWN else {"net_arch": [setting.hidden] * 2},
        rollout_buffer_class=buffer,
        device=setting.device,
        seed=0,
    )


def make_task(env: str, num_envs: int, seed: int) -> tuple[str, Any]:
    """The name of the policy, and the environments that it acts in."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    if env != DRAWN:
        return "MlpPolicy", make_vec_env(env, num_envs, seed=seed)
    drawn = make_vec_env(env.split(",", maxsplit=1)[0], num_envs, seed=seed, wrapper_class=draw_pixels)
    return "CnnPolicy", VecFrameStack(drawn, FRAMES)


def draw_pixels(env: Any) -> Any:
    """CartPole seen as a picture."""
    from gymnasium import spaces
    from gymnasium.wrappers import TransformObservation

    return TransformObservation(env, render_state, spaces.Box(0, 255, (PIXELS, PIXELS, 1), np.uint8))


def render_state(state: Any) -> Any:
    """The cart is a block, the pole a line."""
    x, _, angle, _ = state
    image, along = np.zeros((PIXELS, PIXELS, 1), np.uint8), np.arange(PIXELS // 2)
    left = int(np.clip((x + 2.4) / 4.8, 0, 1) * (PIXELS - 12))
    columns = np.clip(left + 6 + along * np.sin(angle), 0, PIXELS - 1).astype(int)
    image[(PIXELS - 12 - along * np.cos(angle)).astype(int), columns] = 255
    image[-12:-6, left : left + 12] = 128
    return image


def compute_results(buffer: Any) -> list[Tensor]:
    """Those of a random rollout in the algorithm's buffer."""
    rng, shape = np.random.default_rng(0), (buffer.buffer_size, buffer.n_envs)
    rewards, values = rng.normal(size=(2, *shape)).astype(np.float32)
    starts = rng.random(shape) < 0.02
    obs = np.zeros((buffer.n_envs, *buffer.obs_shape), buffer.observation_space.dtype)
    action = np.zeros((buffer.n_envs, buffer.action_dim), np.float32)
    buffer.reset()
    for reward, value, start in zip(rewards, torch.as_tensor(values, device=buffer.device), starts, strict=True):
        buffer.add(obs, action, reward, start, value, torch.zeros_like(value))
    last_values = torch.linspace(-1, 1, buffer.n_envs, device=buffer.device)
    buffer.compute_returns_and_advantage(last_values, np.arange(buffer.n_envs) % 3 == 0)
    found = [torch.as_tensor(x).cpu().clone() for x in (buffer.advantages, buffer.returns)]
    buffer.reset()
    return found
