"""Calls whose shapes or numbers change, against repeated ones, and how many kernels they compile.

*Host* is a call by the host's clock, the GPU idle before it. Numbers that change do so with every call. A shape never
seen before is called once; calls that compiled a kernel are counted apart. Results of every regime are compared with
the reference backend's.
"""

import itertools
import random
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

import rl_triton_core as ours
from benchmarks import harness
from benchmarks.calls import HEADLINE, combine_workloads, list_tensors
from benchmarks.harness import Call
from benchmarks.results import Row, make_row
from benchmarks.workloads import Inputs, Workload, draw_inputs, draw_sequences
from rl_triton_core._internal.launch.fast_path import forget_plans
from rl_triton_core._internal.launch.kernels import VARIANTS
from rl_triton_core.testing import assert_close

ALL = combine_workloads([HEADLINE], ["gae", "vtrace", "retrace", "prefix_sum"])
SETTINGS = {"cpu": ALL, "cuda": ALL, "quick": [Workload("gae", 4, 8)]}
NUM_SHAPES = {False: (200, 1000), True: (3, 3)}
"""How many shapes are called, and over how many kernels are counted, unless it is quick and if it is."""
MAX_CELLS = 1 << 22
CHECKED = 5  # of how many shapes the results are compared
CALLS = 50


def measure(workload: Workload, options: Namespace) -> Iterator[Row]:
    device, (number, counted) = options.device, NUM_SHAPES[options.quick]
    inputs, x = draw_inputs(workload, device), torch.zeros(workload.shape, device=device)
    calls: dict[str, Call] = {"empty call": lambda: None, "torch.add": partial(torch.add, x, x)}
    for regime, change in list_changes(workload).items():
        calls[regime] = make_call(workload, inputs, change)
        for _ in range(3):
            check_results(workload, inputs, change())
            calls[regime]()
    for regime, bursts in harness.time_in_turns(calls, device, options.seconds).items():
        host = [harness.time_host(calls[regime], device) for _ in range(CALLS)]
        yield make_row("ours", "full", "µs", itertools.chain(*bursts), regime=regime)
        yield make_row("ours", "host", "µs", host, regime=regime)
    limit = 200 if options.quick else MAX_CELLS
    shapes = (draw_inputs(other, device) for other in draw_shapes(workload, number, limit))
    yield from time_inputs(workload, shapes, device, regime="shapes never seen")
    if workload.layout == "env-major":
        packed = (draw_packed(workload, seed, device) for seed in range(number))
        yield from time_inputs(workload, packed, device, regime="packed rows of changing lengths")
    forget_calls(device)
    for other in draw_shapes(workload, counted, limit):
        make_call(other, draw_inputs(other, device))()
    yield make_row("ours", "kernels", "", count_kernels(device), regime=f"{counted} shapes")


def list_changes(workload: Workload) -> dict[str, Callable[[], dict[str, Any]]]:
    """By regime, what draws the numbers of the next call."""
    spec, numbers = workload.spec, (0.9 + 1e-6 * i for i in itertools.count())
    names = ["gamma"] * spec.discounts + ["lambda_"] * (spec.lambda_ is not None)
    changes: dict[str, Callable[[], dict[str, Any]]] = {
        "annealed numbers": lambda: dict.fromkeys(names, next(numbers)),
        "NumPy numbers": lambda: dict.fromkeys(names, np.float32(next(numbers))),
    }
    return {"repeated": dict, **(changes if names else {})}


def make_call(workload: Workload, inputs: Inputs, change: Callable[[], dict[str, Any]] = dict) -> Call:
    """A call of the public function with all its results, and with other numbers each time."""
    function = getattr(ours, workload.spec.function)
    given = inputs if "cu_seqlens" in inputs else {**inputs, "time_dim": workload.time_dim}
    return lambda: function(**given, **change())


def check_results(workload: Workload, inputs: Inputs, numbers: dict[str, Any]) -> None:
    choices = numbers, {**numbers, "backend": "reference"}
    results, expected = (list_tensors(make_call(workload, inputs, lambda x=x: x)()) for x in choices)
    for x, y in zip(results, expected, strict=True):
        assert_close(x.cpu(), y.cpu().double(), rtol=1e-5)


def draw_shapes(workload: Workload, number: int, max_cells: int) -> list[Workload]:
    generator = random.Random(0)
    shapes: dict[tuple[int, int], None] = {}
    while len(shapes) < number:
        envs, steps = (int(2 ** generator.uniform(1, 13)) for _ in range(2))
        if envs * steps <= max_cells:
            shapes[envs, steps] = None
    return [workload._replace(num_envs=envs, num_steps=steps) for envs, steps in shapes]


def draw_packed(workload: Workload, seed: int, device: str) -> Inputs:
    """Up to 256 sequences of up to 512 steps, end to end."""
    generator = np.random.default_rng(seed)
    return draw_sequences(workload.estimator, generator.integers(1, 513, generator.integers(1, 257)), device)


def time_inputs(workload: Workload, draws: Iterable[Inputs], device: str, **regime: str) -> Iterator[Row]:
    """One call for each of some inputs, without those that compiled a kernel, and all of them."""
    forget_calls(device)
    times: dict[bool, list[float]] = {False: [], True: []}  # perhaps every call compiles, and none is left
    kernels = count_kernels(device)
    for i, inputs in enumerate(draws):
        timed = harness.time_host(make_call(workload, inputs), device)
        times[count_kernels(device) != kernels].append(timed)
        kernels = count_kernels(device)
        if i < CHECKED:
            check_results(workload, inputs, {})
    yield make_row("ours", "host", "µs", times[False], **regime)
    highest = [float(np.percentile(times[False], 90))] if times[False] else []
    yield make_row("ours", "host, highest decile", "µs", highest, **regime)
    mean = statistics.mean(itertools.chain(*times.values()))
    yield make_row("ours", "host, mean with those that compile", "µs", mean, **regime)
    yield make_row("ours", "calls that compile", "", len(times[True]), **regime)


def forget_calls(device: str) -> None:
    """As in a new process, but for what is compiled on disk."""
    forget_plans()
    if device == "cuda":
        VARIANTS.clear()
        list_caches().clear()


def count_kernels(device: str) -> int:
    return sum(len(caches[0]) for caches in list_caches().values()) if device == "cuda" else 0


def list_caches() -> dict[Any, Any]:
    from rl_triton_core._internal.scan.kernel.scan import scan

    caches: dict[Any, Any] = scan.device_caches
    return caches
