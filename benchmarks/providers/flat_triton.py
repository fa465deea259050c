"""Flat Triton kernels in the paper's manner: a program per row, the whole row in one associative scan.

Backward estimators load in reversed order. Rows are env-major: a time-major window is transposed, and its results back.
For rows too long for that, `blocks` has a program per row that scans one block after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.harness import Call
from benchmarks.providers.limits import FLAT_LONGEST
from benchmarks.workloads import ACTIONS, GAMMA, Inputs, Workload

Launch = Callable[[Inputs, float, int], list[Tensor]]
BLOCK = 4096
"""Steps that a walk scans at once."""


def make_call(workload: Workload, inputs: Inputs) -> Call | None:
    """The launch in the ordinary way, and the results' allocation."""
    launch_rows = LAUNCHES.get(workload.spec.function)
    if launch_rows is None or workload.num_steps > FLAT_LONGEST or workload.dtype != "float32" or "mask" in inputs:
        return None
    return run_rowwise(launch_rows, workload, inputs)


def make_block_call(workload: Workload, inputs: Inputs) -> Call | None:
    """Likewise, a program walking its row in blocks."""
    if workload.estimator not in WALKS or workload.truncated or workload.dtype != "float32":
        return None
    return run_rowwise(WALKS[workload.estimator], workload, inputs)


def run_rowwise(launch_rows: Launch, workload: Workload, inputs: Inputs) -> Call:
    """A launch on env-major rows, whatever the layout."""
    options = workload.spec.lambda_ or 1.0, len(workload.spec.outputs)
    if workload.time_dim == 1:
        return lambda: launch_rows(inputs, *options)

    def transpose_and_run() -> list[Tensor]:
        rows = {name: x.transpose(0, 1).contiguous() if x.ndim > 1 else x for name, x in inputs.items()}
        return [x.t().contiguous() for x in launch_rows(rows, *options)]

    return transpose_and_run


# --- kernels ----------------------------------------------------------------------------------------------------------


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
def find_next_value(values, bootstrap, truncated, t, inside, last, VALUES: tl.constexpr, TRUNCATED: tl.constexpr):
    """(V(s_{t+1}) unless terminated, 1 at a cut)."""
    value = tl.zeros_like(t).to(tl.float32)
    if VALUES:
        value = tl.load(values + t + 1, mask=inside & (last == 0), other=0.0)
    if TRUNCATED:
        cut = last | (tl.load(truncated + t, mask=inside, other=0) != 0)
        value = tl.where(cut, tl.load(bootstrap + t, mask=inside, other=0.0), value)
    else:
        cut = last
        value = tl.where(last, tl.load(bootstrap + tl.program_id(0)), value)
    return value, tl.where(cut, 1.0, 0.0)


@triton.jit
def gae_terms(
    rewards, values, terminated, truncated, bootstrap, t, inside, last, gamma, lambda_, TRUNCATED: tl.constexpr
):
    """(α, β, V)."""
    reward = tl.load(rewards + t, mask=inside, other=0.0)
    value = tl.load(values + t, mask=inside, other=0.0)
    nonterminal = 1.0 - tl.load(terminated + t, mask=inside, other=0).to(tl.float32)
    following, cut = find_next_value(values, bootstrap, truncated, t, inside, last, True, TRUNCATED)
    alpha = reward + gamma * nonterminal * following - value
    return alpha, gamma * lambda_ * nonterminal * (1.0 - cut), value


@triton.jit
def gae_kernel(
    rewards, values, terminated, truncated, bootstrap, out, returns, steps, gamma, lambda_,
    TRUNCATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, inside, last = index_reversed_row(steps, BLOCK)
    alpha, beta, value = gae_terms(
        rewards, values, terminated, truncated, bootstrap, t, inside, last, gamma, lambda_, TRUNCATED
    )  # fmt: skip
    advantage, _ = tl.associative_scan((alpha, beta), 0, combine)
    tl.store(out + t, advantage, mask=inside)
    if returns is not None:
        tl.store(returns + t, advantage + value, mask=inside)


@triton.jit
def gae_walk(rewards, values, terminated, bootstrap, out, returns, steps, gamma, lambda_, BLOCK: tl.constexpr):
    state = 0.0
    for start in range(0, steps, BLOCK):
        t, inside, last = index_reversed_row(steps, BLOCK, start)
        alpha, beta, value = gae_terms(
            rewards, values, terminated, None, bootstrap, t, inside, last, gamma, lambda_, False
        )  # fmt: skip
        advantage, state = scan_block(alpha, beta, state, BLOCK)
        tl.store(out + t, advantage, mask=inside)
        tl.store(returns + t, advantage + value, mask=inside)


@triton.jit
def returns_kernel(
    rewards, values, terminated, truncated, bootstrap, out, steps, gamma, lambda_,
    VALUES: tl.constexpr, TRUNCATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, inside, last = index_reversed_row(steps, BLOCK)
    reward = tl.load(rewards + t, mask=inside, other=0.0)
    nonterminal = 1.0 - tl.load(terminated + t, mask=inside, other=0).to(tl.float32)
    following, cut = find_next_value(values, bootstrap, truncated, t, inside, last, VALUES, TRUNCATED)
    beta = lambda_ * nonterminal * (1.0 - cut)
    alpha = reward + gamma * (nonterminal - beta) * following
    result, _ = tl.associative_scan((alpha, gamma * beta), 0, combine)
    tl.store(out + t, result, mask=inside)


@triton.jit
def vtrace_kernel(
    rewards, values, terminated, target, behaviour, truncated, bootstrap, targets, advantages, steps, gamma, lambda_,
    TRUNCATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, inside, last = index_reversed_row(steps, BLOCK)
    reward = tl.load(rewards + t, mask=inside, other=0.0)
    value = tl.load(values + t, mask=inside, other=0.0)
    nonterminal = 1.0 - tl.load(terminated + t, mask=inside, other=0).to(tl.float32)
    log_ratio = tl.load(target + t, mask=inside, other=0.0) - tl.load(behaviour + t, mask=inside, other=0.0)
    rho = tl.minimum(tl.exp(log_ratio), 1.0)
    following, cut = find_next_value(values, bootstrap, truncated, t, inside, last, True, TRUNCATED)
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
    steps, gamma, lambda_, ACTIONS: tl.constexpr, TRUNCATED: tl.constexpr, BLOCK: tl.constexpr,
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
    if TRUNCATED:
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
def traces_terms(x, done, truncated, steps, start, decay, TRUNCATED: tl.constexpr, BLOCK: tl.constexpr):
    """(α, β, indices into the tensors, whether they are in the row)."""
    position = start + tl.arange(0, BLOCK)
    inside, inner = position < steps, (position > 0) & (position < steps)
    t = tl.program_id(0).to(tl.int64) * steps + position
    ended = tl.load(done + t - 1, mask=inner, other=0) != 0
    if TRUNCATED:
        ended = ended | (tl.load(truncated + t - 1, mask=inner, other=0) != 0)
    return tl.load(x + t, mask=inside, other=0.0), tl.where(ended, 0.0, decay), t, inside


@triton.jit
def traces_kernel(x, done, truncated, out, steps, decay, TRUNCATED: tl.constexpr, BLOCK: tl.constexpr):
    alpha, beta, t, inside = traces_terms(x, done, truncated, steps, 0, decay, TRUNCATED, BLOCK)
    result, _ = tl.associative_scan((alpha, beta), 0, combine)
    tl.store(out + t, result, mask=inside)


@triton.jit
def traces_walk(x, done, out, steps, decay, BLOCK: tl.constexpr):
    state = 0.0
    for start in range(0, steps, BLOCK):
        alpha, beta, t, inside = traces_terms(x, done, None, steps, start, decay, False, BLOCK)
        result, state = scan_block(alpha, beta, state, BLOCK)
        tl.store(out + t, result, mask=inside)


# --- launches ---------------------------------------------------------------------------------------------------------


def choose_block(steps: int) -> dict[str, int]:
    """The block that holds a row, and warps for it."""
    block = triton.next_power_of_2(steps)
    return {"BLOCK": block, "num_warps": min(32, max(4, block // 256))}


def launch(kernel: Any, like: Tensor, outputs: int, inputs: Sequence[Tensor | None], *numbers: float, **constants: Any):
    """A kernel with a program per row, and its results; `truncated` is the input behind the flags that it needs."""
    out, (rows, steps) = [torch.empty_like(like) for _ in range(outputs)], like.shape
    kernel[(rows,)](*inputs, *out, steps, *numbers, **{**choose_block(steps), **constants})
    return out


def launch_gae(i: Inputs, lambda_: float, outputs: int) -> list[Tensor]:
    truncated = i.get("truncated")
    inputs = (i["rewards"], i["values"], i["terminated"], truncated, i["bootstrap_values"])
    if outputs == 2:
        return launch(gae_kernel, i["rewards"], 2, inputs, GAMMA, lambda_, TRUNCATED=truncated is not None)
    out = torch.empty_like(i["rewards"])
    launch(gae_kernel, i["rewards"], 0, (*inputs, out, None), GAMMA, lambda_, TRUNCATED=truncated is not None)
    return [out]


def launch_returns(i: Inputs, lambda_: float, outputs: int) -> list[Tensor]:
    values, truncated = i.get("values"), i.get("truncated")
    inputs = (i["rewards"], values, i["terminated"], truncated, i["bootstrap_values"])
    present = {"VALUES": values is not None, "TRUNCATED": truncated is not None}
    return launch(returns_kernel, i["rewards"], 1, inputs, GAMMA, lambda_, **present)


LOG_PROBS = ("target_log_probs", "behaviour_log_probs")


def launch_vtrace(i: Inputs, lambda_: float, outputs: int) -> list[Tensor]:
    truncated = i.get("truncated")
    names = ("rewards", "values", "terminated", *LOG_PROBS)
    inputs = (*(i[name] for name in names), truncated, i["bootstrap_values"])
    return launch(vtrace_kernel, i["rewards"], 2, inputs, GAMMA, lambda_, TRUNCATED=truncated is not None)


def launch_retrace(i: Inputs, lambda_: float, outputs: int) -> list[Tensor]:
    truncated = i.get("truncated")
    names = ("rewards", "q_values", "terminated", *LOG_PROBS, "next_action_probs", "next_q_values")
    inputs, present = (*(i[name] for name in names), truncated), {"TRUNCATED": truncated is not None}
    return launch(retrace_kernel, i["rewards"], 2, inputs, GAMMA, lambda_, ACTIONS=ACTIONS, **present)


def launch_traces(i: Inputs, decay: float) -> list[Tensor]:
    truncated = i.get("truncated")
    inputs = (i["x"], i["dones"] if "dones" in i else i["terminated"], truncated)
    return launch(traces_kernel, i["x"], 1, inputs, decay, TRUNCATED=truncated is not None)


def walk_gae(i: Inputs, lambda_: float, outputs: int) -> list[Tensor]:
    inputs = (i["rewards"], i["values"], i["terminated"], i["bootstrap_values"])
    return launch(gae_walk, i["rewards"], 2, inputs, GAMMA, lambda_, **choose_block(BLOCK))


def walk_traces(i: Inputs, lambda_: float, outputs: int) -> list[Tensor]:
    return launch(traces_walk, i["x"], 1, (i["x"], i["terminated"]), GAMMA * lambda_, **choose_block(BLOCK))


WALKS: dict[str, Launch] = {"gae": walk_gae, "eligibility_traces": walk_traces}
LAUNCHES: dict[str, Launch] = {
    "compute_gae": launch_gae,
    "compute_vtrace": launch_vtrace,
    "compute_retrace": launch_retrace,
    "compute_lambda_returns": launch_returns,
    "compute_discounted_returns": launch_returns,
    "compute_eligibility_traces": lambda i, lambda_, _: launch_traces(i, GAMMA * lambda_),
    "compute_episodic_prefix_sum": lambda i, _, __: launch_traces(i, 1.0),
}
