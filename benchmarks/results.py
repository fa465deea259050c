"""Result files: a table for each benchmark and machine, with a line for each number that was measured.

`results/MACHINE/BENCHMARK.csv` begins with the machine and its software in lines that begin with #. A line then has a
setting, as "name=value; ..."; an arm, one of the ways that are compared; a metric and its unit; the quartiles of what
was measured, and of how many values; the commit; and a note, where there is no number the reason.
"""

import argparse
import csv
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rl_triton_core.system_info import find_commit, system_info

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DIRTY = "-dirty"
WRITTEN = ("benchmarks/results", "docs", "README.md")  # what measuring and `report.py` write


class Row(NamedTuple):
    setting: str
    arm: str
    metric: str
    unit: str
    low: float | None
    median: float | None
    high: float | None
    count: int
    commit: str
    note: str

    def read_setting(self) -> dict[str, str]:
        return read_setting(self.setting)


class Result(NamedTuple):
    system: dict[str, str]
    rows: list[Row]


def make_row(arm: str, metric: str, unit: str, values: float | Iterable[float], note: str = "", **setting: Any) -> Row:
    """A line with the quartiles of some values; the runner knows the setting, or its beginning, and the commit."""
    numbers = [values] if isinstance(values, int | float) else list(values)
    quartiles = statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else numbers * 3
    low, median, high = (float(f"{x:.5g}") for x in quartiles) if numbers else (None, None, None)
    return Row(format_setting(setting), arm, metric, unit, low, median, high, len(numbers), "", note)


def describe_failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"


def format_setting(setting: dict[str, Any]) -> str:
    return "; ".join(f"{name}={value}" for name, value in setting.items())


def read_setting(setting: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in setting.split("; ")) if setting else {}


def read_result(path: Path) -> Result:
    return parse_result(path.read_text(encoding="utf-8")) if path.exists() else Result({}, [])


@cache
def parse_result(text: str) -> Result:
    """The machine and the lines of a result file, which whoever reads it again shares."""
    lines = text.splitlines()
    about = [line for line in lines if line.startswith("# ")]
    table = csv.DictReader(lines[len(about) :])
    return Result(dict(line[2:].split(": ", 1) for line in about), [read_row(line) for line in table])


def read_row(line: dict[str, str]) -> Row:
    numbers: dict[str, Any] = {x: float(line[x]) if line[x] else None for x in ("low", "median", "high")}
    return Row(**{**line, **numbers, "count": int(line["count"])})


def write_result(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in result.system.items())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([Row._fields, *result.rows])


def add_rows(path: Path, system: dict[str, str], setting: dict[str, Any], rows: Iterable[Row]) -> list[Row]:
    """Write the lines of a setting into a file of this machine, in the place of those that it has of it."""
    known, about = read_result(path), format_setting(setting)
    for part in ("gpu", "cpu"):
        if known.system.get(part, system[part]).split(", ")[0] != system[part].split(", ")[0]:
            raise SystemExit(f"{path} was measured on {known.system[part]}, not on {system[part]}: name another folder")
    new = [
        row._replace(setting="; ".join(filter(None, (about, row.setting))), commit=row.commit or system["commit"])
        for row in rows
    ]
    is_own = [f"{row.setting}; ".startswith(f"{about}; ") for row in known.rows]
    place = is_own.index(True) if True in is_own else len(is_own)
    kept = [row for row, own in zip(known.rows, is_own, strict=True) if not own]
    write_result(path, Result(system, [*kept[:place], *new, *kept[place:]]))
    return new


def read_machines(benchmark: str, folder: Path = RESULTS) -> dict[str, Result]:
    """The result files of a benchmark by machine, those of GPUs first."""
    paths = sorted(folder.glob(f"*/{benchmark}.csv"), key=lambda path: (path.parent.name == "cpu", path))
    return {path.parent.name: read_result(path) for path in paths}


def select_rows(rows: Sequence[Row], arm: str = "", metric: str = "", **setting: Any) -> list[Row]:
    wanted = {name: str(value) for name, value in setting.items()}.items()
    chosen = [row for row in rows if arm in ("", row.arm) and metric in ("", row.metric)]
    return [row for row in chosen if wanted <= row.read_setting().items()]


class Parser(argparse.ArgumentParser):
    """The arguments of a script that measures. Nothing is measured for RESULTS that no commit holds."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("folder", type=Path)
        self.add_argument("--commit", help="what to record in place of the checkout's commit")

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments; exits where files differ from the commit that the results would name."""
        options = super().parse_args(*args, **kwargs)
        kept, commit = options.folder.resolve().is_relative_to(RESULTS), name_commit()
        if kept and options.commit is None and commit.endswith(DIRTY):
            self.error(f"--commit: got none, expected a name, since files differ from {commit.removesuffix(DIRTY)}")
        return options


def describe_system(commit: str | None) -> dict[str, str]:
    return system_info() | {"commit": commit or name_commit()}


def name_commit() -> str:
    """The checkout's commit, marked as dirty if other files differ from it than those that measuring writes."""
    found = find_commit()
    return found.removesuffix(DIRTY) if found.endswith(DIRTY) and not has_changes() else found


def has_changes() -> bool:
    """Whether a tracked file does that is neither a result nor a page."""
    command = ["git", "-C", str(ROOT), "diff", "--quiet", "HEAD", "--", ".", *(f":!{path}" for path in WRITTEN)]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0
