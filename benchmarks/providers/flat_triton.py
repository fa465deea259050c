"""Flat Triton kernels in the paper's manner: a program per row, the whole row in one associative scan.

Backward estimators load in reversed order. Rows are env-major: a time-major window is transposed, and its results back.
For rows too long for that, `blocks` has a program per row that scans one block after another.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.harness import Call
from benchmarks.workloads import ACTIONS, GAMMA, LOG_PROBS, PER_ACTION, Inputs, Workload

FLAT_LONGEST = 131072  # longer rows are too much for a single block of one program
BLOCK = 4096  # steps that a walk scans at once


class Kernel(NamedTuple):
    """A kernel, the inputs that it takes (None for one that is not there), and how many results it may write."""

    function: Any
    inputs: tuple[str, ...]
    outputs: int = 1


def make_call(workload: Workload, inputs: Inputs) -> Call | None:
    kernel = KERNELS.get(workload.spec.function)
    if kernel is None or workload.num_steps > FLAT_LONGEST or workload.dtype != "float32" or "mask" in inputs:
        return None
    return run_rowwise(kernel, workload, inputs, workload.num_steps)


def make_block_call(workload: Workload, inputs: Inputs) -> Call | None:
    """Likewise, a program walking its row in blocks."""
    if workload.estimator not in WALKS or workload.truncated or workload.dtype != "float32":
        return None
    return run_rowwise(WALKS[workload.estimator], workload, inputs, BLOCK)


def run_rowwise(kernel: Kernel, workload: Workload, inputs: Inputs, steps_at_once: int) -> Call:
    """A launch with a program per row, on env-major rows whatever the layout."""
    lambda_ = workload.spec.lambda_ or 1.0
    decay = GAMMA * lambda_ if workload.spec.discounts else 1.0
    numbers = (workload.num_steps, *((decay,) if "x" in inputs else (GAMMA, lambda_)))
    block = triton.next_power_of_2(steps_at_once)
    options = {"BLOCK": block, "num_warps": min(32, max(4, block // 256))}

    def launch_kernel(rows: Inputs) -> list[Tensor]:
        out = [torch.empty_like(rows[kernel.inputs[0]]) for _ in workload.spec.outputs]
        left_out = [None] * (kernel.outputs - len(out))
        tensors = (*map(rows.get, kernel.inputs), *out, *left_out)
        kernel.function[(workload.num_envs,)](*tensors, *numbers, **options)
        return out

    def transpose_and_launch() -> list[Tensor]:
        rows = {name: x.transpose(0, 1).contiguous() if x.ndim > 1 else x for name, x in inputs.items()}
        return [x.t().contiguous() for x in launch_kernel(rows)]

    return partial(launch_kernel, inputs) if workload.time_dim == 1 else transpose_and_launch


@triton.jit
def combine(alpha, beta, alpha_next, beta_next):
    return alpha_next + beta_next * alpha, beta_next * beta


@triton.jit
def scan_block(alpha, beta, state, BLOCK: tl.constexpr):
    """(the states of a block after the one that enters it, the last of them)."""
    states, decays = tl.associative_scan((alpha, beta), 0, combine)
    states += decays * state
    return states, tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, states, 0.0), 0)


@triton.jit
def index_reversed_row(steps, BLOCK: tl.constexpr, start=0):
    """(indices into the tensors, whether they are in the row, whether they are the last step)."""
    position = start + tl.arange(0, BLOCK)
    t = tl.program_id(0).to(tl.int64) * steps + (steps - 1 - position)
    return t, position < steps, position == 0


@triton.jit
def find_next_value(values, bootstrap, truncated, t, inside, last):
    """(V(s_{t+1}) unless terminated, 1 at a cut)."""
    value = tl.zeros_like(t).to(tl.float32)
    if values is not None:
        value = tl.load(values + t + 1, mask=inside & (last == 0), other=0.0)
    if truncated is not None:
        cut = last | (tl.load(truncated + t, mask=inside, other=0) != 0)
        value = tl.where(cut, tl.load(bootstrap + t, mask=inside, other=0.0), value)
    else:
        cut = last
        value = tl.where(last, tl.load(bootstrap + tl.program_id(0)), value)
    return value, tl.where(cut, 1.0, 0.0)


@triton.jit
def gae_terms(rewards, values, terminated, truncated, bootstrap, t, inside, last, gamma, lambda_):
    """(α, β, V)."""
    reward = tl.load(rewards + t, mask=inside, other=0.0)
    value = tl.load(values + t, mask=inside, other=0.0)
    nonterminal = 1.0 - tl.load(terminated + t, mask=inside, other=0).to(tl.float32)
    following, cut = find_next_value(values, bootstrap, truncated, t, inside, last)
    alpha = reward + gamma * nonterminal * following - value
    return alpha, gamma * lambda_ * nonterminal * (1.0 - cut), value


@triton.jit
def gae_kernel(
    rewards, values, terminated, truncated, bootstrap, out, returns, steps, gamma, lambda_, BLOCK: tl.constexpr
):
    t, inside, last = index_reversed_row(steps, BLOCK)
    alpha, beta, value = gae_terms(rewards, values, terminated, truncated, bootstrap, t, inside, last, gamma, lambda_)
    advantage, _ = tl.associative_scan((alpha, beta), 0, combine)
    tl.store(out + t, advantage, mask=inside)
    if returns is not None:
        tl.store(returns + t, advantage + value, mask=inside)


@triton.jit
def gae_walk(rewards, values, terminated, bootstrap, out, returns, steps, gamma, lambda_, BLOCK: tl.constexpr):
    state = 0.0
    for start in range(0, steps, BLOCK):
        t, inside, last = index_reversed_row(steps, BLOCK, start)
        alpha, beta, value = gae_terms(rewards, values, terminated, None, bootstrap, t, inside, last, gamma, lambda_)
        advantage, state = scan_block(alpha, beta, state, BLOCK)
        tl.store(out + t, advantage, mask=inside)
        tl.store(returns + t, advantage + value, mask=inside)


@triton.jit
def returns_kernel(rewards, values, terminated, truncated, bootstrap, out, steps, gamma, lambda_, BLOCK: tl.constexpr):
    t, inside, last = index_reversed_row(steps, BLOCK)
    reward = tl.load(rewards + t, mask=inside, other=0.0)
    nonterminal = 1.0 - tl.load(terminated + t, mask=inside, other=0).to(tl.float32)
    following, cut = find_next_value(values, bootstrap, truncated, t, inside, last)
    beta = lambda_ * nonterminal * (1.0 - cut)
    alpha = reward + gamma * (nonterminal - beta) * following
    result, _ = tl.associative_scan((alpha, gamma * beta), 0, combine)
    tl.store(out + t, result, mask=inside)


@triton.jit
def vtrace_kernel(
    rewards, values, terminated, target, behaviour, truncated, bootstrap, targets, advantages, steps, gamma, lambda_,
    BLOCK: tl.constexpr,
):  # fmt: skip
    t, inside, last = index_reversed_row(steps, BLOCK)
    reward = tl.load(rewards + t, mask=inside, other=0.0)
    value = tl.load(values + t, mask=inside, other=0.0)
    nonterminal = 1.0 - tl.load(terminated + t, mask=inside, other=0).to(tl.float32)
    log_ratio = tl.load(target + t, mask=inside, other=0.0) - tl.load(behaviour + t, mask=inside, other=0.0)
    rho = tl.minimum(tl.exp(log_ratio), 1.0)
    following, cut = find_next_value(values, bootstrap, truncated, t, inside, last)
    inner = nonterminal * (1.0 - cut)
    alpha = rho * (reward + gamma * nonterminal * following - value)
    error, _ = tl.associative_scan((alpha, gamma * lambda_ * rho * inner), 0, combine)
    tl.store(targets + t, value + error, mask=inside)
    tl.debug_barrier()
    after = tl.load(targets + t + 1, mask=inside & (last == 0), other=0.0)
    ahead = tl.where(inner > 0, after, nonterminal * following)
    tl.store(advantages + t, rho * (reward + gamma * ahead - value), mask=inside)


@triton.jit
def retrace_kernel(
    rewards, q_values, terminated, target, behaviour, next_probs, next_q, truncated, targets, advantages,
    steps, gamma, lambda_, BLOCK: tl.constexpr, ACTIONS: tl.constexpr = ACTIONS,
):  # fmt: skip
    t, inside, last = index_reversed_row(steps, BLOCK)
    not_last = inside & (last == 0)
    reward = tl.load(rewards + t, mask=inside, other=0.0)
    q_value = tl.load(q_values + t, mask=inside, other=0.0)
    nonterminal = 1.0 - tl.load(terminated + t, mask=inside, other=0).to(tl.float32)
    following = tl.zeros_like(reward)
    for a in tl.static_range(ACTIONS):
        probability = tl.load(next_probs + t * ACTIONS + a, mask=inside, other=0.0)
        following += probability * tl.load(next_q + t * ACTIONS + a, mask=inside, other=0.0)
    following *= nonterminal
    log_ratio = tl.load(target + t, mask=inside, other=0.0) - tl.load(behaviour + t, mask=inside, other=0.0)
    log_after = tl.load(target + t + 1, mask=not_last, other=0.0) - tl.load(behaviour + t + 1, mask=not_last, other=0.0)
    cut = last
    if truncated is not None:
        cut = last | (tl.load(truncated + t, mask=inside, other=0) != 0)
    inner = nonterminal * tl.where(cut, 0.0, 1.0)
    alpha = reward + gamma * following - q_value
    beta = gamma * lambda_ * tl.minimum(tl.exp(log_after), 1.0) * inner
    error, _ = tl.associative_scan((alpha, beta), 0, combine)
    tl.store(targets + t, q_value + error, mask=inside)
    tl.debug_barrier()
    ahead = tl.where(inner > 0, tl.load(targets + t + 1, mask=not_last, other=0.0), following)
    rho = tl.minimum(tl.exp(log_ratio), 1.0)
    tl.store(advantages + t, rho * (reward + gamma * ahead - q_value), mask=inside)


@triton.jit
def traces_terms(x, done, truncated, steps, start, decay, BLOCK: tl.constexpr):
    """(α, β, indices into the tensors, whether they are in the row)."""
    position = start + tl.arange(0, BLOCK)
    inside, inner = position < steps, (position > 0) & (position < steps)
    t = tl.program_id(0).to(tl.int64) * steps + position
    ended = tl.load(done + t - 1, mask=inner, other=0) != 0
    if truncated is not None:
        ended = ended | (tl.load(truncated + t - 1, mask=inner, other=0) != 0)
    return tl.load(x + t, mask=inside, other=0.0), tl.where(ended, 0.0, decay), t, inside


@triton.jit
def traces_kernel(x, done, truncated, out, steps, decay, BLOCK: tl.constexpr):
    alpha, beta, t, inside = traces_terms(x, done, truncated, steps, 0, decay, BLOCK)
    result, _ = tl.associative_scan((alpha, beta), 0, combine)
    tl.store(out + t, result, mask=inside)


@triton.jit
def traces_walk(x, done, out, steps, decay, BLOCK: tl.constexpr):
    state = 0.0
    for start in range(0, steps, BLOCK):
        alpha, beta, t, inside = traces_terms(x, done, None, steps, start, decay, BLOCK)
        result, state = scan_block(alpha, beta, state, BLOCK)
        tl.store(out + t, result, mask=inside)


ENDS = ("truncated", "bootstrap_values")
KERNELS = {
    "compute_gae": Kernel(gae_kernel, ("rewards", "values", "terminated", *ENDS), 2),
    "compute_vtrace": Kernel(vtrace_kernel, ("rewards", "values", "terminated", *LOG_PROBS, *ENDS), 2),
    "compute_retrace": Kernel(
        retrace_kernel, ("rewards", "q_values", "terminated", *LOG_PROBS, *PER_ACTION, "truncated"), 2
    ),
    "compute_lambda_returns": Kernel(returns_kernel, ("rewards", "values", "terminated", *ENDS)),
    "compute_discounted_returns": Kernel(returns_kernel, ("rewards", "values", "terminated", *ENDS)),
    "compute_eligibility_traces": Kernel(traces_kernel, ("x", "terminated", "truncated")),
    "compute_episodic_prefix_sum": Kernel(traces_kernel, ("x", "dones", "truncated")),
}
WALKS = {
    "gae": Kernel(gae_walk, ("rewards", "values", "terminated", "bootstrap_values"), 2),
    "eligibility_traces": Kernel(traces_walk, ("x", "terminated")),
}
