"""The targets, and whether result files reach them: writes benchmarks/results/targets.md.

    python benchmarks/targets.py

benchmarks/notes.json says why a target is missed, by its key.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files, suites
from benchmarks.measured import Machine, list_medians, read_gpus, select_workloads
from benchmarks.suites import SUITES, SWEEP, SWEEP_SHAPES, combine_workloads
from benchmarks.tables import make_table
from benchmarks.workloads import Workload

LIGHT = ("gae", "lambda_returns", "discounted_returns", "eligibility_traces", "prefix_sum")
LARGE_CELLS = 8_000_000


class Target(NamedTuple):
    """A limit for some numbers of a machine: for each of them, or for their geometric mean."""

    what: str
    find: Callable[[Any], pd.Series]
    """The numbers of a `Machine`, or of what it is called."""
    limit: float
    at_least: bool = True
    unit: str = "×"
    mean: bool = False

    def judge(self, machine: Machine | str) -> tuple[str, str]:
        """Reached, missed, incomplete or not measured yet; and the number."""
        values = self.find(machine)
        known = values.dropna()
        if not len(known):
            return "not measured yet", ""
        reached = known >= self.limit if self.at_least else known <= self.limit
        if self.mean:
            mean = float(np.exp(np.log(known).mean()))
            reached = pd.Series([mean >= self.limit])
            text = f"{mean:.2f}{self.unit} over {len(known)}"
        else:
            worst = known.argmin() if self.at_least else known.argmax()
            text = f"{known.iloc[worst]:.2f}{self.unit} at the worst ({known.index[worst]}); "
            text += f"{reached.sum()} of {len(known)}"
        missing = len(values) - len(known)
        text += f"; {missing} more not measured" * bool(missing)
        return "missed" if not reached.all() else "incomplete" if missing else "reached", text


# --- the numbers ------------------------------------------------------------------------------------------------------

Find = Callable[[Machine], pd.Series]
RETRACE_LONG = SUITES["retrace_long"].workloads
LARGE = [w for w in SUITES["large"].workloads if w.cells >= LARGE_CELLS]
LONG = combine_workloads(suites.LONG_SHAPES, suites.LONG_ESTIMATORS, suites.ENV_MAJOR)


def compare(suite: str, wanted: Iterable[Workload], other: str, ours: str = "ours", kind: str = "full") -> Find:
    """How many times faster ours is than another arm."""
    return lambda machine: select_workloads(list_medians(machine.find_ratios(suite, other, ours, kind)), wanted)


def find_roofline(suite: str, wanted: Iterable[Workload]) -> Find:
    """The percentage of the roofline."""
    return lambda machine: select_workloads(list_medians(machine.find_roofline(suite)), wanted)


def compare_retrace(machine: Machine) -> pd.Series:
    """Retrace against the compiled scan, in the sweep and on longer rows."""
    sweep = combine_workloads(SWEEP_SHAPES, ["retrace"], suites.ENV_MAJOR)
    chosen = {"sweep": sweep, "retrace_long": RETRACE_LONG}
    return pd.concat([compare(suite, wanted, "compiled_scan")(machine) for suite, wanted in chosen.items()])


def compare_lengths(machine: Machine) -> pd.Series:
    """Retrace's device time per byte on longer rows over that on the shortest."""
    per_byte = 100 / find_roofline("retrace_long", RETRACE_LONG)(machine)
    return per_byte.iloc[1:] / per_byte.iloc[0]


def compare_long_rows(machine: Machine) -> pd.Series:
    """Long rows against a program per row: the flat kernel where it holds them, else the one that goes in blocks."""
    arms = ["flat_triton" if w.num_steps <= suites.FLAT_LONGEST else "blocks_triton" for w in LONG]
    return pd.concat([compare("long", [w], arm, kind="device")(machine) for w, arm in zip(LONG, arms, strict=True)])


def find_overhead(machine: Machine) -> pd.Series:
    """The full call beyond that of torch.add on the same shape."""
    ours, add = (list_medians(machine.find_times("headline", name)) for name in ("ours", "torch_add"))
    return select_workloads(ours - add, combine_workloads([suites.HEADLINE], layouts=suites.ENV_MAJOR))


def compare_layouts(machine: Machine) -> pd.Series:
    """Time-major over env-major, on the device."""
    found = []
    for suite in ("sweep", "large"):
        wanted = [w for w in SUITES[suite].workloads if w.layout == "time-major" and not w.truncated]
        times = list_medians(machine.find_times(suite, kind="device"))
        found.append(select_workloads(times, wanted) / select_workloads(times, wanted, layout="env-major"))
    return pd.concat(found)


def compare_truncated(machine: Machine) -> pd.Series:
    """The device time with truncations, without the time of the extra bytes, over the plain time."""
    wanted = combine_workloads(SWEEP_SHAPES, truncated=[True])
    times, floors = list_medians(machine.find_times("sweep", kind="device")), machine.find_floors("sweep")
    extra = select_workloads(floors, wanted) - select_workloads(floors, wanted, truncated=False)
    return (select_workloads(times, wanted) - extra) / select_workloads(times, wanted, truncated=False)


def compare_flags(machine: Machine) -> pd.Series:
    """Device time with flags of other types over that with bool, by the ratio of the bytes."""
    per_byte = list_medians(machine.find_times("flags", kind="device")) / machine.find_floors("flags")
    wanted = [w for w in SUITES["flags"].workloads if w.flags != "bool"]
    return select_workloads(per_byte, wanted) / select_workloads(per_byte, wanted, flags="bool")


# --- the targets ------------------------------------------------------------------------------------------------------

TARGETS = {
    "flat_mean": Target(
        "full call, all estimators, 12 shapes, plain and truncated: geometric mean against the flat Triton kernel",
        compare("sweep", SWEEP, "flat_triton"), 1.5, mean=True,
    ),
    "flat_each": Target("the same, each", compare("sweep", SWEEP, "flat_triton"), 1.0),
    "flat_device": Target(
        "device, the same: geometric mean", compare("sweep", SWEEP, "flat_triton", kind="device"), 1.8, mean=True
    ),
    "flat_device_each": Target("device, each", compare("sweep", SWEEP, "flat_triton", kind="device"), 1.0),
    "flags": Target(
        "device, GAE with flags of other types over bool, by the ratio of the bytes", compare_flags, 1.1, at_least=False
    ),
    "retrace_compiled": Target("full call, Retrace at every T against the compiled scan", compare_retrace, 1.5),
    "retrace_floor": Target(
        "device, Retrace at 512 environments, roofline",
        find_roofline("retrace_long", RETRACE_LONG), 50.0, unit=" %",
    ),
    "retrace_length": Target(
        "device, Retrace per byte at 512 environments, longer rows over the shortest", compare_lengths, 1.0,
        at_least=False,
    ),
    "cuda_rows": Target(
        "full call with `out=`, advantages in 40 shapes against the CUDA kernel with a thread per row",
        compare("rows", SUITES["rows"].workloads, "cuda_rows", "ours_out"), 1.0,
    ),
    "host_overhead": Target(
        "full call at 4096x128 beyond that of `torch.add`", find_overhead, 2.0, at_least=False, unit=" µs"
    ),
    "roofline_light": Target(
        "device, N·T ≥ 8M, both layouts, roofline: GAE, returns, traces, prefix sums",
        find_roofline("large", [w for w in LARGE if w.estimator in LIGHT]), 85.0, unit=" %",
    ),
    "roofline_heavy": Target(
        "device, N·T ≥ 8M, both layouts, roofline: V-Trace, Retrace",
        find_roofline("large", [w for w in LARGE if w.estimator not in LIGHT]), 75.0, unit=" %",
    ),
    "time_major": Target("device, time-major over env-major at the same shape", compare_layouts, 1.15, at_least=False),
    "long_flat": Target(
        f"device, long rows against a Triton program per row: flat up to {suites.FLAT_LONGEST} steps, more in blocks",
        compare_long_rows, 12.0,
    ),
    "long_floor": Target(
        "device, 64x65536, roofline",
        find_roofline("long", [w for w in LONG if w.num_envs == 64]),
        100 / 3, unit=" %",
    ),
    "truncations": Target(
        "device, with truncations less the extra inputs' bytes over plain", compare_truncated, 1.25, at_least=False
    ),
}  # fmt: skip


def list_targets(
    targets: dict[str, Target], machine: Machine | str, notes: dict[str, str]
) -> tuple[list[list[str]], list[str]]:
    """A line for every target on a machine, and the reasons where one is missed."""
    lines, reasons = [], []
    for key, target in targets.items():
        status, found = target.judge(machine)
        bound = ("≥ " if target.at_least else "≤ ") + f"{target.limit:g}{target.unit}"
        lines.append([target.what, bound, f"**{status}**" if status == "missed" else status, found])
        if status == "missed":
            reasons.append(f"*{target.what}*: {notes.get(key, 'no evidence yet')}")
    return lines, reasons


def read_notes() -> dict[str, str]:
    """Why targets are missed, by their keys."""
    return files.read_result(files.ROOT / "benchmarks" / "notes.json")


def write_page(machine: Machine, notes: dict[str, str]) -> str:
    """Every target of a machine, and the reason where one is missed."""
    lines, reasons = list_targets(TARGETS, machine, notes)
    head = f"# Targets, {machine.name}\n\nWritten by `python benchmarks/targets.py`."
    return "\n\n".join([head, make_table(["", "target", "", "measured"], lines), *reasons]) + "\n"


def main() -> None:
    """Write the page of every GPU."""
    notes = read_notes()
    for machine in read_gpus():
        path = files.RESULTS / machine.name / "targets.md"
        path.write_text(write_page(machine, notes), encoding="utf-8")
        print("wrote", path)


if __name__ == "__main__":
    main()
