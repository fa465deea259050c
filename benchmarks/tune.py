"""Time the launches that windows could have, verified against the table's own, and write which are best to a folder.

    python benchmarks/tune.py FOLDER [--estimator gae vtrace ...] [--layout time-major] [--window 4096x2048 ...]

The rows of rl_triton_core/kernels/launch.py are chosen from what this finds. Writes tune_GPU.json: for every window the
candidates by their time on the device, and where the table's own choice stands among them.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files
from benchmarks.harness import Call, CudaClock
from benchmarks.providers import ours
from benchmarks.run import tensors
from benchmarks.workloads import ESTIMATORS, Workload, bytes_moved, draw
from rl_triton_core.backends import triton as backend
from rl_triton_core.kernels.launch import WARPS, Launch
from rl_triton_core.recurrence import Problem
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
CAPTURED, REPLAYS = 10, 5
AGREE = 1e-5
"""The largest ‖x − table's x‖ / ‖table's x‖ of a candidate."""

MOST_NUMBERS = 64
"""The most numbers of a chunk that a thread is to hold."""

Candidate = tuple[Launch, int]
"""A launch, and the number of segments."""


def main() -> None:
    parser = files.parser(__doc__)
    parser.add_argument("--estimator", nargs="+", choices=ESTIMATORS, default=["gae", "vtrace", "retrace"])
    parser.add_argument("--layout", nargs="+", choices=tuple(backend.launch.TABLE), default=tuple(backend.launch.TABLE))
    parser.add_argument("--window", nargs="+", default=WINDOWS, help="NUM_ENVSxNUM_STEPS")
    options = parser.parse_args()
    workloads = [
        Workload(name, *map(int, window.split("x")), layout)
        for name in options.estimator
        for layout in options.layout
        for window in options.window
    ]
    jobs = [(workload, candidate) for workload in workloads for candidate in candidates(workload)]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_only, *zip(*jobs, strict=True)))
    rows = [row for workload in workloads for row in times(workload)]
    name = torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "_")
    files.write(options.folder / f"tune_{name}.json", {"system": files.system(options.commit)}, rows=rows)


def candidates(workload: Workload) -> Iterator[Candidate]:
    """Launches whose tiles are not much larger than the window, with as many segments as make sense."""
    steps, lanes = workload.num_steps, workload.num_envs
    for unroll in (4, 8, 16):
        if unroll > max(steps, 4) or unroll * workload.numbers_per_step > MOST_NUMBERS:
            continue
        for launch in env_major(unroll, steps) if workload.layout == "env-major" else time_major(unroll):
            if launch.block_lanes <= 2 * lanes and launch.steps < 2 * max(steps, unroll):
                for segments in segment_numbers(steps, lanes, launch):
                    yield launch, segments


def env_major(unroll: int, steps: int) -> Iterator[Launch]:
    """All of a warp's threads along the steps, as far as there are steps; or those of several warps."""
    chunks = min(32, max(1, -(-steps // unroll)))
    chunks = 1 << (chunks - 1).bit_length()
    for warps in (1, 4, 8):
        yield Launch(32 * warps // chunks, chunks, unroll, warps)
    for warps in (4, 8):
        yield Launch(1, 32 * warps, unroll, warps)


def time_major(unroll: int) -> Iterator[Launch]:
    """A warp's threads along the lanes, or some of them, and warps along the steps."""
    for lanes in (16, 32):
        for chunks in (1, 2, 4, 8, 16):
            warps = lanes * chunks // 32
            if 1 <= warps <= 8 and unroll * chunks > 4:
                yield Launch(lanes, chunks, unroll, warps)


def segment_numbers(steps: int, lanes: int, launch: Launch) -> list[int]:
    """None, and with few programs what keeps a GPU busy, and twice that."""
    tiles = -(-steps // launch.steps)
    warps = -(-lanes // launch.block_lanes) * launch.num_warps
    wanted = {1} if steps <= 8192 else set()
    wanted |= {min(tiles, 1024, x * WARPS // (2 * warps)) for x in (2, 4) if 4 * warps <= WARPS and tiles >= 8}
    return sorted({backend.launch.none_empty(tiles, number) for number in wanted if number})


def call_of(workload: Workload) -> Call:
    """The public function, which never replays a launch."""
    arm = ours.arm(workload, draw(workload, "cuda"))
    return partial(inspect.unwrap(arm.func), **arm.keywords)


@contextmanager
def launched(settings: Callable[[Problem], Candidate]) -> Iterator[None]:
    """Whatever is launched is launched so."""
    chosen = backend.settings
    backend.settings = settings
    try:
        yield
    finally:
        backend.settings = chosen


def compile_only(workload: Workload, candidate: Candidate) -> None:
    """Fill Triton's cache on disk."""
    with suppress(RuntimeError), launched(lambda _: candidate):
        call_of(workload)()


def times(workload: Workload) -> Iterator[files.Row]:
    """A line for every candidate, the best first."""
    call = call_of(workload)
    noted: list[Candidate] = []
    from_table = backend.settings

    def note(problem: Problem) -> Candidate:
        noted.append(from_table(problem))
        return noted[-1]

    with launched(note):
        want = [x.double() for x in tensors(call())]
    found = []
    for candidate in dict.fromkeys([noted[0], *candidates(workload)]):
        with launched(lambda _, candidate=candidate: candidate):
            try:
                error = max(relative_error(x.double(), y) for x, y in zip(tensors(call()), want, strict=True))
                found.append((device_time(call), candidate, error))
            except RuntimeError as trouble:
                print(workload, candidate, "failed:", str(trouble).splitlines()[0])
    found.sort(key=lambda line: line[0])
    print(
        workload, *(f"{us:.2f} us {tuple(launch)} x {segments}" for us, (launch, segments), _ in found[:3]), sep="\n  "
    )
    for us, (launch, segments), error in found:
        yield {
            **workload._asdict(),
            **launch._asdict(),
            "segments": segments,
            "in_table": (launch, segments) == noted[0],
            "microseconds": round(us, 3),
            "gb_per_s": round(bytes_moved(workload) / us / 1e3, 1),
            "agrees": bool(error <= AGREE),
        }


def device_time(call: Call) -> float:
    """Microseconds on the device, from a graph of several calls."""
    clock = CudaClock()
    replay: Any = clock.capture(call, CAPTURED)
    clock.time(replay)
    return statistics.median(clock.time(replay) for _ in range(REPLAYS)) / CAPTURED


if __name__ == "__main__":
    main()
