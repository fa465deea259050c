"""Whether networks and optimizers are as they were: what they hold is compared in few calls, without a look into it."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

from rl_triton_core._internal.capture.host import list_parts
from rl_triton_core._internal.capture.key import GLOBAL_HOOKS
from rl_triton_core._internal.capture.optimizers import list_step_hooks

LOCAL = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")


class Snapshot:
    """What is in all dictionaries and lists that modules and optimizers have, and where their tensors lie.

    Learning rates apart, which are read in every update. Parts are as `collect_facts` takes them, facts what it found.
    """

    def __init__(self, parts: Collection[tuple[Any, ...]], facts: Collection[Any]) -> None:
        optimizers = [x for _, x, *_ in parts if x is not None]
        found: list[Any] = [vars(x) for x in (*list_parts(x for own, *_ in parts for x in own), *optimizers)]
        found += [*GLOBAL_HOOKS, *chain.from_iterable(map(list_step_hooks, optimizers))]
        for x in found:
            found += [y for y in (x.values() if isinstance(x, dict) else x) if isinstance(y, dict | list)]
        self.empty, self.lists = [x for x in found if not x], [x for x in found if x and isinstance(x, list)]
        self.groups = [group for x in optimizers for group in x.param_groups]
        self.dicts = [x for x in found if x and isinstance(x, dict) and all(x is not y for y in self.groups)]
        self.parameters = [x for own in facts for x in own.parameters]
        states = [x for own in facts for kept in own.kept for x in kept]
        self.tensors = [x for x in chain(self.parameters, states) if isinstance(x, Tensor)]
        self.held, self.places = self.list_held(), self.locate()

    def list_held(self) -> list[Any]:
        """All of it."""
        settings = [x for group in self.groups for name, x in group.items() if name != "lr"]
        return [*chain.from_iterable(map(dict.values, self.dicts)), *chain.from_iterable(self.lists), *settings]

    def locate(self) -> list[Any]:
        """Where tensors are, and what they are like."""
        kinds = (Tensor.data_ptr, Tensor.stride, Tensor.numel)
        return [[*map(LOCAL, self.parameters)], *([*map(kind, self.tensors)] for kind in kinds)]

    def holds(self) -> bool:
        """Whether nothing has changed; False where that is not known."""
        held = self.list_held()
        is_same = not any(self.empty) and len(held) == len(self.held) and all(map(is_, held, self.held))
        try:
            return is_same and self.locate() == self.places
        except RuntimeError:  # a tensor has no memory
            return False
