"""Whether RLlib's PPO learns as well with compiled updates, which are stock's up to rounding: returns by seed."""

from __future__ import annotations

import itertools
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.learning import train_all
from benchmarks.results import Row
from benchmarks.same_learning import Returns, compare_arms


class Setting(NamedTuple):
    """What is learned, and from how many seeds."""

    task: str
    iterations: int
    steps_each: int
    target_return: float
    seeds: int = 8


CARTPOLE = Setting("CartPole-v1", 16, 2048, 450.0)
SETTINGS = {"cpu": [CARTPOLE], "cuda": [CARTPOLE], "quick": [CARTPOLE._replace(iterations=1, steps_each=512, seeds=1)]}


def measure(setting: Setting, options: Namespace) -> Iterator[Row]:
    """As of Stable-Baselines3's algorithms: returns of the last iteration; in training, means of all iterations."""
    runs = [(setting, *x) for x in itertools.product(("stock", "ours"), range(setting.seeds))]
    found = list(train_all(train, runs, options.jobs, time.time() + options.ends - time.perf_counter()))
    yield from compare_arms(("stock", "ours"), found, setting.target_return)


def train(run: tuple[Setting, str, int]) -> Returns:
    """One run on a CPU, with one thread and a Ray of its own."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig

    from rl_triton_adapters.rllib import enable_triton

    torch.set_num_threads(1)
    setting, arm, seed = run
    config = PPOConfig().environment(setting.task).debugging(seed=seed, log_level="ERROR")
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=8).learners(num_learners=0)
    config.training(train_batch_size_per_learner=setting.steps_each, minibatch_size=256, num_epochs=10, lr=3e-4)
    config.training(vf_clip_param=1e9, use_kl_loss=False, lambda_=0.95, clip_param=0.2)
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        algorithm = (config if arm == "stock" else enable_triton(config)).build_algo()
        if arm == "ours" and "updates are compiled" not in (x := algorithm.learner_group._learner.describe()):
            raise RuntimeError(x)
        returns = [algorithm.train()["env_runners"]["episode_return_mean"] for _ in range(setting.iterations)]
        return Returns(arm, sum(returns) / len(returns), returns[-1])
    finally:
        ray.shutdown()
