"""What pages are made of: tables in Markdown, numbers as text, and the machine that a result file names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.files import Row, name_processor
from benchmarks.quartiles import MISSING, format_quartiles

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


def format_time(time: Any) -> str:
    """Microseconds with the digits worth reading."""
    return format_quartiles(time, lambda x: f"{x:.1f}" if x < 100 else f"{x:.0f}")


def format_times(*times: Any) -> str:
    """Several of them, or that there are none."""
    cells = [format_time(time) for time in times]
    return MISSING if {*cells} == {MISSING} else " / ".join(cells)


def format_ratio(ratio: Any) -> str:
    """How many times faster."""
    return format_quartiles(ratio, lambda x: f"{x:.2f}" if x < 20 else f"{x:.0f}", "×")


def format_percent(share: Any) -> str:
    """A percentage."""
    return format_quartiles(share, lambda x: f"{x:.0f}", " %")


def format_bandwidth(bandwidth: Any) -> str:
    """Gigabytes per second."""
    return format_quartiles(bandwidth, lambda x: f"{x:.0f}", " GB/s")
