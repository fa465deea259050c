"""The result files of a machine, as one table to ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks import files
from benchmarks.workloads import Workload, bytes_moved

Key = tuple[str, Workload, str]


class Results:
    """The rows of all bench_*.json in a folder by suite, workload and provider; later files win."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.heads: dict[str, files.Row] = {}
        self.rows: dict[Key, files.Row] = {}
        self.bandwidths: dict[Key, float] = {}
        for path in sorted(folder.glob("bench_*.json")):
            self.add(files.read(path))

    def add(self, result: files.Row) -> None:
        """One file."""
        self.heads[result["suite"]] = {name: value for name, value in result.items() if name != "rows"}
        for row in result["rows"]:
            key = (result["suite"], workload_of(row), row["provider"])
            self.rows[key] = row
            self.bandwidths[key] = result["copy_bandwidth_gb_per_s"] * 1e3

    def suite(self, suite: str) -> Iterator[tuple[Workload, str, files.Row]]:
        """The rows of a suite."""
        return ((workload, name, row) for (found, workload, name), row in self.rows.items() if found == suite)

    def time(self, suite: str, workload: Workload, provider: str, kind: str) -> float | None:
        """Microseconds, "full" or "device", if there are any."""
        found: float | None = self.rows.get((suite, workload, provider), {}).get(kind)
        return found

    def ratio(self, suite: str, workload: Workload, other: str, ours: str = "ours", kind: str = "full") -> float | None:
        """How many times faster ours is."""
        times = self.time(suite, workload, other, kind), self.time(suite, workload, ours, kind)
        return None if times[0] is None or times[1] is None else times[0] / times[1]

    def floor(self, suite: str, workload: Workload, provider: str = "ours") -> float | None:
        """Microseconds that the bytes take at the bandwidth of a copy in the same run."""
        bandwidth = self.bandwidths.get((suite, workload, provider))
        return None if bandwidth is None else bytes_moved(workload) / bandwidth

    def over_floor(self, suite: str, workload: Workload, provider: str = "ours") -> float | None:
        """The device time over its floor."""
        time, floor = self.time(suite, workload, provider, "device"), self.floor(suite, workload, provider)
        return None if time is None or floor is None else time / floor


def gpus(folder: Path) -> list[Results]:
    """The results of every machine but the CPU's that has some."""
    found = {path.parent for path in folder.glob("*/bench_*.json")} - {folder / "cpu"}
    return [Results(path) for path in sorted(found)]


def workload_of(row: files.Row) -> Workload:
    """What a row is about."""
    return Workload(*(row[name] for name in Workload._fields))
