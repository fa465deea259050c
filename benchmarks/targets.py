"""The targets, and whether result files reach them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from benchmarks import files
from benchmarks.measured import Results
from benchmarks.providers.limits import FLAT_LONGEST
from benchmarks.suites import (
    ENV_MAJOR,
    HEADLINE,
    LARGE_SHAPES,
    LONG_ESTIMATORS,
    LONG_SHAPES,
    RETRACE_SHAPES,
    SUITES,
    SWEEP_SHAPES,
    workloads,
)
from benchmarks.workloads import Workload, bytes_moved

LIGHT = ("gae", "lambda_returns", "discounted_returns", "eligibility_traces", "prefix_sum")
HEAVY = ("vtrace", "retrace")
LARGE_CELLS = 8_000_000


class Point(NamedTuple):
    """A number that a target judges, if it was measured."""

    value: float | None
    where: str


class Verdict(NamedTuple):
    """What came of a target."""

    status: str
    number: str


NOT_YET = Verdict("not measured yet", "")


PointsOf = Callable[[Results, files.Row | None], Iterable[Point]]
"""The numbers in the results of a GPU, and in those of the pass of Stable-Baselines3 on a CPU."""


class Target(NamedTuple):
    """A limit for some points: each of them, or their geometric mean."""

    what: str
    points: PointsOf
    limit: float
    at_least: bool = True
    unit: str = "×"
    mean: bool = False

    def judge(self, results: Results, sb3: files.Row | None) -> Verdict:
        """Reached, missed, incomplete, or not measured yet; and the number."""
        points = list(self.points(results, sb3))
        known = [(point.value, point.where) for point in points if point.value is not None]
        if not known:
            return NOT_YET
        good = [self.holds(value) for value, _ in known]
        if self.mean:
            mean = statistics.geometric_mean(value for value, _ in known)
            good, text = [self.holds(mean)], f"{self.written(mean)} over {len(known)}"
        else:
            worst = (min if self.at_least else max)(known)
            text = f"{self.written(worst[0])} at the worst ({worst[1]}); {sum(good)} of {len(known)}"
        missing = len(points) - len(known)
        if missing:
            text += f"; {missing} more not measured"
        return Verdict("missed" if not all(good) else "incomplete" if missing else "reached", text)

    def holds(self, value: float) -> bool:
        """Whether a number is within the limit; NaN is not."""
        return value >= self.limit if self.at_least else value <= self.limit

    def written(self, value: float) -> str:
        """A number with its unit."""
        return f"{value:.2f}{self.unit}" if abs(value) < 100 else f"{value:.0f}{self.unit}"


def quotient(a: float | None, b: float | None) -> float | None:
    """a / b, if there are both."""
    return None if a is None or b is None else a / b


# --- the points -------------------------------------------------------------------------------------------------------


def against(suite: str, chosen: Iterable[Workload], other: str, ours: str = "ours", kind: str = "full") -> PointsOf:
    """How many times faster ours is than another arm."""

    def points(results: Results, sb3: files.Row | None) -> Iterator[Point]:
        return (Point(results.ratio(suite, workload, other, ours, kind), str(workload)) for workload in kept)

    kept = tuple(chosen)
    return points


def retrace_points(results: Results, sb3: files.Row | None) -> Iterator[Point]:
    """Retrace against the compiled scan."""
    yield from against("sweep", workloads(SWEEP_SHAPES, ["retrace"], ENV_MAJOR), "compiled_scan")(results, sb3)
    yield from against("retrace_long", SUITES["retrace_long"].workloads, "compiled_scan")(results, sb3)


def length_points(results: Results, sb3: files.Row | None) -> Iterator[Point]:
    """Retrace's device time per byte on longer rows over that on the shortest."""
    shortest, *longer = workloads(RETRACE_SHAPES, ["retrace"], ENV_MAJOR)
    for workload in longer:
        ratios = (results.over_floor("retrace_long", w) for w in (workload, shortest))
        yield Point(quotient(*ratios), str(workload))


def long_points(results: Results, sb3: files.Row | None) -> Iterator[Point]:
    """Long rows against a program per row: the flat kernel's where it holds them, else that of blocks."""
    for workload in workloads(LONG_SHAPES, LONG_ESTIMATORS, ENV_MAJOR):
        other = "flat_triton" if workload.num_steps <= FLAT_LONGEST else "blocks_triton"
        yield from against("long", [workload], other, kind="device")(results, sb3)


def over_floor(suite: str, chosen: Iterable[Workload], inverse: bool = False) -> PointsOf:
    """Device time over the floor of the bytes, or the percentage of the roofline."""

    def points(results: Results, sb3: files.Row | None) -> Iterator[Point]:
        for workload in kept:
            ratio = results.over_floor(suite, workload)
            yield Point(ratio if ratio is None or not inverse else 100 / ratio, str(workload))

    kept = tuple(chosen)
    return points


def overhead_points(results: Results, sb3: files.Row | None) -> Iterator[Point]:
    """The full call beyond that of torch.add on the same shape."""
    for workload in workloads([HEADLINE], layouts=ENV_MAJOR):
        ours, add = (results.time("headline", workload, name, "full") for name in ("ours", "torch_add"))
        yield Point(None if ours is None or add is None else ours - add, workload.estimator)


def layout_points(results: Results, sb3: files.Row | None) -> Iterator[Point]:
    """Time-major over env-major, on the device."""
    for suite, shapes in (("sweep", SWEEP_SHAPES), ("large", LARGE_SHAPES)):
        for workload in workloads(shapes, layouts=["time-major"]):
            times = [
                results.time(suite, w, "ours", "device") for w in (workload, workload._replace(layout="env-major"))
            ]
            yield Point(quotient(*times), str(workload))


def truncation_points(results: Results, sb3: files.Row | None) -> Iterator[Point]:
    """What is left of the device time with truncations after the bytes of the extra inputs, over the plain time."""
    for workload in workloads(SWEEP_SHAPES, truncated=[True]):
        plain = workload._replace(truncated=False)
        time, plain_time = (results.time("sweep", w, "ours", "device") for w in (workload, plain))
        bandwidth = results.bandwidths.get(("sweep", workload, "ours"), math.nan)
        extra = (bytes_moved(workload) - bytes_moved(plain)) / bandwidth
        yield Point(quotient(None if time is None else time - extra, plain_time), str(workload))


def sb3_points(shape: tuple[int, int]) -> PointsOf:
    """The stock pass over ours, on one core."""

    def points(results: Results, sb3: files.Row | None) -> Iterator[Point]:
        found = by_threads(sb3, shape)
        yield Point(found[1]["speedup"] if 1 in found else None, str(shape))

    return points


def thread_points(shape: tuple[int, int]) -> PointsOf:
    """Our pass on one core over that on several."""

    def points(results: Results, sb3: files.Row | None) -> Iterator[Point]:
        times = {threads: row["microseconds"]["adapter"] for threads, row in by_threads(sb3, shape).items()}
        most = max(times, default=1)
        yield Point(quotient(times.get(1), times[most] if most > 1 else None), f"{most} threads")

    return points


def by_threads(sb3: files.Row | None, shape: tuple[int, int]) -> dict[int, files.Row]:
    """What was measured of a pass, by the number of threads."""
    rows = [] if sb3 is None else sb3["rows"]
    return {row["threads"]: row for row in rows if (row["n_steps"], row["n_envs"]) == shape}


# --- the targets ------------------------------------------------------------------------------------------------------

SWEEP = workloads(SWEEP_SHAPES, layouts=ENV_MAJOR, truncated=(False, True))
LARGE = [w for w in SUITES["large"].workloads if w.cells >= LARGE_CELLS]
TARGETS = {
    "flat_mean": Target(
        "full call, all estimators, 12 shapes, plain and truncated: geometric mean against the flat Triton kernel",
        against("sweep", SWEEP, "flat_triton"), 1.5, mean=True,
    ),
    "flat_each": Target("the same, each", against("sweep", SWEEP, "flat_triton"), 1.0),
    "retrace_compiled": Target("full call, Retrace at every T against the compiled scan", retrace_points, 1.5),
    "retrace_floor": Target(
        "device, Retrace at 512 environments over its bytes' floor",
        over_floor("retrace_long", SUITES["retrace_long"].workloads), 2.0, at_least=False,
    ),
    "retrace_length": Target(
        "device, Retrace per byte at 512 environments, longer rows over the shortest",
        length_points, 1.0, at_least=False,
    ),
    "cuda_rows": Target(
        "full call with `out=`, GAE in 40 shapes against the CUDA kernel with a thread per row",
        against("rows", SUITES["rows"].workloads, "cuda_rows", "ours_out"), 1.0,
    ),
    "host_overhead": Target(
        "full call at 4096x128 beyond that of `torch.add`", overhead_points, 2.0, at_least=False, unit=" µs"
    ),
    "roofline_light": Target(
        "device, N·T ≥ 8M, both layouts, roofline: GAE, returns, traces, prefix sums",
        over_floor("large", [w for w in LARGE if w.estimator in LIGHT], inverse=True), 85.0, unit=" %",
    ),
    "roofline_heavy": Target(
        "device, N·T ≥ 8M, both layouts, roofline: V-Trace, Retrace",
        over_floor("large", [w for w in LARGE if w.estimator in HEAVY], inverse=True), 75.0, unit=" %",
    ),
    "time_major": Target("device, time-major over env-major at the same shape", layout_points, 1.15, at_least=False),
    "long_flat": Target(
        f"device, long rows against a Triton program per row: flat up to {FLAT_LONGEST} steps, more in blocks",
        long_points, 12.0,
    ),
    "long_floor": Target(
        "device, 64x65536 over its bytes' floor",
        over_floor("long", workloads(LONG_SHAPES[:1], LONG_ESTIMATORS, ENV_MAJOR)), 3.0, at_least=False,
    ),
    "cpu_short": Target(
        "CPU, (n_steps, n_envs) = (2048, 1) against the pass of Stable-Baselines3", sb3_points((2048, 1)), 50.0
    ),
    "cpu_wide": Target("CPU, (128, 4096) on one core, likewise", sb3_points((128, 4096)), 1.5),
    "cpu_threads": Target("CPU, (128, 4096), more threads against one", thread_points((128, 4096)), 1.0),
    "truncations": Target(
        "device, with truncations less the extra inputs' bytes over plain", truncation_points, 1.25, at_least=False
    ),
}  # fmt: skip
