"""From a public function's arguments to its results: validate, choose a backend, run.

Three ways lead there. Plain calls go straight to the backend. Calls of which an input requires grad evaluate the
equations with PyTorch's operations and leave only the scan to the backend, whose gradient is a scan the other way.
Calls that torch.compile is tracing go through a custom operator, which it does not look into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rl_triton_core import validation as check
from rl_triton_core.backends import choose
from rl_triton_core.backends.reference import evaluate
from rl_triton_core.recurrence import RECURRENCES, Problem, Recurrence, Step

Results = tuple[torch.Tensor | None, ...]


def solve(
    recurrence: Recurrence,
    inputs: Mapping[str, Any],
    *,
    terminated: Any,
    truncated: Any,
    gamma: Any,
    lambda_: Any,
    bootstrap_values: Any,
    next_values: Any,
    mask: Any,
    mask_mode: Any,
    time_dim: int,
    wanted: Sequence[bool],
    out: Any,
    backend: str | None,
) -> Results:
    """Validate a call of an estimator and compute its wanted results.

    Args:
        recurrence: The estimator.
        inputs: Its inputs by name. The first sets the shape and device of all.
        wanted: Which of its outputs to compute.
        terminated: As in `compute_gae`, like all arguments that follow.
        truncated: .
        gamma: .
        lambda_: .
        bootstrap_values: .
        next_values: .
        mask: .
        mask_mode: .
        time_dim: .
        out: .
        backend: .
    """
    name, first = next(iter(inputs.items()))
    window = check.check_window(name, first, time_dim)
    for name, tensor in inputs.items():
        check.check_per_step(name, tensor, window)
    check.check_flags("terminated", terminated, window)
    check.check_flags("truncated", truncated, window)
    check.check_flags("mask", mask, window)
    skip = check.check_mask_mode(mask_mode)
    problem = Problem(
        recurrence=recurrence,
        inputs=tuple(inputs[name] for name in recurrence.inputs),
        outputs=(None,) * len(wanted),
        time_dim=window.time_dim,
        gamma=check.check_gamma(gamma, window),
        lambda_=check.check_number("lambda_", lambda_, 0.0, 1.0),
        params=(),
        next_values=next_values,
        bootstrap=check.check_continuation(bootstrap_values, next_values, truncated, mask if skip else None, window),
        terminated=terminated,
        truncated=truncated,
        mask=mask,
        skip=skip,
    )
    if out is not None:
        check.check_out(out, recurrence.outputs, wanted, window, tensors(problem))
    return dispatch(problem, wanted, out or (None,) * len(wanted), backend)


def dispatch(
    problem: Problem, wanted: Sequence[bool], out: Sequence[torch.Tensor | None], backend: str | None
) -> Results:
    """Compute by the way that the call needs, into `out` where it is given."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors(problem)):
        return copy_into(out, differentiable(problem, wanted, backend))
    if torch.compiler.is_compiling():
        return copy_into(out, traceable(problem, wanted, backend))
    problem = replace(problem, outputs=allocate(problem, wanted, out))
    execute(problem, backend)
    return problem.outputs


def execute(problem: Problem, backend: str | None) -> None:
    """Fill the problem's outputs."""
    chosen = choose(backend, problem.inputs[0].device)
    if problem.inputs[0].numel():
        chosen.run(problem)


def allocate(problem: Problem, wanted: Sequence[bool], out: Sequence[torch.Tensor | None]) -> Results:
    """The tensors to fill: those given, new ones in the memory order of the inputs for the others that are wanted."""
    like = problem.inputs[0]
    return tuple(
        tensor if tensor is not None or not want else torch.empty_like(like, dtype=problem.dtype)
        for tensor, want in zip(out, wanted, strict=True)
    )


def copy_into(out: Sequence[torch.Tensor | None], results: Results) -> Results:
    """Results computed elsewhere, in the tensors given for them."""
    return tuple(
        result if tensor is None or result is None else tensor.copy_(result)
        for tensor, result in zip(out, results, strict=True)
    )


def tensors(problem: Problem) -> tuple[torch.Tensor, ...]:
    """All tensors a problem reads."""
    optional = (getattr(problem, name) for name in STREAMS)
    return (*problem.inputs, *(x for x in optional if isinstance(x, torch.Tensor)))


STREAMS = ("gamma", "next_values", "bootstrap", "terminated", "truncated", "mask")

# -- differentiable ---------------------------------------------------------------------------------------------------


def differentiable(problem: Problem, wanted: Sequence[bool], backend: str | None) -> Results:
    """Results with a graph: the equations in PyTorch, the scan by the backend."""
    scan = partial(linear_recurrence, backend=backend or "")
    results = evaluate(problem, torch.float64 if backend == "reference" else problem.dtype, scan)
    return tuple(
        problem.unview(result).to(problem.dtype) if want else None for result, want in zip(results, wanted, strict=True)
    )


def linear_coefficients(step: Step) -> tuple[Any, Any]:
    """α and β as they are given."""
    alpha, beta = step.inputs
    return alpha, beta


def linear_readout(step: Step, state: Any) -> tuple[Any, ...]:
    """The state itself."""
    return (state,)


LINEAR = Recurrence("linear", ("alpha", "beta"), 0, ("states",), linear_coefficients, linear_readout)


@torch.library.custom_op("rl_triton_core::linear_recurrence", mutates_args=())
def linear_recurrence(alpha: torch.Tensor, beta: torch.Tensor, backend: str) -> torch.Tensor:
    """A[t] = α[t] + β[t]·A[t+1] along dimension 1 of [1, steps, lanes]."""
    out = torch.empty_like(alpha)
    problem = Problem(LINEAR, (alpha[0], beta[0]), (out[0],), 0, 1.0, 1.0, (), None, 0.0, None, None, None, True)
    execute(problem, backend or None)
    return out


@linear_recurrence.register_fake
def _(alpha: torch.Tensor, beta: torch.Tensor, backend: str) -> torch.Tensor:
    return torch.empty_like(alpha)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keep what the gradient needs: β and the states."""
    _, beta, ctx.backend = inputs
    ctx.save_for_backward(beta, output)


def linear_recurrence_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    """λ[t] = ∂L/∂A[t] + β[t-1]·λ[t-1];  ∂L/∂α = λ;  ∂L/∂β[t] = λ[t]·A[t+1]."""
    beta, state = ctx.saved_tensors
    before = torch.cat([torch.zeros_like(beta[:, :1]), beta[:, :-1]], dim=1)
    alpha_grad = linear_recurrence(grad.flip(1), before.flip(1), ctx.backend).flip(1)
    after = torch.cat([state[:, 1:], torch.zeros_like(state[:, :1])], dim=1)
    return alpha_grad, alpha_grad * after, None


linear_recurrence.register_autograd(linear_recurrence_backward, setup_context=save_for_backward)

# -- traceable --------------------------------------------------------------------------------------------------------


def traceable(problem: Problem, wanted: Sequence[bool], backend: str | None) -> Results:
    """Results through a custom operator that torch.compile takes as it is."""
    streams = [getattr(problem, name) for name in STREAMS]
    results = iter(
        solve_operator(
            problem.recurrence.name,
            list(problem.inputs),
            [x if isinstance(x, torch.Tensor) else None for x in streams],
            [x if isinstance(x, float) else 0.0 for x in (problem.gamma, problem.bootstrap)],
            problem.lambda_,
            list(problem.params),
            problem.time_dim,
            problem.skip,
            list(wanted),
            backend or "",
        )
    )
    return tuple(next(results) if want else None for want in wanted)


@torch.library.custom_op("rl_triton_core::solve", mutates_args=())
def solve_operator(
    name: str,
    inputs: Sequence[torch.Tensor],
    streams: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    lambda_: float,
    params: Sequence[float],
    time_dim: int,
    skip: bool,
    wanted: Sequence[bool],
    backend: str,
) -> list[torch.Tensor]:
    """A `Problem`, field by field."""
    values: dict[str, Any] = dict(zip(STREAMS, streams, strict=True))
    for key, number in zip(("gamma", "bootstrap"), numbers, strict=True):
        values[key] = number if values[key] is None else values[key]
    problem = Problem(
        recurrence=RECURRENCES[name],
        inputs=tuple(inputs),
        outputs=(),
        time_dim=time_dim,
        lambda_=lambda_,
        params=tuple(params),
        skip=skip,
        **values,
    )
    outputs = allocate(problem, wanted, (None,) * len(wanted))
    execute(replace(problem, outputs=outputs), backend or None)
    return [x for x in outputs if x is not None]


@solve_operator.register_fake
def _(
    name: str,
    inputs: Sequence[torch.Tensor],
    streams: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    lambda_: float,
    params: Sequence[float],
    time_dim: int,
    skip: bool,
    wanted: Sequence[bool],
    backend: str,
) -> list[torch.Tensor]:
    real = [x for x in (*inputs, *streams[:3]) if x is not None]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in real) else torch.float32
    return [torch.empty_like(inputs[0], dtype=dtype) for want in wanted if want]
