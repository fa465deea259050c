"""What pages are made of: tables in Markdown, numbers as text, and the machine that a result file names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from benchmarks.files import Row, name_processor

NOT_YET = "*not measured yet*"


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text, and the others numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def join_parts(parts: Iterable[str]) -> str:
    """Paragraphs, without the empty ones."""
    return "\n\n".join(filter(None, parts))


def describe_machine(result: Row) -> str:
    """What a result was measured on: its GPU, if it has one and its backend runs there."""
    system = result["system"]
    names = ("python", "torch", "triton", "numba", "numpy", "cuda", "rocm")
    packages = (f"{name} {system[name]}" for name in names if system[name] != "none")
    on_gpu = system["gpu"] != "none" and result.get("backend", "triton") == "triton"
    commits = ", ".join(f"`{name[:7]}{'-dirty' * name.endswith('-dirty')}`" for name in system["commit"].split(", "))
    hardware, number = name_processor(system, "cuda" if on_gpu else "cpu"), len(system["gpu"].split(", "))
    several = f"{number} x " * (on_gpu and number > 1)
    return f"{several}{hardware}; {', '.join(packages)}; commit {commits}."


def format_time(time: float | None) -> str:
    """Microseconds with the digits worth reading."""
    return "–" if is_missing(time) else f"{time:.1f}" if time < 100 else f"{time:.0f}"


def format_times(*times: float | None) -> str:
    """Several of them, or that there are none."""
    return "–" if all(map(is_missing, times)) else " / ".join(map(format_time, times))


def format_ratio(ratio: float | None) -> str:
    """How many times faster."""
    return "–" if is_missing(ratio) else f"{ratio:.2f}×" if ratio < 20 else f"{ratio:.0f}×"


def format_percent(share: float | None) -> str:
    """A percentage."""
    return "–" if is_missing(share) else f"{share:.0f} %"


def is_missing(number: float | None) -> bool:
    """Whether it was not measured."""
    return number is None or math.isnan(number)
