"""Stable-Baselines3: `learn` of PPO, A2C and MaskablePPO, with its buffer, with ours, and with our whole update."""

import json
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize
from torch import Tensor

from benchmarks.end_to_end import ARMS, Arm, Setting
from benchmarks.end_to_end.stopwatch import ADVANTAGES, REST, Stopwatch
from benchmarks.results import ROOT
from rl_triton_adapters.sb3 import enable, rollout_buffer_class_for

DRAWN, HIDDEN = "CartPole-v1, drawn", " without velocities"
FAMILIES = ("A2C", "MaskablePPO", "RecurrentPPO")
OPTIONS: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "benchmarks" / "published" / "rl_zoo.json").read_text(encoding="utf-8")
)
"""What the tuned settings of RL Zoo change besides, by task. `normalizes`: with `VecNormalize`."""
PIXELS, FRAMES = 84, 4


def make_arm(name: str, setting: Setting, watch: Stopwatch) -> Arm:
    model = make_model(name, setting)
    buffer, steps = model.rollout_buffer, setting.num_envs * setting.num_steps
    buffer.compute_returns_and_advantage = watch.around(ADVANTAGES, buffer.compute_returns_and_advantage)
    model.collect_rollouts = watch.around("acting", model.collect_rollouts)
    model.env.step = watch.around(REST, model.env.step)
    model.train = watch.around("update", model.train)
    return Arm(lambda: model.learn(steps, reset_num_timesteps=False), lambda: compute_results(buffer))


def list_arms(setting: Setting) -> tuple[str, ...]:
    """Of tuned settings, and of RecurrentPPO, which takes no buffer, first and last."""
    return (ARMS[0], ARMS[-1]) if setting.env in OPTIONS or find_family(setting.env) == "RecurrentPPO" else ARMS


def find_class(algorithm: str, is_ours: bool) -> Any:
    """An algorithm of stock, or what there is in its place."""
    package = stable_baselines3 if hasattr(stable_baselines3, algorithm) else import_module("sb3_contrib")
    with enable() if is_ours else nullcontext():
        return getattr(package, algorithm)


def find_family(env: str) -> str:
    name = env.rpartition(", ")[2]
    return name if name in FAMILIES else "PPO"


def make_model(name: str, setting: Setting) -> Any:
    """The algorithm; every arm starts with the same weights and environments."""
    family = find_family(setting.env)
    algorithm = find_class(family, name == "captured")
    policy, env = make_task(setting.env, setting.num_envs)
    options = {"n_steps": setting.num_steps, "batch_size": setting.batch_size, "n_epochs": setting.epochs}
    if family == "A2C":
        options = {"n_steps": setting.batch_size // setting.num_envs}
    if name != "stock" and family != "RecurrentPPO":
        options["rollout_buffer_class"] = rollout_buffer_class_for(env.observation_space, algorithm, verbose=0)
    tuned = dict(OPTIONS.get(setting.env, {}))
    if tuned.pop("normalizes", False):
        env = VecNormalize(env)
    network = {"net_arch": [setting.hidden] * 2, **tuned.pop("policy_kwargs", {})}
    if "activation_fn" in network:
        network["activation_fn"] = getattr(torch.nn, network["activation_fn"])
    options |= tuned | ({} if setting.env == DRAWN else {"policy_kwargs": network})
    return algorithm(policy, env, device=setting.device, seed=0, **options)


def make_task(env: str, num_envs: int, seed: int = 0) -> tuple[str, Any]:
    """The policy and the environments, each with a monitor."""
    name, family = env.split(",", maxsplit=1)[0], find_family(env)
    make = partial(make_vec_env, n_envs=num_envs, seed=seed)
    policy = "MlpLstmPolicy" if family == "RecurrentPPO" else "MlpPolicy"
    if env.startswith(DRAWN):
        return "CnnPolicy", VecFrameStack(make(name, wrapper_class=draw_pixels), FRAMES)
    if name.endswith(HIDDEN):
        return policy, VecNormalize(make(name.removesuffix(HIDDEN), wrapper_class=hide_velocities))
    if family == "MaskablePPO":
        return policy, make(partial(make_masked, name))
    return policy, make(name)


def make_masked(name: str) -> Any:
    """sb3-contrib's environment, or another one whose actions are all allowed."""
    if name == "InvalidActionEnvDiscrete":
        return import_module("sb3_contrib.common.envs").InvalidActionEnvDiscrete(dim=80, n_invalid_actions=60)
    mask = import_module("sb3_contrib.common.wrappers").ActionMasker
    return mask(gymnasium.make(name), lambda env: np.ones(env.action_space.n, bool))


def hide_velocities(env: Any) -> Any:
    space = type(env.observation_space)(env.observation_space.low[::2], env.observation_space.high[::2])
    return TransformObservation(env, lambda x: x[::2], space)


def draw_pixels(env: Any) -> Any:
    """CartPole seen as a picture."""
    return TransformObservation(env, render_state, spaces.Box(0, 255, (PIXELS, PIXELS, 1), np.uint8))


def render_state(state: Any) -> Any:
    """The cart is a block, the pole a line that leans so much further that it shows."""
    x, angle = state[0], 4 * state[2]
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
    more = {"lstm_states": make_states(buffer)} if hasattr(buffer, "hidden_state_shape") else {}
    buffer.reset()
    for reward, value, start in zip(rewards, torch.as_tensor(values, device=buffer.device), starts, strict=True):
        buffer.add(obs, action, reward, start, value, torch.zeros_like(value), **more)
    last_values = torch.linspace(-1, 1, buffer.n_envs, device=buffer.device)
    buffer.compute_returns_and_advantage(last_values, np.arange(buffer.n_envs) % 3 == 0)
    found = [torch.as_tensor(x).cpu().clone() for x in (buffer.advantages, buffer.returns)]
    buffer.reset()
    return found


def make_states(buffer: Any) -> Any:
    zeros = torch.zeros(buffer.hidden_state_shape[1:])
    return import_module("sb3_contrib.common.recurrent.type_aliases").RNNStates((zeros, zeros), (zeros, zeros))
