"""From hidden states to log-probabilities: the logits of one chunk of tokens at a time, in one buffer, made twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.arguments.validation import find_precision
from rl_triton_core._internal.backend import choose_backend
from rl_triton_core._internal.tokens.problem import Stream, TokenProblem, TokenResults
from rl_triton_core._internal.tokens.solve import differentiate_tokens, run_backend

CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
"""About so many of logits are there at once."""
LEAST_TOKENS = 256
"""Of a chunk: products of fewer rows take much longer per row."""


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

    def list_chunks(self, ends: Iterable[int] | None = None) -> list[slice]:
        """The tokens of each chunk; with `ends` of sequences, whole ones, at least one."""
        count, row = len(self.hidden), len(self.weight) * self.hidden.element_size()
        room = CHUNK_BYTES.get(self.hidden.device.type, CHUNK_BYTES["cpu"]) // row
        step = max(LEAST_TOKENS, room) if self.chunk is None else self.chunk
        bounds, last = [0], 0
        for end in (*range(step, count, step), count) if ends is None else ends:
            if end - bounds[-1] > step and last > bounds[-1]:
                bounds.append(last)
            last = end
        return [slice(*x) for x in pairwise([*bounds, count]) if x[0] < x[1]]

    def make_buffer(self, chunks: list[slice]) -> torch.Tensor:
        """Memory for the logits of any chunk."""
        return self.hidden.new_empty(max((x.stop - x.start for x in chunks), default=0), len(self.weight))

    def take(self, part: slice, buffer: torch.Tensor) -> tuple[torch.Tensor, TokenProblem]:
        """The hidden states of a chunk, 0 where masked, and its logits with what belongs to them."""
        mask = None if self.mask is None else self.mask[part]
        hidden = self.hidden[part]
        hidden = hidden if mask is None else hidden.masked_fill((mask == 0)[:, None], 0)  # what is masked may be NaN
        logits = torch.mm(hidden, self.weight.t(), out=buffer[: len(hidden)])
        logits = logits if self.bias is None else logits.add_(self.bias)
        return hidden, TokenProblem(logits, self.tokens[part], mask, self.temperature)

    def evaluate(self, chunks: list[slice], has_entropy: bool, use: Callable[..., None] | None = None) -> TokenResults:
        """The results of all chunks; `use` is called with those of each while its logits are there."""
        buffer, backend = self.make_buffer(chunks), choose_backend(self.backend, self.hidden.device)
        found = [TokenProblem(buffer[:0], self.tokens[:0], None, self.temperature).allocate_results(has_entropy)]
        for part in chunks:
            rows, problem = self.take(part, buffer)
            found.append(run_backend(problem, has_entropy, backend))
            if use is not None:
                use(part, rows, problem, found[-1])
        columns: Any = zip(*found, strict=True)
        return TokenResults(*(None if x[0] is None else torch.cat(x) for x in columns))  # type: ignore[arg-type]


class LinearGradients:
    """Sums over chunks of the gradients by hidden states, weight and bias that are wanted, in float32 or wider."""

    def __init__(self, call: LinearTokens, wanted: Sequence[bool]) -> None:
        self.call, self.precision = call, find_precision((call.hidden,))
        self.by_hidden = torch.empty_like(call.hidden) if wanted[0] else None
        self.by_weight = torch.zeros_like(call.weight, dtype=self.precision) if wanted[1] else None
        self.by_bias = call.weight.new_zeros(len(call.weight), dtype=self.precision) if wanted[2] else None

    def add(
        self, part: slice, rows: torch.Tensor, problem: TokenProblem, results: TokenResults, upstream: Sequence[Stream]
    ) -> None:
        """Add a chunk's, whose logits are overwritten, from the derivatives of a loss by results."""
        of_tokens = (problem.logits, problem.tokens, problem.mask, *results, *upstream)
        given: Any = (*of_tokens, problem.temperature, True, self.call.backend)
        slopes = differentiate_tokens(*given)
        if self.by_hidden is not None:
            torch.mm(slopes, self.call.weight, out=self.by_hidden[part])
        if self.by_weight is not None:
            add_product(self.by_weight, slopes, rows)
        if self.by_bias is not None:
            self.by_bias += slopes.sum(0, dtype=self.precision)

    def finish(self, factor: float | torch.Tensor | None = None) -> list[Stream]:
        """The sums, times a factor, in the dtype of the hidden states.

        With a factor, those of float16 are float32: they may leave the range of float16 before a loss is scaled.
        """
        dtype, sums = self.call.hidden.dtype, (self.by_hidden, self.by_weight, self.by_bias)
        if factor is not None:
            sums = tuple(None if x is None else x.to(self.precision).mul_(factor) for x in sums)  # type: ignore[assignment]
            dtype = torch.float32 if dtype == torch.float16 else dtype
        return [None if x is None else x.to(dtype) for x in sums]


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
        chunks, sums = call.list_chunks(), LinearGradients(call, ctx.needs_input_grad)
        buffer = call.make_buffer(chunks)
        for part in chunks:
            numbers = [None if x is None else x[part] for x in (*results, by_log_probs, by_entropy)]
            sums.add(part, *call.take(part, buffer), TokenResults(*numbers[:4]), numbers[4:])  # type: ignore[arg-type]
        return *sums.finish(), None, None


def add_product(total: torch.Tensor, slopes: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add slopesᵀ·hidden to sums of all chunks; on a GPU, products are not rounded to half precision before."""
    if slopes.is_cuda and total.dtype != slopes.dtype:
        torch.addmm(total, slopes.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(slopes.t(), hidden)
