"""Judge the table of launches by what a search has timed: its launch for every rollout, the best, and their ratio."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.files import Row
from benchmarks.measured import read_workload
from benchmarks.pages import make_table
from benchmarks.workloads import Workload, count_bytes_per_step
from rl_triton_core._internal.kernels import launch
from rl_triton_core._internal.kernels.launch import TABLE, Launch

LIMIT = 1.1
"""The most that the table's launch may take, by the time of the best."""


class Verdict(NamedTuple):
    """A rollout, and lines of the search: the table's launch, None where it was not timed, and the best."""

    workload: Workload
    masked: bool
    ours: Row | None
    best: Row

    @property
    def ratio(self) -> float:
        """The table's time by the best."""
        return self.ours["microseconds"] / self.best["microseconds"] if self.ours else float("inf")


def judge_rows(rows: Iterable[Row]) -> list[Verdict]:
    """A verdict for every rollout, by the launches whose results agree."""
    groups: dict[tuple[Workload, bool], list[Row]] = {}
    for row in rows:
        if row["agrees"]:
            groups.setdefault(find_rollout(row), []).append(row)
    return [make_verdict(*rollout, found) for rollout, found in groups.items()]


def find_rollout(row: Row) -> tuple[Workload, bool]:
    """What was computed, and whether with a mask. One environment has its steps side by side in both layouts."""
    workload = read_workload(row)
    layout = "env-major" if workload.num_envs == 1 else workload.layout
    return workload._replace(layout=layout), row.get("masked", False)


def make_verdict(workload: Workload, masked: bool, rows: list[Row]) -> Verdict:
    """The table's launch among those that were timed."""
    ours, segments = look_up(workload, masked)
    timed = [row for row in rows if read_launch(row) == ours and row["segments"] == segments]
    return Verdict(workload, masked, timed[0] if timed else None, min(rows, key=lambda row: row["microseconds"]))


def look_up(workload: Workload, masked: bool) -> tuple[Launch, int]:
    """The table's launch, and its number of segments."""
    held = count_bytes_per_step(workload._replace(dtype="float32")) + masked
    row = launch.find_launch(workload.num_steps, workload.num_envs, held, workload.layout, table=TABLE)
    return row, launch.count_segments(workload.num_steps, -(-workload.num_envs // row.block_lanes), row)


def read_launch(row: Row) -> Launch:
    """The launch of a line."""
    return Launch(*(row[name] for name in Launch._fields))


def write_verdicts(verdicts: Iterable[Verdict]) -> str:
    """A line for every rollout: the table's launch (lanes, chunks, unroll, warps) and the best."""
    lines = []
    for verdict in verdicts:
        (ours, segments), best = look_up(verdict.workload, verdict.masked), verdict.best
        time = verdict.ours["microseconds"] if verdict.ours else float("nan")
        mine = [", ".join(map(str, ours)), f"{segments}", f"{time:.2f}"]
        other = [", ".join(map(str, read_launch(best))), f"{best['segments']}", f"{best['microseconds']:.2f}"]
        lines.append([f"{verdict.workload}{' masked' * verdict.masked}", *mine, *other, f"{verdict.ratio:.2f}"])
    return make_table(["", "table's launch", "segments", "us", "best", "segments", "us", "ratio"], lines)
