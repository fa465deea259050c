"""Train PPO of Stable-Baselines3 and `TritonPPO` from the same seeds, and write returns over steps and seconds.

    python -m benchmarks.learning FOLDER [--device cuda] [--task NAME ...] [--seeds N] [--jobs N]

Each run is a process of its own with one thread, JOBS at a time; arms take turns. A point is an iteration: the mean
return of the last 100 episodes. Writes learning.json.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
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


def main() -> None:
    """Train every arm of every task with every seed."""
    parser = files.make_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--task", nargs="+", choices=[task.env for task in TASKS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of every run, in place of those of its task")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    tasks = [x for x in TASKS if (x.env in options.task if options.task else options.device in x.devices)]
    runs = [
        (task._replace(total_steps=options.steps or task.total_steps), arm, seed, options.device)
        for task, seed, arm in itertools.product(tasks, range(options.seeds), ARMS)
    ]
    about = {"system": files.describe_system(options.commit), "device": options.device, "jobs": options.jobs}
    rows: list[files.Row] = []
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        for row in pool.imap_unordered(train, runs, chunksize=1):
            end = f"{row['returns'][-1]} in {row['seconds'][-1]} s"
            print(f"{row['task']}, {row['arm']}, seed {row['seed']}: {end}", flush=True)
            rows = sorted([*rows, row], key=lambda x: (x["task"], list(ARMS).index(x["arm"]), x["seed"]))
            files.write_result(options.folder / "learning.json", about, rows=rows)


def train(run: tuple[Task, str, int, str]) -> files.Row:
    """One run, with a point for each of its iterations."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Curve(BaseCallback):
        """Records the points; an iteration ends where the next rollout starts, and with the run."""

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            if returns:
                seconds = round(time.perf_counter() - start, 2)
                points.append((self.model.num_timesteps, seconds, round(sum(returns) / len(returns), 1)))

        _on_training_end = _on_rollout_start

    task, arm, seed, device = run
    torch.set_num_threads(1)
    points: list[tuple[int, float, float]] = []
    model = make_model(task, arm, seed, device)
    start = time.perf_counter()
    model.learn(task.total_steps, Curve())
    steps, seconds, returns = map(list, zip(*points, strict=True))
    about = {"task": task.env, "target_return": task.target_return, "arm": arm, "seed": seed}
    return {**about, "steps": steps, "seconds": seconds, "returns": returns}


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
