"""Pieces of generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

NOT_YET = "*not measured yet*"


def generated(command: str) -> str:
    """Says that a page is generated, and by what."""
    return f"""\
This page is generated from `benchmarks/results/` by `make report` (`python benchmarks/report.py`); change the script,
not the page. `{command}` measures anew."""


def machine(system: Row, on_gpu: bool = True) -> str:
    """What a result was measured on: its GPU if it has one, and that took part."""
    names = ("python", "torch", "triton", "numba", "numpy", "cuda", "rocm")
    packages = (f"{name} {system[name]}" for name in names if system[name] != "none")
    hardware = system["gpu"] if on_gpu and system["gpu"] != "none" else system["cpu"]
    commit, dash, dirty = system["commit"].partition("-")
    return f"{hardware}; {', '.join(packages)}; commit `{commit[:12]}{dash}{dirty}`."


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of some fields, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def among(rows: Iterable[Row], name: str) -> str:
    """The values of a field, in order of appearance."""
    values = dict.fromkeys(str(row[name]) for row in rows if row.get(name) is not None)
    return ", ".join(values)


def number(x: float) -> str:
    """Two significant digits."""
    return f"{x:.1e}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text, and the others numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))
