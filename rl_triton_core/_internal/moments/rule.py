"""What normalisation by moments is, for every backend: count, mean and M2, the sum of squared deviations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.arguments import groups
from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.equations.primitives import safe_sqrt, select

Exchange = Callable[[torch.Tensor], torch.Tensor]
"""From this rank's (count, mean, M2), [1, 3] in float64, to those of all ranks, [num_ranks, 3]."""


class Rule(NamedTuple):
    """How moments become a divisor: √(M2 / (count − correction) + inside), at least `floor`, plus `added`."""

    correction: float
    added: float
    floor: float
    inside: float


class Task(NamedTuple):
    """A checked call, with tensors as matrices of one shape."""

    values: torch.Tensor
    mask: torch.Tensor | None
    out: torch.Tensor
    rule: Rule


def at_least(bound: Any, x: Any) -> Any:
    """The larger of a number and what may be NaN, which stays."""
    return select(x < bound, bound, x)


def compute_standardizer(
    count: Any, mean: Any, m2: Any, correction: Any, added: Any, floor: Any, inside: Any
) -> tuple[Any, Any]:
    """What to subtract from every element, and what to multiply the difference with."""
    enough = count > correction
    variance = m2 / select(enough, count - correction, 1)
    divisor = at_least(floor, safe_sqrt(variance + inside)) + added
    none = divisor == 0
    factor = select(none, 0, 1 / select(none, 1, divisor))
    return select(enough, mean, 0), select(enough, factor, 1)


def view_as_matrices(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Tensors of one shape as matrices, in the last one's memory order; None if they need more than two dimensions."""
    if all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors]
    shape, last = tensors[0].shape, tensors[-1]
    sizes: list[int] = []
    strides: list[tuple[int, ...]] = []
    for dim in sorted((d for d, size in enumerate(shape) if size != 1), key=last.stride, reverse=True):
        inner = tuple(x.stride(dim) for x in tensors)
        if strides and strides[-1] == tuple(shape[dim] * stride for stride in inner):
            sizes[-1], strides[-1] = sizes[-1] * shape[dim], inner
        else:
            sizes.append(shape[dim])
            strides.append(inner)
    if len(sizes) > 2:
        return None
    missing = 2 - len(sizes)
    sizes, strides = [1] * missing + sizes, [(0,) * len(tensors)] * missing + strides
    return [x.as_strided(sizes, [stride[i] for stride in strides]) for i, x in enumerate(tensors)]


# -- arguments ---------------------------------------------------------------------------------------------------------

EPSILON_MODES = ("add", "floor", "variance")


def check_rule(correction: Any, epsilon: Any, epsilon_mode: Any) -> Rule:
    """Check the numbers of the rule by which elements are normalised."""
    check.check_choice("epsilon_mode", epsilon_mode, EPSILON_MODES)
    number = check.check_number("epsilon", epsilon, 0.0, math.inf)
    added, floor, inside = (number if epsilon_mode == mode else 0.0 for mode in EPSILON_MODES)
    return Rule(check.check_number("correction", correction, 0.0, math.inf), added, floor, inside)


def make_exchange(group: Any, differentiable: bool) -> Exchange | None:
    """How the ranks of a group, of which this process must be a member, exchange their moments; None without one."""
    if group is not None and differentiable:
        raise ValueError(
            "group: got one together with advantages that require grad, expected them detached, "
            "since no gradient crosses ranks"
        )
    own = groups.check_group(group)
    return None if own is None else partial(groups.gather_rows, group=own)
