"""A serial Numba loop over each environment's row, on one thread: GAE."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from benchmarks.harness import Call
from benchmarks.workloads import GAMMA, Inputs, Workload


def make_call(workload: Workload, inputs: Inputs) -> Call | None:
    """The loop over arrays with time last, whatever the layout."""
    if workload.estimator != "gae" or workload.truncated:
        return None
    names, dim = ("rewards", "values", "terminated"), workload.time_dim
    arrays = [inputs[name].movedim(dim, 1).numpy() for name in names]
    bootstrap, lambda_ = inputs["bootstrap_values"].numpy(), workload.spec.lambda_
    rates = np.float32(GAMMA), np.float32(lambda_)
    return lambda: [torch.from_numpy(x).movedim(1, dim) for x in run_gae(*arrays, bootstrap, *rates)]


@numba.njit
def run_gae(rewards: Any, values: Any, terminated: Any, bootstrap: Any, gamma: Any, lambda_: Any) -> Any:
    """Schulman 2016."""
    advantages, returns = np.empty(rewards.shape, np.float32), np.empty(rewards.shape, np.float32)
    for n in range(rewards.shape[0]):
        advantage, following = np.float32(0), bootstrap[n]
        for t in range(rewards.shape[1] - 1, -1, -1):
            nonterminal = np.float32(0 if terminated[n, t] else 1)
            delta = rewards[n, t] + gamma * following * nonterminal - values[n, t]
            advantage = delta + gamma * lambda_ * nonterminal * advantage
            advantages[n, t], returns[n, t], following = advantage, advantage + values[n, t], values[n, t]
    return advantages, returns
