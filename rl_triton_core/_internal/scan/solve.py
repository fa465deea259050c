"""From a public function's arguments to its results: validate, choose a backend, run.

There are three ways. Plain calls go straight to the backend. Calls that are differentiated, or transformed by
torch.func, evaluate the equations with PyTorch's operations and leave only the scan to the backend. Calls that
torch.compile traces go through a custom operator, which it does not look into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.arguments.outputs import check_out
from rl_triton_core._internal.arguments.packing import SCHEMA, Packed, pack
from rl_triton_core._internal.backend import check_choice, choose_backend, copy_problem_to_host, needs_host
from rl_triton_core._internal.scan.autograd import needs_graph, solve_with_graph
from rl_triton_core._internal.scan.bootstrap import check_continuation
from rl_triton_core._internal.scan.problem import STREAMS, Problem, Results, allocate_outputs, list_tensors, run_backend
from rl_triton_core._internal.scan.recurrence import RECURRENCES, Expectation, Recurrence


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

    `inputs` are those of the recurrence by name, without those that are not given; first the one for which
    `check_layout` returned the layout. `wanted` says which outputs to compute, and `params` are the numbers of
    `Recurrence.params`, checked. `next_values` may be an `Expectation`, and `out` has a tensor or None for each output.
    All others, and errors, are as of `compute_gae`; `Step.decay` is γλ.

    Returns:
        A tensor for every output in the order of `Recurrence.outputs`, None for each that is not wanted.
    """
    for name, tensor in inputs.items():
        check.check_per_step(name, tensor, layout)
    check.check_flags("terminated", terminated, layout)
    check.check_flags("truncated", truncated, layout)
    check.check_flags("mask", mask, layout)
    gamma = check.check_gamma(gamma, layout)
    check.check_values((recurrence.name, *inputs), {"terminated": terminated, "truncated": truncated}, mask, gamma)
    skip = check.check_choice("mask_mode", mask_mode, check.MASK_MODES) == "skip"
    problem = Problem(
        recurrence=recurrence,
        like=next(iter(inputs.values())),
        inputs=tuple(map(inputs.get, recurrence.inputs)),
        outputs=(None,) * len(wanted),
        time_dim=layout.time_dim,
        gamma=gamma,
        lambda_=check.check_number("lambda_", lambda_, 0.0, 1.0),
        params=params,
        next_values=next_values,
        bootstrap=check_continuation(
            bootstrap_values,
            next_values,
            truncated,
            mask if skip else None,
            layout,
            check.find_precision((*inputs.values(), gamma)),
        ),
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

    def flatten_input(x: torch.Tensor) -> torch.Tensor:
        return x if x.ndim <= 3 else x.flatten(2)

    like = flatten_input(inputs[0])
    if check.is_stream(gamma):
        gamma = gamma.unsqueeze(2).expand(like.shape) if gamma.ndim < like.ndim else flatten_input(gamma)
    if initial is not None:
        initial = layout.expand_over_time(initial if initial.ndim < 2 else initial.flatten(1))
    problem = Problem(
        recurrence,
        like,
        tuple(map(flatten_input, inputs)),
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
    if check.is_traced():
        return None
    flat = tensor.flatten(2)
    return flat if flat.data_ptr() == tensor.data_ptr() else None


def dispatch_problem(problem: Problem, wanted: Sequence[bool], out: Any, backend: str | None) -> Results:
    """Compute by the way that the call needs, into `out` where it is given (and checked)."""
    out, device = (None,) * len(wanted) if out is None else out, problem.like.device
    if needs_host(device):
        check_choice(backend, device)
        results = dispatch_problem(copy_problem_to_host(problem), wanted, None, backend)
        return copy_into_out(out, tuple(x if x is None else x.to(device) for x in results))
    graph, traced = needs_graph(list_tensors(problem)), check.is_traced()
    ahead = problem.next_values
    if graph:
        return copy_into_out(out, solve_with_graph(problem, wanted, backend))
    if isinstance(ahead, Expectation) and (traced or not choose_backend(backend, device).scan.SUPPORTS_EXPECTATION):
        problem.next_values = ahead.sum_over_actions(problem.dtype)
    if traced:
        return copy_into_out(out, solve_through_operator(problem, wanted, backend))
    problem.mark_numbers()
    problem.outputs = allocate_outputs(problem, wanted, out)
    run_backend(problem, backend)
    return problem.outputs


def copy_into_out(out: Sequence[torch.Tensor | None], results: Results) -> Results:
    """Copy results into the tensors given for them; return these, and the results for which none was given."""
    return tuple(
        result if tensor is None or result is None else tensor.copy_(result)
        for tensor, result in zip(out, results, strict=True)
    )


# -- torch.compile ----------------------------------------------------------------------------------------------------

NUMBERS = STREAMS[:2]
"""The streams that may be numbers."""


def solve_through_operator(problem: Problem, wanted: Sequence[bool], backend: str | None) -> Results:
    """Compute a problem's wanted results by the operator."""
    streams = [getattr(problem, name) for name in STREAMS]
    numbers = [0.0 if check.is_stream(x) else x for x in streams[: len(NUMBERS)]]
    numbers += [problem.lambda_, *problem.params]
    packed = pack(
        [problem.like],
        [*problem.inputs, *(x if check.is_stream(x) else None for x in streams)],
        numbers,
        [problem.time_dim],
        [problem.skip, problem.starts_at],
        [problem.recurrence.name],
        wanted,
        backend,
    )
    results = iter(solve_operator(*packed))
    return tuple(next(results) if want else None for want in wanted)


def unpack_problem(packed: Packed) -> Problem:
    """Build the `Problem` again."""
    recurrence, numbers, (like,) = RECURRENCES[packed.names], packed.read_numbers(), packed.inputs
    num_inputs, (skip, starts_at) = len(recurrence.inputs), packed.flags
    streams: dict[str, Any] = dict(zip(STREAMS, packed.tensors[num_inputs:], strict=True))
    for name, number in zip(NUMBERS, numbers, strict=False):
        streams[name] = number if streams[name] is None else streams[name]
    lambda_, *params = numbers[len(NUMBERS) :]
    return Problem(
        recurrence,
        like,
        tuple(packed.tensors[:num_inputs]),
        (),
        packed.integers[0],
        lambda_=lambda_,
        params=tuple(params),
        skip=skip,
        starts_at=starts_at,
        **streams,
    )


@torch.library.custom_op("rl_triton_core::solve", mutates_args=(), schema=SCHEMA)
def solve_operator(*arguments: Any) -> list[torch.Tensor]:
    """Compute the wanted results of a packed problem."""
    packed = Packed(*arguments)
    problem = unpack_problem(packed)
    problem.outputs = allocate_outputs(problem, packed.wanted, (None,) * len(packed.wanted))
    run_backend(problem, packed.backend or None)
    return [x for x in problem.outputs if x is not None]


@solve_operator.register_fake
def _(*arguments: Any) -> list[torch.Tensor]:
    packed = Packed(*arguments)._replace(symbols=None)
    dtype = unpack_problem(packed).dtype
    return [torch.empty_like(packed.inputs[0], dtype=dtype) for want in packed.wanted if want]
