"""What the estimators take and give, and the papers' equations by way of any scan; nothing of ours is imported here.

Tensors have environments and time in either order; `dim` is the dimension of time. With a serial scan in float64 this
is the oracle that every arm must agree with, and with a doubling scan the baseline that torch.compile makes fast.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Inputs = dict[str, Tensor]
Scan = Callable[[Tensor, Tensor, int, bool], Tensor]
"""A[t] = α[t] + β[t]·A[t+1], or of A[t-1] if not reversed, from (α, β, dimension of time, reversed)."""

Equation = Callable[[Inputs, int, "Rates", Scan], tuple[Tensor, ...]]
"""The results, from the inputs, the dimension of time, the discounts, and a scan."""

GAMMA = 0.99
ACTIONS = 4
FLAGS = {"terminated": 0.02, "truncated": 0.01, "dones": 0.02, "mask": 0.9}  # flags, and how often they are set
LOG_PROBS = ("target_log_probs", "behaviour_log_probs")
PER_ACTION = ("next_action_probs", "next_q_values")


class Rates(NamedTuple):
    """γ and λ."""

    gamma: float = GAMMA
    lambda_: float = 1.0


def scan_serially(alpha: Tensor, beta: Tensor, dim: int, reverse: bool) -> Tensor:
    """One step after another in NumPy, in the dtype of α."""
    a, b = (x.movedim(dim, 0).cpu().numpy() for x in (alpha, beta))
    states, state = np.empty_like(a), np.zeros_like(a[0])
    for t in range(len(a))[:: -1 if reverse else 1]:
        state = states[t] = a[t] + b[t] * state
    return torch.from_numpy(states).movedim(0, dim).to(alpha.device)


def scan_by_doubling(alpha: Tensor, beta: Tensor, dim: int, reverse: bool) -> Tensor:
    """Hillis and Steele: log2 T rounds of (α, β) <- (α + β·α_shifted, β·β_shifted)."""
    steps, shift = alpha.shape[dim], 1
    while shift < steps:
        alpha, beta = (
            alpha + beta * shift_steps(alpha, dim, shift, reverse, 0.0),
            beta * shift_steps(beta, dim, shift, reverse, 1.0),
        )
        shift *= 2
    return alpha


def shift_steps(x: Tensor, dim: int, shift: int, reverse: bool, fill: float) -> Tensor:
    """x some steps later (earlier if not reversed), and the fill where there is no such step."""
    kept = x.narrow(dim, shift if reverse else 0, x.shape[dim] - shift)
    padding = [0, shift] if reverse else [shift, 0]
    return torch.nn.functional.pad(kept, padding if dim == 1 else [0, 0, *padding], value=fill)


def look_ahead(x: Tensor, dim: int, last: Tensor) -> Tensor:
    """x[t+1], and `last` after the last step."""
    return torch.cat([x.narrow(dim, 1, x.shape[dim] - 1), last.unsqueeze(dim)], dim)


def find_done(i: Inputs) -> Tensor:
    flags = i["dones"] if "dones" in i else i["terminated"]
    return flags | i["truncated"] if "truncated" in i else flags


def find_continuing(i: Inputs, dim: int) -> Tensor:
    """Whether the next step belongs to the same trajectory; that of the last step does not."""
    steps = torch.arange(i["rewards"].shape[dim], device=i["rewards"].device)
    return ~find_done(i) & (steps < len(steps) - 1).unsqueeze(1 - dim)


def find_next_values(i: Inputs, values: Tensor, dim: int) -> Tensor:
    """V(s_{t+1}): the bootstrap value at a cut, 0 after a terminal state."""
    bootstrap = i["bootstrap_values"]
    if bootstrap.ndim == 1:
        found = look_ahead(values, dim, bootstrap)
    else:
        inside = look_ahead(values, dim, bootstrap.select(dim, -1))
        found = torch.where(find_continuing(i, dim), inside, bootstrap)
    return torch.where(i["terminated"], 0.0, found)


def solve_gae(i: Inputs, dim: int, rates: Rates, scan: Scan) -> tuple[Tensor, ...]:
    """Schulman 2016: A[t] = r + γ·NV − V + γλ·A[t+1], and the targets A + V."""
    if "mask" in i:
        return solve_masked_gae(i, dim, rates, scan)
    delta = i["rewards"] + rates.gamma * find_next_values(i, i["values"], dim) - i["values"]
    advantages = scan(delta, rates.gamma * rates.lambda_ * find_continuing(i, dim).to(delta.dtype), dim, True)
    return advantages, advantages + i["values"]


def solve_masked_gae(i: Inputs, dim: int, rates: Rates, scan: Scan) -> tuple[Tensor, ...]:
    """GAE of the row without its masked steps, for which the others are moved to the end; 0 where masked."""
    order = i["mask"].byte().argsort(dim=dim, stable=True)
    moved = {name: x.gather(dim, order) if x.ndim == 2 else x for name, x in i.items()}
    valid = moved.pop("mask")
    results = solve_gae(moved, dim, rates, scan)
    return tuple(torch.zeros_like(x).scatter(dim, order, x.where(valid, 0.0)) for x in results)


def solve_vtrace(i: Inputs, dim: int, rates: Rates, scan: Scan) -> tuple[Tensor, ...]:
    """Espeholt 2018 with all clips at 1: D[t] = ρ·(r + γ·NV − V) + γ·c·D[t+1], targets V + D, and advantages."""
    rho = (i["target_log_probs"] - i["behaviour_log_probs"]).exp().clamp(max=1)
    continues, next_values = find_continuing(i, dim), find_next_values(i, i["values"], dim)
    delta = rho * (i["rewards"] + rates.gamma * next_values - i["values"])
    beta = rates.gamma * (rates.lambda_ * rho) * continues.to(rho.dtype)
    targets = i["values"] + scan(delta, beta, dim, True)
    next_targets = torch.where(continues, look_ahead(targets, dim, next_values.select(dim, -1)), next_values)
    return targets, rho * (i["rewards"] + rates.gamma * next_targets - i["values"])


def solve_retrace(i: Inputs, dim: int, rates: Rates, scan: Scan) -> tuple[Tensor, ...]:
    """Munos 2016 with all clips at 1: D[t] = r + γ·NQ − Q + γ·c[t+1]·D[t+1], targets Q + D, and advantages."""
    rho = (i["target_log_probs"] - i["behaviour_log_probs"]).exp().clamp(max=1)
    expected = i["expected_next_q"] if "expected_next_q" in i else (i["next_action_probs"] * i["next_q_values"]).sum(-1)
    next_q, continues = torch.where(i["terminated"], 0.0, expected), find_continuing(i, dim)
    delta = i["rewards"] + rates.gamma * next_q - i["q_values"]
    trace = look_ahead(rates.lambda_ * rho, dim, torch.zeros_like(rho.select(dim, 0)))
    targets = i["q_values"] + scan(delta, rates.gamma * trace * continues.to(rho.dtype), dim, True)
    next_targets = torch.where(continues, look_ahead(targets, dim, next_q.select(dim, -1)), next_q)
    return targets, rho * (i["rewards"] + rates.gamma * next_targets - i["q_values"])


def solve_lambda_returns(i: Inputs, dim: int, rates: Rates, scan: Scan) -> tuple[Tensor, ...]:
    """Sutton & Barto 2018: G[t] = r + γ(1 − λ)·V[t+1] + γλ·G[t+1]; r + γ·NV at the end."""
    values = i["values"] if "values" in i else torch.zeros_like(i["rewards"])
    continues = find_continuing(i, dim).to(i["rewards"].dtype)
    weights = rates.gamma * (1 - rates.lambda_ * continues)
    alpha = i["rewards"] + weights * find_next_values(i, values, dim)
    return (scan(alpha, rates.gamma * rates.lambda_ * continues, dim, True),)


def solve_traces(i: Inputs, dim: int, rates: Rates, scan: Scan) -> tuple[Tensor, ...]:
    """z[t] = x + γλ·z[t-1] within an episode, and prefix sums without discounts."""
    done = find_done(i)
    continues = ~torch.cat([torch.zeros_like(done.narrow(dim, 0, 1)), done.narrow(dim, 0, done.shape[dim] - 1)], dim)
    return (scan(i["x"], rates.gamma * rates.lambda_ * continues.to(i["x"].dtype), dim, False),)


class Estimator(NamedTuple):
    """A public function, its equation, its inputs per step by the names of its arguments, and the results asked for."""

    function: str
    equation: Equation
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bootstraps: bool = True
    truncates: bool = True
    discounts: bool = True
    lambda_: float | None = None


STEPS, TARGETS = ("rewards", "values", "terminated"), ("targets", "advantages")
Q_STEPS = ("rewards", "q_values", "terminated", *LOG_PROBS, *PER_ACTION)
LOCAL = {"bootstraps": False, "truncates": False, "discounts": False}
GAE = Estimator("compute_gae", solve_gae, STEPS, ("advantages", "returns"), lambda_=0.95)
ESTIMATORS = {
    "gae": GAE,
    "vtrace": Estimator("compute_vtrace", solve_vtrace, (*STEPS, *LOG_PROBS), TARGETS, lambda_=1.0),
    "retrace": Estimator("compute_retrace", solve_retrace, Q_STEPS, TARGETS, bootstraps=False, lambda_=1.0),
    "lambda_returns": Estimator("compute_lambda_returns", solve_lambda_returns, STEPS, ("returns",), lambda_=0.95),
    "discounted_returns": Estimator(
        "compute_discounted_returns", solve_lambda_returns, ("rewards", "terminated"), ("returns",)
    ),
    "eligibility_traces": Estimator(
        "compute_eligibility_traces", solve_traces, ("x", "terminated"), ("traces",), bootstraps=False, lambda_=0.95
    ),
    "prefix_sum": Estimator("compute_episodic_prefix_sum", solve_traces, ("x", "dones"), ("sums",), **LOCAL),
}
VARIANTS = {  # GAE without its value targets, and with a mask
    "gae_advantages": GAE._replace(outputs=("advantages",)),
    "gae_masked": GAE._replace(inputs=(*GAE.inputs, "mask")),
}
