"""Time every estimator's first call on this CPU, with and without what an earlier process compiled.

    python benchmarks/first_call.py FOLDER [--commit HASH]

Each call is the first of a process of its own. What it compiles goes to a directory that is empty for one process, and
holds what that one left for the next. The backend and its compiler are imported before, and timed too.
Writes first_call.json: seconds, quartiles over a few such pairs of processes.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files
from benchmarks.harness import Clock
from benchmarks.providers import ours
from benchmarks.quartiles import find_quartiles
from benchmarks.workloads import ESTIMATORS, Workload, draw_inputs

SHAPE = (128, 64)
"""Environments and steps: so few that running takes no time worth mentioning."""
PAIRS = 3

Times = tuple[float, ...]
"""Seconds of the phases of a process."""


def main(arguments: list[str] | None = None) -> None:
    """Measure every estimator."""
    options = files.make_parser(__doc__).parse_args(arguments)
    rows = [measure_estimator(estimator) for estimator in ESTIMATORS]
    files.save_rows(options, "first_call.json", rows, shape=SHAPE, pairs=PAIRS)


def measure_estimator(estimator: str) -> files.Row:
    """Quartiles over some pairs of processes."""
    empty, filled = zip(*(time_pair(estimator) for _ in range(PAIRS)), strict=True)
    phases = {"import": (empty + filled, 0), "compiled": (empty, 1), "loaded": (filled, 1), "second": (filled, 2)}
    found = {name: find_quartiles((x[phase] for x in times), 6) for name, (times, phase) in phases.items()}
    return {"estimator": estimator, **found}


def time_pair(estimator: str) -> tuple[Times, Times]:
    """Times in a process that finds nothing compiled, and in one that finds what the first has left."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NUMBA_CACHE_DIR"] = folder
        return run_in_new_process(estimator), run_in_new_process(estimator)


def run_in_new_process(estimator: str) -> Times:
    """The times of `time_phases` in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(time_phases, (estimator,))


def time_phases(estimator: str) -> Times:
    """Seconds to import the backend and its compiler, of the first call, and of the second."""
    workload, clock = Workload(estimator, *SHAPE), Clock()
    call = ours.make_call(workload, draw_inputs(workload, "cpu"))
    phases = (lambda: importlib.import_module("rl_triton_core._internal.scan.cpu"), call, call)
    return tuple(clock.time(phase) / 1e6 for phase in phases)


if __name__ == "__main__":
    main()
