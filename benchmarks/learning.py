"""Whether ours learns what stock learns, and in less time: many runs of both from the same seeds.

Each run is a process of its own with one thread, several at a time; arms take turns, and seeds take turns on the GPUs.
`measure` has a point for every iteration: the mean return of the last 100 episodes, off policy of the last 10. Runs
that the budget stops keep the points they have. `compare` says whether what is equal up to rounding learns as well.
Rounding grows with every update, so runs of one seed differ in the end, and only many seeds tell. The control is stock
with weights moved by 1e-7 of themselves before training: what rounding alone does.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import product
from multiprocessing import TimeoutError, get_context
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.harness import Options, Rows, Setting, make_row
from benchmarks.settings import TABLE

GRACE = 10.0  # seconds that runs have to return when the time is over
EPISODES = 20  # without exploration, after training


class Run(NamedTuple):
    """A training run, and when it is stopped: as `time.time` says it."""

    setting: Setting
    arm: str
    seed: int
    device: str
    ends: float


Points = list[tuple[int, float, float]]
"""Of a run: steps, seconds and returns."""


def train_all(train: Callable[[Run], Any], arms: Sequence[str], setting: Setting, options: Options) -> dict[str, Any]:
    """What the runs of every arm return, one with each seed; those that the time does not allow are left out."""
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if options.device == "cuda" else ["cpu"]
    ends = time.time() + options.ends - time.perf_counter()
    runs = [Run(setting, x, i, devices[i % len(devices)], ends) for i, x in product(range(setting.seeds), arms)]
    found: dict[str, Any] = {arm: [] for arm in arms}
    with get_context("spawn").Pool(options.jobs, torch.set_num_threads, (1,), None if options.quick else 1) as pool:
        for run, result in [(run, pool.apply_async(train, (run,))) for run in runs]:
            left = None if options.ends == float("inf") else max(0.0, options.ends + GRACE - time.perf_counter())
            with suppress(TimeoutError):
                found[run.arm].append(result.get(left))
    return found


def measure(setting: Setting, options: Options) -> Rows:
    """Every arm with every seed: curves, and when they reach the target. Quartiles are those over seeds."""
    for arm, curves in train_all(train, ("stock", "ours"), setting, options).items():
        yield from describe_curves(arm, [*filter(None, curves)], setting)


def describe_curves(arm: str, curves: list[Points], setting: Setting) -> Rows:
    reaching = ([x for x in points if x[2] >= setting.target_return] for points in curves)
    reached = [points[0] for points in reaching if points]
    finished = [points for points in curves if points[-1][0] >= setting.total_steps]
    yield make_row(arm, "last return", "", [points[-1][2] for points in curves])
    yield make_row(arm, "runs to the end", "", len(finished))
    yield make_row(arm, "runs to the target", "", len(reached))
    yield make_row(arm, "steps to the target", "", [steps for steps, *_ in reached])
    yield make_row(arm, "time to the target", "s", [seconds for _, seconds, _ in reached])
    for points in zip(*curves, strict=False):
        yield make_row(arm, "return", "", [found for *_, found in points], steps=points[0][0])
        yield make_row(arm, "time", "s", [seconds for _, seconds, _ in points], steps=points[0][0])


def train(run: Run) -> Points:
    """One run, with a point for each of its iterations, once it has compiled what it needs."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Recorder(BaseCallback):
        """Records the points; an iteration ends where the next rollout starts, and with the run."""

        def _on_step(self) -> bool:
            return time.time() < run.ends

        def _on_rollout_start(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            if returns and self.model.num_timesteps % (run.setting.num_envs * run.setting.num_steps) == 0:
                points.append((self.model.num_timesteps, time.perf_counter() - start, sum(returns) / len(returns)))

        _on_training_end = _on_rollout_start

    if run.device != "cpu":
        torch.cuda.set_device(run.device)
    points: Points = []
    setting = run.setting
    options = {"n_steps": setting.num_steps} if setting.algorithm == "PPO" else {"stats_window_size": 10}
    options |= TABLE["learning"]["options"].get(f"{setting.task}, {setting.algorithm}", {})
    model = make_model(run, batch_size=setting.batch_size, **options)
    start = time.perf_counter()
    model.learn(setting.total_steps, Recorder())
    return points


CONTROL, FUSED = "control", "fused Adam"
"""The latter is stock with PyTorch's fused Adam, which is ours for TD3 on a CPU."""
MORE_ARMS = dict.fromkeys(("RecurrentPPO", "TD3"), (CONTROL, FUSED))
Outcome = tuple[float, float]
"""What one run returns in training (the last episodes, or all iterations), and after it."""


def compare(train: Callable[[Run], Outcome], setting: Setting, options: Options) -> Rows:
    """Quartiles over seeds, all values in the note, and how likely a difference of means as large is by chance."""
    arms = ("stock", *MORE_ARMS.get(setting.algorithm, ()), "ours")  # the quickest last
    outcomes = train_all(train, arms, setting, options)
    evaluated = {arm: [after for _, after in found] for arm, found in outcomes.items()}
    for arm, returns in evaluated.items():
        yield make_row(arm, "return", "", returns, " ".join(f"{x:.0f}" for x in sorted(returns)))
        yield make_row(arm, "return in training", "", [trained for trained, _ in outcomes[arm]])
        share = [sum(x >= setting.target_return for x in returns) / len(returns)] if returns else []
        yield make_row(arm, "share of runs at the target", "", share, f"of {len(returns)}")
        for other in {"stock": (), "ours": ("stock", CONTROL)}.get(arm, ("stock",)):
            if known := evaluated.get(other):
                yield make_row(arm, f"chance of the difference from {other}", "", find_chance(known, returns))


def find_chance(first: list[float], second: list[float], trials: int = 20_000) -> float:
    """A two-sided permutation test of the difference of means."""
    values, generator = np.array([*first, *second]), np.random.default_rng(0)
    shuffled = generator.permuted(np.tile(values, (trials, 1)), axis=1)
    differences = shuffled[:, : len(first)].mean(1) - shuffled[:, len(first) :].mean(1)
    least = abs(np.mean(first) - np.mean(second)) - 1e-9
    return float((1 + (np.abs(differences) >= least).sum()) / (1 + trials))


def train_sb3(run: Run) -> Outcome:
    from rl_triton_adapters.common.optimizers import fuse_optimizer

    name = run.setting.algorithm
    model = make_model(run, **TABLE["same_learning"]["options"][name])
    if run.arm == CONTROL:
        generator = torch.Generator().manual_seed(1000 + run.seed)
        for x in model.policy.parameters():
            x.data.mul_(1 + 1e-7 * torch.randn(x.shape, generator=generator).to(x.device))
    for owner in (model.policy.actor, model.policy.critic) if name == "TD3" else (model.policy,):
        if run.arm == FUSED:
            fuse_optimizer(owner.optimizer)
    model.learn(run.setting.total_steps)
    model.get_env().training = False  # the normalisation stays as it is
    folder = "sb3_contrib.common.maskable" if name == "MaskablePPO" else "stable_baselines3.common"
    evaluate = import_module(f"{folder}.evaluation").evaluate_policy
    returns, _ = evaluate(model, model.get_env(), EPISODES, return_episode_rewards=True)
    return float(np.mean([episode["r"] for episode in model.ep_info_buffer])), float(np.mean(returns))


def make_model(run: Run, **options: Any) -> Any:
    from benchmarks.end_to_end.sb3 import find_class, make_task

    model = find_class(run.setting.algorithm, run.arm == "ours")
    task = make_task(f"{run.setting.task}, {run.setting.algorithm}", run.setting.num_envs)
    return model(*task, seed=run.seed, device=run.device, **options)


def train_rllib(run: Run) -> Outcome:
    from benchmarks import rllib_training

    (setting, arm, seed, *_), known = run, TABLE["same_learning_rllib"]["options"]
    steps = min(2048, setting.total_steps)
    given = {"env": setting.task, "num_envs": setting.num_envs, "train_batch_size": steps, "num_epochs": 10}
    with rllib_training.local_ray():
        algorithm = rllib_training.build_algorithm(arm, Setting(**given), "cpu", seed, **known)
        if arm == "ours" and "updates are compiled" not in (x := algorithm.learner_group._learner.describe()):
            raise RuntimeError(x)
        returns = [algorithm.train()["env_runners"]["episode_return_mean"] for _ in range(setting.total_steps // steps)]
        return sum(returns) / len(returns), returns[-1]


compare_sb3, compare_rllib = (partial(compare, x) for x in (train_sb3, train_rllib))
