"""A NumPy loop over time on all environments in float32; what comes before and after it is done by PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Call
from benchmarks.workloads import Inputs, Workload, solve_equations


def make_call(workload: Workload, inputs: Inputs) -> Call:
    """The paper's equation around the loop."""
    return lambda: solve_equations(workload, inputs, scan_in_numpy)


def scan_in_numpy(alpha: Tensor, beta: Tensor, dim: int, reverse: bool) -> Tensor:
    """A[t] = α[t] + β[t]·A[neighbour], a step at a time."""
    a, b = (x.movedim(dim, 0).numpy() for x in (alpha, beta))
    states, state = np.empty_like(a), np.zeros_like(a[0])
    for t in range(len(a))[:: -1 if reverse else 1]:
        state = states[t] = a[t] + b[t] * state
    return torch.from_numpy(states).movedim(0, dim)
