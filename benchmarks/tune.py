"""The launches that rollouts could have, each verified against the table's own, by their time on the device.

The rows of `_internal/launch/table.py` are chosen from what this finds. `python -m benchmarks.tune FILE` says where the
table's own choice stands among the launches that a result file has.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from triton.runtime.errors import TritonError

from benchmarks.calls import list_tensors
from benchmarks.harness import Call
from benchmarks.providers import ours
from benchmarks.results import Row, make_row, read_result
from benchmarks.workloads import LAYOUTS, Workload, count_bytes_per_step, draw_inputs
from rl_triton_core._internal.launch import table as launch
from rl_triton_core._internal.launch.table import TABLE, Launch
from rl_triton_core._internal.launch.tuning import Candidate, device_time, launch_candidates
from rl_triton_core._internal.scan import triton as backend
from rl_triton_core._internal.scan.problem import Problem
from rl_triton_core.testing import relative_error

SHAPES = (
    (32768, 8), (32768, 32), (16384, 128), (4096, 128), (16384, 512), (4096, 2048), (512, 512), (512, 4096), (64, 512),
    (64, 65536), (1, 1048576),
)  # fmt: skip
AGREE = 1e-5
"""The largest ‖x − table's x‖ / ‖table's x‖ of a candidate."""
VALID = 0.9
"""The share of the steps that a mask keeps."""
LIMIT = 1.1
"""The most that the table's launch may take, by the time of the best."""


class Rollout(NamedTuple):
    """The fields of a workload, and whether it has a mask."""

    estimator: str
    num_envs: int
    num_steps: int
    layout: str = "env-major"
    truncated: bool = False
    dtype: str = "float32"
    flags: str = "bool"
    masked: bool = False

    @classmethod
    def of(cls, row: Row) -> Rollout:
        """What a line is about. One environment has its steps side by side in both layouts."""
        x = row.read_setting()
        flags = {name: x[name] == "True" for name in ("truncated", "masked")}
        found = cls(**{**x, **flags, "num_envs": int(x["num_envs"]), "num_steps": int(x["num_steps"])})  # type: ignore[arg-type]
        return found._replace(layout="env-major") if found.num_envs == 1 else found

    @property
    def workload(self) -> Workload:
        """What is computed."""
        return Workload(*self[:-1])

    def list_candidates(self) -> Iterator[Candidate]:
        """The launches that it could have."""
        held = count_bytes_per_step(self.workload) + self.masked
        return launch_candidates(self.num_steps, self.num_envs, held, self.layout)

    def look_up(self) -> Candidate:
        """The table's launch, and its number of segments."""
        held = count_bytes_per_step(self.workload._replace(dtype="float32")) + self.masked
        row = launch.find_launch(self.num_steps, self.num_envs, held, self.layout, table=TABLE)
        return row, launch.count_segments(self.num_steps, -(-self.num_envs // row.block_lanes), row)

    def __str__(self) -> str:
        return f"{self.workload}{' masked' * self.masked}"


ALL = [
    Rollout(name, *shape, layout, truncated, masked=masked)
    for truncated, masked in ((False, False), (True, False), (False, True))
    for name, layout, shape in product(("gae", "vtrace", "retrace"), LAYOUTS, SHAPES)
]
SETTINGS: dict[str, list[Rollout]] = {"cpu": [], "cuda": ALL, "quick": [Rollout("gae", 16, 16)]}


def prepare(settings: Sequence[Rollout], options: Namespace) -> None:
    """Compile all candidates in parallel processes."""
    jobs = [(rollout, candidate) for rollout in settings for candidate in rollout.list_candidates()]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_only, *zip(*jobs, strict=True)))


def compile_only(rollout: Rollout, candidate: Candidate) -> None:
    """Fill Triton's cache on disk."""
    with suppress(RuntimeError, TritonError), launch_with(lambda _: candidate):
        make_call(rollout)()


def measure(rollout: Rollout, options: Namespace) -> Iterator[Row]:
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
                print(rollout, candidate, "does not run:", str(trouble).splitlines()[0])
    for microseconds, candidate, error in sorted(found, key=lambda line: line[0]):
        notes = ["in the table"] * (candidate == noted[0]) + ["disagrees"] * (not error <= AGREE)
        yield make_row(name_candidate(candidate), "device", "µs", microseconds, ", ".join(notes))


# --- the search -------------------------------------------------------------------------------------------------------


def make_call(rollout: Rollout) -> Call:
    """The public function, which never takes the fast path."""
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


def name_candidate(candidate: Candidate) -> str:
    """A launch's settings and its number of segments."""
    row, segments = candidate
    return " ".join(map(str, (*row, segments)))


def read_candidate(row: Row) -> Candidate:
    """The launch of a line, and its number of segments."""
    *settings, segments = map(int, row.arm.split())
    return Launch(*settings), segments


# --- the table among its candidates -----------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """A rollout, and lines of the search: the table's launch, None where it was not timed, and the best."""

    rollout: Rollout
    ours: Row | None
    best: Row

    @property
    def ratio(self) -> float:
        """The table's time by the best."""
        return (self.ours.median or 0.0) / (self.best.median or 1.0) if self.ours else float("inf")

    def __str__(self) -> str:
        text = f"{self.rollout}: {name_candidate(self.rollout.look_up())} takes {self.ratio:.2f} of the time of"
        return f"{text} {self.best.arm}, {self.best.median:.2f} µs"


def judge_rows(rows: Iterable[Row]) -> list[Verdict]:
    """A verdict for every rollout, by the launches whose results agree."""
    groups: dict[Rollout, list[Row]] = {}
    for row in rows:
        if "disagrees" not in row.note:
            groups.setdefault(Rollout.of(row), []).append(row)
    return [make_verdict(rollout, found) for rollout, found in groups.items()]


def make_verdict(rollout: Rollout, rows: list[Row]) -> Verdict:
    """The table's launch among those that were timed."""
    own = [row for row in rows if read_candidate(row) == rollout.look_up()]
    return Verdict(rollout, own[0] if own else None, min(rows, key=lambda row: row.median or float("inf")))


if __name__ == "__main__":
    print(*judge_rows(read_result(Path(sys.argv[1])).rows), sep="\n")
