"""What follows from times: shares, Amdahl's bound, speed-ups; and the order in which arms take turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.end_to_end.stopwatch import ADVANTAGES, REST, TOTAL

Times = list[dict[str, float]]
"""The parts of every iteration of an arm, in the order of the rounds."""


class Quartiles(NamedTuple):
    """The middle half of some numbers."""

    low: float
    median: float
    high: float


def order_arms(arms: Sequence[str], round_: int) -> list[str]:
    """The order in a round: rotated, and every second time backwards, so that each arm takes every place equally."""
    first = round_ // 2 % len(arms)
    order = [*arms[first:], *arms[:first]]
    return order[::-1] if round_ % 2 else order


def find_quartiles(numbers: Sequence[float]) -> Quartiles:
    """Linear between the numbers."""
    if len(numbers) == 1:
        return Quartiles(*numbers * 3)
    return Quartiles(*statistics.quantiles(numbers, n=4, method="inclusive"))


def list_parts(times: Times) -> tuple[str, ...]:
    """The parts that have a name of their own."""
    return tuple(name for name in times[0] if name not in (TOTAL, REST))


def find_part_quartiles(times: Times) -> dict[str, Quartiles]:
    """The times of every part."""
    return {name: find_quartiles([found.get(name, 0.0) for found in times]) for name in times[0]}


def find_share(times: Times, parts: Iterable[str] = (ADVANTAGES,)) -> float:
    """What some parts take of an iteration: the median over iterations."""
    return statistics.median(sum(found.get(part, 0.0) for part in parts) / found[TOTAL] for found in times)


def find_bound(taken: float) -> float:
    """Amdahl: how many times faster an iteration gets without what takes this share of it."""
    return 1 / (1 - taken)


def find_speed_up(slow: Times, fast: Times) -> Quartiles:
    """How many times faster an iteration is, of the pairs that each round made."""
    return find_quartiles([a[TOTAL] / b[TOTAL] for a, b in zip(slow, fast, strict=True)])
