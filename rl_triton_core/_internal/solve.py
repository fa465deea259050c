"""From a public function's arguments to its results: validate, choose a backend, run.

There are three ways. Plain calls go straight to the backend. Calls of which an input requires grad evaluate the
equations with PyTorch's operations and leave only the scan to the backend, whose gradient is a scan the other way.
Calls that torch.compile traces go through a custom operator, which it does not look into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rl_triton_core._internal import validation as check
from rl_triton_core._internal.backends import choose
from rl_triton_core._internal.backends.reference import evaluate_recurrence
from rl_triton_core._internal.bootstrap import check_continuation
from rl_triton_core._internal.linear import LINEAR_FORWARD
from rl_triton_core._internal.outputs import check_out
from rl_triton_core._internal.recurrence import RECURRENCES, Expectation, Problem, Recurrence

Results = tuple[Any, ...]
"""The results in the order of `Recurrence.outputs`, None for each that is not wanted."""


def solve(
    recurrence: Recurrence,
    inputs: Mapping[str, Any],
    layout: check.RolloutLayout,
    *,
    wanted: Sequence[bool] = (True,),
    gamma: Any = 1.0,
    lambda_: Any = 1.0,
    params: tuple[float, ...] = (),
    terminated: Any = None,
    truncated: Any = None,
    bootstrap_values: Any = None,
    next_values: Any = None,
    mask: Any = None,
    mask_mode: Any = "skip",
    out: Any = None,
    backend: str | None = None,
) -> Results:
    """Check the arguments of an estimator that looks at values, and compute its wanted results.

    Args:
        recurrence: The estimator.
        inputs: Its inputs by name, without those that are not given; first the one that set the layout.
        layout: What `check_layout` returned for that input.
        wanted: Which of its outputs to compute.
        gamma: Discount γ, one finite number >= 0 or one per step, where 0 ends the trajectory.
        lambda_: λ in [0, 1]; `Step.decay` is γλ.
        params: The recurrence's own numbers in the order of `Recurrence.params`, checked.
        terminated: Flags of steps that ended in a terminal state; None: nowhere.
        truncated: Flags of steps whose episode was cut although its state has a future; None: nowhere.
        bootstrap_values: V(s_{t+1}) at truncated steps and at the rollout's end, in any of the public forms.
        next_values: V(s_{t+1}) of every step, or an `Expectation` of it; replaces `bootstrap_values`.
        mask: Nonzero where a step belongs to the trajectory; None: everywhere.
        mask_mode: ``"skip"`` or ``"reset"``.
        out: One preallocated tensor per output, None for those to allocate; None for all.
        backend: ``"triton"``, ``"cpu"`` or ``"reference"``; None chooses by the tensors' device.

    Returns:
        A tensor for every output in the order of `Recurrence.outputs`, None for each that is not wanted.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape, device or value is wrong, or neither `bootstrap_values` nor `next_values` was given.
        BackendUnavailableError: The backend asked for cannot run here.
    """
    for name, tensor in inputs.items():
        check.check_per_step(name, tensor, layout)
    check.check_flags("terminated", terminated, layout)
    check.check_flags("truncated", truncated, layout)
    check.check_flags("mask", mask, layout)
    skip = check.check_choice("mask_mode", mask_mode, check.MASK_MODES) == "skip"
    problem = Problem(
        recurrence=recurrence,
        like=next(iter(inputs.values())),
        inputs=tuple(map(inputs.get, recurrence.inputs)),
        outputs=(None,) * len(wanted),
        time_dim=layout.time_dim,
        gamma=check.check_gamma(gamma, layout),
        lambda_=check.check_number("lambda_", lambda_, 0.0, 1.0),
        params=params,
        next_values=next_values,
        bootstrap=check_continuation(bootstrap_values, next_values, truncated, mask if skip else None, layout),
        terminated=terminated,
        truncated=truncated,
        mask=mask,
        cu_seqlens=layout.cu_seqlens,
        skip=skip,
    )
    if out is not None:
        check_out(out, recurrence.outputs, wanted, problem.like, list_tensors(problem))
    return dispatch_problem(problem, wanted, out, backend)


def solve_features(
    recurrence: Recurrence,
    inputs: tuple[torch.Tensor, ...],
    layout: check.RolloutLayout,
    *,
    initial: torch.Tensor | None,
    gamma: float | torch.Tensor = 1.0,
    out: Any,
    backend: str | None,
    **fields: Any,
) -> torch.Tensor:
    """Compute the one result of a recurrence whose inputs may have features.

    Args:
        recurrence: The estimator.
        inputs: Its inputs, checked: all of one shape, time and environments first, then features.
        layout: What `check_layout` returned for the first of them.
        initial: The state that enters the scan, [num_envs, *features]; None: 0.
        gamma: What `Step.decay` is: a number or a tensor of the inputs' shape or of their steps'.
        out: A preallocated result; None allocates one.
        backend: ``"triton"``, ``"cpu"`` or ``"reference"``; None chooses by the tensors' device.
        fields: Further fields of `Problem`, checked.

    Returns:
        The result, shaped like the inputs.
    """

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x if x.ndim <= 3 else x.flatten(2)

    like = flat(inputs[0])
    if isinstance(gamma, torch.Tensor):
        gamma = gamma.unsqueeze(2).expand(like.shape) if gamma.ndim < like.ndim else flat(gamma)
    if initial is not None:
        initial = layout.expand_over_time(initial if initial.ndim < 2 else initial.flatten(1))
    problem = Problem(
        recurrence,
        like,
        tuple(map(flat, inputs)),
        (None,),
        layout.time_dim,
        gamma=gamma,
        initial=initial,
        cu_seqlens=layout.cu_seqlens,
        **fields,
    )
    if out is not None:
        check_out((out,), recurrence.outputs, (True,), inputs[0], (*inputs, *list_tensors(problem)))
    target = None if out is None else flatten_features(out)
    result: torch.Tensor
    (result,) = dispatch_problem(problem, (True,), None if target is None else (target,), backend)
    result = result.view(inputs[0].shape)
    return result if out is None else out if target is not None else out.copy_(result)


def flatten_features(tensor: torch.Tensor) -> torch.Tensor | None:
    """View a tensor's features as one dimension over the same memory; None if its strides do not allow that."""
    if tensor.ndim <= 3:
        return tensor
    if torch.compiler.is_compiling():
        return None
    flat = tensor.flatten(2)
    return flat if flat.data_ptr() == tensor.data_ptr() else None


def dispatch_problem(problem: Problem, wanted: Sequence[bool], out: Any, backend: str | None) -> Results:
    """Compute by the way that the call needs, into `out` where it is given (and checked)."""
    out = (None,) * len(wanted) if out is None else out
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in list_tensors(problem))
    traced = torch.compiler.is_compiling()
    if isinstance(problem.next_values, Expectation) and (graph or traced or not supports_expectation(problem, backend)):
        problem.next_values = problem.next_values.dense(problem.terminated, problem.mask)
    if graph:
        return copy_into_out(out, solve_with_graph(problem, wanted, backend))
    if traced:
        return copy_into_out(out, solve_through_operator(problem, wanted, backend))
    problem.outputs = allocate_outputs(problem, wanted, out)
    run_backend(problem, backend)
    return problem.outputs


def supports_expectation(problem: Problem, backend: str | None) -> bool:
    """Whether the backend takes an expectation as it is."""
    return choose(backend, problem.like.device).supports_expectation


def run_backend(problem: Problem, backend: str | None) -> None:
    """Fill the problem's outputs."""
    chosen = choose(backend, problem.like.device)
    if problem.like.numel():
        chosen.run(problem)


def allocate_outputs(problem: Problem, wanted: Sequence[bool], out: Sequence[torch.Tensor | None]) -> Results:
    """The tensors to fill: those given, and for others that are wanted new ones in the memory order of the inputs."""
    dtype = problem.dtype
    return tuple(
        tensor if tensor is not None or not want else torch.empty_like(problem.like, dtype=dtype)
        for tensor, want in zip(out, wanted, strict=True)
    )


def copy_into_out(out: Sequence[torch.Tensor | None], results: Results) -> Results:
    """Copy results into the tensors given for them; return these, and the results for which none was given."""
    return tuple(
        result if tensor is None or result is None else tensor.copy_(result)
        for tensor, result in zip(out, results, strict=True)
    )


def list_tensors(problem: Problem) -> tuple[torch.Tensor, ...]:
    """All tensors that a problem reads."""
    expected = problem.next_values if isinstance(problem.next_values, Expectation) else ()
    streams = (*problem.inputs, *expected, *(getattr(problem, name) for name in STREAMS))
    return tuple(x for x in streams if isinstance(x, torch.Tensor))


STREAMS = (
    "gamma",
    "bootstrap",
    "next_values",
    "initial",
    "terminated",
    "truncated",
    "mask",
    "previous_done",
    "cu_seqlens",
)
NUMBERS = STREAMS[:2]

# -- differentiable ---------------------------------------------------------------------------------------------------


def solve_with_graph(problem: Problem, wanted: Sequence[bool], backend: str | None) -> Results:
    """Results with a graph: the equations in PyTorch, the scan by the backend."""
    scan = partial(linear_scan, backend=backend or "")
    results = evaluate_recurrence(problem, torch.float64 if backend == "reference" else problem.dtype, scan)
    return tuple(
        problem.unview(result).to(problem.dtype) if want else None for result, want in zip(results, wanted, strict=True)
    )


@torch.library.custom_op("rl_triton_core::linear_scan", mutates_args=())
def linear_scan(alpha: torch.Tensor, beta: torch.Tensor, backend: str) -> torch.Tensor:
    """A[t] = α[t] + β[t]·A[t-1] along dimension 1 of [groups, steps, lanes]."""
    out = torch.empty_like(alpha)
    problem = Problem(LINEAR_FORWARD, alpha, (alpha, beta), (out,), time_dim=1)
    run_backend(problem, backend or None)
    return out


@linear_scan.register_fake
def _(alpha: torch.Tensor, beta: torch.Tensor, backend: str) -> torch.Tensor:
    return torch.empty_like(alpha)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keep what the gradient needs: β and the states."""
    _, beta, ctx.backend = inputs
    ctx.save_for_backward(beta, output)


def linear_scan_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    """λ[t] = ∂L/∂A[t] + β[t+1]·λ[t+1];  ∂L/∂α = λ;  ∂L/∂β[t] = λ[t]·A[t-1]."""
    beta, state = ctx.saved_tensors
    after = torch.cat([beta[:, 1:], torch.zeros_like(beta[:, :1])], dim=1)
    alpha_grad = linear_scan(grad.flip(1), after.flip(1), ctx.backend).flip(1)
    before = torch.cat([torch.zeros_like(state[:, :1]), state[:, :-1]], dim=1)
    return alpha_grad, alpha_grad * before, None


linear_scan.register_autograd(linear_scan_backward, setup_context=save_for_backward)

# -- traceable --------------------------------------------------------------------------------------------------------


def solve_through_operator(problem: Problem, wanted: Sequence[bool], backend: str | None) -> Results:
    """Results through a custom operator that torch.compile takes as it is."""
    streams = [getattr(problem, name) for name in STREAMS]
    results = iter(
        solve_operator(
            problem.recurrence.name,
            problem.like,
            list(problem.inputs),
            [x if isinstance(x, torch.Tensor) else None for x in streams],
            [0.0 if isinstance(x, torch.Tensor) else float(x) for x in streams[: len(NUMBERS)]],
            problem.lambda_,
            list(problem.params),
            problem.time_dim,
            problem.skip,
            problem.starts_at,
            list(wanted),
            backend or "",
        )
    )
    return tuple(next(results) if want else None for want in wanted)


def build_problem(
    name: str,
    like: torch.Tensor,
    inputs: Sequence[torch.Tensor | None],
    streams: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    lambda_: float,
    params: Sequence[float],
    time_dim: int,
    skip: bool,
    starts_at: bool,
) -> Problem:
    """A `Problem` from the operator's arguments."""
    values: dict[str, Any] = dict(zip(STREAMS, streams, strict=True))
    for key, number in zip(NUMBERS, numbers, strict=True):
        values[key] = number if values[key] is None else values[key]
    fields: dict[str, Any] = {"lambda_": lambda_, "params": tuple(params), "skip": skip, "starts_at": starts_at}
    return Problem(RECURRENCES[name], like, tuple(inputs), (), time_dim, **values, **fields)


@torch.library.custom_op("rl_triton_core::solve", mutates_args=())
def solve_operator(
    name: str,
    like: torch.Tensor,
    inputs: Sequence[torch.Tensor | None],
    streams: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    lambda_: float,
    params: Sequence[float],
    time_dim: int,
    skip: bool,
    starts_at: bool,
    wanted: Sequence[bool],
    backend: str,
) -> list[torch.Tensor]:
    """A `Problem`, field by field."""
    problem = build_problem(name, like, inputs, streams, numbers, lambda_, params, time_dim, skip, starts_at)
    problem.outputs = allocate_outputs(problem, wanted, (None,) * len(wanted))
    run_backend(problem, backend or None)
    return [x for x in problem.outputs if x is not None]


@solve_operator.register_fake
def _(
    name: str,
    like: torch.Tensor,
    inputs: Sequence[torch.Tensor | None],
    streams: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    lambda_: float,
    params: Sequence[float],
    time_dim: int,
    skip: bool,
    starts_at: bool,
    wanted: Sequence[bool],
    backend: str,
) -> list[torch.Tensor]:
    problem = build_problem(name, like, inputs, streams, numbers, lambda_, params, time_dim, skip, starts_at)
    return [torch.empty_like(like, dtype=problem.dtype) for want in wanted if want]
