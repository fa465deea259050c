"""A checked problem on a backend: the tensors it reads, the outputs it fills, and the run itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_triton_core._internal.backend import choose_backend
from rl_triton_core._internal.scan.problem import Problem
from rl_triton_core._internal.scan.recurrence import Expectation

Results = tuple[Any, ...]
"""The results in the order of `Recurrence.outputs`, None for each that is not wanted."""
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
"""The fields of a problem that may be tensors, beside its inputs and outputs."""


def list_tensors(problem: Problem) -> tuple[torch.Tensor, ...]:
    """All tensors that a problem reads."""
    expected = problem.next_values if isinstance(problem.next_values, Expectation) else ()
    streams = (*problem.inputs, *expected, *(getattr(problem, name) for name in STREAMS))
    return tuple(x for x in streams if isinstance(x, torch.Tensor))


def allocate_outputs(problem: Problem, wanted: Sequence[bool], out: Sequence[torch.Tensor | None]) -> Results:
    """The tensors to fill: those given, and for others that are wanted new ones in the memory order of the inputs."""
    dtype = problem.dtype
    return tuple(
        tensor if tensor is not None or not want else torch.empty_like(problem.like, dtype=dtype)
        for tensor, want in zip(out, wanted, strict=True)
    )


def run_backend(problem: Problem, backend: str | None) -> None:
    """Fill the problem's outputs."""
    chosen = choose_backend(backend, problem.like.device)
    if problem.like.numel():
        chosen.run(problem)
