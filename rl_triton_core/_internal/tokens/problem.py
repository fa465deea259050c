"""What log-probabilities of tokens are to a backend: tensors and a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.arguments.validation import find_precision

Stream = torch.Tensor | None


@dataclass(eq=False)
class TokenProblem:
    """One call, validated, without a graph."""

    logits: torch.Tensor
    """[..., V]."""
    tokens: torch.Tensor
    """[...], integers from 0 to V − 1 where they are not masked."""
    mask: Stream
    """[...]: what is 0 is neither read nor differentiated. Or None."""
    temperature: float
    split: Any = None
    """The `Part` of the vocabulary that the logits are of, or None; with one, tokens of others are −1."""

    @property
    def dtype(self) -> torch.dtype:
        """What the arithmetic is done in, and the results are: float64 if the logits are, else float32."""
        return find_precision((self.logits,))

    def allocate_results(self, has_entropy: bool) -> TokenResults:
        """Memory for the results."""
        a, b, c, d = (torch.empty(self.tokens.shape, dtype=self.dtype, device=self.logits.device) for _ in range(4))
        return TokenResults(a, b, c, d if has_entropy else None)


class TokenResults(NamedTuple):
    """What a backend computes of every token, and what its gradient needs: [...] each, 0 where masked."""

    log_probs: torch.Tensor
    peaks: torch.Tensor
    """The largest logit."""
    log_totals: torch.Tensor
    """log Σ exp((x − peak)/temperature)."""
    entropy: Stream = None


class TokenLogProbs(NamedTuple):
    """What `token_log_probs` returns: float32, or float64 if the logits are; shaped like the tokens."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    """None if it was not asked for."""


Upstream = tuple[Stream, Stream]
"""Derivatives of a loss by log-probabilities and by entropies, [...] each, or None."""


def view_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., V] as [rows, columns, V] with the numbers of each token side by side; a copy where strides forbid that."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if sizes and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        elif size != 1:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 2 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return x.contiguous().view(1, -1, x.shape[-1])
    missing = 2 - len(sizes)
    return x.as_strided((*[1] * missing, *sizes, x.shape[-1]), (*[0] * missing, *strides, 1))
