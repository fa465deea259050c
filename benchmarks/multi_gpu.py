"""Iterations of examples/ppo_multi_gpu.py, eager and captured in turns, in one process and in one per GPU.

Every process has the same number of environments, so that two learn from twice as many steps. Before, both make the
same updates of the same rollout, and weights must agree. Times are those of the first process. On CPUs, over gloo,
nothing is captured.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed, multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import ppo_multi_gpu

from benchmarks.end_to_end import frameworks
from benchmarks.end_to_end.ppo import make_arguments
from benchmarks.harness import list_times, wait_for
from benchmarks.results import Row


class Setting(NamedTuple):
    """How many processes, and what each does."""

    processes: int
    num_envs: int
    num_steps: int
    hidden: int = 64
    epochs: int = 4
    minibatches: int = 4


PROCESSES = dict.fromkeys((1, max(1, torch.cuda.device_count())))
SETTINGS = {
    "cpu": [],
    "cuda": [Setting(n, *about) for n in PROCESSES for about in ((4096, 128), (16384, 128, 128))],
    "quick": [Setting(2, 4, 16, 8, 2, 2)],
}
UPDATES = ("eager", "captured")
SECONDS, WARM_UPS = 8.0, 2
Trainings = dict[str, ppo_multi_gpu.DistributedTraining]


def measure(setting: Setting, options: Namespace) -> Iterator[Row]:
    """Start the processes, and take the times of the first."""
    with tempfile.TemporaryDirectory() as folder:
        about = folder, setting, options.device, options.seconds or SECONDS
        multiprocessing.spawn(measure_share, about, nprocs=setting.processes)
        times, reason = torch.load(Path(folder) / "times")
    for row in list_times(times, "captured", "iteration", "ms"):
        yield row._replace(note=reason if row.arm == "captured" else "")


def measure_share(rank: int, folder: str, setting: Setting, where: str, seconds: float) -> None:
    """One of the processes; the first keeps the times."""
    device = where if where == "cpu" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(device)
    backend = "gloo" if device == "cpu" else "nccl"
    meeting = f"file://{folder}/meet"
    distributed.init_process_group(backend, init_method=meeting, rank=rank, world_size=setting.processes)
    found = time_updates(setting, device, rank, seconds)
    if rank == 0:
        torch.save(found, f"{folder}/times")
    distributed.barrier()  # one that parts earlier breaks off what others have not received
    distributed.destroy_process_group()


def time_updates(setting: Setting, device: str, rank: int, seconds: float) -> tuple[dict[str, list[list[float]]], str]:
    """Microseconds of iterations, a turn each, and why nothing was captured; the first chooses how many turns."""
    trainings = {update: make_training(setting, update, device, rank) for update in UPDATES}
    compare_updates(trainings)
    times: dict[str, list[list[float]]] = {update: [] for update in UPDATES}
    turns = torch.ones(1, dtype=torch.int64, device=device)
    for turn in itertools.count():
        for update, training in trainings.items():
            started = time.perf_counter()
            training.run_iteration(training.args.learning_rate)
            wait_for(device)
            times[update] += [[1e6 * (time.perf_counter() - started)]] * (turn >= WARM_UPS)
        if turn == WARM_UPS:
            turns.fill_(int(seconds * 1e6 / sum(turn[0] for (turn,) in times.values())))
            distributed.broadcast(turns, 0)
        if turn >= WARM_UPS + turns.item():
            break
    reason = trainings["captured"].update.reason
    for training in trainings.values():
        training.collect.reset()
        training.update.reset()
    return times, reason


def make_training(setting: Setting, update: str, device: str, rank: int) -> ppo_multi_gpu.DistributedTraining:
    """The example's training, with environments of its own in every process."""
    args = make_arguments(frameworks.Setting(*setting[1:], device=device))
    args.env, args.update, args.seed = "cartpole", update, 1 + rank
    return ppo_multi_gpu.DistributedTraining(args)


def compare_updates(trainings: Trainings) -> None:
    """Both update the same weights by the same minibatches, to the same weights within rounding."""
    eager, captured = trainings.values()
    eager.data = {name: x.flatten(0, 1).clone() for name, x in eager.collect().items()}
    captured.data = {name: x.clone() for name, x in eager.data.items()}
    for rows in torch.randperm(len(eager.data["obs"]), device=eager.args.device).chunk(eager.args.num_minibatches):
        for training in trainings.values():
            training.update(rows)
    for name, want in eager.agent.state_dict().items():
        torch.testing.assert_close(captured.agent.state_dict()[name], want, rtol=1e-3, atol=1e-5)
