"""From a validated loss to its value and gradients: through a backend, torch.autograd and torch.compile.

The gradient is ready when the loss is: `LossFunction` keeps it, and its backward pass multiplies it by the incoming
gradient. Calls that torch.compile is tracing go through a custom operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rl_triton_core._internal.arguments.packing import SCHEMA, Packed, pack
from rl_triton_core._internal.arguments.validation import is_traced, refuse_transforms
from rl_triton_core._internal.backend import Backend, choose_backend, copy_problem_to_host, needs_host
from rl_triton_core._internal.launch.launcher import Outcome, record_outcome
from rl_triton_core._internal.loss.equations import STATISTICS, Choices, Coefficients
from rl_triton_core._internal.loss.problem import LossProblem, PPOLoss, Results, Stream, Streams
from rl_triton_core._internal.moments.rule import Rule

Targets = Sequence[tuple[torch.Size, torch.dtype] | None]
"""Shapes and dtypes of gradients, None for one that is not wanted."""


def solve_loss(problem: LossProblem, inputs: Sequence[torch.Tensor], backend: str | None) -> PPOLoss:
    """The loss of a call with detached tensors; with a graph if one of the inputs, as they were given, asks for it."""
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    problem.wanted = tuple(graph and x.requires_grad for x in inputs)
    if is_traced():
        return solve_traced(problem, backend)
    refuse_transforms("losses")
    chosen = choose_backend(backend, problem.like.device)
    problem.mark_numbers()
    loss, statistics, gradients = run_backend(problem, chosen)
    written = (loss, statistics, *gradients)
    targets = [(x.shape, x.dtype) if want else None for x, want in zip(inputs, problem.wanted, strict=True)]
    finish = partial(finish_loss, targets if graph else None, chosen.loss.scale_gradients)
    results = finish(written, inputs)
    record_outcome(Outcome(results, written, tuple(inputs), finish))
    return results


def finish_loss(
    targets: Targets | None,
    scale: Callable[[Sequence[torch.Tensor], torch.Tensor], None],
    written: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> PPOLoss:
    """What a call returns, from what a backend wrote: the loss, the statistics and the gradients."""
    loss = written[0]
    if targets is not None:
        loss = LossFunction.apply(written, targets, scale, *inputs)  # type: ignore[no-untyped-call]
    return PPOLoss(loss, *written[1].unbind())


def run_backend(problem: LossProblem, backend: Backend) -> Results:
    """Compute by a backend. Without elements there is nothing to compute."""
    if needs_host(problem.like.device):
        loss, statistics, gradients = run_backend(copy_problem_to_host(problem), backend)
        to_device = partial(torch.Tensor.to, device=problem.like.device)
        return Results(to_device(loss), to_device(statistics), [*map(to_device, gradients)])
    if problem.like.shape[0]:
        results: Results = backend.loss.compute_loss(problem)
        return results
    statistics = torch.zeros(len(STATISTICS), dtype=problem.dtype, device=problem.like.device)
    statistics[STATISTICS.index("explained_variance")].fill_(math.nan)
    return Results(
        statistics.new_zeros(()), statistics, [x.zero_() for x in problem.allocate_gradients() if x is not None]
    )


class LossFunction(torch.autograd.Function):
    """Gives a loss that a backend wrote its graph; without `setup_context`, which takes time in every call."""

    @staticmethod
    def forward(ctx: Any, written: Sequence[torch.Tensor], targets: Any, scale: Any, *_: torch.Tensor) -> torch.Tensor:
        """Keep the gradients but none of the inputs."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*written[2:])
        ctx.targets, ctx.scale = targets, scale
        return written[0]

    @staticmethod
    def backward(ctx: Any, grad: Stream) -> tuple[Any, ...]:
        """The gradients times that of the loss. They are overwritten if nothing needs them again."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph: got True, expected False, since the losses have no second derivative")
        if grad is None:
            return None, None, None, *(None for _ in ctx.targets)
        saved = ctx.saved_tensors
        if keeps_graph():
            return None, None, None, *arrange_gradients(ctx, [x * grad for x in saved])
        ctx.scale(tuple(saved), grad)
        return None, None, None, *arrange_gradients(ctx, saved)


def arrange_gradients(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[Stream, ...]:
    """Gradients in the shapes and dtypes of the inputs that they are by; None where none is wanted."""
    rest = iter(gradients)
    return tuple(None if x is None else next(rest).view(x[0]).to(x[1]) for x in ctx.targets)


def get_gradients(loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a loss, which are ready without a backward pass.

    Args:
        loss: `loss` of a `PPOLoss`, or what another function of `rl_triton_core.losses` returns. Not under
            torch.compile.

    Returns:
        One for each differentiable tensor that the loss was computed from, in the order of the arguments, None where
        that requires no gradient. A backward pass through the loss may overwrite them.

    Raises:
        ValueError: The loss has no graph, or it is another tensor.

    Example:
        >>> log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
        >>> result = ppo_loss(LogProbs(log_probs), None, torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 1.0]))
        >>> get_gradients(result.loss)
        (tensor([-0.5000,  0.0000]),)
    """
    node: Any = loss.grad_fn
    is_loss = type(node) is LossFunction._backward_cls
    if not is_loss:
        raise ValueError(f"loss: got a tensor with grad_fn {node}, expected a loss of rl_triton_core.losses")
    return arrange_gradients(node, node.saved_tensors)


def keeps_graph() -> bool:
    """Whether the backward pass that is running was asked to retain its graph; if unknown, yes."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


# -- torch.compile ----------------------------------------------------------------------------------------------------


def solve_traced(problem: LossProblem, backend: str | None) -> PPOLoss:
    """The loss and its statistics through an operator that torch.compile takes as it is."""
    if problem.exchange is not None:
        raise ValueError("group: got one under torch.compile, expected None there")
    coefficients, normalizer, rule = problem.coefficients, problem.normalizer, problem.rule
    numbers = [0.0 if isinstance(x, torch.Tensor) else x for x in coefficients]
    numbers += [0.0 if normalizer is None else normalizer, *([] if rule is None else rule)]
    packed = pack(
        problem.differentiable,
        [*problem.streams, *(x if isinstance(x, torch.Tensor) else None for x in coefficients), *problem.old_inputs],
        numbers,
        [problem.length, *problem.sizes],
        [problem.values is not None, problem.per_sequence, normalizer is not None],
        problem.choices,
        problem.wanted,
        backend,
    )
    loss, statistics, *_ = loss_operator(*packed)
    return PPOLoss(loss, *statistics.unbind())


def unpack_loss(packed: Packed) -> LossProblem:
    """Build the `LossProblem` again."""
    has_values, per_sequence, has_normalizer = packed.flags
    *network, values = packed.inputs if has_values else (*packed.inputs, None)
    count, rest = len(Coefficients._fields), packed.tensors[len(Streams._fields) :]
    numbers = packed.read_numbers()
    normalizer, *rule = numbers[count:]
    coefficients = (number if x is None else x for x, number in zip(rest, numbers[:count], strict=False))
    length, *sizes = packed.integers
    return LossProblem(
        Choices(*packed.names.split(",")),
        tuple(x for x in network if x is not None),
        Streams(*packed.tensors[: len(Streams._fields)]),
        values,
        tuple(x for x in rest[count:] if x is not None),
        tuple(sizes),
        Coefficients(*coefficients),
        length,
        per_sequence,
        normalizer if has_normalizer else None,
        Rule(*rule) if rule else None,
        wanted=tuple(packed.wanted),
    )


@torch.library.custom_op("rl_triton_core::loss", mutates_args=(), schema=SCHEMA)
def loss_operator(*arguments: Any) -> list[torch.Tensor]:
    """The loss of a packed problem, its statistics, and the gradients that are wanted."""
    packed = Packed(*arguments)
    problem = unpack_loss(packed)
    backend = choose_backend(packed.backend or None, problem.like.device)
    loss, statistics, gradients = run_backend(problem, backend)
    return [loss, statistics, *gradients]


@loss_operator.register_fake
def _(*arguments: Any) -> list[torch.Tensor]:
    problem = unpack_loss(Packed(*arguments)._replace(symbols=None))
    loss = problem.like.new_empty((), dtype=problem.dtype)
    return [loss, loss.new_empty(len(STATISTICS)), *(x for x in problem.allocate_gradients() if x is not None)]


def keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    """Keep what the backward pass multiplies."""
    packed = Packed(*inputs)
    ctx.wanted, ctx.dtypes = packed.wanted, [x.dtype for x in packed.inputs]
    ctx.save_for_backward(*output[2:])


def scale_gradients(ctx: Any, grads: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The gradients times that of the loss."""
    saved = iter(ctx.saved_tensors)
    scaled = [
        (next(saved) * grads[0]).to(dtype) if want else None for want, dtype in zip(ctx.wanted, ctx.dtypes, strict=True)
    ]
    return scaled, *[None] * (len(Packed._fields) - 1)


loss_operator.register_autograd(scale_gradients, setup_context=keep_gradients)
