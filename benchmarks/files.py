"""Result files: a head that says what was measured on what, and tables with a line per row."""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DIRTY = "-dirty"
WRITTEN = ("benchmarks/results", "docs", "README.md")
"""What the scripts that measure and `pages.py` write."""


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """The arguments of every script that measures: a folder for the results, and the commit."""
    found = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folder", type=Path)
    found.add_argument("--commit", help="what to record in place of the checkout's commit")
    return found


class Parser(argparse.ArgumentParser):
    """Nothing is measured for RESULTS that no commit holds."""

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments; exits where files differ from the commit that the results would name."""
        options = super().parse_args(*args, **kwargs)
        kept = options.folder.resolve().is_relative_to(RESULTS)
        if kept and options.commit is None and find_commit().endswith(DIRTY):
            self.error(
                f"--commit: got none, expected a name, since files differ from {find_commit().removesuffix(DIRTY)}"
            )
        return options


def describe_system(named: str | None) -> dict[str, str]:
    """Hardware, versions and commit."""
    from rl_triton_core.system_info import system_info

    return system_info() | {"commit": named or find_commit()}


def find_commit() -> str:
    """The checkout's commit, marked as dirty if other files differ from it than those that measuring writes."""
    from rl_triton_core.system_info import find_commit as describe_commit

    found = describe_commit()
    return found.removesuffix(DIRTY) if found.endswith(DIRTY) and not has_changes() else found


def has_changes() -> bool:
    """Whether a tracked file does that is neither a result nor a page."""
    command = ["git", "-C", str(ROOT), "diff", "--quiet", "HEAD", "--", ".", *(f":!{path}" for path in WRITTEN)]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


def write_result(path: Path, head: Row, **tables: Iterable[Row]) -> None:
    """A result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_json(head, tables), encoding="utf-8")


def save_rows(options: argparse.Namespace, name: str, rows: Iterable[Row], **about: Any) -> None:
    """Write the result file of a script that has these arguments, and print its rows."""
    rows = list(rows)
    write_result(options.folder / name, {"system": describe_system(options.commit), **about}, rows=rows)
    print(*rows, sep="\n")


def continue_result(path: Path, head: Row, is_kept: Callable[[Row], bool], *tables: str) -> Row:
    """A result that is already there with the rows that a run with this head keeps; empty if there are none.

    Its commits are added to the head. Exits if it comes from other hardware.
    """
    found, system = read_result(path) if path.exists() else {}, head["system"]
    found |= {name: list(filter(is_kept, found.get(name, []))) for name in tables}
    if not any(found[name] for name in tables):
        return {}
    before, now = (name_processor(x, head["device"]) for x in (found["system"], system))
    if before != now:
        raise SystemExit(f"{path} was measured on {before}, not on {now}: name another folder")
    system |= {"gpu": found["system"]["gpu"], "commit": join_commits(found["system"]["commit"], system["commit"])}
    return found


def name_processor(system: Row, device: str) -> str:
    """The GPU of a machine, any of those that are there, or its CPU."""
    return str(system["cpu"] if device == "cpu" else system["gpu"].split(", ")[0])


def join_commits(*names: str) -> str:
    """The commits of several results, each once."""
    return ", ".join(dict.fromkeys(", ".join(names).split(", ")))


def format_json(head: Row, tables: dict[str, Iterable[Row]]) -> str:
    """JSON with a line per row, so that two results compare."""
    lines = [json.dumps(head, indent=2)[:-2]]
    for name, rows in tables.items():
        lines.append(f'  "{name}": [\n    ' + ",\n    ".join(map(json.dumps, rows)) + "\n  ]")
    return ",\n".join(lines) + "\n}\n"


def write_csv(path: Path, about: dict[str, str], rows: list[Row]) -> None:
    """What was measured on what in lines that begin with #, and the rows as a table, lists with spaces inside."""
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in about.items())
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()})


def read_result(path: Path) -> Row:
    """A result file."""
    result: Row = json.loads(path.read_text(encoding="utf-8"))
    return result


def read_results(pattern: str, folder: Path = RESULTS) -> list[Row]:
    """The result files of all machines that are called so, the CPU's first."""
    return [read_result(path) for path in sorted(folder.glob(pattern))]
