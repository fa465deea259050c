"""Training loops end to end, arm against arm.

In every setting, all arms first compute the advantages of the same experience, which must agree with those of the first
arm. Then each trains an agent of its own, an iteration in turns.
"""

import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.end_to_end import ARMS, Arm, Setting
from benchmarks.end_to_end.stopwatch import ADVANTAGES, TOTAL, Stopwatch, count_calls, watch_memory
from benchmarks.harness import take_turns
from benchmarks.results import Row, describe_failure, make_row
from rl_triton_core.testing import relative_error

TOLERANCE = 1e-5  # the largest ‖x − stock‖ / ‖stock‖ of an arm that counts
WARM_UPS = 2


@dataclass
class Entry:
    """An arm in a setting, and what came of it."""

    name: str
    note: str = ""  # why there are no times
    arm: Arm | None = None
    times: list[dict[str, float]] = field(default_factory=list)
    """The parts of every iteration, in the order of the rounds."""
    about: dict[str, int] = field(default_factory=dict)
    """On a GPU: the peak of the memory that it reserves until it is warm, and the calls of an iteration."""


def measure(module: Any, setting: Setting, options: Namespace) -> Iterator[Row]:
    return make_rows(measure_setting(module, setting, options.rounds, options.seconds), setting)


def measure_setting(module: Any, setting: Setting, rounds: int, seconds: float) -> list[Entry]:
    """After so many seconds no round begins, unless some arm has not had every place in the order twice."""
    watch = Stopwatch(setting.device)
    entries = prepare_arms(module, setting, watch)
    running = {entry.name: entry for entry in entries if entry.arm is not None}
    for order in take_turns(running, seconds, least=min(2 * len(running), rounds), most=rounds):
        for name in order:
            running[name].times.append(time_iteration(running[name].arm, watch))
    for entry in running.values() if setting.device == "cuda" else ():
        entry.about |= count_calls(partial(time_iteration, entry.arm, watch))
    return entries


def prepare_arms(module: Any, setting: Setting, watch: Stopwatch) -> list[Entry]:
    """The arms, each compared with the first one and warm."""
    names = module.list_arms(setting) if hasattr(module, "list_arms") else ARMS
    entries, expected = [Entry(name) for name in names], None
    for entry in entries:
        try:
            with watch_memory(setting.device, entry.about):
                arm = module.make_arm(entry.name, setting, watch)
                results = [torch.as_tensor(x).double() for x in arm.results()]
                for _ in range(WARM_UPS):
                    time_iteration(arm, watch)
        except Exception as error:
            entry.note = describe_failure(error)
            continue
        expected = expected or results
        error = float(max(relative_error(x, y) for x, y in zip(results, expected, strict=True)))
        if error <= TOLERANCE:
            entry.arm = arm
        else:
            entry.note = f"wrong: its relative error is {error:.3g}"
    return entries


def time_iteration(arm: Arm | None, watch: Stopwatch) -> dict[str, float]:
    assert arm is not None
    return watch.time(partial(arm.iteration, *arm.fresh()))


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
            scale, unit = (2**20, "MiB") if name == "peak" else (steps, "per minibatch")
            yield make_row(entry.name, name, unit, number / scale)
