"""Time the launches that rollouts could have, verified against the table's own, and write which are best to a folder.

    python benchmarks/tune.py FOLDER [--estimator gae vtrace ...] [--layout time-major] [--window 4096x2048 ...]
        [--truncated] [--masked]

The rows of `_internal/launch/table.py` are chosen from what this finds. Writes tune_GPU.json: for every rollout the
candidates by their time on the device. Prints where the table's own choice stands among them.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from triton.runtime.errors import TritonError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files
from benchmarks.files import Row
from benchmarks.harness import Call
from benchmarks.providers import ours
from benchmarks.run import list_tensors
from benchmarks.workloads import ESTIMATORS, Workload, count_bytes, count_bytes_per_step, draw_inputs
from rl_triton_core._internal.launch import table as launch
from rl_triton_core._internal.launch.table import TABLE, Launch
from rl_triton_core._internal.launch.tuning import Candidate, device_time, launch_candidates
from rl_triton_core._internal.scan import triton as backend
from rl_triton_core._internal.scan.problem import Problem
from rl_triton_core.testing import relative_error

WINDOWS = (
    "32768x8", "32768x32", "16384x128", "4096x128", "16384x512", "4096x2048", "512x512", "512x4096", "64x512",
    "64x65536", "1x1048576",
)  # fmt: skip
AGREE = 1e-5
"""The largest ‖x − table's x‖ / ‖table's x‖ of a candidate."""
VALID = 0.9
"""How many steps of a masked rollout are valid."""
LIMIT = 1.1
"""The most that the table's launch may take, by the time of the best."""


class Rollout(NamedTuple):
    """What is computed, and whether with a mask."""

    workload: Workload
    masked: bool

    @classmethod
    def of(cls, row: Row) -> Rollout:
        """What a line is about. One environment has its steps side by side in both layouts."""
        workload = Workload.of(row)
        layout = "env-major" if workload.num_envs == 1 else workload.layout
        return cls(workload._replace(layout=layout), row.get("masked", False))

    def list_candidates(self) -> Iterator[Candidate]:
        """The launches that it could have."""
        _, envs, steps, layout, *_ = self.workload
        return launch_candidates(steps, envs, count_bytes_per_step(self.workload) + self.masked, layout)

    def look_up(self) -> Candidate:
        """The table's launch, and its number of segments."""
        _, envs, steps, layout, *_ = self.workload
        held = count_bytes_per_step(self.workload._replace(dtype="float32")) + self.masked
        row = launch.find_launch(steps, envs, held, layout, table=TABLE)
        return row, launch.count_segments(steps, -(-envs // row.block_lanes), row)

    def __str__(self) -> str:
        return f"{self.workload}{' masked' * self.masked}"


def main() -> None:
    parser = files.make_parser(__doc__)
    parser.add_argument("--estimator", nargs="+", choices=ESTIMATORS, default=["gae", "vtrace", "retrace"])
    parser.add_argument("--layout", nargs="+", choices=tuple(TABLE), default=tuple(TABLE))
    parser.add_argument("--window", nargs="+", default=WINDOWS, help="NUM_ENVSxNUM_STEPS")
    parser.add_argument("--truncated", action="store_true", help="with truncation flags and bootstrap values per step")
    parser.add_argument("--masked", action="store_true", help="with masked steps, which are skipped")
    options = parser.parse_args()
    choices = product(options.estimator, options.layout, options.window)
    workloads = (Workload(name, *map(int, window.split("x")), layout) for name, layout, window in choices)
    rollouts = [
        Rollout(x._replace(truncated=options.truncated and x.spec.truncates), options.masked) for x in workloads
    ]
    jobs = [(rollout, candidate) for rollout in rollouts for candidate in rollout.list_candidates()]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_only, *zip(*jobs, strict=True)))
    rows = [row for rollout in rollouts for row in time_candidates(rollout)]
    name = torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "_")
    files.save_rows(options, f"tune_{name}.json", rows)
    print(*judge_rows(rows), sep="\n")


# --- the search -------------------------------------------------------------------------------------------------------


def make_call(rollout: Rollout) -> Call:
    """The public function, which never replays a launch."""
    call = ours.make_call(rollout.workload, draw_inputs(rollout.workload, "cuda"))
    mask = {"mask": torch.rand_like(call.keywords[rollout.workload.spec.inputs[0]]) < VALID} if rollout.masked else {}
    return partial(inspect.unwrap(call.func), **call.keywords, **mask)


@contextmanager
def launch_with(choose: Callable[[Problem], Candidate]) -> Iterator[None]:
    """Whatever is launched is launched so."""
    chosen = backend.default_launch
    backend.default_launch = choose
    try:
        yield
    finally:
        backend.default_launch = chosen


def compile_only(rollout: Rollout, candidate: Candidate) -> None:
    """Fill Triton's cache on disk."""
    with suppress(RuntimeError, TritonError), launch_with(lambda _: candidate):
        make_call(rollout)()


def time_candidates(rollout: Rollout) -> Iterator[Row]:
    """A line for every candidate, the best first."""
    call = make_call(rollout)
    noted: list[Candidate] = []
    from_table = backend.default_launch

    def note_launch(problem: Problem) -> Candidate:
        noted.append(from_table(problem))
        return noted[-1]

    with launch_with(note_launch):
        want = [x.double() for x in list_tensors(call())]
    found = []
    for candidate in dict.fromkeys([noted[0], *rollout.list_candidates()]):
        with launch_with(lambda _, candidate=candidate: candidate):
            try:
                error = max(relative_error(x.double(), y) for x, y in zip(list_tensors(call()), want, strict=True))
                found.append((device_time(call), candidate, error))
            except (RuntimeError, TritonError) as trouble:
                print(rollout, candidate, "failed:", str(trouble).splitlines()[0])
    moved = count_bytes(rollout.workload) + rollout.masked * rollout.workload.cells
    for us, (row, segments), error in sorted(found, key=lambda line: line[0]):
        yield {
            **rollout.workload._asdict(),
            "masked": rollout.masked,
            **row._asdict(),
            "segments": segments,
            "in_table": (row, segments) == noted[0],
            "microseconds": round(us, 3),
            "gb_per_s": round(moved / us / 1e3, 1),
            "agrees": bool(error <= AGREE),
        }


# --- the table among its candidates -----------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """A rollout, and lines of the search: the table's launch, None where it was not timed, and the best."""

    rollout: Rollout
    ours: Row | None
    best: Row

    @property
    def ratio(self) -> float:
        """The table's time by the best."""
        return self.ours["microseconds"] / self.best["microseconds"] if self.ours else float("inf")

    def __str__(self) -> str:
        (row, segments), (best, best_segments) = self.rollout.look_up(), read_candidate(self.best)
        time = f"{self.best['microseconds']:.2f} us"
        text = f"{self.rollout}: {tuple(row)} x {segments} takes {self.ratio:.2f} of the time of"
        return f"{text} {tuple(best)} x {best_segments}, {time}"


def judge_rows(rows: Iterable[Row]) -> list[Verdict]:
    """A verdict for every rollout, by the launches whose results agree."""
    groups: dict[Rollout, list[Row]] = {}
    for row in rows:
        if row["agrees"]:
            groups.setdefault(Rollout.of(row), []).append(row)
    return [make_verdict(rollout, found) for rollout, found in groups.items()]


def make_verdict(rollout: Rollout, rows: list[Row]) -> Verdict:
    """The table's launch among those that were timed."""
    ours = [row for row in rows if read_candidate(row) == rollout.look_up()]
    return Verdict(rollout, ours[0] if ours else None, min(rows, key=lambda row: row["microseconds"]))


def read_candidate(row: Row) -> Candidate:
    """The launch of a line, and its number of segments."""
    return Launch(*(row[name] for name in Launch._fields)), row["segments"]


if __name__ == "__main__":
    main()
