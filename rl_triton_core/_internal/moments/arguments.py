"""Checks of the rule and the processes by which elements are normalised."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import distributed

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.moments.rule import Rule

EPSILON_MODES = ("add", "floor", "variance")

all_gather: Any = getattr(distributed, "all_gather_single", None) or getattr(
    distributed, "all_gather_into_tensor", None
)
"""Of one tensor per rank into one; torch 2.13 has renamed it."""


def gather_moments(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather the moments of all ranks, in their order."""
    every = own.new_empty((distributed.get_world_size(group), own.shape[1]))
    all_gather(every, own, group=group)
    return every


def check_rule(correction: Any, epsilon: Any, epsilon_mode: Any) -> Rule:
    """Check the numbers of the rule by which elements are normalised."""
    check.check_choice("epsilon_mode", epsilon_mode, EPSILON_MODES)
    number = check.check_number("epsilon", epsilon, 0.0, math.inf)
    added, floor, inside = (number if epsilon_mode == mode else 0.0 for mode in EPSILON_MODES)
    return Rule(check.check_number("correction", correction, 0.0, math.inf), added, floor, inside)


def check_group(group: Any, differentiable: bool) -> Any:
    """Check a process group, of which this process must be a member."""
    if differentiable:
        raise ValueError(
            "group: got one together with advantages that require grad, expected them detached, "
            "since no gradient crosses ranks"
        )
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError(f"group: got {group!r} without torch.distributed, expected it initialised, or None")
    if group == "world":
        return distributed.group.WORLD
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"group: got {group!r}, expected a torch.distributed.ProcessGroup with this process in it, 'world' or None"
        )
    return group
