"""IMPALA and APPO of RLlib on CartPole-v1: how many updates replay a graph while batches vary.

A batch has a slot for each step and each end of an episode, so that training has batches of many sizes, each with a
graph of its own.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.end_to_end.impala import create_config
from benchmarks.end_to_end.stopwatch import watch_memory
from benchmarks.harness import wait_for
from benchmarks.results import Row, make_row

CORES = len(os.sched_getaffinity(0))
FRAGMENT, NUM_ENVS = 50, 10
"""Steps of a fragment, and environments of an env runner."""
FIRST = 50
"""Updates that are looked at on their own: they capture most."""
SECONDS = 15.0


class Setting(NamedTuple):
    """An algorithm, the steps of a batch, and how many env runners there are; with 0 one in the process."""

    algorithm: str
    batch_size: int
    env_runners: int = max(1, min(8, CORES - 2))


ALL = [Setting(name, size) for name in ("IMPALA", "APPO") for size in (500, 2000)]
SETTINGS = {"cpu": ALL, "cuda": ALL, "quick": [Setting(name, 200, 0) for name in ("IMPALA", "APPO")]}


def prepare(settings: Sequence[Setting], options: Namespace) -> None:
    """Start Ray."""
    import ray

    ray.init(num_cpus=CORES, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)


def measure(setting: Setting, options: Namespace) -> Iterator[Row]:
    """RLlib's own training and ours, one after the other, each from its beginning."""
    for arm in ("stock", "ours"):
        yield from measure_training(setting, arm, options)


def measure_training(setting: Setting, arm: str, options: Namespace) -> Iterator[Row]:
    """One training, with a learner in this process."""
    memory: dict[str, int] = {}
    with watch_memory(options.device, memory):
        algorithm = make_config(setting, arm, options.device).build_algo()
        updates = record_updates(algorithm.learner_group._learner, options.device)
        while not updates:  # env runners are starting
            algorithm.train()
        ends = time.perf_counter() + (options.seconds or SECONDS)
        while time.perf_counter() < ends:
            algorithm.train()
        algorithm.stop()
    times = [x.milliseconds for x in updates]
    yield make_row(arm, "updates", "", len(updates))
    yield make_row(arm, "sizes", "", len({x.size for x in updates}))
    yield make_row(arm, "replayed", "%", 100 * sum(x.is_replayed for x in updates) / len(updates))
    yield make_row(arm, "update", "ms", times[FIRST:] or times)
    yield make_row(arm, f"first {FIRST} updates", "ms", sum(times[:FIRST]))
    yield from (make_row(arm, "peak", "MiB", x / 2**20) for x in memory.values())


def make_config(setting: Setting, arm: str, device: str) -> Any:
    """An algorithm's config."""
    config = create_config(setting.algorithm)
    config.environment("CartPole-v1").debugging(seed=0, log_level="ERROR").reporting(min_time_s_per_iteration=1)
    config.env_runners(
        num_env_runners=setting.env_runners, num_envs_per_env_runner=NUM_ENVS, rollout_fragment_length=FRAGMENT
    )
    config.learners(num_learners=0, num_gpus_per_learner=int(device == "cuda"))
    config.training(train_batch_size_per_learner=setting.batch_size, lr=5e-4)
    if arm == "stock":
        return config
    from rl_triton_adapters.rllib import enable_triton

    return enable_triton(config)


class Update(NamedTuple):
    """Of how many slots it was, how long it took, and whether it replayed a graph."""

    size: int
    milliseconds: float
    is_replayed: bool


def record_updates(learner: Any, device: str) -> list[Update]:
    """A list to which a learner adds its updates, each after the device is done. RLlib's learners have no graphs."""
    updates: list[Update] = []
    ours = getattr(learner, "triton_update", None)
    owner, name = (learner, "_update") if ours is None else (ours, "make_step")
    make_update = getattr(owner, name)

    def list_graphs() -> dict[int, int]:
        """The graphs that there are, and the number of the call that used each last."""
        return {} if ours is None else {id(x): x.last_call for x in ours.find_step().captured.values()}

    def run_update(batch: dict[str, Any], *args: Any) -> Any:
        before, started = list_graphs(), time.perf_counter()
        found = make_update(batch, *args)
        wait_for(device)
        milliseconds = 1e3 * (time.perf_counter() - started)
        is_replayed = any(before.get(key, last) != last for key, last in list_graphs().items())
        updates.append(Update(sum(len(columns["obs"]) for columns in batch.values()), milliseconds, is_replayed))
        return found

    setattr(owner, name, run_update)
    return updates
