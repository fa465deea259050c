"""The public functions, as a user calls them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import rl_triton_core
from benchmarks.harness import Call
from benchmarks.workloads import ESTIMATORS, GAMMA, Inputs, Workload


def make_call(workload: Workload, inputs: Inputs) -> partial[Any]:
    """The results are allocated by the call."""
    spec = workload.spec
    options: dict[str, Any] = {"time_dim": workload.time_dim, **inputs}
    if spec.function == "compute_gae" and spec.outputs == ("advantages",):
        options["compute_returns"] = False
    if spec.discounts:
        options["gamma"] = GAMMA
    if spec.lambda_ is not None:
        options["lambda_"] = spec.lambda_
    return partial(getattr(rl_triton_core, spec.function), **options)


def make_call_with_out(workload: Workload, inputs: Inputs) -> Call:
    """The results go into tensors that are there."""
    like = inputs[workload.spec.inputs[0]]
    results = [torch.empty_like(like, dtype=torch.float32) for _ in workload.spec.outputs]
    out = (*results, None)[:2] if workload.spec.function in PAIRS else results[0]
    return partial(make_call(workload, inputs), out=out)


PAIRS = {spec.function for spec in ESTIMATORS.values() if len(spec.outputs) == 2}
"""The functions that have two results."""
