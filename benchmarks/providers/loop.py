"""A Python loop over time with PyTorch operations on all environments: what most frameworks run."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.harness import Call
from benchmarks.workloads import GAMMA, Inputs, Workload


def make_call(workload: Workload, inputs: Inputs) -> Call | None:
    """The loop over views with time first, whatever the layout."""
    dim, lambda_ = workload.time_dim, workload.spec.lambda_ or 1.0
    loop, number = LOOPS.get(workload.spec.function), len(workload.spec.outputs)
    if loop is None:
        return None

    def call() -> list[Tensor]:
        rollout = {name: x.movedim(dim, 0) if x.ndim > 1 else x for name, x in inputs.items()}
        return [x.movedim(0, dim) for x in loop(rollout, lambda_)[:number]]

    return call


def iterate_backward(i: Inputs) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Steps from the last to the first: (t, 1 unless terminated, 1 unless the episode or the window ends)."""
    last = len(i["rewards"]) - 1
    for t in range(last, -1, -1):
        nonterminal = 1.0 - i["terminated"][t].float()
        inner = nonterminal * (1.0 - i["truncated"][t].float()) if "truncated" in i else nonterminal
        yield t, nonterminal, inner if t < last else torch.zeros_like(inner)


def find_next_value(i: Inputs, values: Tensor | None, t: int) -> Tensor:
    """V(s_{t+1}): the bootstrap value at a cut. Without values they are 0 inside."""
    bootstrap = i["bootstrap_values"]
    if t == len(i["rewards"]) - 1:
        return bootstrap if bootstrap.ndim == 1 else bootstrap[t]
    value = torch.zeros_like(i["rewards"][t]) if values is None else values[t + 1]
    return torch.where(i["truncated"][t], bootstrap[t], value) if "truncated" in i else value


def run_gae(i: Inputs, lambda_: float) -> list[Tensor]:
    rewards, values = i["rewards"], i["values"]
    advantages, advantage = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t, nonterminal, inner in iterate_backward(i):
        delta = rewards[t] + GAMMA * find_next_value(i, values, t) * nonterminal - values[t]
        advantages[t] = advantage = delta + GAMMA * lambda_ * inner * advantage
    return [advantages, advantages + values]


def run_lambda_returns(i: Inputs, lambda_: float) -> list[Tensor]:
    rewards = i["rewards"]
    returns, following = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t, nonterminal, inner in iterate_backward(i):
        value = find_next_value(i, i.get("values"), t) * nonterminal
        returns[t] = following = rewards[t] + GAMMA * ((1 - lambda_ * inner) * value + lambda_ * inner * following)
    return [returns]


def run_vtrace(i: Inputs, lambda_: float) -> list[Tensor]:
    rewards, values = i["rewards"], i["values"]
    targets, advantages, error = torch.zeros_like(rewards), torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t, nonterminal, inner in iterate_backward(i):
        rho = (i["target_log_probs"][t] - i["behaviour_log_probs"][t]).exp().clamp(max=1.0)
        value = find_next_value(i, values, t) * nonterminal
        advantages[t] = rho * (rewards[t] + GAMMA * (value + inner * error) - values[t])
        delta = rho * (rewards[t] + GAMMA * value - values[t])
        error = delta + GAMMA * lambda_ * rho * inner * error
        targets[t] = values[t] + error
    return [targets, advantages]


def run_retrace(i: Inputs, lambda_: float) -> list[Tensor]:
    rewards, q_values = i["rewards"], i["q_values"]
    targets, advantages = torch.zeros_like(rewards), torch.zeros_like(rewards)
    error = trace = next_q_value = torch.zeros_like(rewards[0])
    for t, nonterminal, inner in iterate_backward(i):
        rho = (i["target_log_probs"][t] - i["behaviour_log_probs"][t]).exp().clamp(max=1.0)
        value = (i["next_action_probs"][t] * i["next_q_values"][t]).sum(-1) * nonterminal
        following = value + inner * (next_q_value + error - value)
        advantages[t] = rho * (rewards[t] + GAMMA * following - q_values[t])
        error = rewards[t] + GAMMA * value - q_values[t] + GAMMA * trace * inner * error
        targets[t] = q_values[t] + error
        trace, next_q_value = lambda_ * rho, q_values[t]
    return [targets, advantages]


def run_traces(i: Inputs, decay: float) -> list[Tensor]:
    """Sutton & Barto 2018, chapter 12; with a decay of 1 the prefix sum."""
    x = i["x"]
    results, trace = torch.zeros_like(x), torch.zeros_like(x[0])
    for t in range(len(x)):
        results[t] = trace = x[t] + decay * trace
        trace = trace * (1.0 - (i["dones"] if "dones" in i else i["terminated"])[t].float())
        if "truncated" in i:
            trace = trace * (1.0 - i["truncated"][t].float())
    return [results]


LOOPS: dict[str, Callable[[Inputs, float], list[Tensor]]] = {
    "compute_gae": run_gae,
    "compute_vtrace": run_vtrace,
    "compute_retrace": run_retrace,
    "compute_lambda_returns": run_lambda_returns,
    "compute_discounted_returns": run_lambda_returns,
    "compute_eligibility_traces": lambda i, lambda_: run_traces(i, GAMMA * lambda_),
    "compute_episodic_prefix_sum": lambda i, _: run_traces(i, 1.0),
}
