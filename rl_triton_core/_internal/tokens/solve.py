"""From validated logits to log-probabilities and their gradient: through a backend, torch.autograd and torch.compile.

Calls that torch.compile is tracing go through two custom operators, one for each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rl_triton_core._internal.arguments.packing import SCHEMA, Packed, pack
from rl_triton_core._internal.arguments.validation import UNREAD, is_traced, refuse_cells, refuse_transforms
from rl_triton_core._internal.backend import Backend, choose_backend, copy_problem_to_host, copy_to_host, needs_host
from rl_triton_core._internal.launch.fast_path import with_fast_path
from rl_triton_core._internal.launch.launcher import Outcome, record_outcome
from rl_triton_core._internal.tokens.problem import Stream, TokenLogProbs, TokenProblem, TokenResults


def solve_tokens(problem: TokenProblem, has_entropy: bool, in_place: bool, backend: str | None) -> TokenLogProbs:
    """Log-probabilities and perhaps entropies of logits as they were given, with a graph if they require grad.

    `in_place` says whether the gradient may take the memory of the logits.
    """
    if is_traced():
        return solve_traced(problem, has_entropy, backend)
    refuse_transforms("token_log_probs")
    logits = problem.logits
    graph = torch.is_grad_enabled() and logits.requires_grad
    problem.logits = logits.detach() if logits.requires_grad else logits
    results = run_backend(problem, has_entropy, choose_backend(backend, logits.device))
    options = (problem.temperature, in_place, backend) if graph else None
    finish = partial(finish_tokens, options, problem.mask is not None)
    written = tuple([x for x in results if x is not None])
    inputs = (logits, problem.tokens) if problem.mask is None else (logits, problem.tokens, problem.mask)
    returned = finish(written, inputs)
    record_outcome(Outcome(returned, written, inputs, finish))
    return returned


def finish_tokens(
    options: tuple[float, bool, str | None] | None,
    has_mask: bool,
    written: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> TokenLogProbs:
    """What a call returns, from what a backend wrote."""
    results = TokenResults(*written)
    returned: Any = results.log_probs, results.entropy
    if options is not None:
        logits, tokens, *mask = inputs
        returned = TokenFunction.apply(results, options, logits, tokens, mask[0] if has_mask else None)  # type: ignore[no-untyped-call]
    return TokenLogProbs(*(returned if isinstance(returned, tuple) else (returned, None)))


def run_backend(problem: TokenProblem, has_entropy: bool, backend: Backend) -> TokenResults:
    """Compute by a backend. Tokens in host memory are checked."""
    if problem.split is not None:
        own = replace(problem, split=None, tokens=problem.tokens.clamp(min=0))
        return problem.split.join(problem, run_backend(own, has_entropy, backend))  # type: ignore[no-any-return]
    if needs_host(problem.logits.device):
        results = run_backend(copy_problem_to_host(problem), has_entropy, backend)
        return TokenResults(*(None if x is None else x.to(problem.logits.device) for x in results))  # type: ignore[arg-type]
    tokens, size = problem.tokens, problem.logits.shape[-1]
    if tokens.device.type not in UNREAD:
        expected = f"0 to {size - 1}, where they are not masked"
        refuse_cells("tokens", tokens, (tokens < 0) | (tokens >= size), problem.mask, expected)
    results = problem.allocate_results(has_entropy)
    if tokens.numel():
        backend.tokens.run(problem, results)
    return results


class TokenFunction(torch.autograd.Function):
    """Gives log-probabilities and entropies that a backend wrote their graph, as `LossFunction` does."""

    @staticmethod
    def forward(ctx: Any, results: TokenResults, options: Any, logits: torch.Tensor, *others: Stream) -> Any:
        """Keep the logits, and what there is one of per token."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, *others, *results)
        ctx.options = options
        return results.log_probs if results.entropy is None else (results.log_probs, results.entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Stream) -> tuple[Stream, ...]:
        """The gradient by the logits, in their memory if that was given up."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph: got True, expected False, since log_probs have no second derivative")
        temperature, in_place, backend = ctx.options
        logits, tokens, mask, *results = ctx.saved_tensors
        upstream = (*grads, None)[:2]
        if all(x is None for x in upstream):
            return None, None, None, None, None
        if in_place:  # what others kept of the logits is gone
            torch.autograd.graph.increment_version(logits)
        arguments: Any = (logits.detach(), tokens, mask, *results, *upstream, temperature, in_place, backend)
        gradient = differentiate_tokens(*arguments)
        return None, None, gradient, None, None


@with_fast_path
def differentiate_tokens(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    mask: Stream,
    log_probs: torch.Tensor,
    peaks: torch.Tensor,
    log_totals: torch.Tensor,
    entropy: Stream,
    by_log_probs: Stream,
    by_entropy: Stream,
    temperature: float,
    in_place: bool,
    backend: str | None,
) -> torch.Tensor:
    """The gradient by the logits, perhaps in their memory."""
    problem = TokenProblem(logits, tokens, mask, temperature)
    results, upstream = TokenResults(log_probs, peaks, log_totals, entropy), (by_log_probs, by_entropy)
    gradient = logits if in_place else torch.empty_like(logits, memory_format=torch.contiguous_format)
    chosen = choose_backend(backend, logits.device)
    if needs_host(logits.device):
        own = torch.empty(logits.shape, dtype=logits.dtype)
        chosen.tokens.differentiate(copy_problem_to_host(problem), copy_to_host(results), copy_to_host(upstream), own)
        return gradient.copy_(own)
    if tokens.numel():
        chosen.tokens.differentiate(problem, results, upstream, gradient)
    return gradient


# -- torch.compile ----------------------------------------------------------------------------------------------------


def solve_traced(problem: TokenProblem, has_entropy: bool, backend: str | None) -> TokenLogProbs:
    """The results through an operator that torch.compile takes as it is."""
    tensors, numbers = [problem.tokens, problem.mask], [problem.temperature]
    packed = pack([problem.logits], tensors, numbers, [], [has_entropy], [], [], backend)
    results: Any = TokenResults(*token_operator(*packed))
    return TokenLogProbs(results.log_probs, results.entropy)


def unpack_tokens(packed: Packed) -> TokenProblem:
    """Build the `TokenProblem` again."""
    return TokenProblem(packed.inputs[0], packed.tensors[0], packed.tensors[1], *packed.read_numbers())  # type: ignore[arg-type]


@torch.library.custom_op("rl_triton_core::tokens", mutates_args=(), schema=SCHEMA)
def token_operator(*arguments: Any) -> list[torch.Tensor]:
    """The results of a packed problem."""
    packed = Packed(*arguments)
    problem = unpack_tokens(packed)
    results = run_backend(problem, packed.flags[0], choose_backend(packed.backend or None, problem.logits.device))
    return [x for x in results if x is not None]


@token_operator.register_fake
def _(*arguments: Any) -> list[torch.Tensor]:
    packed = Packed(*arguments)._replace(symbols=None)
    return [x for x in unpack_tokens(packed).allocate_results(packed.flags[0]) if x is not None]


@torch.library.custom_op("rl_triton_core::tokens_backward", mutates_args=(), schema=SCHEMA)
def gradient_operator(*arguments: Any) -> list[torch.Tensor]:
    """The gradient by the logits of a packed problem, whose tensors are followed by results and derivatives by them."""
    packed = Packed(*arguments)
    everything: Any = (packed.inputs[0], *packed.tensors, *packed.read_numbers(), False, packed.backend or None)
    return [differentiate_tokens(*everything)]


@gradient_operator.register_fake
def _(*arguments: Any) -> list[torch.Tensor]:
    return [torch.empty_like(Packed(*arguments).inputs[0], memory_format=torch.contiguous_format)]


def keep_tokens(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    """Keep what the backward pass needs."""
    packed = Packed(*inputs)
    results = TokenResults(*output)
    ctx.save_for_backward(packed.inputs[0], packed.symbols, *packed.tensors, *results)
    ctx.packed = packed._replace(inputs=[], tensors=[], symbols=None)


def differentiate_traced(ctx: Any, grads: Sequence[Stream]) -> tuple[Any, ...]:
    """The gradient by the logits."""
    logits, symbols, *tensors = ctx.saved_tensors
    upstream = grads[0], grads[3] if len(grads) > 3 else None
    packed = ctx.packed._replace(inputs=[logits], tensors=[*tensors, *upstream], symbols=symbols)
    others = None if tensors[1] is None else [None, None]  # PyTorch wants a list for one of tensors, or an empty one
    return gradient_operator(*packed), others, None, None, [], None, None, [], None


token_operator.register_autograd(differentiate_traced, setup_context=keep_tokens)
