"""The readable log-probabilities: PyTorch's operations on whole tensors, in float32, or float64 if the logits are."""

from __future__ import annotations

import torch

from rl_triton_core._internal.equations.primitives import multiply_or_zero
from rl_triton_core._internal.tokens.problem import Stream, TokenProblem, TokenResults, Upstream


def run(problem: TokenProblem, results: TokenResults) -> None:
    """Fill the results."""
    valid = find_valid(problem)
    x = torch.where(valid, problem.logits, 0).to(problem.dtype)
    peak = x.amax(-1, keepdim=True)
    logits = (x - peak) / problem.temperature
    log_total = logits.logsumexp(-1, keepdim=True)
    log_probs = logits - log_total
    chosen = log_probs.gather(-1, torch.where(valid, problem.tokens[..., None].long(), 0))
    entropy = -multiply_or_zero(log_probs.exp(), log_probs).sum(-1, keepdim=True)
    for out, result in zip(results, (chosen, peak, log_total, entropy), strict=True):
        if out is not None:
            out.copy_(torch.where(valid, result, 0)[..., 0])


def differentiate(problem: TokenProblem, results: TokenResults, upstream: Upstream, gradient: torch.Tensor) -> None:
    """Fill the gradient by the logits, which may be their memory."""
    valid = find_valid(problem)

    def read_column(x: Stream) -> torch.Tensor:
        return torch.where(valid, x[..., None], 0) if x is not None else torch.zeros_like(results.peaks)[..., None]

    peak, log_total, entropy = (read_column(x) for x in results[1:])
    by_log_probs, by_entropy = (read_column(x) for x in upstream)
    x = torch.where(valid, problem.logits, 0).to(problem.dtype)
    log_probs = (x - peak) / problem.temperature - log_total
    is_token = torch.arange(x.shape[-1], device=x.device) == problem.tokens[..., None]
    probs = log_probs.exp()
    slope = by_log_probs * (is_token.to(probs) - probs)
    slope = slope - by_entropy * multiply_or_zero(probs, log_probs + entropy)
    gradient.copy_(slope / problem.temperature)


def find_valid(problem: TokenProblem) -> torch.Tensor:
    """Which tokens count, [..., 1]."""
    tokens, mask = problem.tokens, problem.mask
    return (torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask != 0)[..., None]
