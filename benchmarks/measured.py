"""The result files of benchmarks/run.py, as one table of a machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks import files
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

    def find_times(self, suite: str, provider: str = "ours", kind: str = "full") -> pd.Series:
        """Microseconds of an arm by workload, "full" or "device"."""
        lines = self.find_suite(suite)
        return lines[lines["provider"] == provider].set_index("workload")[kind].astype(float).dropna()

    def find_ratios(self, suite: str, other: str, ours: str = "ours", kind: str = "full") -> pd.Series:
        """How many times faster ours is than another arm, by workload."""
        return (self.find_times(suite, other, kind) / self.find_times(suite, ours, kind)).dropna()

    def find_floors(self, suite: str) -> pd.Series:
        """Microseconds that the bytes take at the bandwidth of a copy in the same run, by workload."""
        return self.find_times(suite, "ours", "floor")

    def find_roofline(self, suite: str) -> pd.Series:
        """The percentage of that bandwidth which ours reaches on the device, by workload."""
        return (100 * self.find_floors(suite) / self.find_times(suite, kind="device")).dropna()


COLUMNS = ("suite", "workload", "provider", "status", "full", "device", "floor")


def read_machine(folder: Path) -> Machine:
    """The rows of all bench_*.json in a folder; later files win."""
    heads, lines = {}, {}
    for path in sorted(folder.glob("bench_*.json")):
        head = files.read_result(path)
        rows, suite, bandwidth = head.pop("rows"), head["suite"], head["copy_bandwidth_gb_per_s"] * 1e3
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


def select_workloads(values: pd.Series, wanted: Iterable[Workload], **fields: Any) -> pd.Series:
    """The values of some workloads, or of the same ones but for some fields; NaN where there are none."""
    index = pd.Index(list(wanted), tupleize_cols=False)
    others = pd.Index([workload._replace(**fields) for workload in index], tupleize_cols=False)
    return values.reindex(others).set_axis(index)
