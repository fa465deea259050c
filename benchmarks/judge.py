"""Judge the table of launches by what a search has timed: its launch for every window, the best, and their ratio.

    python benchmarks/judge.py FILE ...

The files are those that benchmarks/tune.py writes. `make report` writes docs/launches.md from those in
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files
from benchmarks.files import RESULTS, Row
from benchmarks.markdown import generated, grouped, machine, table
from benchmarks.workloads import Workload
from rl_triton_core._internal.kernels import launch
from rl_triton_core._internal.kernels.launch import TABLE, Launch

LIMIT = 1.1
"""The most that the table's launch may take, by the time of the best."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    print(verdicts_table(judged(row for path in parser.parse_args().files for row in files.read(path)["rows"])))


class Verdict(NamedTuple):
    """A window, and lines of the search: the table's launch, None where it was not timed, and the best."""

    workload: Workload
    masked: bool
    ours: Row | None
    best: Row

    @property
    def ratio(self) -> float:
        """The table's time by the best."""
        return self.ours["microseconds"] / self.best["microseconds"] if self.ours else float("inf")


def judged(rows: Iterable[Row]) -> list[Verdict]:
    """A verdict for every window, by the launches whose results agree."""
    windows = grouped([{**row, "window": window(row)} for row in rows if row["agrees"]], "window")
    return [verdict(*key, found) for (key,), found in windows.items()]


def window(row: Row) -> tuple[Workload, bool]:
    """What was computed, and whether with a mask. One environment has its steps side by side in both layouts."""
    workload = Workload(*(row[name] for name in Workload._fields))
    layout = "env-major" if workload.num_envs == 1 else workload.layout
    return workload._replace(layout=layout), row.get("masked", False)


def verdict(workload: Workload, masked: bool, rows: list[Row]) -> Verdict:
    """The table's launch among those that were timed."""
    ours, number = from_table(workload, masked)
    timed = [row for row in rows if launch_of(row) == ours and row["segments"] == number]
    return Verdict(workload, masked, timed[0] if timed else None, min(rows, key=lambda row: row["microseconds"]))


def from_table(workload: Workload, masked: bool) -> tuple[Launch, int]:
    """The table's launch, and its number of segments."""
    streams = workload.numbers_per_step + masked
    row = launch.settings(workload.num_steps, workload.num_envs, streams, workload.layout, table=TABLE)
    return row, launch.segments(workload.num_steps, -(-workload.num_envs // row.block_lanes), row)


def launch_of(row: Row) -> Launch:
    """The launch of a line."""
    return Launch(*(row[name] for name in Launch._fields))


def undecided(verdicts: Iterable[Verdict]) -> Iterator[tuple[str, Launch]]:
    """The rows of the table that no window has, in each layout."""
    decided = {(x.workload.layout, from_table(x.workload, x.masked)[0]) for x in verdicts}
    for layout, rows in TABLE.items():
        yield from ((layout, row) for _, row in rows if (layout, row) not in decided)


def verdicts_table(verdicts: Iterable[Verdict]) -> str:
    """A line for every window."""
    head = ["", "table: lanes, chunks, unroll, warps", "segments", "us", "best", "segments", "us", "ratio"]
    return table(head, (line(verdict) for verdict in verdicts))


def line(verdict: Verdict) -> list[str]:
    """A window, the table's launch and the best."""
    ours = verdict.ours or {"microseconds": float("nan")}
    row, number = from_table(verdict.workload, verdict.masked)
    mine = [among(row), f"{number}", f"{ours['microseconds']:.2f}"]
    best = [among(launch_of(verdict.best)), f"{verdict.best['segments']}", f"{verdict.best['microseconds']:.2f}"]
    return [f"{verdict.workload}{' masked' * verdict.masked}", *mine, *best, f"{verdict.ratio:.2f}"]


def among(row: Launch) -> str:
    """The settings of a launch, in the order of their names."""
    return ", ".join(map(str, row))


def page() -> str:
    """docs/launches.md."""
    results = [files.read(path) for path in sorted(RESULTS.glob("*/tune_*.json"))]
    rows = [row for result in results for row in result["rows"]]
    verdicts = judged(rows)
    wrong = sum(not row["agrees"] for row in rows)
    worst = max(verdict.ratio for verdict in verdicts)
    machines = "\n".join(f"* {machine(result['system'])}" for result in results)
    rest = "\n".join(f"* {layout}: {among(row)}" for layout, row in dict.fromkeys(undecided(verdicts)))
    return f"""\
# Launches

{generated("make tune")}

The table of launches in `_internal/kernels/launch.py`, against the quickest launch that `benchmarks/tune.py` found
for a window. A launch is a number of lanes, of chunks, of steps in a chunk and of warps, and over how many segments
time is split. Times are of the device. Of {len(rows)} launches, {wrong} were left out for other results. Largest ratio:
{worst:.2f}; a test holds it below {LIMIT:g}.

{machines}

{verdicts_table(verdicts)}

Launches of the table that none of these windows has; they are for sizes or numbers of inputs in between:

{rest}
"""


if __name__ == "__main__":
    main()
