"""Sequences of tokens, end to end or in rows of equal length."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Sequences:
    """Where the sequences of a call lie, and how much each token counts; what there is of tokens is flat."""

    shape: torch.Size
    """Of a tensor with one number per token."""
    cu_seqlens: torch.Tensor | None
    mask: torch.Tensor | None

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.shape[0]) if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def find_starts(self, device: torch.device) -> torch.Tensor:
        """Where each begins, and the end of the last; on the device if they are not packed."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        return torch.arange(self.count + 1, device=device) * self.shape[1]

    def weigh(self, like: torch.Tensor) -> torch.Tensor:
        """How much each token counts, in float64, on the device of a tensor of tokens."""
        if self.mask is None:
            return torch.ones_like(like, dtype=torch.float64)
        return (self.mask if self.mask.is_floating_point() else self.mask != 0).double()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of each sequence's tokens."""
        if self.cu_seqlens is None:
            return x.view(self.shape).sum(1)
        return torch.segment_reduce(x, "sum", offsets=self.cu_seqlens.long(), axis=0, unsafe=True, initial=0)

    def invert_counts(self, weights: torch.Tensor) -> torch.Tensor:
        """1 / the sum of each sequence's weights, 0 where that is 0."""
        count = self.sum(weights)
        return torch.where(count == 0, 0, 1 / count)

    def average(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of each sequence's tokens, with their weights; 0 without any."""
        weights = self.weigh(x)
        total, count = self.sum(torch.where(weights != 0, x.double(), 0) * weights), self.sum(weights)
        return torch.where(count == 0, 0, total / count)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """What there is one of per sequence, for every token (PyTorch 2.11 fixes an integer of `repeat_interleave`)."""
        if self.cu_seqlens is None:
            return x[:, None].expand(self.shape).flatten()
        return x.repeat_interleave(self.cu_seqlens.diff(), output_size=self.shape[0])
