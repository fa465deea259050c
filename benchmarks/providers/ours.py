"""The public functions, as a user calls them."""

from __future__ import annotations

from functools import partial
from inspect import unwrap
from typing import Any

import torch

import rl_triton_core
from benchmarks.harness import Call
from benchmarks.workloads import GAMMA, Inputs, Workload


def arm(workload: Workload, inputs: Inputs) -> partial[Any]:
    """The results are allocated by the call."""
    spec = workload.spec
    options: dict[str, Any] = {"time_dim": workload.time_dim, **inputs}
    if workload.estimator == "gae":
        options["compute_returns"] = False
    if workload.estimator != "prefix_sum":
        options["gamma"] = GAMMA
    if spec.lambda_ is not None:
        options["lambda_"] = spec.lambda_
    return partial(getattr(rl_triton_core, spec.function), **options)


def whole(workload: Workload, inputs: Inputs) -> Call:
    """Validated and launched anew, as when nothing is replayed."""
    call = arm(workload, inputs)
    return partial(unwrap(call.func), **call.keywords)


def with_out(workload: Workload, inputs: Inputs) -> Call:
    """The results go into tensors that are there."""
    like = inputs[workload.spec.inputs[0]]
    results = [torch.empty_like(like, dtype=torch.float32) for _ in range(workload.spec.outputs)]
    pair = {"gae": (results[0], None), "vtrace": tuple(results), "retrace": tuple(results)}
    return partial(arm(workload, inputs), out=pair.get(workload.estimator, results[0]))
