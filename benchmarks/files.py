"""Result files: a head that says what was measured on what, and tables with a line per row."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments of every script that measures: a folder for the results, and the commit."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folder", type=Path)
    found.add_argument("--commit", help="what to record where there is no git checkout")
    return found


def system(commit: str | None) -> dict[str, str]:
    """Hardware, versions and commit."""
    from rl_triton_core.system_info import system_info

    info = system_info()
    info["commit"] = commit or info["commit"]
    return info


def write(path: Path, head: Row, **tables: Iterable[Row]) -> None:
    """A result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(head, tables), encoding="utf-8")


def as_json(head: Row, tables: dict[str, Iterable[Row]]) -> str:
    """JSON with a line per row, so that two results compare."""
    lines = [json.dumps(head, indent=2)[:-2]]
    for name, rows in tables.items():
        lines.append(f'  "{name}": [\n    ' + ",\n    ".join(map(json.dumps, rows)) + "\n  ]")
    return ",\n".join(lines) + "\n}\n"


def write_csv(path: Path, rows: list[Row]) -> None:
    """The rows as a table, lists with spaces between their numbers."""
    with path.open("w", newline="", encoding="utf-8") as file:
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()})


def read(path: Path) -> Row:
    """A result file."""
    result: Row = json.loads(path.read_text(encoding="utf-8"))
    return result
