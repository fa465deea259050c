"""What the protocol itself costs, and what PyTorch asks for one elementwise operation on the same shape."""

from __future__ import annotations

import torch

from benchmarks.harness import Call
from benchmarks.workloads import Inputs, Workload


def make_null_call(workload: Workload, inputs: Inputs) -> Call:
    """Nothing."""
    return lambda: None


def make_torch_add(workload: Workload, inputs: Inputs) -> Call:
    """a + b in float32."""
    device = next(iter(inputs.values())).device
    a, b = torch.ones(2, workload.num_envs, workload.num_steps, device=device)
    return lambda: torch.add(a, b)
