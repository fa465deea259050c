"""The rounding errors of every estimator, against those of a serial float32 loop.

An error is ‖x − exact‖ / ‖exact‖, where benchmarks/equations.py with a serial float64 loop gives the exact result. A
ratio is the error over that of the same loop in float32. Discounts and inputs are float32 numbers, so that the errors
are those of arithmetic alone. For half-precision inputs the error is compared with that of rounding them, the float64
loop on the rounded inputs, from which the result should be no farther than the float32 loop on these is. A line has the
worst of several discounts, lengths of episodes, layouts and results: that with the largest ratio.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_triton_core
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
from benchmarks.results import Row, make_row
from benchmarks.workloads import LAYOUTS
from rl_triton_core.testing import relative_error

STEPS = (128, 1024, 8192, 131072)
HALF_STEPS = 8192
ELEMENTS, MIN_ROWS = 1 << 16, 8
LOG_RATIO_SCALE = 0.02
HALVES = ("bfloat16", "float16")
BACKENDS = {"cpu": ("cpu", "reference"), "cuda": ("triton",), "quick": ("cpu",)}
RATIO_LIMIT = 2.0
ROUNDING_TOLERANCE = 0.01
"""By how much the ratio to the error of rounding inputs of half precision may differ from 1."""
SERIAL_FLOOR = torch.finfo(torch.float32).eps / 2
"""No loop is taken to be better."""


# --- data -------------------------------------------------------------------------------------------------------------


class Rules(NamedTuple):
    """Discounts, and the mean length of an episode; None if no episode ends."""

    gamma: float
    lambda_: float
    episode: int | None


RULES = [Rules(*choice) for choice in product((0.99, 0.999), (0.95, 1.0), (None, 500))]


class Rollouts(NamedTuple):
    """Inputs [envs, steps], where all rules have as many environments, and their discounts [envs, 1]."""

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
    columns = (torch.tensor([math.inf if x is None else x for x in column]) for column in zip(*RULES, strict=True))
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


class Setting(NamedTuple):
    """A backend and a case, the dtype of its inputs, and the length of the rollouts."""

    backend: str
    case: str
    inputs: str
    steps: int


SETTINGS = {
    name: [
        Setting(backend, case, dtype, steps)
        for backend in backends
        for case, steps in product(CASES, (16, 32) if name == "quick" else STEPS)
        for dtype in ("float32", *HALVES)
        if dtype == "float32" or steps in (16, HALF_STEPS)
    ]
    for name, backends in BACKENDS.items()
}
draw_once = lru_cache(maxsize=1)(draw_rollouts)
"""Settings follow each other on the same rollouts."""


def prepare(settings: Sequence[Setting], options: Namespace) -> None:
    """The tensors are small."""
    torch.set_num_threads(1)


def measure(setting: Setting, options: Namespace) -> Iterator[Row]:
    """The errors where they are worst, and what is beyond a limit."""
    rows = 2 if setting.backend == "reference" or options.quick else max(MIN_ROWS, ELEMENTS // setting.steps)
    compare = compare_float32 if setting.inputs == "float32" else compare_half
    found = list(compare(CASES[setting.case], draw_once(setting.steps, rows), rows, setting))
    for group in dict.fromkeys(map(tuple, found)):
        yield from list_worst([errors for errors in found if tuple(errors) == group])


def list_worst(found: list[dict[str, float]]) -> Iterator[Row]:
    """The numbers of the comparison with the largest ratio, the last; NaN is largest. The name of a ratio is first."""
    ratio = next(iter(found[0]))
    distance = (lambda x: abs(x - 1)) if ratio == "ratio to rounding" else (lambda x: x)
    limit = ROUNDING_TOLERANCE if ratio == "ratio to rounding" else RATIO_LIMIT
    worst = max(found, key=lambda errors: (math.isnan(errors[ratio]), distance(errors[ratio])))
    for metric, value in worst.items():
        bad = metric == ratio and not distance(value) <= limit
        yield make_row("ours", metric, "", value, f"wrong: beyond the limit {limit}" * bad)


def iterate_rules(case: Case, rows: int) -> Iterator[slice]:
    """The environments of each of the rules that make a difference to an estimator."""
    seen = []
    for i, rules in enumerate(RULES):
        about = [getattr(rules, name) for name in (*case.rates, "episode")]
        if about not in seen:
            seen.append(about)
            yield slice(i * rows, (i + 1) * rows)


def compare_float32(case: Case, rollouts: Rollouts, rows: int, setting: Setting) -> Iterator[dict[str, float]]:
    """Errors for float32 inputs, by rules, layout and output."""
    exact, serial = (compute_exactly(case, rollouts, dtype) for dtype in (torch.float64, torch.float32))
    for mine, layout in product(iterate_rules(case, rows), LAYOUTS):
        got = compute_ours(case, rollouts.select(mine), setting.backend, layout, "float32")
        for x, loop, want in zip(got, serial, exact, strict=True):
            yield compare_errors("", relative_error(x, want[mine]), relative_error(loop[mine], want[mine]))


def compare_half(case: Case, rollouts: Rollouts, rows: int, setting: Setting) -> Iterator[dict[str, float]]:
    """Errors for half-precision inputs, by rules and output: against the inputs' rounding, and beyond it."""
    exact = compute_exactly(case, rollouts, torch.float64)
    given = rollouts.cast(getattr(torch, setting.inputs)).cast(torch.float64)._replace(rates=rollouts.rates)
    best, serial = (compute_exactly(case, given, precision) for precision in (torch.float64, torch.float32))
    for mine in iterate_rules(case, rows):
        got = compute_ours(case, given.select(mine), setting.backend, "env-major", setting.inputs)
        for x, *others in zip(got, serial, best, exact, strict=True):
            loop, nearest, want = (other[mine] for other in others)
            error, rounding = relative_error(x, want), relative_error(nearest, want)
            yield {"ratio to rounding": error / rounding, "error": error, "rounding": rounding}
            yield compare_errors("beyond rounding, ", relative_error(x, nearest), relative_error(loop, nearest))


def compare_errors(prefix: str, error: float, serial: float) -> dict[str, float]:
    """An error, that of the serial float32 loop, and their ratio."""
    ratio = error / max(serial, SERIAL_FLOOR)
    return {f"{prefix}ratio": ratio, f"{prefix}error": error, f"{prefix}serial": serial}
