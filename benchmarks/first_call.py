"""The first call of every estimator in a process, with and without what an earlier process compiled. Seconds.

What a call compiles goes to a directory that is empty for one process, and holds what that one left for the next. The
backend and its compiler are imported before, and timed too.
"""

import importlib
import multiprocessing
import os
import tempfile
from functools import partial

from benchmarks.harness import Options, Rows, Setting, make_row, time_call
from benchmarks.providers.others import make_call
from benchmarks.workloads import Workload, draw_inputs

Times = tuple[float, ...]
PAIRS = 3  # of processes
UPDATE = "update, "  # before its head


def measure(setting: Setting, options: Options) -> Rows:
    """Phases over some pairs of processes."""
    empty, filled = zip(*(time_pair(setting) for _ in range(PAIRS)), strict=True)
    phases = {"import": (empty + filled, 0), "compiled": (empty, 1), "loaded": (filled, 1), "second call": (filled, 2)}
    for name, (times, phase) in phases.items():
        yield make_row("ours", name, "s", [found[phase] for found in times])


def time_pair(setting: Setting) -> tuple[Times, Times]:
    """Times in a process that finds nothing compiled, and in one that finds what the first has left."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NUMBA_CACHE_DIR"] = folder
        return run_in_new_process(setting), run_in_new_process(setting)


def run_in_new_process(setting: Setting) -> Times:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(time_phases, [*vars(setting).values()])


def time_phases(estimator: str, *shape: int) -> Times:
    """To import the backend and its compiler, of the first call, and of the second."""
    if estimator.startswith(UPDATE):
        module, call = "rl_triton_core.compiled", partial(compile_update, estimator.removeprefix(UPDATE))
    else:
        workload = Workload(estimator, *shape)
        module, call = "rl_triton_core._internal.scan.cpu", make_call(workload, draw_inputs(workload, "cpu"))
    phases = (lambda: importlib.import_module(module), call, call)
    return tuple(time_call(phase, "cpu") / 1e6 for phase in phases)


def compile_update(head: str) -> None:
    importlib.import_module("rl_triton_core.compiled").compile_update(head)
