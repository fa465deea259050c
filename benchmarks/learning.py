"""Algorithms of Stable-Baselines3 and ours from the same seeds: returns over steps and seconds.

Each run is a process of its own with one thread, several at a time; arms take turns, and seeds take turns on the GPUs.
A point is the mean return of the last 100 episodes, off policy of the last 10. Runs that the budget stops keep the
points they have.
"""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks import off_policy
from benchmarks.end_to_end.sb3 import DRAWN, choose_algorithm, make_task
from benchmarks.results import Row, make_row


class Setting(NamedTuple):
    """What is learned, and from how many seeds."""

    task: str
    target_return: float
    total_steps: int
    num_envs: int
    num_steps: int
    """Of each environment, between two points."""
    batch_size: int
    seeds: int = 5
    algorithm: str = "PPO"


OPTIONS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"learning_rate": 1e-3, "n_epochs": 10},
    "Pendulum-v1": {"learning_rate": 1e-3, "gamma": 0.9, "clip_range": 0.2},
    "InvertedPendulum-v5": {"learning_rate": 1e-3},
    DRAWN: {"learning_rate": 5e-4, "gamma": 0.98, "gae_lambda": 0.9},
}
"""More arguments of `PPO`."""
CPU = [
    Setting("CartPole-v1", 475.0, 131_072, 8, 128, 256),
    Setting("Pendulum-v1", -250.0, 163_840, 8, 256, 256),
    Setting("InvertedPendulum-v5", 800.0, 147_456, 8, 128, 256),
    Setting("Pendulum-v1", -400.0, 7_000, 1, 200, 256, algorithm="SAC"),
    Setting("InvertedPendulum-v5", 500.0, 8_000, 1, 200, 256, algorithm="SAC"),
]
CPU = [x for x in CPU if importlib.util.find_spec("mujoco") or not x.task.startswith("Inverted")]
SETTINGS = {
    "cpu": CPU,
    "cuda": [*CPU, Setting(DRAWN, 200.0, 61_440, 8, 128, 256, 16)],
    "quick": [Setting("CartPole-v1", 1.0, 512, 2, 64, 64, 1)],
}
ARMS = {"stock": "stock", "ours": "captured"}
GRACE = 10.0
"""Seconds that runs have to return when the time is over."""


class Run(NamedTuple):
    """A training run, and when it is stopped: as `time.time` says it."""

    setting: Setting
    arm: str
    seed: int
    device: str
    ends: float


class Curve(NamedTuple):
    """The points of a run: steps, seconds and returns."""

    arm: str
    seed: int
    points: list[tuple[int, float, float]]

    def find_target(self, target: float) -> tuple[int, float] | None:
        """Steps and seconds after which a return is reached, if it is."""
        return next(((steps, seconds) for steps, seconds, found in self.points if found >= target), None)


def measure(setting: Setting, options: Namespace) -> Iterator[Row]:
    """Every arm with every seed: curves, and when they reach the target. Quartiles are those over seeds."""
    ends = time.time() + options.ends - time.perf_counter()
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if options.device == "cuda" else ["cpu"]
    runs = [
        Run(setting, arm, seed, devices[seed % len(devices)], ends)
        for seed, arm in itertools.product(range(setting.seeds), ARMS)
    ]
    curves = [curve for curve in train_all(train, runs, options.jobs, ends) if curve.points]
    for arm in ARMS:
        yield from describe_curves(arm, [x for x in curves if x.arm == arm], setting)


def describe_curves(arm: str, curves: list[Curve], setting: Setting) -> Iterator[Row]:
    """The lines of an arm's runs, and a line for every point that all of them have."""
    reached = [found for curve in curves if (found := curve.find_target(setting.target_return)) is not None]
    finished = [x for x in curves if x.points[-1][0] >= setting.total_steps]
    yield make_row(arm, "last return", "", [curve.points[-1][2] for curve in curves])
    yield make_row(arm, "runs to the end", "", len(finished))
    yield make_row(arm, "runs to the target", "", len(reached))
    yield make_row(arm, "steps to the target", "", [steps for steps, _ in reached])
    yield make_row(arm, "time to the target", "s", [seconds for _, seconds in reached])
    for points in zip(*(curve.points for curve in curves), strict=False):
        yield make_row(arm, "return", "", [found for *_, found in points], steps=points[0][0])
        yield make_row(arm, "time", "s", [seconds for _, seconds, _ in points], steps=points[0][0])


def train_all(train: Callable[[Any], Any], runs: list[Any], jobs: int, ends: float) -> Iterator[Any]:
    """The runs as they finish; those that have not begun when the time is over are left out."""
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        found = pool.imap_unordered(train, runs, chunksize=1)
        for _ in runs:
            left = None if ends == float("inf") else max(0.0, ends + GRACE - time.time())
            try:
                yield found.next(left)
            except multiprocessing.TimeoutError:
                return


def train(run: Run) -> Curve:
    """One run, with a point for each of its iterations."""
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

    torch.set_num_threads(1)
    if run.device != "cpu":
        torch.cuda.set_device(run.device)
    points: list[tuple[int, float, float]] = []
    model = make_model(run)
    start = time.perf_counter()
    model.learn(run.setting.total_steps, Recorder())
    return Curve(run.arm, run.seed, points)


def make_model(run: Run) -> Any:
    """The algorithm of an arm, which has compiled what it needs."""
    setting = run.setting
    if setting.algorithm != "PPO":
        kind = off_policy.choose_class(run.arm, setting.algorithm)
        task = make_task(setting.task, setting.num_envs, run.seed)
        options = {"batch_size": setting.batch_size, "stats_window_size": 10}
        return kind(*task, device=run.device, seed=run.seed, **options)
    return choose_algorithm(ARMS[run.arm])(
        *make_task(setting.task, setting.num_envs, run.seed),
        n_steps=setting.num_steps,
        batch_size=setting.batch_size,
        device=run.device,
        seed=run.seed,
        **OPTIONS[setting.task],
    )
