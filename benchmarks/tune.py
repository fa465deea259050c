"""Time the launches that windows could have, verified against the table's own, and write which are best to a folder.

    python benchmarks/tune.py FOLDER [--estimator gae vtrace ...] [--layout time-major] [--window 4096x2048 ...]
        [--truncated] [--masked]

The rows of `_internal/kernels/launch.py` are chosen from what this finds. Writes tune_GPU.json: for every window the
candidates by their time on the device. benchmarks/judge.py says where the table's own choice stands among them.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from triton.runtime.errors import TritonError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files, judge
from benchmarks.harness import Call
from benchmarks.providers import ours
from benchmarks.run import list_tensors
from benchmarks.workloads import ESTIMATORS, Workload, count_bytes, count_bytes_per_step, draw_inputs
from rl_triton_core._internal.backends import triton as backend
from rl_triton_core._internal.recurrence import Problem
from rl_triton_core._internal.tuning import Candidate, device_time, launch_candidates
from rl_triton_core.testing import relative_error

WINDOWS = (
    "32768x8",
    "32768x32",
    "16384x128",
    "4096x128",
    "16384x512",
    "4096x2048",
    "512x512",
    "512x4096",
    "64x512",
    "64x65536",
    "1x1048576",
)
AGREE = 1e-5
"""The largest ‖x − table's x‖ / ‖table's x‖ of a candidate."""
VALID = 0.9
"""How many steps of a masked window are valid."""


class Rollout(NamedTuple):
    """What is computed, and whether with a mask."""

    workload: Workload
    masked: bool

    def candidates(self) -> Iterator[Candidate]:
        """The launches that it could have."""
        _, envs, steps, layout, *_ = self.workload
        return launch_candidates(steps, envs, count_bytes_per_step(self.workload) + self.masked, layout)

    def __str__(self) -> str:
        return f"{self.workload}{' masked' * self.masked}"


def main() -> None:
    parser = files.make_parser(__doc__)
    parser.add_argument("--estimator", nargs="+", choices=ESTIMATORS, default=["gae", "vtrace", "retrace"])
    parser.add_argument("--layout", nargs="+", choices=tuple(backend.launch.TABLE), default=tuple(backend.launch.TABLE))
    parser.add_argument("--window", nargs="+", default=WINDOWS, help="NUM_ENVSxNUM_STEPS")
    parser.add_argument("--truncated", action="store_true", help="with truncation flags and bootstrap values per step")
    parser.add_argument("--masked", action="store_true", help="with masked steps, which are skipped")
    options = parser.parse_args()
    workloads = (
        Workload(name, *map(int, window.split("x")), layout)
        for name in options.estimator
        for layout in options.layout
        for window in options.window
    )
    windows = [Rollout(x._replace(truncated=options.truncated and x.spec.truncates), options.masked) for x in workloads]
    jobs = [(window, candidate) for window in windows for candidate in window.candidates()]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_only, *zip(*jobs, strict=True)))
    rows = [row for window in windows for row in time_candidates(window)]
    name = torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "_")
    files.write_result(
        options.folder / f"tune_{name}.json", {"system": files.describe_system(options.commit)}, rows=rows
    )
    print(judge.write_verdicts(judge.judge_rows(rows)))


def make_call(window: Rollout) -> Call:
    """The public function, which never replays a launch."""
    call = ours.make_call(window.workload, draw_inputs(window.workload, "cuda"))
    mask = {"mask": torch.rand_like(call.keywords[window.workload.spec.inputs[0]]) < VALID} if window.masked else {}
    return partial(inspect.unwrap(call.func), **call.keywords, **mask)


@contextmanager
def launched(settings: Callable[[Problem], Candidate]) -> Iterator[None]:
    """Whatever is launched is launched so."""
    chosen = backend.default_launch
    backend.default_launch = settings
    try:
        yield
    finally:
        backend.default_launch = chosen


def compile_only(window: Rollout, candidate: Candidate) -> None:
    """Fill Triton's cache on disk."""
    with suppress(RuntimeError, TritonError), launched(lambda _: candidate):
        make_call(window)()


def time_candidates(window: Rollout) -> Iterator[files.Row]:
    """A line for every candidate, the best first."""
    call = make_call(window)
    noted: list[Candidate] = []
    from_table = backend.default_launch

    def note(problem: Problem) -> Candidate:
        noted.append(from_table(problem))
        return noted[-1]

    with launched(note):
        want = [x.double() for x in list_tensors(call())]
    found = []
    for candidate in dict.fromkeys([noted[0], *window.candidates()]):
        with launched(lambda _, candidate=candidate: candidate):
            try:
                error = max(relative_error(x.double(), y) for x, y in zip(list_tensors(call()), want, strict=True))
                found.append((device_time(call), candidate, error))
            except (RuntimeError, TritonError) as trouble:
                print(window, candidate, "failed:", str(trouble).splitlines()[0])
    found.sort(key=lambda line: line[0])
    print(window, *(f"{us:.2f} us {tuple(launch)} x {segments}" for us, (launch, segments), _ in found[:3]), sep="\n  ")
    moved = count_bytes(window.workload) + window.masked * window.workload.cells
    for us, (launch, segments), error in found:
        yield {
            **window.workload._asdict(),
            "masked": window.masked,
            **launch._asdict(),
            "segments": segments,
            "in_table": (launch, segments) == noted[0],
            "microseconds": round(us, 3),
            "gb_per_s": round(moved / us / 1e3, 1),
            "agrees": bool(error <= AGREE),
        }


if __name__ == "__main__":
    main()
