"""Minibatches as plain slices of a batch's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import tree
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.minibatch_utils import MiniBatchCyclicIterator
from torch import Tensor


def can_slice_minibatches(iterator: Any) -> bool:
    """Whether an iterator's minibatches are rows of tensors, of modules without a state."""
    return type(iterator) is MiniBatchCyclicIterator and all(
        len(batch) > 0
        and SampleBatch.SEQ_LENS not in batch
        and all(isinstance(x, Tensor) and x.shape[:1] == (len(batch),) for x in tree.flatten(dict(batch)))
        for batch in iterator._batch.policy_batches.values()
    )


def slice_minibatches(iterator: Any, may_share: Callable[[], bool] = lambda: False) -> Iterator[MultiAgentBatch]:
    """Yield the minibatches of RLlib's `MiniBatchCyclicIterator`, draw by draw, as plain slices of the columns.

    RLlib builds three `SampleBatch` objects for each, and maps over the columns' names each time.

    Args:
        iterator: One that has not begun, and for which `can_slice_minibatches` holds.
        may_share: Whether the next minibatch may be views of the batch: what it is for changes it nowhere.
    """
    for parts in draw_minibatches(iterator, iterator._batch.policy_batches, may_share):
        yield gather_batch(iterator, parts)


def draw_rows(iterator: Any) -> dict[str, list[Tensor]]:
    """The numbers of the rows of all these minibatches, by the names of the modules."""
    batches = {name: {"": torch.arange(len(batch))} for name, batch in iterator._batch.policy_batches.items()}
    drawn = [*draw_minibatches(iterator, batches, lambda: True)]
    return {name: [parts[name][""] for parts in drawn] for name in batches}


def draw_minibatches(
    iterator: Any, batches: dict[str, Any], may_share: Callable[[], bool]
) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield minibatches of other columns for the modules of an iterator, as it would draw them."""
    cycles = {
        name: BatchCycle(dict(batches[name]), len(batch), iterator._minibatch_size, iterator._shuffle_batch_per_epoch)
        for name, batch in iterator._batch.policy_batches.items()
    }
    total, count = iterator._num_total_minibatches, 0
    while count < total or (not total and min(x.num_epochs for x in cycles.values()) < iterator._num_epochs):
        share = may_share()
        yield {name: cycle.draw_minibatch(share) for name, cycle in cycles.items()}
        count += 1


def gather_batch(iterator: Any, parts: dict[str, dict[str, Any]]) -> MultiAgentBatch:
    """A minibatch of an iterator."""
    return MultiAgentBatch({name: SampleBatch(columns) for name, columns in parts.items()}, len(iterator._batch))


class BatchCycle:
    """The rows of one module's batch, over and over."""

    def __init__(self, columns: dict[str, Any], count: int, minibatch_size: int, shuffle: bool) -> None:
        self.columns, self.count = columns, count
        self.minibatch_size, self.shuffle = minibatch_size, shuffle
        self.start = self.num_epochs = 0

    def draw_minibatch(self, share: bool) -> dict[str, Any]:
        """The next rows, copied unless they may be shared; where the batch ends, it is shuffled and begins again."""
        parts, missing = [], self.minibatch_size
        while self.start + missing >= self.count:
            parts.append(self.slice_columns(self.start, self.count))
            missing -= self.count - self.start
            self.start = 0
            self.num_epochs += 1
            if self.shuffle:
                self.shuffle_columns()
        if missing:
            parts.append(self.slice_columns(self.start, self.start + missing))
            self.start += missing
        if len(parts) > 1:
            joined: dict[str, Any] = tree.map_structure(lambda *rows: torch.cat(rows), *parts)
            return joined
        return parts[0] if share else map_columns(torch.clone, parts[0])

    def slice_columns(self, first: int, last: int) -> dict[str, Any]:
        """These rows of all columns."""
        return map_columns(lambda column: column[first:last], self.columns)

    def shuffle_columns(self) -> None:
        """Draw a permutation as RLlib does, and put the rows in its order."""
        permutation = torch.from_numpy(np.random.permutation(self.count))  # noqa: NPY002
        rows = permutation.to(tree.flatten(self.columns)[0].device)
        self.columns = map_columns(lambda column: column.index_select(0, rows), self.columns)


def map_columns(function: Callable[[Tensor], Tensor], columns: dict[str, Any]) -> dict[str, Any]:
    """Apply a function to every tensor of possibly nested columns."""
    return {
        name: function(column) if isinstance(column, Tensor) else tree.map_structure(function, column)
        for name, column in columns.items()
    }
