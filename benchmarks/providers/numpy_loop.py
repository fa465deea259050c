"""A NumPy loop over time on all environments in float32, in the paper's order: that of the accuracy measurements."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks import accuracy
from benchmarks.harness import Call
from benchmarks.workloads import GAMMA, Inputs, Workload

NAMES = {"x": "rewards", "q_values": "values", "dones": "terminated", "bootstrap_values": "bootstrap"}
LOOPS = {
    "gae": accuracy.gae,
    "vtrace": accuracy.vtrace,
    "retrace": accuracy.retrace,
    "lambda_returns": accuracy.lambda_returns,
    "discounted_returns": accuracy.discounted_returns,
    "eligibility_traces": accuracy.eligibility_traces,
    "prefix_sum": accuracy.episodic_prefix_sum,
}


def arm(workload: Workload, inputs: Inputs) -> Call:
    """The loop over arrays with time first, whatever the layout."""
    dim, loop = workload.time_dim, LOOPS[workload.estimator]
    arrays = {NAMES.get(name, name): (x.movedim(dim, 0) if x.ndim > 1 else x).numpy() for name, x in inputs.items()}
    absent = np.zeros_like(arrays["rewards"])
    discount, lambda_ = (np.asarray(x, np.float32) for x in (GAMMA, workload.spec.lambda_ or 1.0))
    known = {name: arrays.get(name, absent) for name in ("values", "bootstrap", "rewards", "terminated")}

    def call() -> list[Tensor]:
        extra = {}
        if workload.estimator in ("vtrace", "retrace"):
            extra["log_ratios"] = arrays["target_log_probs"] - arrays["behaviour_log_probs"]
        if workload.estimator == "retrace":
            extra["next_q"] = (arrays["next_action_probs"] * arrays["next_q_values"]).sum(-1)
        window = accuracy.Window(
            **known,
            truncated=arrays.get("truncated", np.zeros_like(absent, bool)),
            **{name: extra.get(name, absent) for name in ("log_ratios", "next_q")},
            beta=absent,
            gamma=discount,
            lambda_=lambda_,
            decay=discount * lambda_,
        )
        results = loop(window)[: workload.spec.outputs]
        return [torch.from_numpy(np.ascontiguousarray(x)).movedim(0, dim) for x in results]

    return call
