"""rlax's GAE under JAX, compiled."""

from __future__ import annotations

import jax
import numpy as np
import rlax
import torch

from benchmarks.harness import Call
from benchmarks.workloads import GAMMA, Inputs, Workload


def arm(workload: Workload, inputs: Inputs) -> Call | None:
    """The call on arrays that JAX holds, until its result is there."""
    if workload.estimator != "gae" or workload.truncated or workload.layout != "env-major":
        return None
    lambda_ = workload.spec.lambda_

    def row(rewards: jax.Array, discounts: jax.Array, values: jax.Array) -> jax.Array:
        return rlax.truncated_generalized_advantage_estimation(rewards, discounts, lambda_, values)

    compiled = jax.jit(jax.vmap(row))
    values = torch.cat([inputs["values"], inputs["bootstrap_values"][:, None]], 1)
    discounts = GAMMA * ~inputs["terminated"]
    arrays = [jax.numpy.asarray(x.numpy()) for x in (inputs["rewards"], discounts, values)]
    return lambda: torch.from_numpy(np.asarray(compiled(*arrays).block_until_ready()))
