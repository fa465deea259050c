"""rlax's GAE under JAX, compiled."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import rlax
import torch

from benchmarks.harness import Call
from benchmarks.workloads import GAMMA, Inputs, Workload


def make_call(workload: Workload, inputs: Inputs) -> Call | None:
    """The call on arrays that JAX holds, until its result is there."""
    if workload.estimator != "gae" or workload.truncated or workload.layout != "env-major":
        return None
    lambda_ = workload.spec.lambda_

    def run_row(rewards: jax.Array, discounts: jax.Array, values: jax.Array) -> Any:
        advantages = rlax.truncated_generalized_advantage_estimation(rewards, discounts, lambda_, values)
        return advantages, advantages + values[:-1]

    compiled = jax.jit(jax.vmap(run_row))
    values = torch.cat([inputs["values"], inputs["bootstrap_values"][:, None]], 1)
    discounts = GAMMA * ~inputs["terminated"]
    arrays = [jax.numpy.asarray(x.numpy()) for x in (inputs["rewards"], discounts, values)]
    return lambda: [torch.from_numpy(np.asarray(x.block_until_ready())) for x in compiled(*arrays)]
