"""Measure the rounding errors of every estimator and write them to a folder.

    python benchmarks/accuracy.py FOLDER [--backend reference|cpu|triton] [--commit HASH]

Writes accuracy_BACKEND.json (hardware, versions, commit, errors). Exits with 1 if a ratio is beyond its limit.

An error is ‖x − exact‖ / ‖exact‖, where benchmarks/equations.py with a serial float64 loop gives the exact result. It
is compared with the error of the same loop in float32. Discounts and inputs are float32 numbers, so that the errors are
those of arithmetic alone. For half-precision inputs the error is compared with that of rounding them: the float64 loop
on the rounded inputs.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rl_triton_core
from benchmarks import files
from benchmarks.equations import (
    ESTIMATORS,
    FLAGS,
    PER_ACTION,
    Equation,
    Estimator,
    Inputs,
    Rates,
    scan_serially,
    solve_linear,
)
from benchmarks.workloads import LAYOUTS
from rl_triton_core.testing import relative_error

STEPS = (128, 1024, 8192, 131072)
HALF_STEPS = 8192
ELEMENTS, MIN_ROWS = 1 << 16, 8
LOG_RATIO_SCALE = 0.02
HALVES = ("bfloat16", "float16")
BACKENDS = ("reference", "cpu", "triton")

RATIO_LIMIT = 2.0
ROUNDING_TOLERANCE = 0.01
SERIAL_FLOOR = torch.finfo(torch.float32).eps / 2


# --- data -------------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """Discounts, and the mean length of an episode; None if no episode ends."""

    gamma: float
    lambda_: float
    episode: int | None


SETTINGS = [Setting(*choice) for choice in product((0.99, 0.999), (0.95, 1.0), (None, 500))]


class Rollouts(NamedTuple):
    """Inputs [envs, steps], where every setting has as many environments, and their discounts [envs, 1]."""

    inputs: Inputs
    rates: Rates

    def select(self, rows: slice) -> Rollouts:
        """Some environments."""
        return Rollouts({k: x[rows] for k, x in self.inputs.items()}, Rates(*(x[rows] for x in self.rates)))

    def cast(self, dtype: torch.dtype) -> Rollouts:
        """All numbers in another type."""
        inputs = {k: x if k in FLAGS else x.to(dtype) for k, x in self.inputs.items()}
        return Rollouts(inputs, Rates(*(x.to(dtype) for x in self.rates)))


def draw_rollouts(steps: int, rows: int, seed: int = 0) -> Rollouts:
    """Random experience in float64 that float32 represents."""
    generator = torch.Generator().manual_seed(seed)
    columns = (torch.tensor([math.inf if x is None else x for x in column]) for column in zip(*SETTINGS, strict=True))
    gamma, lambda_, episode = (x.float().double().repeat_interleave(rows)[:, None] for x in columns)
    shape = (len(gamma), steps)
    ends, terminal = (torch.rand(shape, generator=generator) < p for p in (1 / episode, 0.5))
    names = ("rewards", "values", "bootstrap_values", "expected_next_q", "target_log_probs")
    inputs = {name: torch.randn(shape, generator=generator).double() for name in names}
    inputs["target_log_probs"] = (inputs["target_log_probs"] * LOG_RATIO_SCALE).float().double()
    inputs |= {"terminated": ends & terminal, "truncated": ends & ~terminal, "dones": ends}
    inputs |= {"behaviour_log_probs": torch.zeros(shape).double(), "q_values": inputs["values"]}
    beta = torch.where(ends, 0, (gamma * lambda_).float().double())
    inputs |= {"x": inputs["rewards"], "alpha": inputs["rewards"], "beta": beta}
    return Rollouts(inputs, Rates(gamma, lambda_))


# --- the estimators ---------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A public function, its equation, its inputs, its results, and the discounts that they depend on."""

    function: str
    equation: Equation
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rates: tuple[str, ...] = ("gamma", "lambda_")
    options: dict[str, Any] = {}  # noqa: RUF012


def make_case(spec: Estimator) -> Case:
    """The case of an estimator: with every flag, bootstrap values at every step, and the expectation over actions."""
    inputs = dict.fromkeys("expected_next_q" if name in PER_ACTION else name for name in spec.inputs)
    inputs |= dict.fromkeys(["truncated"] * spec.truncates + ["bootstrap_values"] * spec.bootstraps)
    rates = ("gamma",) * spec.discounts + ("lambda_",) * (spec.lambda_ is not None)
    return Case(spec.function, spec.equation, tuple(inputs), spec.outputs, rates)


CASES = {spec.function: make_case(spec) for spec in ESTIMATORS.values()} | {
    f"linear_recurrence({reverse=})": Case(
        "linear_recurrence",
        partial(solve_linear, reverse=reverse),
        ("alpha", "beta"),
        ("states",),
        options={"reverse": reverse},
    )
    for reverse in (True, False)
}


def compute_exactly(case: Case, rollouts: Rollouts, dtype: torch.dtype) -> list[Tensor]:
    """The equation with a serial loop in some precision, as float64."""
    inputs, rates = rollouts.cast(dtype)
    chosen = {name: inputs[name] for name in case.inputs}
    return [x.double() for x in case.equation(chosen, 1, rates, scan_serially)]


def compute_ours(case: Case, rollouts: Rollouts, backend: str, layout: str, dtype: str) -> list[Tensor]:
    """Our results, [envs, steps] in float64; all environments have the discounts of the first."""
    time_major = layout == "time-major"
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"

    def prepare(name: str) -> Tensor:
        x = rollouts.inputs[name].t() if time_major else rollouts.inputs[name]
        return x.contiguous().to(device, torch.bool if name in FLAGS else getattr(torch, dtype))

    arguments: dict[str, Any] = {name: prepare(name) for name in case.inputs} | case.options
    if case.function != "linear_recurrence":
        arguments |= {name: float(getattr(rollouts.rates, name)[0]) for name in case.rates}
    function = getattr(rl_triton_core, case.function)
    results = function(**arguments, time_dim=0 if time_major else -1, backend=backend)
    results = results if isinstance(results, tuple) else (results,)
    return [(x.t() if time_major else x).cpu().double() for x in results]


# --- measuring --------------------------------------------------------------------------------------------------------


def compare_with_serial(error: float, serial: float) -> dict[str, float]:
    """An error, that of the serial float32 loop, and their ratio. No loop is taken to be better than the floor."""
    ratio = error / max(serial, SERIAL_FLOOR)
    return {"error": round_number(error), "serial_error": round_number(serial), "ratio": round_number(ratio)}


def round_number(x: float) -> float:
    """The digits worth keeping."""
    return float(f"{x:.6g}")


def iterate_settings(case: Case, rows: int) -> Iterator[tuple[dict[str, Any], slice]]:
    """The settings that make a difference to an estimator, and the environments that have them."""
    seen = []
    for i, setting in enumerate(SETTINGS):
        about = {name: getattr(setting, name) for name in (*case.rates, "episode")}
        if about not in seen:
            seen.append(about)
            yield about, slice(i * rows, (i + 1) * rows)


def measure_float32(case: Case, rollouts: Rollouts, rows: int, backend: str) -> Iterator[files.Row]:
    """Errors for float32 inputs, by setting, layout and output."""
    exact, serial = (compute_exactly(case, rollouts, dtype) for dtype in (torch.float64, torch.float32))
    for (about, mine), layout in product(iterate_settings(case, rows), LAYOUTS):
        got = compute_ours(case, rollouts.select(mine), backend, layout, "float32")
        for output, x, loop, want in zip(case.outputs, got, serial, exact, strict=True):
            errors = relative_error(x, want[mine]), relative_error(loop[mine], want[mine])
            yield {**about, "layout": layout, "output": output, **compare_with_serial(*errors)}


def measure_half(case: Case, rollouts: Rollouts, rows: int, backend: str) -> Iterator[files.Row]:
    """Errors for half-precision inputs, by type, setting and output."""
    exact = compute_exactly(case, rollouts, torch.float64)
    for dtype in HALVES:
        given = rollouts.cast(getattr(torch, dtype)).cast(torch.float64)._replace(rates=rollouts.rates)
        best, serial = (compute_exactly(case, given, precision) for precision in (torch.float64, torch.float32))
        for about, mine in iterate_settings(case, rows):
            got = compute_ours(case, given.select(mine), backend, "env-major", dtype)
            for output, x, *others in zip(case.outputs, got, serial, best, exact, strict=True):
                loop, nearest, want = (other[mine] for other in others)
                error, rounding = relative_error(x, want), relative_error(nearest, want)
                yield {
                    **{"dtype": dtype, **about, "output": output},
                    "error": round_number(error),
                    "rounding_error": round_number(rounding),
                    "ratio": round_number(error / rounding),
                    "beyond_rounding": compare_with_serial(relative_error(x, nearest), relative_error(loop, nearest)),
                }


def find_failures(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows beyond a limit; NaN is."""
    good = [row["ratio"] <= RATIO_LIMIT for row in result["float32"]]
    for row in result["half"]:
        within = row["beyond_rounding"]["ratio"] <= RATIO_LIMIT
        good.append(within and abs(row["ratio"] - 1) <= ROUNDING_TOLERANCE)
    rows = zip(result["float32"] + result["half"], good, strict=True)
    return [row for row, is_good in rows if not is_good]


TABLES = {"float32": measure_float32, "half": measure_half}
draw_once = lru_cache(maxsize=1)(draw_rollouts)
"""Estimators follow each other on the same rollouts."""


def measure_task(task: tuple[str, str, int, int], backend: str) -> list[files.Row]:
    """The rows of one table, of one estimator on rollouts of one length, and of so many environments per setting."""
    table, name, steps, rows = task
    found = TABLES[table](CASES[name], draw_once(steps, rows), rows, backend)
    return [{"estimator": name, "steps": steps, "rows": rows} | row for row in found]


def run(backend: str, lengths: list[int], rows: int | None, jobs: int = 1) -> dict[str, Any]:
    """All rows of results; a line per task is printed on the way."""
    half_length = max((steps for steps in lengths if steps <= HALF_STEPS), default=min(lengths))
    tasks = [
        (table, name, steps, rows or max(MIN_ROWS, ELEMENTS // steps))
        for steps, name, table in product(lengths, CASES, TABLES)
        if table == "float32" or steps == half_length
    ]
    result: dict[str, Any] = {table: [] for table in TABLES}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        measured = (pool.map if jobs > 1 else map)(partial(measure_task, backend=backend), tasks)
        for (table, name, steps, _), found in zip(tasks, measured, strict=True):
            result[table] += found
            worst = max(found, key=lambda row: (math.isnan(row["ratio"]), row["ratio"]))
            print(f"{name:34}{table:10}{steps:>8}{worst['error']:10.1e}{worst['ratio']:>9.4f}")
    return result


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, and say what is beyond its limit."""
    parser = files.make_parser(__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="triton" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="lengths of the rollouts")
    parser.add_argument("--rows", type=int, help="environments per setting; fewer where rollouts are longer by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes, for the backends that need no GPU")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    print(f"{'worst of the settings':34}{'inputs':10}{'steps':>8}{'error':>10}{'ratio':>9}")
    result = run(options.backend, options.steps, options.rows, options.jobs)
    limits = {"ratio": RATIO_LIMIT, "rounding": ROUNDING_TOLERANCE, "serial_floor": SERIAL_FLOOR}
    head = {"system": files.describe_system(options.commit), "backend": options.backend, "limits": limits}
    head["seconds"] = round(time.perf_counter() - started, 1)
    path = options.folder / f"accuracy_{options.backend}.json"
    files.write_result(path, head, **result)
    print("wrote", path, "in", head["seconds"], "s")
    failures = find_failures(result)
    for row in failures:
        print("beyond the limit:", json.dumps(row))
    return bool(failures)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    sys.exit(main())
