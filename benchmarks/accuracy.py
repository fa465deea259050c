"""Measure the rounding errors of every estimator and write them to a folder.

    python benchmarks/accuracy.py FOLDER [--backend reference|cpu|triton] [--commit HASH]

Needs no installation of the project: torch and numpy, with numba for the backend cpu and triton for the backend triton.
Writes accuracy_BACKEND.json (hardware, versions, commit, errors). Exits with 1 if a ratio is beyond its limit.

An error is ‖x − exact‖ / ‖exact‖, where the exact result is a float64 loop and imports nothing of ours. It is compared
with that of the same loop in float32, which does the operations of the papers' equations one after another. Discounts
and inputs are float32 numbers, so that the errors are those of arithmetic alone.

Of half-precision inputs the error is compared with that of rounding them: the float64 loop on the rounded inputs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rl_triton_core as ours
from benchmarks import files
from benchmarks.workloads import LAYOUTS

STEPS = (128, 1024, 8192, 131072)
HALF_STEPS = 8192
ELEMENTS, FEWEST_ROWS = 1 << 16, 8
GAMMAS, LAMBDAS, EPISODES = (0.99, 0.999), (0.95, 1.0), (None, 500)
LOG_RATIO_SCALE = 0.02
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
BACKENDS = ("reference", "cpu", "triton")

RATIO_LIMIT = 2.0
ROUNDING_TOLERANCE = 0.01
SERIAL_FLOOR = float(np.finfo(np.float32).eps) / 2


# --- data -------------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """Discounts, and the mean length of an episode; None if the window is part of one."""

    gamma: float
    lambda_: float
    episode: int | None


SETTINGS = [Setting(*choice) for choice in product(GAMMAS, LAMBDAS, EPISODES)]


@dataclass(frozen=True)
class Window:
    """Experience as arrays [steps, rows], where every setting has rows of its own; discounts per row."""

    rewards: np.ndarray
    values: np.ndarray
    bootstrap: np.ndarray
    log_ratios: np.ndarray
    next_q: np.ndarray
    beta: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    gamma: np.ndarray
    lambda_: np.ndarray
    decay: np.ndarray

    def cast(self, dtype: type) -> Window:
        """The same numbers in the type of the arithmetic."""
        return self.each(lambda x: x if x.dtype == bool else x.astype(dtype))

    def rounded(self, dtype: torch.dtype) -> Window:
        """The window after its inputs per step have been rounded."""
        return self.each(lambda x: round_to(x, dtype) if x.ndim == 2 and x.dtype != bool else x)

    def each(self, function: Callable[[np.ndarray], np.ndarray]) -> Window:
        """The window after a function of every array."""
        return replace(self, **{field.name: function(getattr(self, field.name)) for field in fields(self)})

    @property
    def done(self) -> np.ndarray:
        """Whether the episode ended at a step."""
        return self.terminated | self.truncated

    @property
    def goes_on(self) -> np.ndarray:
        """Whether the next step belongs to the same trajectory."""
        inner = np.arange(len(self.done))[:, None] < len(self.done) - 1
        return ~self.done & inner

    @property
    def next_values(self) -> np.ndarray:
        """V(s_{t+1}): 0 after a terminal state, the bootstrap value at a cut."""
        return np.where(self.terminated, 0, np.where(self.goes_on, ahead(self.values), self.bootstrap))


def draw(steps: int, rows: int, seed: int = 0) -> Window:
    """Random experience in float64 that float32 represents."""
    rng = np.random.default_rng(seed)
    gamma, lambda_, episode = (np.repeat(np.array(x, float), rows) for x in zip(*SETTINGS, strict=True))
    gamma, lambda_ = (round_to(x, torch.float32) for x in (gamma, lambda_))
    shape = (steps, len(gamma))
    ends = rng.random(shape) < 1 / np.nan_to_num(episode, nan=np.inf)
    terminal = rng.random(shape) < 0.5
    normal = {name: rng.standard_normal(shape) for name in ("rewards", "values", "bootstrap", "next_q", "log_ratios")}
    normal["log_ratios"] *= LOG_RATIO_SCALE
    return Window(
        **normal,
        beta=np.where(ends, 0, gamma * lambda_),
        terminated=ends & terminal,
        truncated=ends & ~terminal,
        gamma=gamma,
        lambda_=lambda_,
        decay=gamma * lambda_,
    ).rounded(torch.float32)


def round_to(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The nearest numbers of this type, in float64."""
    return torch.from_numpy(x).to(dtype).double().numpy()


# --- the serial loops -------------------------------------------------------------------------------------------------


def scan(alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """A[t] = α[t] + β[t]·A[t+1], one step after another, in the type of the arrays."""
    states, state = np.empty_like(alpha), np.zeros_like(alpha[0])
    for t in reversed(range(len(alpha))):
        state = states[t] = alpha[t] + beta[t] * state
    return states


def scan_forward(alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """A[t] = α[t] + β[t]·A[t-1]."""
    return scan(alpha[::-1], beta[::-1])[::-1]


def ahead(x: np.ndarray) -> np.ndarray:
    """x[t+1], 0 behind the end."""
    return np.concatenate([x[1:], np.zeros_like(x[:1])])


def starts(done: np.ndarray) -> np.ndarray:
    """Whether a step is the first one after the end of an episode."""
    return np.concatenate([np.zeros_like(done[:1]), done[:-1]])


def gae(w: Window) -> tuple[np.ndarray, ...]:
    """Schulman 2016: A[t] = r + γ·NV − V + γλ·A[t+1]."""
    advantages = scan(w.rewards + w.gamma * w.next_values - w.values, w.decay * w.goes_on)
    return advantages, advantages + w.values


def vtrace(w: Window) -> tuple[np.ndarray, ...]:
    """Espeholt 2018 with all clips at 1: D[t] = ρ·(r + γ·NV − V) + γ·c·D[t+1], targets V + D, and advantages."""
    rho = np.minimum(np.exp(w.log_ratios), 1)
    errors = scan(rho * (w.rewards + w.gamma * w.next_values - w.values), w.gamma * (w.lambda_ * rho) * w.goes_on)
    targets = w.values + errors
    next_targets = np.where(w.goes_on, ahead(targets), w.next_values)
    return targets, rho * (w.rewards + w.gamma * next_targets - w.values)


def retrace(w: Window) -> tuple[np.ndarray, ...]:
    """Munos 2016 with all clips at 1: D[t] = r + γ·NQ − Q + γ·c[t+1]·D[t+1], targets Q + D, and advantages."""
    rho = np.minimum(np.exp(w.log_ratios), 1)
    next_q = np.where(w.terminated, 0, w.next_q)
    errors = scan(w.rewards + w.gamma * next_q - w.values, w.gamma * ahead(w.lambda_ * rho) * w.goes_on)
    targets = w.values + errors
    next_targets = np.where(w.goes_on, ahead(targets), next_q)
    return targets, rho * (w.rewards + w.gamma * next_targets - w.values)


def lambda_returns(w: Window) -> tuple[np.ndarray, ...]:
    """Sutton & Barto 2018: G[t] = r + γ(1 − λ)·V[t+1] + γλ·G[t+1]; r + γ·NV at the end."""
    weights = np.where(w.goes_on, w.gamma * (1 - w.lambda_), w.gamma)
    return (scan(w.rewards + weights * w.next_values, w.decay * w.goes_on),)


def discounted_returns(w: Window) -> tuple[np.ndarray, ...]:
    """G[t] = r + γ·G[t+1]; r + γ·NV at the end."""
    return (scan(w.rewards + np.where(w.goes_on, 0, w.gamma * w.next_values), w.gamma * w.goes_on),)


def eligibility_traces(w: Window) -> tuple[np.ndarray, ...]:
    """z[t] = x + γλ·z[t-1]."""
    return (scan_forward(w.rewards, w.decay * ~starts(w.done)),)


def episodic_prefix_sum(w: Window) -> tuple[np.ndarray, ...]:
    """C[t] = x + C[t-1]."""
    return (scan_forward(w.rewards, (~starts(w.done)).astype(w.rewards.dtype)),)


def linear_backward(w: Window) -> tuple[np.ndarray, ...]:
    """A[t] = α + β·A[t+1]."""
    return (scan(w.rewards, w.beta),)


def linear_forward(w: Window) -> tuple[np.ndarray, ...]:
    """A[t] = α + β·A[t-1]."""
    return (scan_forward(w.rewards, w.beta),)


# --- the estimators ---------------------------------------------------------------------------------------------------


class Estimator(NamedTuple):
    """A public function, its serial loop, and how its arguments are named in a window."""

    function: Callable[..., Any]
    serial: Callable[[Window], tuple[np.ndarray, ...]]
    outputs: tuple[str, ...]
    arguments: dict[str, str]
    rates: tuple[str, ...] = ("gamma", "lambda_")
    """The discounts that its results depend on."""
    options: dict[str, Any] = {}  # noqa: RUF012


def same(*names: str) -> dict[str, str]:
    """Arguments that are named alike."""
    return {name: name for name in names}


FLAGS, RATES = same("terminated", "truncated"), same("gamma", "lambda_")
CRITIC = {**same("rewards", "values"), **FLAGS, "bootstrap_values": "bootstrap"}
LINEAR = {"alpha": "rewards", "beta": "beta"}
ESTIMATORS = {
    "compute_gae": Estimator(ours.compute_gae, gae, ("advantages", "returns"), {**CRITIC, **RATES}),
    "compute_vtrace": Estimator(
        ours.compute_vtrace, vtrace, ("targets", "advantages"), {**CRITIC, **RATES, "log_ratios": "log_ratios"}
    ),
    "compute_retrace": Estimator(
        ours.compute_retrace,
        retrace,
        ("targets", "advantages"),
        {**same("rewards", "log_ratios"), **FLAGS, **RATES, "q_values": "values", "expected_next_q": "next_q"},
    ),
    "compute_lambda_returns": Estimator(ours.compute_lambda_returns, lambda_returns, ("returns",), {**CRITIC, **RATES}),
    "compute_discounted_returns": Estimator(
        ours.compute_discounted_returns,
        discounted_returns,
        ("returns",),
        {**same("rewards", "gamma"), **FLAGS, "bootstrap_values": "bootstrap"},
        ("gamma",),
    ),
    "compute_eligibility_traces": Estimator(
        ours.compute_eligibility_traces, eligibility_traces, ("traces",), {"x": "rewards", **FLAGS, **RATES}
    ),
    "compute_episodic_prefix_sum": Estimator(
        ours.compute_episodic_prefix_sum, episodic_prefix_sum, ("sums",), {"x": "rewards", "dones": "done"}, ()
    ),
    "linear_recurrence(reverse=True)": Estimator(ours.linear_recurrence, linear_backward, ("states",), LINEAR),
    "linear_recurrence(reverse=False)": Estimator(
        ours.linear_recurrence, linear_forward, ("states",), LINEAR, options={"reverse": False}
    ),
}


class Place(NamedTuple):
    """Where our functions run, and on what."""

    backend: str
    device: str
    layout: str = "env-major"
    dtype: torch.dtype = torch.float32


def call(estimator: Estimator, window: Window, rows: slice, place: Place) -> list[np.ndarray]:
    """Our results on some rows of a window, [steps, rows]."""
    time_dim = 0 if place.layout == "time-major" else -1

    def argument(name: str) -> float | torch.Tensor:
        x = getattr(window, name)[..., rows]
        if x.ndim == 1:
            return float(x[0])
        tensor = torch.from_numpy(np.ascontiguousarray(x if time_dim == 0 else x.T))
        return tensor.to(place.device, torch.bool if tensor.dtype == torch.bool else place.dtype)

    arguments = {name: argument(field) for name, field in estimator.arguments.items()}
    results = estimator.function(**arguments, **estimator.options, time_dim=time_dim, backend=place.backend)
    results = results if isinstance(results, tuple) else (results,)
    return [(x if time_dim == 0 else x.t()).cpu().double().numpy() for x in results]


# --- measuring --------------------------------------------------------------------------------------------------------


def relative_error(actual: np.ndarray, exact: np.ndarray) -> float:
    """‖actual − exact‖ / ‖exact‖ in float64."""
    return norm(actual.astype(np.float64) - exact) / norm(exact)


def norm(x: np.ndarray) -> float:
    """The Euclidean norm."""
    return float(np.sqrt(np.square(x).sum()))


def against_serial(error: float, serial: float) -> dict[str, float]:
    """An error, that of the serial float32 loop, and their ratio. No loop is taken to be better than the floor."""
    ratio = error / max(serial, SERIAL_FLOOR)
    return {"error": rounded(error), "serial_error": rounded(serial), "ratio": rounded(ratio)}


def rounded(x: float) -> float:
    """The digits worth keeping."""
    return float(f"{x:.6g}")


def settings(estimator: Estimator, rows: int) -> Iterator[tuple[dict[str, Any], slice]]:
    """The settings that make a difference to an estimator, and the rows of a window that have them."""
    seen = []
    for i, setting in enumerate(SETTINGS):
        about = {name: getattr(setting, name) for name in (*estimator.rates, "episode")}
        if about not in seen:
            seen.append(about)
            yield about, slice(i * rows, (i + 1) * rows)


def measure(estimator: Estimator, window: Window, rows: int, place: Place) -> Iterator[dict[str, Any]]:
    """Errors for float32 inputs, by setting, layout and output."""
    exact, serial = estimator.serial(window), estimator.serial(window.cast(np.float32))
    for (about, mine), layout in product(settings(estimator, rows), LAYOUTS):
        got = call(estimator, window, mine, place._replace(layout=layout))
        for output, x, loop, want in zip(estimator.outputs, got, serial, exact, strict=True):
            errors = relative_error(x, want[:, mine]), relative_error(loop[:, mine], want[:, mine])
            yield {**about, "layout": layout, "output": output, **against_serial(*errors)}


def measure_half(estimator: Estimator, window: Window, rows: int, place: Place) -> Iterator[dict[str, Any]]:
    """Errors for half-precision inputs, by type, setting and output."""
    exact = estimator.serial(window)
    for name, dtype in HALVES.items():
        given = window.rounded(dtype)
        best, serial = estimator.serial(given), estimator.serial(given.cast(np.float32))
        for about, mine in settings(estimator, rows):
            got = call(estimator, given, mine, place._replace(dtype=dtype))
            for output, x, *others in zip(estimator.outputs, got, serial, best, exact, strict=True):
                loop, nearest, want = (other[:, mine] for other in others)
                error, rounding = relative_error(x, want), relative_error(nearest, want)
                yield {
                    **{"dtype": name, **about, "output": output},
                    "error": rounded(error),
                    "rounding_error": rounded(rounding),
                    "ratio": rounded(error / rounding),
                    "beyond_rounding": against_serial(relative_error(x, nearest), relative_error(loop, nearest)),
                }


def failures(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows beyond a limit; NaN is."""
    good = [row["ratio"] <= RATIO_LIMIT for row in result["float32"]]
    good_half = [
        abs(row["ratio"] - 1) <= ROUNDING_TOLERANCE and row["beyond_rounding"]["ratio"] <= RATIO_LIMIT
        for row in result["half"]
    ]
    rows = zip(result["float32"] + result["half"], good + good_half, strict=True)
    return [row for row, is_good in rows if not is_good]


class Task(NamedTuple):
    """What is measured at once: one estimator on windows of one length."""

    table: str
    estimator: str
    steps: int
    rows: int


TABLES = {"float32": measure, "half": measure_half}
window_of = lru_cache(maxsize=1)(draw)
"""Estimators follow each other on the same window."""


def rows_of(task: Task, place: Place) -> list[dict[str, Any]]:
    """A task's rows of results."""
    head = {"estimator": task.estimator, "steps": task.steps, "rows": task.rows}
    window = window_of(task.steps, task.rows)
    return [head | row for row in TABLES[task.table](ESTIMATORS[task.estimator], window, task.rows, place)]


def run(backend: str, lengths: list[int], rows: int | None, jobs: int = 1) -> dict[str, Any]:
    """All rows of results; a line per task is printed on the way."""
    place = Place(backend, "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")
    half_length = max((steps for steps in lengths if steps <= HALF_STEPS), default=min(lengths))
    tasks = [
        Task(table, name, steps, rows or max(FEWEST_ROWS, ELEMENTS // steps))
        for steps, name, table in product(lengths, ESTIMATORS, TABLES)
        if table == "float32" or steps == half_length
    ]
    result: dict[str, Any] = {table: [] for table in TABLES}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        measured = (pool.map if jobs > 1 else map)(partial(rows_of, place=place), tasks)
        for task, found in zip(tasks, measured, strict=True):
            result[task.table] += found
            print(summary(task.table, found), flush=True)
    return result


def summary(table: str, rows: list[dict[str, Any]]) -> str:
    """The worst of some rows, in a line."""
    worst = max(rows, key=lambda row: (np.isnan(row["ratio"]), abs(row["ratio"] - (table == "half"))))
    other = worst["serial_error" if table == "float32" else "rounding_error"]
    kind, errors = worst.get("dtype", table), f"{worst['error']:10.1e}{other:10.1e}"
    return f"{worst['estimator']:34}{kind:10}{worst['steps']:>8}{errors}{worst['ratio']:>9.4f}"


def main(arguments: list[str] | None = None) -> int:
    parser = files.parser(__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="triton" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="lengths of the windows")
    parser.add_argument("--rows", type=int, help="environments per setting; fewer where windows are longer by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes, for the backends that need no GPU")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    print("Worst of the settings. Reference: a serial float32 loop; for half-precision inputs, rounding them.")
    print(f"{'estimator':34}{'inputs':10}{'steps':>8}{'error':>10}{'reference':>10}{'ratio':>9}")
    result = run(options.backend, options.steps, options.rows, options.jobs)
    write(options, result, round(time.perf_counter() - started, 1))
    bad = failures(result)
    for row in bad:
        print("beyond the limit:", json.dumps(row))
    return bool(bad)


def write(options: argparse.Namespace, result: dict[str, Any], seconds: float) -> None:
    """The result file."""
    limits = {"ratio": RATIO_LIMIT, "rounding": ROUNDING_TOLERANCE, "serial_floor": SERIAL_FLOOR}
    head = {"backend": options.backend, "seconds": seconds, "limits": limits}
    path = options.folder / f"accuracy_{options.backend}.json"
    files.write(path, {"system": files.system(options.commit), **head}, **result)
    print("wrote", path, "in", seconds, "s")


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    sys.exit(main())
