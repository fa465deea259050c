"""Time calls whose shapes or numbers change, against repeated ones, and count the kernels that they compile.

    python benchmarks/regimes.py FOLDER [--commit HASH] [--estimator NAME ...] [--shapes N]

Runs on a GPU if there is one, else on the CPU. *Host*: the call by the host's clock, the GPU synchronised before it;
*full*: as in benchmarks/harness.py. Repeated calls are of 4096 environments and 128 steps; numbers that change do so
with every call. A shape never seen before is called once; those whose call compiled a kernel are counted apart. The
results of every regime are compared with the reference backend's. At last, kernels are counted over 1,000 shapes.
Writes regimes_BACKEND.json: microseconds.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rl_triton_core as ours
from benchmarks import files, harness
from benchmarks.harness import Call
from benchmarks.quartiles import find_quartiles
from benchmarks.run import list_tensors
from benchmarks.workloads import ESTIMATORS, LAYOUTS, Inputs, Workload, draw_inputs, draw_sequences
from rl_triton_core._internal.launch.fast_path import forget_plans
from rl_triton_core._internal.launch.variants import forget_variants
from rl_triton_core.testing import assert_close

REPEATED = (4096, 128)
COUNTED = 1000
MAX_CELLS = 1 << 22
CHECKED = 5
"""Of how many shapes the results are compared."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main(arguments: list[str] | None = None) -> None:
    """Measure the estimators in both layouts."""
    parser = files.make_parser(__doc__)
    parser.add_argument(
        "--estimator", nargs="+", choices=ESTIMATORS, default=["gae", "vtrace", "retrace", "prefix_sum"]
    )
    parser.add_argument("--shapes", type=int, default=200)
    options = parser.parse_args(arguments)
    rows = [{"regime": name, **time_repeated(call)} for name, call in list_floors().items()]
    for estimator, layout in itertools.product(options.estimator, LAYOUTS):
        found = measure_workload(Workload(estimator, *REPEATED, layout=layout), options.shapes)
        rows += [{"estimator": estimator, "layout": layout, **row} for row in found]
    name = f"regimes_{'triton' if DEVICE == 'cuda' else 'cpu'}.json"
    files.save_rows(options, name, rows, fast_path=ours.fast_path_status()._asdict())


def list_floors() -> dict[str, Call]:
    """What the protocol costs by itself, and what any operation of PyTorch does."""
    x = torch.zeros(REPEATED, device=DEVICE)
    return {"empty call": lambda: None, "torch.add": partial(torch.add, x, x)}


def measure_workload(workload: Workload, num_shapes: int) -> Iterator[files.Row]:
    """Time one estimator in one layout in all regimes."""
    inputs = draw_inputs(workload, DEVICE)
    for regime, change in list_changes(workload).items():
        call = make_call(workload, inputs, change)
        for _ in range(3):
            check_results(workload, inputs, change())
            call()
        yield {"regime": regime, **time_repeated(call)}
    shapes = (draw_inputs(other, DEVICE) for other in draw_shapes(workload, num_shapes))
    yield {"regime": "shapes never seen", **time_inputs(workload, shapes)}
    if workload.layout == "env-major" and workload.estimator != "eligibility_traces":
        packed = (draw_packed(workload, seed) for seed in range(num_shapes))
        yield {"regime": "packed rows of changing lengths", **time_inputs(workload, packed)}
    forget_calls()
    for other in draw_shapes(workload, COUNTED):
        make_call(other, draw_inputs(other, DEVICE), dict)()
    yield {"regime": f"kernels over {COUNTED} shapes", "kernels": count_kernels()}


# --- calls ------------------------------------------------------------------------------------------------------------


def list_changes(workload: Workload) -> dict[str, Callable[[], dict[str, Any]]]:
    """By regime, what draws the numbers of the next call."""
    spec = workload.spec
    if not spec.discounts:
        return {"repeated": dict}
    numbers = (0.9 + 1e-6 * i for i in itertools.count())
    names = ["gamma"] if spec.lambda_ is None else ["gamma", "lambda_"]
    return {
        "repeated": dict,
        "annealed numbers": lambda: dict.fromkeys(names, next(numbers)),
        "NumPy numbers": lambda: dict.fromkeys(names, np.float32(next(numbers))),
    }


def make_call(workload: Workload, inputs: Inputs, change: Callable[[], dict[str, Any]]) -> Call:
    """A call of the public function with all its results, and with other numbers each time."""
    function = getattr(ours, workload.spec.function)
    given = inputs if "cu_seqlens" in inputs else {**inputs, "time_dim": workload.time_dim}
    return lambda: function(**given, **change())


def check_results(workload: Workload, inputs: Inputs, numbers: dict[str, Any]) -> None:
    """Raise unless the results are those of the reference backend."""
    choices = numbers, {**numbers, "backend": "reference"}
    results, expected = (list_tensors(make_call(workload, inputs, lambda x=x: x)()) for x in choices)
    for x, y in zip(results, expected, strict=True):
        assert_close(x.cpu(), y.cpu().double(), rtol=1e-5)


def draw_shapes(workload: Workload, number: int) -> list[Workload]:
    """Workloads of random shapes, each once."""
    generator = random.Random(0)
    shapes: dict[tuple[int, int], None] = {}
    while len(shapes) < number:
        envs, steps = (int(2 ** generator.uniform(1, 13)) for _ in range(2))
        if envs * steps <= MAX_CELLS:
            shapes[envs, steps] = None
    return [workload._replace(num_envs=envs, num_steps=steps) for envs, steps in shapes]


def draw_packed(workload: Workload, seed: int) -> Inputs:
    """Up to 256 sequences of up to 512 steps, end to end."""
    generator = np.random.default_rng(seed)
    return draw_sequences(workload.estimator, generator.integers(1, 513, generator.integers(1, 257)), DEVICE)


# --- times ------------------------------------------------------------------------------------------------------------


def time_repeated(call: Call) -> files.Row:
    """The time of full calls over turns, and the host's over calls."""
    clock, plan = harness.make_clock(DEVICE), harness.PLANS[DEVICE]
    full = find_quartiles(harness.time_median(call, clock, plan)[0] for _ in range(plan.medians))
    return {"full": full, "host": find_quartiles(time_host(call) for _ in range(50))}


def time_host(call: Call) -> float:
    """The host's time of a call, the GPU idle before it."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return harness.Clock().time(call)


def time_inputs(workload: Workload, draws: Iterable[Inputs]) -> files.Row:
    """One call for each of some inputs, with and without those that compiled a kernel."""
    forget_calls()
    calls, compiling, kernels = [], [], count_kernels()
    for i, inputs in enumerate(draws):
        timed = time_host(make_call(workload, inputs, dict))
        (calls if count_kernels() == kernels else compiling).append(timed)
        kernels = count_kernels()
        if i < CHECKED:
            check_results(workload, inputs, {})
    return {
        "host": find_quartiles(calls),
        "host_highest_decile": float(np.percentile(calls, 90)),
        "host_mean_with_compilation": statistics.mean([*calls, *compiling]),
        "compiling_calls": len(compiling),
    }


def forget_calls() -> None:
    """As in a new process, but for what is compiled on disk."""
    forget_plans()
    if DEVICE == "cuda":
        forget_variants()
        list_caches().clear()


def count_kernels() -> int:
    """How many variants of the scan are compiled."""
    return sum(len(caches[0]) for caches in list_caches().values()) if DEVICE == "cuda" else 0


def list_caches() -> dict[Any, Any]:
    """Triton's kernels of the scan, by device."""
    from rl_triton_core._internal.scan.kernel.scan import scan

    caches: dict[Any, Any] = scan.device_caches
    return caches


if __name__ == "__main__":
    main()
