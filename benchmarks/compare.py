"""Compare two result files of the same suite, and name what became slower.

    python benchmarks/compare.py OLD.json NEW.json [--threshold 1.1] [--provider ours ours_out]

Prints new / old for every time that both files have, and the times that only the old file has. Exits with 1 if a time
grew beyond the threshold or is missing. Absolute times of different machines do not compare.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files
from benchmarks.workloads import Workload


def read_times(path: Path, providers: list[str]) -> pd.Series:
    """Microseconds by arm and kind: medians over turns."""
    rows = [row for row in files.read_result(path)["rows"] if row["provider"] in providers]
    return pd.Series(
        {
            (f"{row['provider']} on {Workload.of(row)}", kind): statistics.median(row[f"{kind}_medians"])
            for row in rows
            for kind in ("full", "device")
            if row[f"{kind}_medians"]
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the ratios, the slowest last; 1 if there are regressions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=1.1, help="the largest new / old that is no regression")
    parser.add_argument("--provider", nargs="+", default=["ours", "ours_out"], help="the arms to compare")
    options = parser.parse_args(arguments)
    old, new = (read_times(path, options.provider) for path in (options.old, options.new))
    table = pd.DataFrame({"old": old, "new": new.reindex(old.index)})
    table["ratio"] = table["new"] / table["old"]
    regressions = table[~(table["ratio"] <= options.threshold)]
    print(table.sort_values("ratio").to_string())
    print(f"{len(table)} times compared, {len(regressions)} regressions beyond {options.threshold:g}")
    return int(len(regressions) > 0)


if __name__ == "__main__":
    sys.exit(main())
