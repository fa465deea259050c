"""Compare two result files of a benchmark, and name what became slower.

    python -m benchmarks.compare OLD.csv NEW.csv [--threshold 1.1] [--arms ours ours_out]

Prints new / old of every median time that both files have, and the times that only the old file has. Exits with 1 if a
time grew beyond the threshold or is missing. Absolute times of different machines do not compare.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import read_result

TIMES = ("µs", "ms", "s")


def read_times(path: Path, arms: Sequence[str]) -> dict[str, float]:
    """Medians by setting, arm and metric."""
    rows = [row for row in read_result(path).rows if row.arm in arms and row.unit in TIMES]
    return {f"{row.setting}: {row.arm}, {row.metric}": row.median for row in rows if row.median is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the ratios, the slowest last; 1 if there are regressions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=1.1, help="the largest new / old that is no regression")
    parser.add_argument("--arms", nargs="+", default=["ours", "ours_out"], help="those to compare")
    options = parser.parse_args(arguments)
    old, new = (read_times(path, options.arms) for path in (options.old, options.new))
    ratios = {name: new.get(name, float("inf")) / time for name, time in old.items()}
    for name, ratio in sorted(ratios.items(), key=lambda item: item[1]):
        print(f"{ratio:6.3f}  {name}")
    slower = sum(not ratio <= options.threshold for ratio in ratios.values())
    print(f"{len(ratios)} times compared, {slower} regressions beyond {options.threshold:g}")
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
