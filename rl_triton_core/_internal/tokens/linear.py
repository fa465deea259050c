"""From hidden states to log-probabilities: the logits of one chunk of tokens at a time, in one buffer, made twice."""

from __future__ import annotations

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

    def list_chunks(self) -> list[slice]:
        """The tokens of each chunk."""
        count, row = len(self.hidden), len(self.weight) * self.hidden.element_size()
        room = CHUNK_BYTES.get(self.hidden.device.type, CHUNK_BYTES["cpu"]) // row
        step = max(LEAST_TOKENS, room) if self.chunk is None else self.chunk
        return [slice(i, min(i + step, count)) for i in range(0, count, step)]

    def make_buffer(self, chunks: list[slice]) -> torch.Tensor:
        """Memory for the logits of any chunk."""
        return self.hidden.new_empty(max((x.stop - x.start for x in chunks), default=0), len(self.weight))

    def take(self, part: slice, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Stream]:
        """The hidden states of a chunk, 0 where masked, its logits, tokens and mask."""
        mask = None if self.mask is None else self.mask[part]
        hidden = self.hidden[part]
        hidden = hidden if mask is None else hidden.masked_fill((mask == 0)[:, None], 0)  # what is masked may be NaN
        logits = torch.mm(hidden, self.weight.t(), out=buffer[: len(hidden)])
        return hidden, logits if self.bias is None else logits.add_(self.bias), self.tokens[part], mask


class LinearFunction(torch.autograd.Function):
    """Log-probabilities and perhaps entropies, [num_tokens] each; logits are made again for their gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Stream, call: LinearTokens, has_entropy: bool
    ) -> tuple[torch.Tensor, Stream]:
        """Evaluate chunk by chunk."""
        chunks, backend = call.list_chunks(), choose_backend(call.backend, hidden.device)
        buffer, found = call.make_buffer(chunks), []
        for part in chunks:
            _, logits, tokens, mask = call.take(part, buffer)
            found.append(run_backend(TokenProblem(logits, tokens, mask, call.temperature), has_entropy, backend))
        empty = TokenProblem(buffer[:0], call.tokens[:0], None, call.temperature).allocate_results(has_entropy)
        columns: Any = zip(empty, *found, strict=True)
        results = TokenResults(*(None if x[0] is None else torch.cat(x) for x in columns))  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, call.tokens, call.mask, *results)
        ctx.call = call[5:]
        return results.log_probs, results.entropy

    @staticmethod
    def backward(ctx: Any, by_log_probs: Stream, by_entropy: Stream) -> tuple[Stream, ...]:
        """The gradients by hidden states, weight and bias, chunk by chunk; sums are kept in float32 or wider."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph: got True, expected False, since log_probs have no second derivative")
        hidden, weight, bias, tokens, mask, *results = ctx.saved_tensors
        call = LinearTokens(hidden, weight, bias, tokens, mask, *ctx.call)
        if by_log_probs is None and by_entropy is None:
            return None, None, None, None, None
        chunks, precision = call.list_chunks(), find_precision((hidden,))
        buffer, (needs_hidden, needs_weight, needs_bias, *_) = call.make_buffer(chunks), ctx.needs_input_grad
        by_hidden = torch.empty_like(hidden) if needs_hidden else None
        by_weight = torch.zeros_like(weight, dtype=precision) if needs_weight else None
        by_bias = torch.zeros_like(bias, dtype=precision) if needs_bias else None
        for part in chunks:
            rows, logits, own, counts = call.take(part, buffer)
            numbers = (None if x is None else x[part] for x in (*results, by_log_probs, by_entropy))
            given: Any = (logits, own, counts, *numbers, call.temperature, True, call.backend)
            slopes = differentiate_tokens(*given)
            if by_hidden is not None:
                torch.mm(slopes, weight, out=by_hidden[part])
            if by_weight is not None:
                add_product(by_weight, slopes, rows)
            if by_bias is not None:
                by_bias += slopes.sum(0, dtype=precision)
        by_weight, by_bias = (None if x is None else x.to(weight.dtype) for x in (by_weight, by_bias))
        return by_hidden, by_weight, by_bias, None, None


def add_product(total: torch.Tensor, slopes: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add slopesᵀ·hidden to sums of all chunks; on a GPU, products are not rounded to half precision before."""
    if slopes.is_cuda and total.dtype != slopes.dtype:
        torch.addmm(total, slopes.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(slopes.t(), hidden)
