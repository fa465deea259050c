"""Train PPO of Stable-Baselines3 and `TritonPPO` from the same seeds, and write returns over steps and seconds.

    python -m benchmarks.learning FOLDER [--device cuda] [--task NAME ...] [--seeds N] [--jobs N] [--budget SECONDS]

Each run is a process of its own with one thread, JOBS at a time; arms take turns, and seeds take turns on the GPUs. A
point is an iteration: the mean return of the last 100 episodes. Runs that the budget stops keep the points they have.
Writes learning.json; what a file that is there has of other tasks stays in it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "adapters"))

from benchmarks import files
from benchmarks.end_to_end.sb3 import DRAWN, choose_algorithm, make_task


class Task(NamedTuple):
    """What is learned, and how."""

    env: str
    target_return: float
    total_steps: int
    num_envs: int
    num_steps: int
    batch_size: int
    options: dict[str, Any]
    """More arguments of `PPO`."""
    devices: tuple[str, ...] = ("cpu", "cuda")


TASKS = (
    Task("CartPole-v1", 475.0, 131_072, 8, 128, 256, {"learning_rate": 1e-3, "n_epochs": 10}),
    Task(
        "Pendulum-v1", -250.0, 163_840, 8, 256, 256, {"learning_rate": 1e-3, "gamma": 0.9, "clip_range": 0.2},
    ),
    Task(
        DRAWN, 200.0, 61_440, 8, 128, 256, {"learning_rate": 5e-4, "gamma": 0.98, "gae_lambda": 0.9}, ("cuda",),
    ),
)  # fmt: skip
ARMS = {"stock": "stock", "ours": "captured"}
GRACE = 10.0
"""Seconds that runs have to return when the time is over."""


class Run(NamedTuple):
    """A training run, and when it is stopped: as `time.time` says it."""

    task: Task
    arm: str
    seed: int
    device: str
    ends: float = float("inf")


def main(arguments: list[str] | None = None) -> None:
    """Train every arm of every task with every seed."""
    parser = files.make_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--task", nargs="+", choices=[task.env for task in TASKS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of every run, in place of those of its task")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which runs are stopped")
    options = parser.parse_args(arguments)
    ends, path = time.time() + options.budget, options.folder / "learning.json"
    tasks = [x for x in TASKS if (x.env in options.task if options.task else options.device in x.devices)]
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if options.device == "cuda" else [options.device]
    runs = [
        Run(task._replace(total_steps=options.steps or task.total_steps), arm, seed, devices[turn % len(devices)], ends)
        for turn, (task, seed) in enumerate(itertools.product(tasks, range(options.seeds)))
        for arm in ARMS
    ]
    about = {"system": files.describe_system(options.commit), "device": options.device, "jobs": options.jobs}
    measured = [task.env for task in tasks]
    before = files.continue_result(path, about, lambda row: row["task"] not in measured, "rows")
    rows = [{"jobs": before["jobs"], **row} for row in before.get("rows", [])]
    for row in train_all(runs, options.jobs, ends):
        end = f"{row['returns'][-1]} in {row['seconds'][-1]} s" if row["steps"] else "no points"
        print(f"{row['task']}, {row['arm']}, seed {row['seed']}: {end}{', stopped' * row['stopped']}", flush=True)
        rows += [{**row, "jobs": options.jobs}] if row["steps"] else []
        rows.sort(key=lambda x: (x["task"], list(ARMS).index(x["arm"]), x["seed"]))
        files.write_result(path, about, rows=rows)


def train_all(runs: list[Run], jobs: int, ends: float) -> Iterator[files.Row]:
    """The runs as they finish; those that have not begun when the time is over are left out."""
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        found = pool.imap_unordered(train, runs, chunksize=1)
        for _ in runs:
            left = None if ends == float("inf") else max(0.0, ends + GRACE - time.time())
            try:
                yield found.next(left)
            except multiprocessing.TimeoutError:
                return


def train(run: Run) -> files.Row:
    """One run, with a point for each of its iterations."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Curve(BaseCallback):
        """Records the points; an iteration ends where the next rollout starts, and with the run."""

        def _on_step(self) -> bool:
            return time.time() < run.ends

        def _on_rollout_start(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            if returns and self.model.num_timesteps % (task.num_envs * task.num_steps) == 0:
                seconds = round(time.perf_counter() - start, 2)
                points.append((self.model.num_timesteps, seconds, round(sum(returns) / len(returns), 1)))

        _on_training_end = _on_rollout_start

    task = run.task
    torch.set_num_threads(1)
    if run.device != "cpu":
        torch.cuda.set_device(run.device)
    points: list[tuple[int, float, float]] = []
    model = make_model(task, run.arm, run.seed, run.device)
    start = time.perf_counter()
    model.learn(task.total_steps, Curve())
    columns = zip(*points, strict=True) if points else ([], [], [])
    about = {"task": task.env, "target_return": task.target_return, "arm": run.arm, "seed": run.seed}
    about |= {"device": run.device, "stopped": model.num_timesteps < task.total_steps}
    return {**about, **dict(zip(("steps", "seconds", "returns"), map(list, columns), strict=True))}


def make_model(task: Task, arm: str, seed: int, device: str) -> Any:
    """The algorithm of an arm, which has compiled what it needs."""
    return choose_algorithm(ARMS[arm])(
        *make_task(task.env, task.num_envs, seed),
        n_steps=task.num_steps,
        batch_size=task.batch_size,
        device=device,
        seed=seed,
        **task.options,
    )


if __name__ == "__main__":
    main()
