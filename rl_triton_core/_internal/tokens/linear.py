"""From hidden states to log-probabilities: the logits of one chunk of tokens at a time, in one buffer, made twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import distributed

from rl_triton_core._internal.arguments.validation import find_precision
from rl_triton_core._internal.backend import choose_backend
from rl_triton_core._internal.tokens.problem import Stream, TokenProblem, TokenResults
from rl_triton_core._internal.tokens.solve import differentiate_tokens, run_backend
from rl_triton_core._internal.tokens.split import Part

CHUNK_BYTES = {"cuda": 1 << 31, "cpu": 1 << 26}
"""About so many of logits are there at once."""
LEAST_TOKENS, SPLIT_TOKENS = 256, 4096
"""Of a chunk: products of fewer rows take much longer per row; and where parts of a vocabulary may differ in size."""


class LinearTokens(NamedTuple):
    """One call, validated: hidden states [num_tokens, H], the layer's weight [V, H] and bias, and what is flat, too."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: Stream
    tokens: torch.Tensor
    mask: Stream
    temperature: float
    chunk: int | None
    backend: str | None
    split: Part | None = None
    """Of a split vocabulary; tokens of others are −1."""

    def list_chunks(self, ends: Iterable[int] | None = None) -> list[slice]:
        """The tokens of each chunk; with `ends` of sequences, whole ones, at least one."""
        count, row = len(self.hidden), len(self.weight) * self.hidden.element_size()
        room = CHUNK_BYTES.get(self.hidden.device.type, CHUNK_BYTES["cpu"]) // row
        usual = max(LEAST_TOKENS, room) if self.split is None else SPLIT_TOKENS  # on all ranks
        step = usual if self.chunk is None else self.chunk
        bounds, last = [0], 0
        for end in (*range(step, count, step), count) if ends is None else ends:
            if end - bounds[-1] > step and last > bounds[-1]:
                bounds.append(last)
            last = end
        return [slice(*x) for x in pairwise([*bounds, count]) if x[0] < x[1]] or [slice(0, 0)]

    def make_buffer(self, chunks: list[slice]) -> torch.Tensor:
        """Memory for the logits of any chunk."""
        return self.hidden.new_empty(max(x.stop - x.start for x in chunks), len(self.weight))

    def take(self, part: slice, buffer: torch.Tensor) -> tuple[torch.Tensor, TokenProblem]:
        """The hidden states of a chunk, 0 where masked, and its logits with what belongs to them."""
        mask = None if self.mask is None else self.mask[part]
        hidden = self.hidden[part]
        hidden = hidden if mask is None else hidden.masked_fill((mask == 0)[:, None], 0)  # what is masked may be NaN
        logits = torch.mm(hidden, self.weight.t(), out=buffer[: len(hidden)])
        logits = logits if self.bias is None else logits.add_(self.bias)
        return hidden, TokenProblem(logits, self.tokens[part], mask, self.temperature, self.split)

    def evaluate(self, chunks: list[slice], has_entropy: bool, use: Callable[..., None] | None = None) -> TokenResults:
        """The results of all chunks; `use` is called with those of each while its logits are there."""
        buffer, backend, found = self.make_buffer(chunks), choose_backend(self.backend, self.hidden.device), []
        for part in chunks:
            rows, problem = self.take(part, buffer)
            found.append(run_backend(problem, has_entropy, backend))
            if use is not None:
                use(part, rows, problem, found[-1])
        columns: Any = zip(*found, strict=True)
        return TokenResults(*(None if x[0] is None else torch.cat(x) for x in columns))  # type: ignore[arg-type]


class LinearGradients:
    """Sums over chunks of the gradients by hidden states, weight and bias that are wanted.

    Of several chunks, and where a factor follows, those of the layer are float32 or wider.
    """

    def __init__(self, call: LinearTokens, wanted: Sequence[bool], is_wide: bool) -> None:
        self.call, self.has_weight = call, wanted[1]
        self.by_weight: Stream = None
        self.dtype = find_precision((call.hidden,)) if is_wide else call.hidden.dtype
        self.by_hidden = torch.empty_like(call.hidden) if wanted[0] else None
        self.by_bias = call.weight.new_zeros(len(call.weight), dtype=self.dtype) if wanted[2] else None

    def add(
        self, part: slice, rows: torch.Tensor, problem: TokenProblem, results: TokenResults, upstream: Sequence[Stream]
    ) -> None:
        """Add a chunk's, whose logits are overwritten, from the derivatives of a loss by results."""
        of_tokens = (problem.logits, problem.tokens, problem.mask, *results, *upstream)
        given: Any = (*of_tokens, problem.temperature, True, self.call.backend)
        slopes = differentiate_tokens(*given)
        if self.by_hidden is not None:
            torch.mm(slopes, self.call.weight, out=self.by_hidden[part])
        if self.has_weight:
            self.by_weight = add_product(self.by_weight, slopes, rows, self.dtype)
        if self.by_bias is not None:
            self.by_bias += slopes.sum(0, dtype=self.dtype)

    def finish(self, factor: float | torch.Tensor | None = None) -> list[Stream]:
        """The sums, perhaps times a factor, in float32 or wider then; those by hidden states over all parts."""
        sums = [self.by_hidden, self.by_weight, self.by_bias]
        sums = sums if factor is None else [None if x is None else x.to(self.dtype).mul_(factor) for x in sums]
        if sums[0] is not None and self.call.split is not None:
            distributed.all_reduce(sums[0], group=self.call.split.group)
        return sums


class LinearFunction(torch.autograd.Function):
    """Log-probabilities and perhaps entropies, [num_tokens] each; logits are made again for their gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Stream, call: LinearTokens, has_entropy: bool
    ) -> tuple[torch.Tensor, Stream]:
        """Evaluate chunk by chunk."""
        results = call.evaluate(call.list_chunks(), has_entropy)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, call.tokens, call.mask, *results)
        ctx.call = call[5:]
        return results.log_probs, results.entropy

    @staticmethod
    def backward(ctx: Any, by_log_probs: Stream, by_entropy: Stream) -> tuple[Stream, ...]:
        """The gradients by hidden states, weight and bias, chunk by chunk."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph: got True, expected False, since log_probs have no second derivative")
        hidden, weight, bias, tokens, mask, *results = ctx.saved_tensors
        if by_log_probs is None and by_entropy is None:
            return None, None, None, None, None
        call = LinearTokens(hidden, weight, bias, tokens, mask, *ctx.call)
        chunks = call.list_chunks()
        sums = LinearGradients(call, ctx.needs_input_grad, len(chunks) > 1)
        buffer = call.make_buffer(chunks)
        for part in chunks:
            numbers = [None if x is None else x[part] for x in (*results, by_log_probs, by_entropy)]
            sums.add(part, *call.take(part, buffer), TokenResults(*numbers[:4]), numbers[4:])  # type: ignore[arg-type]
        del buffer
        return *(None if x is None else x.to(hidden.dtype) for x in sums.finish()), None, None


def add_product(total: Stream, slopes: torch.Tensor, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add slopesᵀ·hidden to a sum of a dtype, if there is one; no product is rounded to half precision before."""
    if slopes.is_cuda and dtype != slopes.dtype:
        if total is None:
            return torch.mm(slopes.t(), hidden, out_dtype=dtype)
        return torch.addmm(total, slopes.t(), hidden, out_dtype=dtype, out=total)
    product = torch.mm(slopes.t().to(dtype), hidden.to(dtype))
    return product if total is None else total.add_(product)
