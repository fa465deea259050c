"""Flat Triton kernels in the paper's manner: a program per row, the whole row in one associative scan.

Backward estimators load in reversed order. Rows are env-major: a time-major window is transposed, and its results back.
For rows too long for that, `blocks` has a program per row that scans one block after another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.harness import Call
from benchmarks.providers.limits import FLAT_LONGEST
from benchmarks.workloads import ACTIONS, GAMMA, Inputs, Workload

Launch = Callable[[Inputs, float], list[Tensor]]
BLOCK = 4096
"""Steps that a walk scans at once."""


def arm(workload: Workload, inputs: Inputs) -> Call | None:
    """The launch in the ordinary way, and the results' allocation."""
    if workload.num_steps > FLAT_LONGEST or workload.dtype != "float32":
        return None
    return rowwise(LAUNCHES[workload.estimator], workload, inputs)


def blocks(workload: Workload, inputs: Inputs) -> Call | None:
    """Likewise, a program walking its row in blocks."""
    if workload.estimator not in WALKS or workload.truncated or workload.dtype != "float32":
        return None
    return rowwise(WALKS[workload.estimator], workload, inputs)


def rowwise(launch: Launch, workload: Workload, inputs: Inputs) -> Call:
    """A launch on env-major rows, whatever the layout."""
    lambda_ = workload.spec.lambda_ or 1.0
    if workload.time_dim == 1:
        return lambda: launch(inputs, lambda_)

    def transposing() -> list[Tensor]:
        rows = {name: x.transpose(0, 1).contiguous() if x.ndim > 1 else x for name, x in inputs.items()}
        return [x.t().contiguous() for x in launch(rows, lambda_)]

    return transposing


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def combine(alpha, beta, alpha_next, beta_next):
    return alpha_next + beta_next * alpha, beta_next * beta


@triton.jit
def scanned(alpha, beta, state, BLOCK: tl.constexpr):
    """(the states of a block after the one that enters it, the last of them)."""
    states, decays = tl.associative_scan((alpha, beta), 0, combine)
    states += decays * state
    return states, tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, states, 0.0), 0)


@triton.jit
def reversed_row(steps, BLOCK: tl.constexpr, start=0):
    """(indices into the tensors, whether they are in the row, whether they are the last step)."""
    position = start + tl.arange(0, BLOCK)
    t = tl.program_id(0).to(tl.int64) * steps + (steps - 1 - position)
    return t, position < steps, position == 0


@triton.jit
def value_after(values, bootstrap, truncated, t, inside, last, VALUES: tl.constexpr, TRUNCATED: tl.constexpr):
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
    """(α, β)."""
    reward = tl.load(rewards + t, mask=inside, other=0.0)
    value = tl.load(values + t, mask=inside, other=0.0)
    nonterminal = 1.0 - tl.load(terminated + t, mask=inside, other=0).to(tl.float32)
    following, cut = value_after(values, bootstrap, truncated, t, inside, last, True, TRUNCATED)
    return reward + gamma * nonterminal * following - value, gamma * lambda_ * nonterminal * (1.0 - cut)


@triton.jit
def gae_kernel(
    rewards, values, terminated, truncated, bootstrap, out, steps, gamma, lambda_,
    TRUNCATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, inside, last = reversed_row(steps, BLOCK)
    terms = gae_terms(
        rewards, values, terminated, truncated, bootstrap, t, inside, last, gamma, lambda_, TRUNCATED
    )  # fmt: skip
    advantage, _ = tl.associative_scan(terms, 0, combine)
    tl.store(out + t, advantage, mask=inside)


@triton.jit
def gae_walk(rewards, values, terminated, bootstrap, out, steps, gamma, lambda_, BLOCK: tl.constexpr):
    state = 0.0
    for start in range(0, steps, BLOCK):
        t, inside, last = reversed_row(steps, BLOCK, start)
        alpha, beta = gae_terms(
            rewards, values, terminated, None, bootstrap, t, inside, last, gamma, lambda_, False
        )  # fmt: skip
        advantage, state = scanned(alpha, beta, state, BLOCK)
        tl.store(out + t, advantage, mask=inside)


@triton.jit
def returns_kernel(
    rewards, values, terminated, truncated, bootstrap, out, steps, gamma, lambda_,
    VALUES: tl.constexpr, TRUNCATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, inside, last = reversed_row(steps, BLOCK)
    reward = tl.load(rewards + t, mask=inside, other=0.0)
    nonterminal = 1.0 - tl.load(terminated + t, mask=inside, other=0).to(tl.float32)
    following, cut = value_after(values, bootstrap, truncated, t, inside, last, VALUES, TRUNCATED)
    beta = lambda_ * nonterminal * (1.0 - cut)
    alpha = reward + gamma * (nonterminal - beta) * following
    result, _ = tl.associative_scan((alpha, gamma * beta), 0, combine)
    tl.store(out + t, result, mask=inside)


@triton.jit
def vtrace_kernel(
    rewards, values, terminated, target, behaviour, truncated, bootstrap, targets, advantages, steps, gamma, lambda_,
    TRUNCATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, inside, last = reversed_row(steps, BLOCK)
    reward = tl.load(rewards + t, mask=inside, other=0.0)
    value = tl.load(values + t, mask=inside, other=0.0)
    nonterminal = 1.0 - tl.load(terminated + t, mask=inside, other=0).to(tl.float32)
    log_ratio = tl.load(target + t, mask=inside, other=0.0) - tl.load(behaviour + t, mask=inside, other=0.0)
    rho = tl.minimum(tl.exp(log_ratio), 1.0)
    following, cut = value_after(values, bootstrap, truncated, t, inside, last, True, TRUNCATED)
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
    t, inside, last = reversed_row(steps, BLOCK)
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
        result, state = scanned(alpha, beta, state, BLOCK)
        tl.store(out + t, result, mask=inside)


# --- launches ---------------------------------------------------------------------------------------------------------


def settings(steps: int) -> dict[str, int]:
    """The block that holds a row, and warps for it."""
    block = triton.next_power_of_2(steps)
    return {"BLOCK": block, "num_warps": min(32, max(4, block // 256))}


def gae(i: Inputs, lambda_: float) -> list[Tensor]:
    rewards, truncated = i["rewards"], i.get("truncated")
    out, (rows, steps) = torch.empty_like(rewards), rewards.shape
    gae_kernel[(rows,)](
        rewards, i["values"], i["terminated"], truncated, i["bootstrap_values"], out, steps, GAMMA, lambda_,
        TRUNCATED=truncated is not None, **settings(steps),
    )  # fmt: skip
    return [out]


def returns(i: Inputs, lambda_: float) -> list[Tensor]:
    rewards, values, truncated = i["rewards"], i.get("values"), i.get("truncated")
    out, (rows, steps) = torch.empty_like(rewards), rewards.shape
    returns_kernel[(rows,)](
        rewards, values, i["terminated"], truncated, i["bootstrap_values"], out, steps, GAMMA, lambda_,
        VALUES=values is not None, TRUNCATED=truncated is not None, **settings(steps),
    )  # fmt: skip
    return [out]


def vtrace(i: Inputs, lambda_: float) -> list[Tensor]:
    rewards, truncated = i["rewards"], i.get("truncated")
    targets, advantages, (rows, steps) = torch.empty_like(rewards), torch.empty_like(rewards), rewards.shape
    vtrace_kernel[(rows,)](
        rewards, i["values"], i["terminated"], i["target_log_probs"], i["behaviour_log_probs"], truncated,
        i["bootstrap_values"], targets, advantages, steps, GAMMA, lambda_,
        TRUNCATED=truncated is not None, **settings(steps),
    )  # fmt: skip
    return [targets, advantages]


def retrace(i: Inputs, lambda_: float) -> list[Tensor]:
    rewards, truncated = i["rewards"], i.get("truncated")
    targets, advantages, (rows, steps) = torch.empty_like(rewards), torch.empty_like(rewards), rewards.shape
    retrace_kernel[(rows,)](
        rewards, i["q_values"], i["terminated"], i["target_log_probs"], i["behaviour_log_probs"],
        i["next_action_probs"], i["next_q_values"], truncated, targets, advantages, steps, GAMMA, lambda_,
        ACTIONS=ACTIONS, TRUNCATED=truncated is not None, **settings(steps),
    )  # fmt: skip
    return [targets, advantages]


def traces(i: Inputs, decay: float) -> list[Tensor]:
    x, truncated = i["x"], i.get("truncated")
    done = i["dones"] if "dones" in i else i["terminated"]
    out, (rows, steps) = torch.empty_like(x), x.shape
    traces_kernel[(rows,)](
        x, done, truncated, out, steps, decay, TRUNCATED=truncated is not None, **settings(steps)
    )  # fmt: skip
    return [out]


def walked_gae(i: Inputs, lambda_: float) -> list[Tensor]:
    rewards = i["rewards"]
    out, (rows, steps) = torch.empty_like(rewards), rewards.shape
    gae_walk[(rows,)](
        rewards, i["values"], i["terminated"], i["bootstrap_values"], out, steps, GAMMA, lambda_, **settings(BLOCK)
    )
    return [out]


def walked_traces(i: Inputs, lambda_: float) -> list[Tensor]:
    x = i["x"]
    out, (rows, steps) = torch.empty_like(x), x.shape
    traces_walk[(rows,)](x, i["terminated"], out, steps, GAMMA * lambda_, **settings(BLOCK))
    return [out]


WALKS: dict[str, Launch] = {"gae": walked_gae, "eligibility_traces": walked_traces}
LAUNCHES: dict[str, Launch] = {
    "gae": gae,
    "vtrace": vtrace,
    "retrace": retrace,
    "lambda_returns": returns,
    "discounted_returns": returns,
    "eligibility_traces": lambda i, lambda_: traces(i, GAMMA * lambda_),
    "prefix_sum": lambda i, _: traces(i, 1.0),
}
