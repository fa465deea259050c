"""The custom operator that torch.compile takes as it is.

Numbers that may change from call to call, such as an annealed γ, are symbols or tensors while it traces. They cross the
operator as a tensor, so that one compilation serves all of their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.arguments.validation import is_stream
from rl_triton_core._internal.equations.schema import describe_schema
from rl_triton_core._internal.scan.execution import STREAMS, Results, allocate_outputs, run_backend
from rl_triton_core._internal.scan.problem import Problem
from rl_triton_core._internal.scan.recurrence import RECURRENCES

NUMBERS = STREAMS[:2]
"""The streams that may be numbers."""


class PackedProblem(NamedTuple):
    """The operator's arguments: a `Problem` in types that an operator may take."""

    recurrence: str
    like: torch.Tensor
    inputs: Sequence[torch.Tensor | None]
    streams: Sequence[torch.Tensor | None]
    """In the order of `STREAMS`."""
    constants: Sequence[float]
    """The streams in `NUMBERS` that are numbers, λ and the recurrence's own; empty where there are `symbols`."""
    symbols: torch.Tensor | None
    """The same numbers, float64 on the CPU."""
    time_dim: int
    skip: bool
    starts_at: bool
    wanted: Sequence[bool]
    backend: str


def solve_through_operator(problem: Problem, wanted: Sequence[bool], backend: str | None) -> Results:
    """Compute a problem's wanted results by the operator."""
    streams = [getattr(problem, name) for name in STREAMS]
    numbers = [0.0 if is_stream(x) else x for x in streams[: len(NUMBERS)]]
    numbers += [problem.lambda_, *problem.params]
    symbolic = any(map(is_symbolic, numbers))
    packed = PackedProblem(
        recurrence=problem.recurrence.name,
        like=problem.like,
        inputs=list(problem.inputs),
        streams=[x if is_stream(x) else None for x in streams],
        constants=[] if symbolic else [float(x) for x in numbers],
        symbols=torch.stack([scalar_tensor(x) for x in numbers]) if symbolic else None,
        time_dim=problem.time_dim,
        skip=problem.skip,
        starts_at=problem.starts_at,
        wanted=list(wanted),
        backend=backend or "",
    )
    results = iter(solve_operator(*packed))
    return tuple(next(results) if want else None for want in wanted)


def is_symbolic(number: float | torch.Tensor) -> bool:
    """Whether a number stands for all values that it may have, while torch.compile traces."""
    from torch.fx.experimental import symbolic_shapes

    return isinstance(number, torch.Tensor) or not symbolic_shapes.has_static_value(number)


def scalar_tensor(number: float) -> torch.Tensor:
    """A number as a tensor, by a product, which torch.compile knows how to make of a symbol."""
    return torch.ones((), dtype=torch.float64, device="cpu") * number


def unpack_problem(packed: PackedProblem) -> Problem:
    """Build the `Problem` again."""
    numbers = list(packed.constants if packed.symbols is None else packed.symbols.tolist())
    streams: dict[str, Any] = dict(zip(STREAMS, packed.streams, strict=True))
    for name, number in zip(NUMBERS, numbers, strict=False):
        streams[name] = number if streams[name] is None else streams[name]
    lambda_, *params = numbers[len(NUMBERS) :]
    return Problem(
        RECURRENCES[packed.recurrence],
        packed.like,
        tuple(packed.inputs),
        (),
        packed.time_dim,
        lambda_=lambda_,
        params=tuple(params),
        skip=packed.skip,
        starts_at=packed.starts_at,
        **streams,
    )


@torch.library.custom_op("rl_triton_core::solve", mutates_args=(), schema=describe_schema(PackedProblem))
def solve_operator(*arguments: Any) -> list[torch.Tensor]:
    """Compute the wanted results of a packed problem."""
    packed = PackedProblem(*arguments)
    problem = unpack_problem(packed)
    problem.outputs = allocate_outputs(problem, packed.wanted, (None,) * len(packed.wanted))
    run_backend(problem, packed.backend or None)
    return [x for x in problem.outputs if x is not None]


@solve_operator.register_fake
def _(*arguments: Any) -> list[torch.Tensor]:
    packed = PackedProblem(*arguments)._replace(constants=[0.0] * len(arguments), symbols=None)
    dtype = unpack_problem(packed).dtype
    return [torch.empty_like(packed.like, dtype=dtype) for want in packed.wanted if want]
