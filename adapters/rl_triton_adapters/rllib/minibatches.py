"""Minibatches as plain slices of a batch's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import tree
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.minibatch_utils import MiniBatchCyclicIterator
from torch import Tensor


def can_slice_minibatches(iterator: Any) -> bool:
    """Whether an iterator's minibatches are rows of tensors, of modules that are not stateful."""
    return type(iterator) is MiniBatchCyclicIterator and all(
        type(batch) is SampleBatch
        and len(batch) > 0
        and SampleBatch.SEQ_LENS not in batch
        and all(isinstance(x, Tensor) and x.shape[:1] == (len(batch),) for x in tree.flatten(dict(batch)))
        for batch in iterator._batch.policy_batches.values()
    )


def slice_minibatches(iterator: Any, may_share: Callable[[], bool] = lambda: False) -> Iterator[MultiAgentBatch]:
    """Yield the minibatches of an iterator for which `can_slice_minibatches` holds, and which has not begun, as slices.

    RLlib builds three `SampleBatch` objects for each, and maps over the columns' names each time. `may_share` says
    whether the next one may be views of the batch: what it is for changes it nowhere.
    """
    options = iterator._minibatch_size, iterator._shuffle_batch_per_epoch
    cycles = {name: BatchCycle(batch, *options) for name, batch in iterator._batch.policy_batches.items()}
    total, count, env_steps = iterator._num_total_minibatches, 0, len(iterator._batch)
    while count < total or (not total and min(x.num_epochs for x in cycles.values()) < iterator._num_epochs):
        share = may_share()
        yield MultiAgentBatch({name: cycle.draw_minibatch(share) for name, cycle in cycles.items()}, env_steps)
        count += 1


def draw_rows(iterator: Any) -> dict[str, list[Tensor]]:
    """The numbers of the rows of all these minibatches, by the names of the modules."""
    batches = {name: SampleBatch({"": torch.arange(len(x))}) for name, x in iterator._batch.policy_batches.items()}
    of_rows = copy(iterator)
    of_rows._batch = MultiAgentBatch(batches, len(iterator._batch))
    drawn = [*slice_minibatches(of_rows, lambda: True)]
    return {name: [x.policy_batches[name][""] for x in drawn] for name in batches}


class BatchCycle:
    """The rows of one module's batch, over and over."""

    def __init__(self, batch: SampleBatch, minibatch_size: int, shuffle: bool) -> None:
        self.columns, self.count = dict(batch), len(batch)
        self.minibatch_size, self.shuffle = minibatch_size, shuffle
        self.start = self.num_epochs = 0

    def draw_minibatch(self, share: bool) -> SampleBatch:
        """The next rows, copied unless they may be shared; where the batch ends, it is shuffled and begins again."""
        parts, missing = [], self.minibatch_size
        while missing:
            rows = slice(self.start, min(self.start + missing, self.count))
            parts.append(map_columns(itemgetter(rows), self.columns))
            missing -= rows.stop - rows.start
            self.start = rows.stop % self.count
            if self.start == 0:
                self.num_epochs += 1
                if self.shuffle:  # by the draw that RLlib makes
                    order = torch.from_numpy(np.random.permutation(self.count))  # noqa: NPY002
                    order = order.to(tree.flatten(self.columns)[0].device)
                    self.columns = map_columns(partial(torch.index_select, dim=0, index=order), self.columns)
        if len(parts) > 1:
            return SampleBatch(tree.map_structure(lambda *rows: torch.cat(rows), *parts))
        return SampleBatch(parts[0] if share else map_columns(torch.clone, parts[0]))


def map_columns(function: Callable[[Tensor], Tensor], columns: dict[str, Any]) -> dict[str, Any]:
    """Apply a function to every tensor of possibly nested columns."""
    return {
        name: function(column) if isinstance(column, Tensor) else tree.map_structure(function, column)
        for name, column in columns.items()
    }
