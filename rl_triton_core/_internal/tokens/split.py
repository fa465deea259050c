"""A vocabulary that is split over processes: each has the logits of some tokens in a row, and all get the results."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.arguments import groups
from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.equations.primitives import multiply_or_zero
from rl_triton_core._internal.tokens.problem import TokenProblem, TokenResults


class Part(NamedTuple):
    """What this process has of a vocabulary: the first token, and the group of those that have the others."""

    first: int
    group: Any

    def find_own(self, tokens: torch.Tensor, size: int) -> torch.Tensor:
        """The place of each token among the `size` of this process; −1 for those of others."""
        own = tokens.long() - self.first
        return torch.where((own >= 0) & (own < size), own, -1)

    def join(self, problem: TokenProblem, results: TokenResults) -> TokenResults:
        """The results of the whole vocabulary, from those of this process for its tokens, −1 being none of them.

        M = max peak,  s = exp((peak − M)/temperature + log_total − log Σ exp of that)     a part's share
        log_prob = log s + its part's,  H = Σ s·(H − log s)
        """
        own = torch.where(problem.tokens < 0, math.inf, results.log_probs)
        sent = [x for x in (*results[1:3], own, results.entropy) if x is not None]
        rows = groups.gather_rows(torch.stack(sent).view(1, -1), self.group)
        peaks, log_totals, log_probs, *entropies = rows.view(len(rows), len(sent), *problem.tokens.shape).unbind(1)
        peak, is_empty = peaks.amax(0), peaks == -math.inf
        logs = torch.where(is_empty, peaks, (peaks - peak) / problem.temperature + log_totals)
        log_total = logs.logsumexp(0)
        logs = logs - log_total
        is_owner = log_probs != math.inf
        valid = torch.ones_like(is_owner[0]) if problem.mask is None else problem.mask != 0
        expected = "expected parts that `first` puts end to end"
        wrong = (is_owner.sum(0) != 1) & valid
        check.refuse(wrong, f"tokens: got one in no part of the vocabulary or in several, {expected}")
        log_prob = torch.where(is_owner, torch.where(is_empty, peaks, log_probs) + logs, 0).sum(0)
        entropy = [multiply_or_zero(logs.exp(), x - logs).sum(0) for x in entropies]
        log_prob, *entropy = (torch.where(valid, x, 0) for x in (log_prob, *entropy))
        return TokenResults(log_prob, peak, log_total, *entropy)


def check_part(group: Any, first: Any) -> Part | None:
    """Check which part of a vocabulary a call has; None if it has all of it."""
    if isinstance(first, bool) or not isinstance(first, Integral):
        raise TypeError(f"first: got {first!r}, expected an int")
    if int(first) < 0 or (first and group is None):
        raise ValueError(f"first: got {first} with group={group!r}, expected at least 0, and 0 without a group")
    if group is not None and check.is_traced():
        raise ValueError("group: got one under torch.compile, expected None there")
    return None if group is None else Part(int(first), groups.check_group(group))
