"""The custom operator of scans, which torch.compile takes as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_triton_core._internal.arguments.packing import SCHEMA, Packed, pack
from rl_triton_core._internal.arguments.validation import is_stream
from rl_triton_core._internal.scan.problem import STREAMS, Problem, Results, allocate_outputs, run_backend
from rl_triton_core._internal.scan.recurrence import RECURRENCES

NUMBERS = STREAMS[:2]
"""The streams that may be numbers."""


def solve_through_operator(problem: Problem, wanted: Sequence[bool], backend: str | None) -> Results:
    """Compute a problem's wanted results by the operator."""
    streams = [getattr(problem, name) for name in STREAMS]
    numbers = [0.0 if is_stream(x) else x for x in streams[: len(NUMBERS)]]
    numbers += [problem.lambda_, *problem.params]
    packed = pack(
        [problem.like],
        [*problem.inputs, *(x if is_stream(x) else None for x in streams)],
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
    packed = Packed(*arguments).without_symbols()
    dtype = unpack_problem(packed).dtype
    return [torch.empty_like(packed.inputs[0], dtype=dtype) for want in packed.wanted if want]
