"""The readable normalisation: float64, PyTorch's operations on whole tensors, differentiable."""

from __future__ import annotations

import math

import torch

from rl_triton_core._internal.moments.rule import Exchange, Rule, Task, compute_standardizer

Moments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(task: Task, exchange: Exchange | None) -> None:
    """Fill the output."""
    task.out.copy_(normalize_values(task.values, task.mask, task.rule, exchange))


def normalize_values(
    values: torch.Tensor, mask: torch.Tensor | None, rule: Rule, exchange: Exchange | None
) -> torch.Tensor:
    """The normalised values in float64, 0 where masked."""
    valid = torch.ones_like(values, dtype=torch.bool) & (True if mask is None else mask != 0)  # in their memory order
    return standardize(torch.where(valid, values, 0).double(), valid, valid.double(), rule, exchange)


def standardize(
    x: torch.Tensor, valid: torch.Tensor, weight: torch.Tensor, rule: Rule, exchange: Exchange | None
) -> torch.Tensor:
    """Elements by their moments, in which they have weights; 0 where they are not valid."""
    moments = merge_moments(weight, x, torch.zeros_like(x))
    if exchange is not None:
        moments = merge_moments(*exchange(torch.stack(moments)[None]).unbind(1))
    subtracted, factor = compute_standardizer(*moments, *rule)
    return torch.where(valid, (x - subtracted) * factor, 0)


def merge_moments(count: torch.Tensor, mean: torch.Tensor, m2: torch.Tensor) -> Moments:
    """Count, mean and M2 of parts taken together, from those of each; a part may be one element.

    Differences to one of the means come first, so that a large mean does not cancel and equal values differ by 0.
    """
    total = count.sum()
    if not count.numel():
        return total, total, total
    pivot = torch.where(count > 0, mean.detach(), -math.inf).amax()
    deviation = torch.where(count > 0, mean - pivot, 0)
    shift = (count * deviation).sum() / torch.where(total > 0, total, 1)
    m2 = m2 + torch.where(count > 0, count * (deviation - shift).square(), 0)
    return total, torch.where(total > 0, pivot + shift, 0), m2.sum()
