"""Whether dictionaries and lists hold what they held: they are compared in few calls, without a look into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

LOCAL = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")


class Snapshot:
    """What is in some dictionaries and lists, each thing by its identity, and where tensors lie.

    Args:
        places: The dictionaries and lists. Learning rates of optimizers are left out: they are read in every update.
        leaves: Tensors whose hooks count, and whether they are frozen.
        tensors: Those of which it counts where they lie.
        kinds: What else counts of these.
    """

    def __init__(
        self,
        places: Iterable[Any],
        leaves: Iterable[Tensor],
        tensors: Iterable[Tensor],
        kinds: Iterable[Callable[[Tensor], Any]] = (),
    ) -> None:
        """Look at all of it once."""
        found = {id(x): x for x in places}.values()
        self.empty = [x for x in found if not x]
        self.groups = [x for x in found if isinstance(x, dict) and "lr" in x]
        full = [x for x in found if x and all(x is not y for y in self.groups)]
        self.views: list[Any] = [x.values() if isinstance(x, dict) else x for x in full]
        self.leaves, self.tensors, self.kinds = [*leaves], [*tensors], (Tensor.data_ptr, *kinds)
        self.held, self.facts = [*self.list_held()], self.list_facts()
        self.facts[0] = [tuple(map(copy, x)) for x in self.facts[0]]  # hooks come and go in the same dictionary

    def list_held(self) -> Iterator[Any]:
        """What is there."""
        settings = (x for group in self.groups for name, x in group.items() if name != "lr")
        return chain(chain.from_iterable(self.views), settings)

    def list_facts(self) -> list[Any]:
        """Where tensors are, what they are like, and how much there is at each place."""
        sizes = [*map(len, self.views), *map(len, self.groups)]
        return [[*map(LOCAL, self.leaves)], sizes, *([*map(x, self.tensors)] for x in self.kinds)]

    def holds(self) -> bool:
        """Whether nothing has changed; False where that is not known."""
        try:
            is_same = not any(self.empty) and all(map(is_, self.list_held(), self.held))
            return is_same and self.list_facts() == self.facts
        except RuntimeError:  # a tensor has no memory, or a dictionary changes meanwhile
            return False
