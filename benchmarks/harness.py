"""How calls are timed: arms take turns, and every time is a median with its quartiles. Microseconds.

*Full*: one call between two CUDA events, the GPU synchronised before the first and after the second; on a CPU by the
host's clock. Arms take turns, a burst of up to 50 calls after as many warm-ups each. *Device*: the time of a call
within a CUDA graph of many (`triton.testing.do_bench_cudagraph`).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

import torch

from benchmarks.results import Row, make_row

Call = Callable[[], Any]
FLOORS = ("null", "torch_add", "floor")
"""Arms that compute something less, with which nothing is compared."""
TURNS, BURST = 5, 50
SECONDS = 1.0
"""About how long an arm is timed: slow calls come in shorter bursts."""


def measure_arms(
    arms: dict[str, Call],
    device: str,
    seconds: float | None = None,
    reference: str = "ours",
    host_only: Collection[str] = (),
    **setting: Any,
) -> Iterator[Row]:
    """The lines of all arms: full calls, and on a GPU the device's own time."""
    yield from list_times(time_in_turns(arms, device, seconds), reference, **setting)
    for name in arms if device == "cuda" else ():
        if name not in host_only:
            yield measure_device(name, arms[name], **setting)


def list_times(
    times: dict[str, list[list[float]]], reference: str = "ours", metric: str = "full", unit: str = "µs", **setting: Any
) -> Iterator[Row]:
    """The lines of all arms' times, and of how many times as long as the reference they take, turn by turn."""
    for name, bursts in times.items():
        scale = {"µs": 1.0, "ms": 1e-3}[unit]
        yield make_row(name, metric, unit, [scale * x for x in itertools.chain(*bursts)], **setting)
    for name in times if reference in times else ():
        if name not in (reference, *FLOORS):
            pairs = zip(times[name], times[reference], strict=True)
            ratios = [statistics.median(x) / statistics.median(y) for x, y in pairs]
            yield make_row(name, f"over {reference}", "×", ratios, **setting)


def time_in_turns(
    arms: dict[str, Call],
    device: str,
    seconds: float | None = None,
    turns: int = TURNS,
    burst: int | None = None,
    warm_up: bool = True,
    prepare: Callable[[str], None] = lambda name: None,
) -> dict[str, list[list[float]]]:
    """The times of every call, by arm and turn. `prepare` is called with an arm's name before its turn, untimed.

    Without warm-ups, which a burst otherwise has as many of as calls, its first call finds the caches as another arm
    left them.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in arms}
    calls: dict[str, int] = {}
    for _, name in itertools.product(range(turns), arms):
        prepare(name)
        if name not in calls:
            calls[name] = burst or choose_burst(arms[name], device, (seconds or SECONDS) / (2 * turns))
        for _ in range(calls[name] * warm_up):
            arms[name]()
        times[name].append([time_call(arms[name], device) for _ in range(calls[name])])
    return times


def choose_burst(call: Call, device: str, seconds: float) -> int:
    """So many calls take so long, if they are no more than `BURST`."""
    first = min(time_call(call, device) for _ in range(2))
    return max(1, min(BURST, int(seconds * 1e6 / max(first, 1e-3))))


def time_call(call: Call, device: str) -> float:
    """One full call."""
    if device != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def time_host(call: Call, device: str) -> float:
    """One call by the host's clock, the device idle before it."""
    wait_for(device)
    return time_call(call, "cpu")


def wait_for(device: str) -> None:
    """Until the device is done."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def measure_device(name: str, call: Call, **setting: Any) -> Row:
    """The line of an arm's time on the device; without a number where it cannot be captured."""
    from triton.testing import do_bench_cudagraph

    try:
        times = do_bench_cudagraph(call, return_mode="all")
    except RuntimeError as error:
        torch.cuda.synchronize()
        return make_row(name, "device", "µs", [], f"not captured: {str(error).splitlines()[0]}", **setting)
    return make_row(name, "device", "µs", [1e3 * x for x in times], **setting)


@cache
def measure_bandwidth() -> float:
    """Bytes per microsecond, read and written, of a large elementwise copy on the GPU; measured once per process."""
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)
    row = measure_device("copy", lambda: torch.mul(source, 1.0, out=target))
    return 2 * source.nbytes / (row.median or float("nan"))
