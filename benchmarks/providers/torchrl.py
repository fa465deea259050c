"""TorchRL's vectorised GAE."""

from __future__ import annotations

import torch
from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

from benchmarks.harness import Call
from benchmarks.workloads import GAMMA, Inputs, Workload


def make_call(workload: Workload, inputs: Inputs) -> Call | None:
    """The call on env-major tensors with a trailing dimension, the values after each step given."""
    if workload.estimator != "gae" or workload.truncated or workload.layout != "env-major":
        return None
    values, bootstrap = inputs["values"], inputs["bootstrap_values"]
    following = torch.cat([values[:, 1:], bootstrap[:, None]], 1)
    terminated = inputs["terminated"]
    tensors = [x.unsqueeze(-1) for x in (values, following, inputs["rewards"], terminated, terminated)]
    function, lambda_ = vec_generalized_advantage_estimate, workload.spec.lambda_
    return lambda: [x.squeeze(-1) for x in function(GAMMA, lambda_, *tensors)]
