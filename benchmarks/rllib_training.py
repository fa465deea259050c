"""RLlib's PPO: whole `algorithm.train()` in this process, stock and with `enable_triton`, iterations in turns.

Both begin alike: their first samples must be equal, and parameters after the first update. The environments alone are
stepped as often as in an iteration, with the same actions each time: no training is faster.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig

from benchmarks import harness
from benchmarks.harness import Options, Rows, Setting, make_row
from rl_triton_adapters.rllib import enable_triton
from rl_triton_core.testing import assert_close


def measure(setting: Setting, options: Options) -> Rows:
    """Milliseconds of an iteration, and how many times faster ours is."""
    with local_ray():
        algorithms = {arm: build_algorithm(arm, setting, options.device) for arm in ("stock", "ours")}
        check_arms(algorithms)
        times = harness.time_rounds({arm: x.train for arm, x in algorithms.items()}, options)
        ours = algorithms["ours"]
        note = f"{ours.learner_group._learner.describe()}; {ours.env_runner.describe()}"
    for arm, found in times.items():
        yield make_row(arm, "iteration", "ms", [x / 1e3 for x in found])
    yield harness.make_ratio("ours", "speed-up", times, note)
    envs = gym.make_vec(setting.env, setting.num_envs)
    actions = envs.action_space.sample()
    envs.reset(seed=0)
    steps = setting.train_batch_size // setting.num_envs
    alone = [harness.time_call(lambda: [envs.step(actions) for _ in range(steps)], "cpu") / 1e3 for _ in range(7)]
    yield make_row("environments alone", "iteration", "ms", alone)


@contextmanager
def local_ray() -> Iterator[None]:
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


def build_algorithm(arm: str, setting: Setting, device: str, seed: int = 0, **training: Any) -> Any:
    config = PPOConfig().environment(setting.env).debugging(seed=seed, log_level="ERROR")
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=setting.num_envs)
    config.learners(num_learners=0, num_gpus_per_learner=int(device == "cuda"))
    config.training(train_batch_size_per_learner=setting.train_batch_size, num_epochs=setting.num_epochs, lr=3e-4)
    config.training(**training)
    return (config if arm == "stock" else enable_triton(config)).build_algo()


def check_arms(algorithms: dict[str, Any]) -> None:
    """The first iteration: equal samples, and parameters up to rounding."""
    first = []
    for algorithm in algorithms.values():
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        first.append(algorithm.env_runner.sample(num_timesteps=100))
        algorithm.train()
    for episodes in zip(*first, strict=True):
        for columns in zip(*([x.get_observations(), x.get_actions()] for x in episodes), strict=True):
            assert_close(*map(torch.as_tensor, columns[::-1]), rtol=0, name="samples")
    stock, ours = (x.learner_group._learner.module["default_policy"] for x in algorithms.values())
    harness.compare_parameters("parameters", ours, stock, rtol=1e-2)
