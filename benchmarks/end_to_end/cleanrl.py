"""A single-file PPO in CleanRL's manner whose environments live on the device: examples/ppo_gpu_envs.py."""

from argparse import Namespace
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.end_to_end import LAMBDA, Arm, Setting
from benchmarks.end_to_end.stopwatch import ADVANTAGES, Stopwatch
from benchmarks.workloads import GAMMA
from rl_triton_core.testing import random_rollout


def load_example() -> Any:
    """The example, which needs packages that reports do not."""
    import ppo_gpu_envs

    return ppo_gpu_envs


def compute_results(compute_advantages: Any, args: Namespace) -> tuple[Tensor, Tensor]:
    """Those of a random rollout."""
    random = random_rollout(args.num_envs, args.num_steps, time_dim=0, device=args.device)
    *steps, final_values = random._replace(truncated=random.truncated & ~random.terminated)
    rollout = load_example().Rollout(None, None, None, steps[1], steps[0], *steps[2:], final_values.clone())
    results: tuple[Tensor, Tensor] = compute_advantages(rollout, final_values[0], args)
    return results


def make_arguments(setting: Any, update: str, device: str) -> Namespace:
    known: Namespace = load_example().parse_arguments([])
    known.env, known.update, known.device = "cartpole", update, device
    known.num_envs, known.num_steps, known.hidden = setting.num_envs, setting.num_steps, setting.hidden
    known.update_epochs, known.num_minibatches = setting.epochs, setting.minibatches
    known.gamma, known.gae_lambda, known.learning_rate = GAMMA, LAMBDA, 3e-4
    return known


def make_arm(name: str, setting: Setting, watch: Stopwatch) -> Arm:
    """With its advantage step timed; inside a graph there is no telling."""
    example = load_example()
    advantages = example.compute_stock_advantages if name == "stock" else example.compute_triton_advantages
    update = "eager" if name != "captured" else "captured" if setting.device == "cuda" else "compiled"
    args = make_arguments(setting, update, setting.device)
    training = example.Training(args, watch.around(ADVANTAGES, advantages) if update != "captured" else advantages)
    return Arm(partial(training.run_iteration, args.learning_rate), partial(compute_results, advantages, args))
