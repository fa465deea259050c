"""The result files of benchmarks/run.py, as one table of a machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks import files
from benchmarks.quartiles import Quartiles, compare_turns, find_quartiles, take_median
from benchmarks.workloads import Workload, count_bytes


class Machine(NamedTuple):
    """What was measured on a machine: a line per suite, workload and provider."""

    name: str
    heads: dict[str, files.Row]
    table: pd.DataFrame

    @property
    def hardware(self) -> str:
        """The name of its GPU."""
        return str(next(iter(self.heads.values()))["system"]["gpu"])

    def find_suite(self, suite: str) -> pd.DataFrame:
        """The lines of a suite."""
        return self.table[self.table["suite"] == suite]

    def find_turns(self, suite: str, provider: str = "ours", kind: str = "full") -> dict[Workload, list[float]]:
        """Microseconds of an arm in each of its turns by workload, "full" or "device"."""
        lines = self.find_suite(suite)
        lines = lines[lines["provider"] == provider]
        return {w: turns for w, turns in zip(lines["workload"], lines[f"{kind}_medians"], strict=True) if turns}

    def find_times(self, suite: str, provider: str = "ours", kind: str = "full") -> Found:
        """Microseconds of an arm by workload."""
        return {w: find_quartiles(turns) for w, turns in self.find_turns(suite, provider, kind).items()}

    def find_ratios(self, suite: str, other: str, ours: str = "ours", kind: str = "full") -> Found:
        """How many times faster ours is than another arm, by workload."""
        slow, fast = (self.find_turns(suite, arm, kind) for arm in (other, ours))
        return {w: compare_turns(slow[w], turns) for w, turns in fast.items() if w in slow}

    def find_floors(self, suite: str) -> pd.Series:
        """Microseconds that the bytes take at the bandwidth of a copy in the same run, by workload."""
        lines = self.find_suite(suite)
        return lines[lines["provider"] == "ours"].set_index("workload")["floor"].astype(float)

    def find_roofline(self, suite: str) -> Found:
        """The percentage of that bandwidth which ours reaches on the device, by workload."""
        floors = self.find_floors(suite)
        turns = self.find_turns(suite, kind="device")
        return {w: find_quartiles(100 * floors[w] / x for x in times) for w, times in turns.items()}


Found = dict[Workload, Quartiles]
COLUMNS = ("suite", "workload", "provider", "status", "full_medians", "device_medians", "floor")


def read_machine(folder: Path) -> Machine:
    """The rows of all bench_*.json in a folder; later files win."""
    heads, lines = {}, {}
    for path in sorted(folder.glob("bench_*.json")):
        head = files.read_result(path)
        rows, suite, bandwidth = head.pop("rows"), head["suite"], 1e3 * take_median(head["copy_bandwidth_gb_per_s"])
        if suite in heads and rows:
            commits = (x["system"]["commit"] for x in (heads[suite], head))
            head["system"]["commit"] = files.join_commits(*commits)
        heads[suite] = head
        for row in rows:
            workload = Workload.of(row)
            more = {"suite": suite, "workload": workload, "floor": count_bytes(workload) / bandwidth}
            lines[suite, workload, row["provider"]] = {**row, **more}
    return Machine(folder.name, heads, pd.DataFrame(lines.values(), columns=COLUMNS))


def read_gpus(folder: Path = files.RESULTS) -> list[Machine]:
    """Every machine but the CPU's that has results."""
    found = {path.parent for path in folder.glob("*/bench_*.json")} - {folder / "cpu"}
    return [read_machine(path) for path in sorted(found)]


def list_medians(found: Found) -> pd.Series:
    """The medians of what was measured, by workload."""
    return pd.Series([take_median(x) for x in found.values()], pd.Index(list(found), tupleize_cols=False), dtype=float)


def select_workloads(values: pd.Series, wanted: Iterable[Workload], **fields: Any) -> pd.Series:
    """The values of some workloads, or of the same ones but for some fields; NaN where there are none."""
    index = pd.Index(list(wanted), tupleize_cols=False)
    others = pd.Index([workload._replace(**fields) for workload in index], tupleize_cols=False)
    return values.reindex(others).set_axis(index)
