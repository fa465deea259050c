"""Training loops end to end, arm against arm.

In every setting, all arms first compute the advantages of the same experience, which must agree with those of the first
arm. Then each trains an agent of its own, an iteration in turns.
"""

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch

from benchmarks import harness
from benchmarks.end_to_end import ARMS, Setting
from benchmarks.end_to_end.stopwatch import ADVANTAGES, TOTAL, Stopwatch, count_calls
from benchmarks.results import Row, describe_failure, make_row

WARM_UPS = 2


@dataclass
class Entry:
    """An arm in a setting, and what came of it."""

    name: str
    note: str = ""  # why there are no times
    results: list[torch.Tensor] = field(default_factory=list)
    time: Callable[[], dict[str, float]] = dict  # of the parts of an iteration
    times: list[dict[str, float]] = field(default_factory=list)
    """The parts of every iteration, in the order of the rounds."""
    about: dict[str, float] = field(default_factory=dict)
    """On a GPU: the peak of the memory that it reserves until it is warm, and the calls of an iteration."""

    def prepare(self, module: Any, setting: Setting, watch: Stopwatch) -> None:
        arm = module.make_arm(self.name, setting, watch)
        self.results = [torch.as_tensor(x).double() for x in arm.results()]
        self.time = lambda: watch.time(partial(arm.iteration, *arm.fresh()))
        for _ in range(WARM_UPS):
            self.time()


def measure(module: Any, setting: Setting, options: Namespace) -> Iterator[Row]:
    setting.device = options.device  # which results say, too
    return make_rows(measure_setting(module, setting, options.rounds, options.seconds), setting)


def measure_setting(module: Any, setting: Setting, rounds: int, seconds: float) -> list[Entry]:
    """After so many seconds no round begins, unless some arm has not had every place in the order twice."""
    watch, on_gpu = Stopwatch(setting.device), setting.device == "cuda"
    names = module.list_arms(setting) if hasattr(module, "list_arms") else ARMS
    entries = [Entry(name) for name in names]
    for entry in entries:
        prepare = partial(entry.prepare, module, setting, watch)
        try:
            if on_gpu:
                entry.about["peak"] = harness.measure_memory(prepare, "reserved")
            else:
                prepare()
            expected = next(x.results for x in entries if x.results)
            entry.note = harness.describe_error(harness.find_error(entry.results, expected))
        except Exception as error:
            entry.note = describe_failure(error)
    running = {entry.name: entry for entry in entries if not entry.note}
    turns = harness.take_turns(running, seconds, least=min(2 * len(running), rounds), most=rounds)
    for name in chain.from_iterable(turns):
        running[name].times.append(running[name].time())
    for entry in running.values() if on_gpu else ():
        entry.about |= count_calls(entry.time)
    return entries


def make_rows(entries: Sequence[Entry], setting: Setting) -> Iterator[Row]:
    """For each arm its times, how many times faster it is than the first, paired by rounds, and what it asks for.

    Of the first, the share of the advantage step, and Amdahl's bound: how many times faster an iteration gets without.
    """
    stock = entries[0].times
    for entry in entries:
        if entry.note:
            yield make_row(entry.name, "", "", [], entry.note)
        for part in entry.times[0] if entry.times else ():
            name = {TOTAL: "iteration"}.get(part, part)
            yield make_row(entry.name, name, "ms", [found.get(part, 0.0) / 1e3 for found in entry.times])
        if entry.times and entry.times is stock:
            shares = [found.get(ADVANTAGES, 0.0) / found[TOTAL] for found in stock]
            yield make_row(entry.name, "share", "%", [100 * x for x in shares])
            yield make_row(entry.name, "bound", "×", 1 / (1 - statistics.median(shares)))
        elif entry.times and stock:
            pairs = zip(stock, entry.times, strict=True)
            yield make_row(entry.name, "speed-up", "×", [a[TOTAL] / b[TOTAL] for a, b in pairs])
        steps = setting.epochs * setting.minibatches
        for name, number in entry.about.items():
            scale, unit = (1, "MiB") if name == "peak" else (steps, "per minibatch")
            yield make_row(entry.name, name, unit, number / scale)
