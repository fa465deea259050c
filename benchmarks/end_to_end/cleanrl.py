"""A single-file PPO in CleanRL's manner whose environments live on the device: examples/ppo_gpu_envs.py."""

from argparse import Namespace
from functools import partial
from typing import Any

import ppo_gpu_envs
from torch import Tensor

from benchmarks.end_to_end import LAMBDA, Arm, Setting
from benchmarks.end_to_end.stopwatch import ADVANTAGES, Stopwatch
from benchmarks.workloads import GAMMA
from rl_triton_core.testing import random_rollout


def compute_results(compute_advantages: Any, args: Namespace) -> tuple[Tensor, Tensor]:
    """Those of a random rollout."""
    random = random_rollout(args.num_envs, args.num_steps, time_dim=0, device=args.device)
    *steps, final_values = random._replace(truncated=random.truncated & ~random.terminated)
    rollout = ppo_gpu_envs.Rollout(None, None, None, steps[1], steps[0], *steps[2:], final_values.clone())
    return compute_advantages(rollout, final_values[0], args)


def make_arguments(setting: Any, update: str, device: str) -> Namespace:
    known = ppo_gpu_envs.parse_arguments([])
    known.env, known.update, known.device = "cartpole", update, device
    known.num_envs, known.num_steps, known.hidden = setting.num_envs, setting.num_steps, setting.hidden
    known.update_epochs, known.num_minibatches = setting.epochs, setting.minibatches
    known.gamma, known.gae_lambda, known.learning_rate = GAMMA, LAMBDA, 3e-4
    return known


def make_arm(name: str, setting: Setting, watch: Stopwatch) -> Arm:
    """With its advantage step timed; inside a graph there is no telling."""
    advantages = getattr(ppo_gpu_envs, f"compute_{'stock' if name == 'stock' else 'triton'}_advantages")
    update = "eager" if name != "captured" else "captured" if setting.device == "cuda" else "compiled"
    args = make_arguments(setting, update, setting.device)
    training = ppo_gpu_envs.Training(args, watch.around(ADVANTAGES, advantages) if update != "captured" else advantages)
    return Arm(partial(training.run_iteration, args.learning_rate), partial(compute_results, advantages, args))
