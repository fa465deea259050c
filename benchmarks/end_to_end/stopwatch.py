"""The time of an iteration by its parts: CUDA events on a GPU, the host's clock on a CPU. Microseconds.

On a GPU also what the host asks of the device.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.harness import wait_for

TOTAL, ADVANTAGES, REST = "total", "advantages", "rest"


class Stopwatch:
    """Marks moments; what lies between two of them belongs to one part. A part inside another interrupts it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.marks: list[tuple[Any, str]] = []

    def time(self, iteration: Callable[[], Any]) -> dict[str, float]:
        """Times of the parts, which add up to the total. Waits for the device before and after, and not within."""
        wait_for(self.device)
        self.marks = []
        self.mark(REST)
        iteration()
        self.mark(REST)
        wait_for(self.device)
        times = {TOTAL: self.between(self.marks[0][0], self.marks[-1][0])}
        for (start, part), (end, _) in pairwise(self.marks):
            times[part] = times.get(part, 0.0) + self.between(start, end)
        return times

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        outer = self.marks[-1][1] if self.marks else REST
        self.mark(name)
        try:
            yield
        finally:
            self.mark(outer)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed

    def mark(self, part: str) -> None:
        self.marks.append((self.now(), part))

    def now(self) -> Any:
        """A moment: on a GPU, when it gets there."""
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1e3 if self.device == "cuda" else float(end - start) * 1e6


def count_calls(iteration: Callable[[], Any]) -> dict[str, int]:
    """How many kernels and graphs an iteration launches, and how often it copies to the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        iteration()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    launches = sum("LaunchKernel" in name or "GraphLaunch" in name for name in names)
    return {"launches": launches, "reads": sum("Memcpy DtoH" in name for name in names)}
