"""What was measured several times: its lower quartile, its median and its upper quartile, linear between numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

Quartiles = list[float]
MISSING = "–"


def find_quartiles(numbers: Iterable[float], digits: int = 6) -> Quartiles:
    """The three of some numbers."""
    return [round(float(x), digits) for x in np.percentile(list(numbers), [25, 50, 75])]


def compare_turns(slow: Sequence[float], fast: Sequence[float], digits: int = 6) -> Quartiles:
    """How many times faster one is than another, by the times of their turns."""
    return find_quartiles((a / b for a, b in zip(slow, fast, strict=False)), digits)


def read_quartiles(found: Any) -> Any:
    """What a result file has: three numbers, with names or without, or a median alone."""
    return [found[name] for name in ("low", "median", "high")] if isinstance(found, dict) else found


def take_median(found: Any) -> float:
    """The median of what a result file has."""
    found = read_quartiles(found)
    return float(found[1] if isinstance(found, list) else found)


def format_quartiles(found: Any, write: Callable[[float], str], unit: str = "") -> str:
    """The median with the quartiles in brackets, as far as they are known."""
    found = read_quartiles(found)
    if not isinstance(found, list):
        return MISSING if found is None or np.isnan(found) else write(found) + unit
    low, median, high = map(write, found)
    return f"{median}{unit} [{low}, {high}]"
