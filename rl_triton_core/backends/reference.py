"""The readable backend: float64, a plain loop over time. The executable specification, and what the others must equal.

`evaluate` writes the recurrence out on whole tensors. With another `scan` it also serves automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_triton_core.boundaries import transition
from rl_triton_core.recurrence import Problem, Step, Stream

Scan = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def unavailable(device: torch.device) -> str | None:
    """It runs everywhere."""
    return None


def run(problem: Problem) -> None:
    """Fill the problem's outputs."""
    dtype = torch.float64 if problem.dtype.is_floating_point else problem.dtype
    for output, result in zip(problem.outputs, evaluate(problem, dtype, loop), strict=True):
        if output is not None:
            output.copy_(problem.unview(result))


def loop(alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """A[t] = α[t] + β[t]·A[t-1], where β[t] = 0 lets nothing through."""
    state = torch.zeros_like(alpha[:, :1])
    states = []
    for t in range(alpha.shape[1]):
        state = alpha[:, t : t + 1] + gated(beta[:, t : t + 1], state)
        states.append(state)
    return torch.cat(states, dim=1)


def gated(factor: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The product, 0 where the factor is 0."""
    return torch.where(factor == 0, 0, factor * state)


def evaluate(problem: Problem, dtype: torch.dtype, scan: Scan) -> tuple[torch.Tensor, ...]:
    """The results of a problem as [groups, steps, lanes], computed in `dtype`.

    Time runs in the direction of the scan here: a backward recurrence sees everything reversed.
    """
    step, valid = steps(problem, dtype)
    alpha, beta = problem.recurrence.coefficients(step)
    alpha, beta = torch.where(valid, alpha, 0), torch.where(valid, beta, 1 if problem.skip else 0)
    if problem.initial is not None:
        first = read(problem, problem.initial, dtype)[:, :1]
        alpha = torch.cat([alpha[:, :1] + gated(beta[:, :1], first), alpha[:, 1:]], dim=1)
    state = scan(alpha, beta)
    before = torch.cat([torch.zeros_like(state[:, :1]), state[:, :-1]], dim=1)
    results = problem.recurrence.readout(step, state, torch.where(step.continues, before, 0))
    return tuple(oriented(problem, torch.where(valid, result, 0)) for result in results)


def steps(problem: Problem, dtype: torch.dtype) -> tuple[Step, torch.Tensor]:
    """All steps at once, in scan order, and which of them are valid. What stands in masked cells becomes 0 first."""
    valid = flag(problem, problem.mask, absent=True)

    def masked(stream: Any) -> torch.Tensor:
        return torch.where(valid, read(problem, stream, dtype), 0)

    inputs = tuple(map(masked, problem.inputs))
    terminated, truncated = flag(problem, problem.terminated), flag(problem, problem.truncated)
    gamma = masked(problem.gamma)
    if isinstance(problem.gamma, torch.Tensor):
        terminated, decay = terminated | (gamma == 0), gamma * problem.lambda_
    else:
        decay = masked(problem.gamma * problem.lambda_)
    index, none, severed = neighbours(valid, problem.skip)
    following = tuple(x.gather(1, index) for x in inputs[: problem.recurrence.followed])
    if problem.recurrence.backward:
        if problem.next_values is None:
            bootstrap = masked(problem.bootstrap)
            ahead = following[0] if following else torch.zeros_like(bootstrap)
        else:
            ahead = bootstrap = masked(problem.next_values)
        next_value, continues = transition(terminated, truncated, none, severed, ahead, bootstrap)
    else:
        done = terminated | truncated
        starts = done if problem.starts_at else done.gather(1, index) & ~none
        departed = flag(problem, problem.departed)[:, :1]
        next_value, continues = torch.zeros_like(gamma), ~(starts | severed | (none & departed))
    following = tuple(torch.where(continues, x, 0) for x in following)
    return Step(inputs, following, next_value, continues, gamma, decay, problem.params), valid


def neighbours(valid: torch.Tensor, skip: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each step's predecessor in the scan, whether it has none, and whether that is masked and severs."""
    position = torch.arange(valid.shape[1], device=valid.device)[None, :, None].expand(valid.shape)
    if skip:
        position = torch.where(valid, position, -1).cummax(1).values
    index = torch.cat([torch.full_like(position[:, :1], -1), position[:, :-1]], dim=1)
    none = index < 0
    index = index.clamp(min=0)
    return index, none, ~none & ~valid.gather(1, index)


def read(problem: Problem, stream: Stream | float, dtype: torch.dtype) -> torch.Tensor:
    """A stream or a number as one element per step, in scan order; None is 0."""
    if isinstance(stream, torch.Tensor):
        return oriented(problem, problem.view(stream).to(dtype))
    return torch.full(problem.shape, stream or 0, dtype=dtype, device=problem.like.device)


def flag(problem: Problem, flags: Stream, absent: bool = False) -> torch.Tensor:
    """Flags as booleans, in scan order."""
    if flags is None:
        return torch.full(problem.shape, absent, device=problem.like.device)
    return oriented(problem, problem.view(flags).ne(0))


def oriented(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    """Between time order and scan order."""
    return tensor.flip(1) if problem.recurrence.backward else tensor
