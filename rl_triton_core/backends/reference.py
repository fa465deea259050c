"""The readable backend: float64, a plain loop over time. The executable specification, and what the others must equal.

`evaluate` writes the recurrence out on whole tensors. With another `scan` it also serves automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_triton_core.boundaries import transition
from rl_triton_core.primitives import select
from rl_triton_core.recurrence import Problem, Step

Scan = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def unavailable(device: torch.device) -> str | None:
    """It runs everywhere."""
    return None


def run(problem: Problem) -> None:
    """Fill the problem's outputs."""
    for output, result in zip(problem.outputs, evaluate(problem, torch.float64, loop), strict=True):
        if output is not None:
            output.copy_(problem.unview(result))


def loop(alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """A[t] = α[t] + β[t]·A[t+1], where β[t] = 0 lets nothing through."""
    state = torch.zeros_like(alpha[:, 0]) if alpha.shape[1] else alpha
    states = []
    for t in reversed(range(alpha.shape[1])):
        state = alpha[:, t] + select(beta[:, t] == 0, 0.0, beta[:, t] * state)
        states.append(state)
    return torch.stack(states[::-1], dim=1) if states else alpha


def evaluate(problem: Problem, dtype: torch.dtype, scan: Scan) -> tuple[torch.Tensor, ...]:
    """The results of a problem as [groups, steps, lanes], computed in `dtype`."""
    step, valid = steps(problem, dtype)
    alpha, beta = problem.recurrence.coefficients(step)
    alpha, beta = alpha.broadcast_to(valid.shape), beta.broadcast_to(valid.shape)
    state = scan(select(valid, alpha, 0.0), select(valid, beta, 1.0 if problem.skip else 0.0))
    return tuple(select(valid, result, 0.0) for result in problem.recurrence.readout(step, state))


def steps(problem: Problem, dtype: torch.dtype) -> tuple[Step, torch.Tensor]:
    """All steps at once, and which of them are valid. What stands in masked cells is replaced by 0 first."""
    valid = flag(problem, problem.mask, absent=True)

    def read(stream: Any) -> torch.Tensor:
        return torch.where(valid, per_step(problem, stream, dtype), 0.0)

    inputs = tuple(map(read, problem.inputs))
    following, last, sealed = neighbours(inputs[: problem.recurrence.followed], valid, problem.skip)
    terminated, truncated = flag(problem, problem.terminated), flag(problem, problem.truncated)
    gamma = read(problem.gamma)
    if isinstance(problem.gamma, torch.Tensor):
        terminated, decay = terminated | (gamma == 0), gamma * problem.lambda_
    else:
        decay = read(problem.gamma * problem.lambda_)
    if problem.next_values is None:
        bootstrap = read(problem.bootstrap)
        ahead = following[0] if following else torch.zeros_like(bootstrap)
    else:
        ahead = bootstrap = read(problem.next_values)
    next_value, continues = transition(terminated, truncated, last, sealed, ahead, bootstrap)
    following = tuple(select(continues, x, 0.0) for x in following)
    return Step(inputs, following, next_value, continues, gamma, decay, problem.params), valid


def neighbours(
    followed: tuple[torch.Tensor, ...], valid: torch.Tensor, skip: bool
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """The inputs at each step's next step, whether there is none in the window, and whether it is masked and severs."""
    num_steps = valid.shape[1]
    index = torch.arange(num_steps, device=valid.device)[None, :, None].expand(valid.shape)
    if skip:
        index = select(valid, index, num_steps).flip(1).cummin(1).values.flip(1)
    index = torch.cat([index[:, 1:], torch.full_like(index[:, :1], num_steps)], dim=1)
    last = index == num_steps
    index = index.clamp(max=max(num_steps - 1, 0))
    sealed = ~last & ~valid.gather(1, index)
    return tuple(x.gather(1, index) for x in followed), last, sealed


def flag(problem: Problem, flags: torch.Tensor | None, absent: bool = False) -> torch.Tensor:
    """Flags as booleans."""
    if flags is None:
        return torch.full(problem.shape, absent, device=problem.inputs[0].device)
    return problem.view(flags).ne(0)


def per_step(problem: Problem, stream: Any, dtype: torch.dtype) -> torch.Tensor:
    """A number or tensor as one element per step."""
    if not isinstance(stream, torch.Tensor):
        return torch.tensor(stream, dtype=dtype, device=problem.inputs[0].device).expand(problem.shape)
    return problem.view(stream).to(dtype)
