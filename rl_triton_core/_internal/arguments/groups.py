"""Groups of processes that compute something together."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

all_gather: Any = getattr(distributed, "all_gather_single", None) or getattr(
    distributed, "all_gather_into_tensor", None
)
"""Of one tensor per rank into one; torch 2.13 has renamed it."""


def gather_rows(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather the row of each rank, in their order."""
    every = own.new_empty((distributed.get_world_size(group), own.shape[1]))
    all_gather(every, own, group=group)
    return every


def check_group(group: Any) -> Any:
    """The group of processes that is meant, of which this one must be a member; None without one."""
    if group is None:
        return None
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError(f"group: got {group!r} without torch.distributed, expected it initialised, or None")
    group = distributed.group.WORLD if group == "world" else group
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"group: got {group!r}, expected a torch.distributed.ProcessGroup with this process in it, 'world' or None"
        )
    return group
