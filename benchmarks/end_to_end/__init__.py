"""Training loops, end to end: what the advantage step takes of an iteration, and what replacing it gives.

A framework is a file of its name here, with settings in the table; docs/end-to-end.md says what is timed, and what the
arms are. The file holds `make_arm`, which makes an arm in a setting as it is before training. Where not all arms differ
in all settings, `list_arms` chooses.

In every setting, all arms first compute the advantages of the same experience, which must agree with those of the first
arm. Then each trains an agent of its own, an iteration in turns.
"""

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import harness, settings
from benchmarks.end_to_end.stopwatch import ADVANTAGES, TOTAL, Stopwatch, count_calls
from benchmarks.results import Row, describe_failure, make_row

LAMBDA, WARM_UPS = 0.95, 2
ARMS = ("stock", "ours", "captured")
"""The framework's own, ours for the advantage step, and ours for all that is replaced."""


class Setting(settings.Setting):
    """A training loop, as cleanrl has them in the table, and its device when it is measured."""

    def __str__(self) -> str:
        """Environments x steps, units of both layers, epochs x minibatches."""
        text = f"{self.num_envs}x{self.num_steps}, hidden {self.hidden}, {self.epochs} epochs x {self.minibatches}"
        return f"{self.env} {text}".strip() + ", recomputed" * self.recompute

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps // self.minibatches


class Arm(NamedTuple):
    """A training loop with its way to compute advantages, the part "advantages" of the stopwatch."""

    iteration: Callable[..., Any]
    results: Callable[[], Sequence[Tensor]]
    """Advantages, and returns if there are any, of experience that is the same for all arms."""
    fresh: Callable[[], Sequence[Any]] = tuple  # what an iteration takes and uses up; made before its time begins


@dataclass
class Entry:
    """An arm in a setting, and what came of it."""

    name: str
    note: str = ""  # why there are no times
    results: list[Tensor] = field(default_factory=list)
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
    return make_rows(time_arms(module, setting, options), setting)


def time_arms(module: Any, setting: Setting, options: Namespace) -> list[Entry]:
    """After so many seconds no round begins, unless some arm has not had every place in the order twice."""
    setting.device = options.device  # which results say, too
    watch, on_gpu = Stopwatch(options.device), options.device == "cuda"
    entries = [Entry(name) for name in getattr(module, "list_arms", lambda _: ARMS)(setting)]
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
    least = min(2 * len(running), options.rounds)
    for name in harness.take_turns(running, options.seconds, least, options.rounds):
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
