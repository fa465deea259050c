"""What commands print: tables and text on the terminal, or one JSON document."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 5.0
"""Of progress that is no bar."""


class Table(NamedTuple):
    """Rows of text under a title."""

    title: str
    columns: Sequence[str]
    """Heads of the columns; none if the rows are names and values."""
    rows: Sequence[Sequence[str]]


class Report(NamedTuple):
    """What a command found."""

    data: Any
    """What `--json` prints."""
    parts: Sequence[Table | str]
    """What is printed without it."""
    exit_code: int = 0


def print_report(report: Report, as_json: bool) -> None:
    """Print a report on standard output."""
    if as_json:
        print(json.dumps(report.data, indent=2))
        return
    print_part = print_with_rich if sys.stdout.isatty() and find_spec("rich") else print_plainly
    for part in report.parts:
        print_part(part)


def print_plainly(part: Table | str) -> None:
    """Print text as it is, and a table with its columns aligned."""
    if isinstance(part, str):
        print(part)
        return
    rows = [part.columns, *part.rows] if part.columns else part.rows
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if part.title:
        print(f"\n{part.title}")
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def print_with_rich(part: Table | str) -> None:
    """Print with colours, lines and wrapped cells."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    if isinstance(part, str):
        Console().print(Text(part))
        return
    table = RichTable(title=part.title or None, title_justify="left", box=box.SIMPLE, show_header=bool(part.columns))
    for column in part.columns or part.rows[0]:
        table.add_column(column)
    for row in part.rows:
        table.add_row(*(Text(cell, STYLES.get(cell, "")) for cell in row))
    Console().print(table)


STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
"""Colours of cells."""


def track_progress(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Pass items on, and show on standard error how many: a bar on a terminal with rich, else a line now and then."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield from print_progress(items, description, total)
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description, total, console=Console(stderr=True), transient=True)


def print_progress(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Pass items on, and print how many are done: at first, and then every few seconds."""
    latest = print_number(0, description, total)
    for number, item in enumerate(items, 1):
        yield item
        if time.monotonic() > latest + SECONDS_BETWEEN_LINES:
            latest = print_number(number, description, total)


def print_number(number: int, description: str, total: int) -> float:
    """Print how many are done, and return when that was."""
    with suppress(OSError):  # it is no reason to stop
        print(f"{description}: {number} of {total}", file=sys.stderr, flush=True)
    return time.monotonic()
