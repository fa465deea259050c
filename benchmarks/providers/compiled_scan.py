"""torch.compile of a doubling scan, compiled for each shape."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.equations import scan_by_doubling
from benchmarks.harness import Call
from benchmarks.workloads import Inputs, Workload, solve_equations

BACKEND = "inductor"


def make_call(workload: Workload, inputs: Inputs) -> Call:
    """The compiled function of the inputs."""
    torch._dynamo.reset()

    def function(inputs: Inputs) -> tuple[Tensor, ...]:
        return solve_equations(workload, inputs, scan_by_doubling)

    compiled = torch.compile(function, dynamic=False, fullgraph=True, backend=BACKEND)
    return lambda: compiled(inputs)
