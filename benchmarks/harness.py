"""The measurement protocol: how a call is timed, in full and on the device alone.

*Full call*: the call between two CUDA events, the GPU synchronised before the first and after the second; 20 warm-up
calls, then the median of 50 calls. *Device*: the call captured 20 times in a CUDA graph, the time of a replay / 20.
Arms take five turns, one median each. Times are microseconds. `time_in_turns` is for arms that wait for each other: it
has every call's time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from benchmarks.quartiles import Quartiles, compare_turns, find_quartiles
from rl_triton_core._internal.capture.graphs import CudaGraphs

Call = Callable[[], Any]


class Plan(NamedTuple):
    """How often things are repeated."""

    warmups: int = 20
    calls: int = 50
    medians: int = 5
    captured: int = 20
    replays: int = 10
    seconds: float = 1.0
    """The longest that one median may take: slower calls are repeated less, and their times say how often."""

    def calls_of(self, microseconds: float) -> tuple[int, int]:
        """Warm-ups and calls for one median of a call that takes this long."""
        share = min(1.0, self.seconds * 1e6 / (max(microseconds, 1e-3) * (self.warmups + self.calls)))
        return max(1, int(self.warmups * share)), max(3, int(self.calls * share))

    def captured_of(self, microseconds: float) -> int:
        """How often a call that takes this long is captured."""
        most = int(self.seconds * 1e6 / (max(microseconds, 1e-3) * (self.replays + 1)))
        return max(1, min(self.captured, most))

    def replays_of(self, microseconds: float) -> int:
        """How often a replay that takes this long is repeated for one median."""
        return max(1, min(self.replays, int(self.seconds * 1e6 / max(microseconds, 1e-3))))


QUICK = Plan(warmups=2, calls=5, medians=2, captured=4, replays=2, seconds=0.2)


PLANS = {"cuda": Plan(seconds=0.5), "cpu": Plan(seconds=0.3)}


class Clock:
    """The host's clock."""

    def time(self, call: Call) -> float:
        """Microseconds of one full call."""
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def capture(self, call: Call, times: int) -> Call | None:
        """A call that replays this one several times without the host; on a CPU the full call is all there is."""
        return None


class CudaClock(Clock):
    """CUDA events and graphs."""

    def __init__(self) -> None:
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time(self, call: Call) -> float:
        """Microseconds of one full call."""
        torch.cuda.synchronize()
        self.start.record()
        call()
        self.end.record()
        torch.cuda.synchronize()
        return float(self.start.elapsed_time(self.end)) * 1e3

    def capture(self, call: Call, times: int) -> Call | None:
        """A graph of the calls."""

        def repeat() -> None:
            for _ in range(times):
                call()

        torch.cuda.synchronize()
        return CudaGraphs(torch.device("cuda")).capture(repeat, ())[1]


def make_clock(device: str) -> Clock:
    """The clock of a device."""
    return CudaClock() if device == "cuda" else Clock()


@dataclass
class Times:
    """The medians of one arm, how often each was repeated, and why there are none of the device."""

    full: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    calls: int = 0
    captured: int = 0
    note: str = ""


def measure_calls(
    arms: dict[str, Call], clock: Clock, plan: Plan, host_only: frozenset[str] = frozenset()
) -> dict[str, Times]:
    """Full-call and device times of arms that take turns."""
    times = {name: Times() for name in arms}
    for _ in range(plan.medians):
        for name, call in arms.items():
            median, calls = time_median(call, clock, plan)
            times[name].full.append(median)
            times[name].calls = min(times[name].calls or calls, calls)
    graphs = dict(capture_arms(arms, clock, plan, times, host_only))
    for _ in range(plan.medians):
        for name, replay in graphs.items():
            replays = [clock.time(replay) for _ in range(plan.replays_of(clock.time(replay)))]
            times[name].device.append(statistics.median(replays) / times[name].captured)
    return times


def time_median(call: Call, clock: Clock, plan: Plan) -> tuple[float, int]:
    """The median of warm calls, and how many they were."""
    warmups, calls = plan.calls_of(min(clock.time(call) for _ in range(2)))
    for _ in range(warmups):
        call()
    return statistics.median(clock.time(call) for _ in range(calls)), calls


def capture_arms(
    arms: dict[str, Call], clock: Clock, plan: Plan, times: dict[str, Times], host_only: frozenset[str]
) -> Iterator[tuple[str, Call]]:
    """The arms that can be captured, as replays."""
    for name, call in arms.items():
        if name in host_only:
            continue
        number = plan.captured_of(min(times[name].full))
        try:
            replay = clock.capture(call, number)
        except RuntimeError as error:
            times[name].note = f"not capturable: {str(error).splitlines()[0]}"
            continue
        if replay is not None:
            times[name].captured = number
            yield name, replay


def time_in_turns(
    arms: dict[str, Call],
    clock: Clock,
    turns: int,
    burst: int = 1,
    seconds: float = 0.0,
    prepare: Callable[[str], None] | None = None,
) -> dict[str, list[list[float]]]:
    """Microseconds of every call, by arm and turn. A turn is a burst of calls; turns go on until the time is over.

    `prepare` is called with an arm's name before its burst, untimed.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in arms}
    end = time.perf_counter() + seconds
    while any(len(x) < turns for x in times.values()) or time.perf_counter() < end:
        for name, call in arms.items():
            if prepare is not None:
                prepare(name)
            times[name].append([clock.time(call) for _ in range(burst)])
    return times


def summarize_calls(times: dict[str, list[list[float]]], unit: float = 1.0) -> dict[str, Quartiles]:
    """The quartiles of all calls, by arm, in so many microseconds."""
    return {name: find_quartiles(x / unit for burst in bursts for x in burst) for name, bursts in times.items()}


def compare_with_stock(times: dict[str, list[list[float]]]) -> Quartiles:
    """How many times faster the adapter is, over turns."""
    return compare_turns(*([statistics.median(burst) for burst in times[name]] for name in ("stock", "adapter")))


def measure_copy_bandwidth(device: str, clock: Clock, plan: Plan) -> Quartiles:
    """Gigabytes per second, read and written, of a large elementwise copy: on the device, or in full on a CPU."""
    source = torch.ones(1 << (28 if device == "cuda" else 24), device=device)
    target = torch.empty_like(source)
    times = measure_calls({"copy": lambda: torch.mul(source, 1.0, out=target)}, clock, plan)["copy"]
    return find_quartiles((2e-3 * source.nbytes / x for x in times.device or times.full), 1)
