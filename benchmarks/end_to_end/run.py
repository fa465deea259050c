"""Training loops end to end, arm against arm.

In every setting, all arms first compute the advantages of the same experience, which must agree with those of the first
arm. Then each trains an agent of its own, an iteration in turns.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.end_to_end.frameworks import Arm, Module, Setting, list_arms
from benchmarks.end_to_end.stopwatch import ADVANTAGES, TOTAL, Stopwatch, count_calls, watch_memory
from benchmarks.results import Row, describe_failure, make_row
from rl_triton_core.testing import relative_error

TOLERANCE = 1e-5
"""The largest ‖x − stock‖ / ‖stock‖ of an arm that counts."""
Times = list[dict[str, float]]
"""The parts of every iteration of an arm, in the order of the rounds."""


class Plan(NamedTuple):
    """How often things are repeated."""

    warmups: int = 2
    rounds: int = 40
    seconds: float = 20.0
    """After so many no round begins, unless some arm has not had every place in the order twice."""


QUICK = Plan(warmups=1, rounds=2)


@dataclass
class Entry:
    """An arm in a setting, and what came of it."""

    name: str
    note: str = ""
    """Why there are no times."""
    arm: Arm | None = None
    times: Times = field(default_factory=list)
    about: dict[str, int] = field(default_factory=dict)
    """On a GPU: the peak of the memory that it reserves until it is warm, and the calls of an iteration."""


def measure(module: Module, setting: Setting, options: Namespace) -> Iterator[Row]:
    """The lines of all arms of a framework's module."""
    plan = QUICK if options.quick else Plan(seconds=options.seconds or Plan().seconds)
    setting = setting._replace(device=options.device)
    return make_rows(measure_setting(module, setting, plan), setting)


# --- one setting ------------------------------------------------------------------------------------------------------


def measure_setting(module: Module, setting: Setting, plan: Plan) -> list[Entry]:
    """The arms with the times of their iterations."""
    watch = Stopwatch(setting.device)
    entries = prepare_arms(module, setting, watch, plan.warmups)
    running = [entry for entry in entries if entry.arm is not None]
    ends = time.perf_counter() + plan.seconds
    for round_ in range(plan.rounds if running else 0):
        if round_ >= 2 * len(running) and time.perf_counter() > ends:
            break
        for entry in order_arms(running, round_):
            entry.times.append(time_iteration(entry.arm, watch))
    for entry in running if setting.device == "cuda" else ():
        entry.about |= count_calls(partial(time_iteration, entry.arm, watch))
    return entries


def prepare_arms(module: Module, setting: Setting, watch: Stopwatch, warmups: int) -> list[Entry]:
    """The arms, each compared with the first one and warm."""
    entries, expected = [Entry(name) for name in list_arms(module, setting)], None
    for entry in entries:
        try:
            with watch_memory(setting.device, entry.about):
                arm = module.make_arm(entry.name, setting, watch)
                results = [torch.as_tensor(x).double() for x in arm.results()]
                for _ in range(warmups):
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
    """The times of an iteration by its parts."""
    assert arm is not None
    return watch.time(partial(arm.iteration, *arm.fresh()))


def order_arms(arms: Sequence[Entry], round_: int) -> list[Entry]:
    """The order in a round: rotated, and every second time backwards, so that each arm takes every place equally."""
    first = round_ // 2 % len(arms)
    order = [*arms[first:], *arms[:first]]
    return order[::-1] if round_ % 2 else order


# --- what follows from times ------------------------------------------------------------------------------------------


def make_rows(entries: Sequence[Entry], setting: Setting) -> Iterator[Row]:
    """For each arm its times, how many times faster it is than the first, paired by rounds, and what it asks for."""
    stock = entries[0].times
    for entry in entries:
        if entry.note:
            yield make_row(entry.name, "", "", [], entry.note)
        for part in entry.times[0] if entry.times else ():
            name = {TOTAL: "iteration"}.get(part, part)
            yield make_row(entry.name, name, "ms", [found.get(part, 0.0) / 1e3 for found in entry.times])
        if entry.times and entry.times is stock:
            share = list_shares(stock)
            yield make_row(entry.name, "share", "%", [100 * x for x in share])
            yield make_row(entry.name, "bound", "×", find_bound(statistics.median(share)))
        elif entry.times and stock:
            pairs = zip(stock, entry.times, strict=True)
            yield make_row(entry.name, "speed-up", "×", [a[TOTAL] / b[TOTAL] for a, b in pairs])
        steps = setting.epochs * setting.minibatches
        for name, number in entry.about.items():
            scale, unit = (2**20, "MiB") if name == "peak" else (steps, "per minibatch")
            yield make_row(entry.name, name, unit, number / scale)


def list_shares(times: Times, parts: Iterable[str] = (ADVANTAGES,)) -> list[float]:
    """What some parts take of each iteration."""
    chosen = list(parts)
    return [sum(found.get(part, 0.0) for part in chosen) / found[TOTAL] for found in times]


def find_bound(share: float) -> float:
    """Amdahl: how many times faster an iteration gets without what takes this share of it."""
    return 1 / (1 - share)
