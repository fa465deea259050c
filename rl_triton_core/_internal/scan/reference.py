"""The readable backend: float64, a plain loop over time. The executable specification, and what the others must equal.

`evaluate_recurrence` computes on whole tensors. With another `scan` it also serves automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_triton_core._internal.arguments.validation import assert_offsets, is_stream
from rl_triton_core._internal.equations.compile import PYTORCH, compile_equation
from rl_triton_core._internal.equations.primitives import Operand, gated_product, select, unwrap_operand
from rl_triton_core._internal.scan.problem import Problem
from rl_triton_core._internal.scan.recurrence import Expectation, Step, Stream
from rl_triton_core.boundaries import apply_boundary_rule

Scan = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SUPPORTS_EXPECTATION = True


def unavailable(device: torch.device) -> str | None:
    """It runs everywhere."""
    return None


def run(problem: Problem) -> None:
    """Fill the problem's outputs."""
    for equation in (problem.recurrence.coefficients, problem.recurrence.readout):
        compile_equation(equation, PYTORCH)  # which refuses what the compiled backends refuse
    dtype = torch.float64 if problem.dtype.is_floating_point else problem.dtype
    for output, result in zip(problem.outputs, evaluate_recurrence(problem, dtype, scan_serially), strict=True):
        if output is not None:
            output.copy_(problem.restore_shape(result))


def scan_serially(alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """A[t] = α[t] + β[t]·A[t-1], where β[t] = 0 lets nothing through."""
    state = torch.zeros_like(alpha[:, :1])
    states = []
    for t in range(alpha.shape[1]):
        state = alpha[:, t : t + 1] + gated_product(beta[:, t : t + 1], state)
        states.append(state)
    return torch.cat(states, dim=1)


def evaluate_recurrence(
    problem: Problem, dtype: torch.dtype, scan: Scan, differentiated: bool = False
) -> tuple[torch.Tensor, ...]:
    """The results of a problem as [groups, steps, lanes], computed in `dtype`.

    Where they are differentiated, a NaN gets no gradient, nor gives one, unless a result that it reaches is read.

    Time runs in the direction of the scan here: a backward recurrence sees everything reversed. Sequences that lie end
    to end are one row, which nothing crosses where one begins.
    """
    row = Row(problem)
    step = build_steps(row, dtype)
    operands = wrap_steps(step) if differentiated else step
    alpha, beta = map(unwrap_operand, problem.recurrence.coefficients(operands))
    alpha, beta = select(row.valid, alpha, 0).to(dtype), select(row.valid, beta, 1).to(dtype)
    alpha = alpha + torch.where(row.begins, gated_product(beta, row.read_stream(problem.initial, dtype)), 0)
    if differentiated:  # a factor that is NaN is a term that is NaN: gradients of 0 pass by it
        broken = beta.isnan()
        alpha, beta = torch.where(broken, beta, alpha), torch.where(broken, 0, beta)
    state = scan(alpha, torch.where(row.begins, 0, beta))
    before = torch.cat([torch.zeros_like(state[:, :1]), state[:, :-1]], dim=1)
    states: tuple[Any, Any] = state, torch.where(step.continues, before, 0)
    if differentiated:
        states = Operand(states[0]), Operand(states[1])
    results = problem.recurrence.readout(operands, *states)
    return tuple(row.reorient_steps(torch.where(row.valid, unwrap_operand(result), 0)) for result in results)


def wrap_steps(step: Step) -> Step:
    """The same steps for equations that are differentiated."""
    *streams, given = step
    params = [trace_number(x, step.gamma) for x in given]
    operands: list[Any] = [tuple(map(Operand, x)) if isinstance(x, tuple) else Operand(x) for x in streams]
    operands.append(tuple(Operand(x.to(step.gamma)) if isinstance(x, torch.Tensor) else x for x in params))
    return Step(*operands)


def build_steps(row: Row, dtype: torch.dtype) -> Step:
    """All steps at once. What stands in masked cells becomes 0 first."""
    problem = row.problem

    def read_valid(stream: Any) -> torch.Tensor:
        return torch.where(row.valid, row.read_stream(stream, dtype), 0)

    inputs = tuple(map(read_valid, problem.inputs))
    terminated, truncated = row.read_flags(problem.terminated), row.read_flags(problem.truncated)
    gamma, varies = read_valid(problem.gamma), is_stream(problem.gamma)
    decay = gamma * problem.lambda_ if varies else read_valid(trace_number(problem.gamma, gamma) * problem.lambda_)
    index, none, is_severed = row.find_neighbours()
    next_inputs = tuple(x.gather(1, index) for x in inputs[: problem.recurrence.num_lookahead])
    if problem.recurrence.backward:
        if problem.next_values is None:
            bootstrap = read_valid(problem.bootstrap)
            ahead = next_inputs[0] if next_inputs else torch.zeros_like(bootstrap)
        elif isinstance(problem.next_values, Expectation):
            ahead = bootstrap = read_valid(problem.next_values.sum_over_actions(dtype))
        else:
            ahead = bootstrap = read_valid(problem.next_values)
        ended = terminated | (gamma == 0) if varies else terminated
        next_value, continues = apply_boundary_rule(ended, truncated, none, is_severed, ahead, bootstrap)
    else:
        done = terminated | truncated
        starts = done if problem.starts_at else done.gather(1, index) & ~none
        starts = starts | (none & row.read_flags(problem.previous_done))
        next_value, continues = torch.zeros_like(gamma), ~(starts | is_severed)
    next_inputs = tuple(torch.where(continues, x, 0) for x in next_inputs)
    return Step(inputs, next_inputs, next_value, continues, gamma, decay, problem.params)


def trace_number(number: Any, like: torch.Tensor) -> Any:
    """A number; as a tensor for torch.compile, whose symbols can be neither multiplied nor compared with operands."""
    if torch.compiler.is_compiling() and isinstance(number, float):
        return torch.ones((), dtype=torch.float64, device=like.device) * number
    return number


class Row:
    """A problem's steps in scan order, as [groups, steps, lanes]."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        groups, length, lanes = problem.shape
        self.shape = (groups, length, lanes) if problem.cu_seqlens is None else (1, length, 1)
        self.position = torch.arange(length, device=problem.like.device)[None, :, None].expand(self.shape)
        self.first = torch.zeros_like(self.position)
        """The position at which the row or sequence of a step begins."""
        if problem.cu_seqlens is not None:
            assert_offsets(problem.cu_seqlens, length)
            starts, ends = problem.cu_seqlens[:-1], problem.cu_seqlens[1:]
            self.sequence = torch.searchsorted(ends, self.position[0, :, 0].to(ends.dtype), right=True)
            first = length - ends if problem.recurrence.backward else starts
            self.first = self.reorient_steps(first[self.sequence][None, :, None])
        self.begins = self.position == self.first
        self.valid = self.read_flags(problem.mask, absent=True)

    def find_neighbours(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each step's predecessor in the scan, whether it has none, and whether that is masked and severs."""
        position = self.position
        if self.problem.skip:
            position = torch.where(self.valid, position, -1).cummax(1).values
        index = torch.cat([torch.full_like(position[:, :1], -1), position[:, :-1]], dim=1)
        none = index < self.first
        index = index.clamp(min=0)
        return index, none, ~none & ~self.valid.gather(1, index)

    def read_stream(self, stream: Stream | float, dtype: torch.dtype) -> torch.Tensor:
        """A stream or a number as one element per step; None is 0."""
        if not isinstance(stream, torch.Tensor) or stream.ndim == 0:
            number = 0 if stream is None else stream  # by a product, which torch.compile knows how to make of a symbol
            return torch.ones(self.shape, dtype=dtype, device=self.problem.like.device) * number
        if self.problem.cu_seqlens is not None and stream.ndim == 2:
            stream = stream.gather(0, self.sequence[None, :])[0]
        return self.reorient_steps(self.problem.view_as_lanes(stream).to(dtype))

    def read_flags(self, flags: Stream, absent: bool = False) -> torch.Tensor:
        """Flags as booleans."""
        if flags is None:
            return torch.full(self.shape, absent, device=self.problem.like.device)
        return self.read_stream(flags, flags.dtype).ne(0)

    def reorient_steps(self, tensor: torch.Tensor) -> torch.Tensor:
        """Between time order and scan order."""
        return tensor.flip(1) if self.problem.recurrence.backward else tensor
