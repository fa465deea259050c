"""Train IMPALA and APPO of RLlib on CartPole-v1, and count how many updates replay a graph while batches vary.

    python -m benchmarks.varying_batches FOLDER [--commit HASH] [--device cuda] [--seconds S]

A batch has a slot for each step and each end of an episode, so that training has batches of many sizes, each with a
graph of its own. Writes varying_batches.json: of RLlib's training and of ours the updates, the sizes that came up, the
share of updates that replayed a graph, how long an update of the learner took (quartiles, in milliseconds; the first
ones, that capture most, in `first_ms` together), and on a GPU the peak of the bytes that PyTorch reserves for it.
"""

from __future__ import annotations

import itertools
import os
import time
from argparse import Namespace
from typing import Any

import torch

from benchmarks import files
from benchmarks.end_to_end.impala import create_config
from benchmarks.end_to_end.stopwatch import Stopwatch, watch_memory
from benchmarks.quartiles import find_quartiles

ALGORITHMS = ("IMPALA", "APPO")
BATCH_SIZES = (500, 2000)
FRAGMENT, NUM_ENVS = 50, 10
"""Steps of a fragment, and environments of an env runner."""
FIRST = 50
"""Updates that are looked at on their own."""


def main(arguments: list[str] | None = None) -> None:
    """Measure RLlib's own training and ours, one after the other."""
    cores = len(os.sched_getaffinity(0))
    parser = files.make_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=15, help="how long each trains")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES, help="steps of a batch")
    parser.add_argument(
        "--env-runners", type=int, default=min(8, cores - 2), help="how many; with 0 one in the process"
    )
    options = parser.parse_args(arguments)
    import ray

    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False)
    rows = [
        {"algorithm": name, "batch_size": size}
        | {arm: measure_training(name, size, arm, options) for arm in ("stock", "ours")}
        for name, size in itertools.product(ALGORITHMS, options.batch_sizes)
    ]
    ray.shutdown()
    files.save_rows(options, "varying_batches.json", rows, device=options.device)


def measure_training(name: str, batch_size: int, arm: str, options: Namespace) -> files.Row:
    """One training from its beginning, with a learner in this process."""
    memory: dict[str, int] = {}
    with watch_memory(options.device, memory):
        algorithm = make_config(name, batch_size, arm, options).build_algo()
        updates = CountedUpdates(algorithm.learner_group._learner, Stopwatch(options.device))
        while not updates.sizes:  # env runners are starting
            algorithm.train()
        ends = time.perf_counter() + options.seconds
        while time.perf_counter() < ends:
            algorithm.train()
        algorithm.stop()
    return updates.make_row() | memory


def make_config(name: str, batch_size: int, arm: str, options: Namespace) -> Any:
    """An algorithm's config."""
    config = create_config(name)
    config.environment("CartPole-v1").debugging(seed=0, log_level="ERROR").reporting(min_time_s_per_iteration=1)
    config.env_runners(
        num_env_runners=options.env_runners, num_envs_per_env_runner=NUM_ENVS, rollout_fragment_length=FRAGMENT
    )
    config.learners(num_learners=0, num_gpus_per_learner=int(options.device == "cuda"))
    config.training(train_batch_size_per_learner=batch_size, lr=5e-4)
    if arm == "stock":
        return config
    from rl_triton_adapters.rllib import enable_triton

    return enable_triton(config)


class CountedUpdates:
    """A learner's updates: their sizes, how long they take, and which replay a graph."""

    def __init__(self, learner: Any, watch: Stopwatch) -> None:
        self.sizes: list[int] = []
        self.milliseconds: list[float] = []
        self.replayed: list[bool] = []
        self.learner, self.update, self.watch = learner, learner._update, watch
        learner._update = self.run_update

    def run_update(self, batch: dict[str, Any]) -> Any:
        """Update, and wait for the device."""
        before = self.list_graphs()
        started = time.perf_counter()
        found = self.update(batch)
        self.watch.wait()
        self.milliseconds.append(1e3 * (time.perf_counter() - started))
        self.sizes.append(sum(len(columns["obs"]) for columns in batch.values()))
        self.replayed.append(any(before.get(key, last) != last for key, last in self.list_graphs().items()))
        return found

    def list_graphs(self) -> dict[int, int]:
        """The graphs that there are, and the number of the call that used each last. RLlib's learners have none."""
        update = getattr(self.learner, "triton_update", None)
        return {} if update is None else {id(x): x.last_call for x in update.find_step().captured.values()}

    def make_row(self) -> files.Row:
        """What a result says of them."""
        return {
            "updates": len(self.sizes),
            "sizes": len(set(self.sizes)),
            "replayed": sum(self.replayed) / len(self.replayed),
            "update_ms": find_quartiles(self.milliseconds[FIRST:] or self.milliseconds, 3),
            "first_ms": sum(self.milliseconds[:FIRST]),
        }


if __name__ == "__main__":
    main()
