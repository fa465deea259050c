"""The result files of benchmarks/run.py, as one table of a machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from benchmarks import files
from benchmarks.workloads import Workload, count_bytes


class Machine(NamedTuple):
    """What was measured on a machine: a line per suite, workload and provider."""

    name: str
    heads: dict[str, files.Row]
    table: pd.DataFrame

    def find_suite(self, suite: str) -> pd.DataFrame:
        """The lines of a suite."""
        return self.table[self.table["suite"] == suite] if len(self.table) else self.table

    def find_times(self, suite: str, provider: str = "ours", kind: str = "full") -> pd.Series:
        """Microseconds of an arm by workload, "full" or "device"."""
        lines = self.find_suite(suite)
        return lines[lines["provider"] == provider].set_index("workload")[kind].dropna() if len(lines) else EMPTY

    def find_ratios(self, suite: str, other: str, ours: str = "ours", kind: str = "full") -> pd.Series:
        """How many times faster ours is than another arm, by workload."""
        return (self.find_times(suite, other, kind) / self.find_times(suite, ours, kind)).dropna()

    def find_floors(self, suite: str) -> pd.Series:
        """Microseconds that the bytes take at the bandwidth of a copy in the same run, by workload."""
        return self.find_times(suite, "ours", "floor")

    def find_roofline(self, suite: str) -> pd.Series:
        """The percentage of that bandwidth which ours reaches on the device, by workload."""
        return (100 * self.find_floors(suite) / self.find_times(suite, kind="device")).dropna()


EMPTY = pd.Series(dtype=float)


def read_machine(folder: Path) -> Machine:
    """The rows of all bench_*.json in a folder; later files win."""
    heads, lines = {}, {}
    for path in sorted(folder.glob("bench_*.json")):
        result = files.read_result(path)
        suite, bandwidth = result["suite"], result["copy_bandwidth_gb_per_s"] * 1e3
        head = {name: value for name, value in result.items() if name != "rows"}
        if suite in heads and result["rows"]:
            commits = [heads[suite]["system"]["commit"], head["system"]["commit"]]
            head["system"]["commit"] = ", ".join(dict.fromkeys(", ".join(commits).split(", ")))
        heads[suite] = head
        for row in result["rows"]:
            workload = read_workload(row)
            more = {"suite": suite, "workload": workload, "floor": count_bytes(workload) / bandwidth}
            lines[suite, workload, row["provider"]] = {**row, **more}
    return Machine(folder.name, heads, pd.DataFrame(lines.values()))


def read_gpus(folder: Path) -> list[Machine]:
    """Every machine but the CPU's that has results."""
    found = {path.parent for path in folder.glob("*/bench_*.json")} - {folder / "cpu"}
    return [read_machine(path) for path in sorted(found)]


def read_workload(row: files.Row) -> Workload:
    """What a row is about."""
    return Workload(*(row[name] for name in Workload._fields if name in row))


def select_workloads(values: pd.Series, wanted: Iterable[Workload]) -> pd.Series:
    """The values of some workloads; NaN where there are none."""
    found = dict(values.items())
    chosen = list(wanted)
    return pd.Series(
        [found.get(workload, float("nan")) for workload in chosen], index=pd.Index(chosen, tupleize_cols=False)
    )
