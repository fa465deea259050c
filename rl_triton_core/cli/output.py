"""What commands print: tables and text on the terminal, or one JSON document."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 5.0  # of progress


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
    """Print a report on standard output: text as it is, and tables with their columns aligned."""
    if as_json:
        print(json.dumps(report.data, indent=2))
        return
    for part in report.parts:
        if isinstance(part, str):
            print(part)
            continue
        rows = [part.columns, *part.rows] if part.columns else part.rows
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        if part.title:
            print(f"\n{part.title}")
        for row in rows:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def track_progress(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Pass items on, and say on standard error how many are done: at first, and then every few seconds."""
    latest = -math.inf
    for number, item in enumerate(items):
        now = time.monotonic()
        if now > latest + SECONDS_BETWEEN_LINES:
            latest = now
            with suppress(OSError):  # it is no reason to stop
                print(f"{description}: {number} of {total}", file=sys.stderr, flush=True)
        yield item
