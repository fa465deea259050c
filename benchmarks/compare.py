"""Compare two result files of the same suite, and name what became slower.

    python benchmarks/compare.py OLD.json NEW.json [--threshold 1.1] [--provider ours ours_out]

Prints new / old for every arm that both files timed, in full and on the device, and names the arms that only the old
file has. Exits with 1 if a time grew beyond the threshold, or an arm that had times has none any more. Absolute times
of different machines do not compare.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files
from benchmarks.measured import workload_of

KINDS = ("full", "device")


class Change(NamedTuple):
    """One time of one arm in both files; None where it has none any more."""

    arm: str
    kind: str
    old: float
    new: float | None

    @property
    def ratio(self) -> float:
        """New over old; infinite where there is no new time."""
        return float("inf") if self.new is None else self.new / self.old

    def __str__(self) -> str:
        new = "no time" if self.new is None else f"{self.new:.2f}"
        return f"{self.ratio:7.3f}  {self.old:10.2f} -> {new:>10}  {self.kind:6}  {self.arm}"


def arms(result: files.Row, providers: list[str]) -> dict[str, files.Row]:
    """The rows of these providers (of all if none are named) by what they time."""
    chosen = (row for row in result["rows"] if not providers or row["provider"] in providers)
    return {f"{row['provider']} on {workload_of(row)}": row for row in chosen}


def changes(before: dict[str, files.Row], after: dict[str, files.Row]) -> list[Change]:
    """Every time of the arms that are in both."""
    return [
        Change(arm, kind, row[kind], after[arm][kind])
        for arm, row in before.items()
        if arm in after
        for kind in KINDS
        if row[kind] is not None
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the ratios, then the regressions; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=1.1, help="the largest new / old that is no regression")
    parser.add_argument("--provider", nargs="+", default=["ours", "ours_out"], help="the arms to compare")
    options = parser.parse_args(arguments)
    before, after = (arms(files.read(path), options.provider) for path in (options.old, options.new))
    found = changes(before, after)
    for change in found:
        print(change)
    for arm in [arm for arm in before if arm not in after]:
        print("not in the new file:", arm)
    regressions = [change for change in found if change.ratio > options.threshold]
    print(f"{len(found)} times compared, {len(regressions)} regressions beyond {options.threshold:g}")
    for change in regressions:
        print("regression:", change)
    return bool(regressions)


if __name__ == "__main__":
    sys.exit(main())
