"""The papers' equations on whole tensors, by way of any scan; nothing of ours is imported here.

Tensors have environments and time in either order; `dim` is time's. In float64 with a serial scan this is the oracle
that every arm must agree with, in float32 with a doubling scan the baseline that torch.compile makes fast.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.workloads import FLAGS, GAMMA, Inputs, Workload, rows_of

Scan = Callable[[Tensor, Tensor, int, bool], Tensor]
"""A[t] = α[t] + β[t]·A[t+1], or of A[t-1] if not reversed, from (α, β, time's dimension, reversed)."""

FEW = 256
"""So few environments are quicker to walk through on a CPU."""


def expected(workload: Workload, inputs: Inputs, rows: Tensor | None = None) -> tuple[Tensor, ...]:
    """The results in float64, of some environments if `rows` are given."""
    chosen = inputs if rows is None else rows_of(inputs, workload, rows)
    wide = {name: x if name in FLAGS else x.double() for name, x in chosen.items()}
    return solve(workload, wide, serial)


def solve(workload: Workload, inputs: Inputs, scan: Scan) -> tuple[Tensor, ...]:
    """The results of an estimator."""
    return EQUATIONS[workload.estimator](inputs, workload.time_dim, workload.spec.lambda_ or 1.0, scan)


# --- scans ------------------------------------------------------------------------------------------------------------


def serial(alpha: Tensor, beta: Tensor, dim: int, reverse: bool) -> Tensor:
    """One step after another."""
    device = alpha.device
    if alpha.shape[1 - dim] <= FEW:
        alpha, beta = alpha.cpu(), beta.cpu()
    alpha, beta = alpha.movedim(dim, 0).contiguous(), beta.movedim(dim, 0).contiguous()
    states, state = torch.empty_like(alpha), torch.zeros_like(alpha[0])
    steps = list(zip(alpha.unbind(), beta.unbind(), states.unbind(), strict=True))
    for a, b, out in reversed(steps) if reverse else steps:
        state = torch.addcmul(a, b, state, out=out)
    return states.movedim(0, dim).to(device)


def doubling(alpha: Tensor, beta: Tensor, dim: int, reverse: bool) -> Tensor:
    """Hillis and Steele: log2 T rounds of (α, β) <- (α + β·α_shifted, β·β_shifted)."""
    steps, shift = alpha.shape[dim], 1
    while shift < steps:
        alpha, beta = (
            alpha + beta * moved(alpha, dim, shift, reverse, 0.0),
            beta * moved(beta, dim, shift, reverse, 1.0),
        )
        shift *= 2
    return alpha


def moved(x: Tensor, dim: int, shift: int, reverse: bool, fill: float) -> Tensor:
    """x some steps later (earlier if not reversed), and the fill where there is no such step."""
    kept = x.narrow(dim, shift if reverse else 0, x.shape[dim] - shift)
    padding = [0, shift] if reverse else [shift, 0]
    return torch.nn.functional.pad(kept, padding if dim == 1 else [0, 0, *padding], value=fill)


# --- boundaries -------------------------------------------------------------------------------------------------------


def ahead(x: Tensor, dim: int, edge: Tensor) -> Tensor:
    """x[t+1], and what stands behind the end."""
    return torch.cat([x.narrow(dim, 1, x.shape[dim] - 1), edge.unsqueeze(dim)], dim)


def behind(x: Tensor, dim: int) -> Tensor:
    """x[t-1], and 0 before the start."""
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, 1)), x.narrow(dim, 0, x.shape[dim] - 1)], dim)


def departed(i: Inputs) -> Tensor:
    """Whether the episode ended."""
    flags = i["dones"] if "dones" in i else i["terminated"]
    return flags | i["truncated"] if "truncated" in i else flags


def goes_on(i: Inputs, dim: int) -> Tensor:
    """Whether the next step belongs to the same trajectory; the last one's does not."""
    steps = torch.arange(i["rewards"].shape[dim], device=i["rewards"].device)
    return ~departed(i) & (steps < len(steps) - 1).unsqueeze(1 - dim)


def next_values(i: Inputs, values: Tensor, dim: int) -> Tensor:
    """V(s_{t+1}): the bootstrap value at a cut, 0 after a terminal state."""
    bootstrap = i["bootstrap_values"]
    if bootstrap.ndim == 1:
        found = ahead(values, dim, bootstrap)
    else:
        found = torch.where(goes_on(i, dim), ahead(values, dim, bootstrap.select(dim, -1)), bootstrap)
    return torch.where(i["terminated"], 0.0, found)


# --- the estimators ---------------------------------------------------------------------------------------------------


def gae(i: Inputs, dim: int, lambda_: float, scan: Scan) -> tuple[Tensor, ...]:
    """Schulman 2016: A[t] = r + γ·NV − V + γλ·A[t+1]."""
    delta = i["rewards"] + GAMMA * next_values(i, i["values"], dim) - i["values"]
    return (scan(delta, GAMMA * lambda_ * goes_on(i, dim).to(delta.dtype), dim, True),)


def gae_with_returns(i: Inputs, dim: int, lambda_: float, scan: Scan) -> tuple[Tensor, ...]:
    """A, and the targets A + V."""
    (advantages,) = gae(i, dim, lambda_, scan)
    return advantages, advantages + i["values"]


def gae_masked(i: Inputs, dim: int, lambda_: float, scan: Scan) -> tuple[Tensor, ...]:
    """A of the row without its masked steps, for which the others are moved to the end; 0 where masked."""
    order = i["mask"].byte().argsort(dim=dim, stable=True)
    moved = {name: x.gather(dim, order) if x.ndim == 2 else x for name, x in i.items()}
    (advantages,) = gae(moved, dim, lambda_, scan)
    return (torch.zeros_like(advantages).scatter(dim, order, advantages.where(moved["mask"], 0.0)),)


def vtrace(i: Inputs, dim: int, lambda_: float, scan: Scan) -> tuple[Tensor, ...]:
    """Espeholt 2018 with all clips at 1: D[t] = ρ·(r + γ·NV − V) + γ·c·D[t+1], targets V + D, and advantages."""
    rho = (i["target_log_probs"] - i["behaviour_log_probs"]).exp().clamp(max=1)
    on, nv = goes_on(i, dim), next_values(i, i["values"], dim)
    delta = rho * (i["rewards"] + GAMMA * nv - i["values"])
    targets = i["values"] + scan(delta, GAMMA * lambda_ * rho * on.to(rho.dtype), dim, True)
    following = torch.where(on, ahead(targets, dim, nv.select(dim, -1)), nv)
    return targets, rho * (i["rewards"] + GAMMA * following - i["values"])


def retrace(i: Inputs, dim: int, lambda_: float, scan: Scan) -> tuple[Tensor, ...]:
    """Munos 2016 with all clips at 1: D[t] = r + γ·NQ − Q + γ·c[t+1]·D[t+1], targets Q + D, and advantages."""
    rho = (i["target_log_probs"] - i["behaviour_log_probs"]).exp().clamp(max=1)
    nq = torch.where(i["terminated"], 0.0, (i["next_action_probs"] * i["next_q_values"]).sum(-1))
    on = goes_on(i, dim)
    delta = i["rewards"] + GAMMA * nq - i["q_values"]
    trace = ahead(rho, dim, torch.zeros_like(rho.select(dim, 0)))
    targets = i["q_values"] + scan(delta, GAMMA * lambda_ * trace * on.to(rho.dtype), dim, True)
    following = torch.where(on, ahead(targets, dim, nq.select(dim, -1)), nq)
    return targets, rho * (i["rewards"] + GAMMA * following - i["q_values"])


def lambda_returns(i: Inputs, dim: int, lambda_: float, scan: Scan) -> tuple[Tensor, ...]:
    """Sutton & Barto 2018: G[t] = r + γ(1 − λ)·V[t+1] + γλ·G[t+1]; r + γ·NV at the end."""
    on = goes_on(i, dim).to(i["rewards"].dtype)
    alpha = i["rewards"] + GAMMA * (1 - lambda_ * on) * next_values(i, i["values"], dim)
    return (scan(alpha, GAMMA * lambda_ * on, dim, True),)


def discounted_returns(i: Inputs, dim: int, lambda_: float, scan: Scan) -> tuple[Tensor, ...]:
    """G[t] = r + γ·G[t+1]; r + γ·NV at the end."""
    on = goes_on(i, dim).to(i["rewards"].dtype)
    alpha = i["rewards"] + GAMMA * (1 - on) * next_values(i, torch.zeros_like(i["rewards"]), dim)
    return (scan(alpha, GAMMA * on, dim, True),)


def traces(i: Inputs, dim: int, lambda_: float, scan: Scan) -> tuple[Tensor, ...]:
    """z[t] = x + γλ·z[t-1] within an episode."""
    return (scan(i["x"], GAMMA * lambda_ * (1 - behind(departed(i), dim).to(i["x"].dtype)), dim, False),)


def prefix_sum(i: Inputs, dim: int, lambda_: float, scan: Scan) -> tuple[Tensor, ...]:
    """C[t] = x + C[t-1] within an episode."""
    return (scan(i["x"], 1 - behind(departed(i), dim).to(i["x"].dtype), dim, False),)


EQUATIONS = {
    "gae": gae,
    "gae_with_returns": gae_with_returns,
    "gae_masked": gae_masked,
    "vtrace": vtrace,
    "retrace": retrace,
    "lambda_returns": lambda_returns,
    "discounted_returns": discounted_returns,
    "eligibility_traces": traces,
    "prefix_sum": prefix_sum,
}
