"""torch.compile of a doubling scan, compiled for each shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.equations import scan_by_doubling
from benchmarks.harness import Call
from benchmarks.workloads import Inputs, Workload, solve_equations

BACKEND = "inductor"


def make_call(workload: Workload, inputs: Inputs) -> Call:
    """The compiled function of the inputs."""
    return partial(compile_scan(workload), inputs)


def compile_scan(workload: Workload) -> Callable[[Inputs], tuple[Tensor, ...]]:
    """The results of an estimator, compiled."""
    solve = partial(solve_equations, workload.spec, workload.time_dim, scan=scan_by_doubling)
    torch._dynamo.reset()
    return torch.compile(solve, dynamic=False, fullgraph=True, backend=BACKEND)
