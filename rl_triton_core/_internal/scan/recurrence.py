"""What an estimator is: a name, its inputs and outputs, and two small equations.

Every estimator is a first-order linear recurrence per environment, backward or forward in time,

    A[t] = α[t] + β[t]·A[t+1]        A[t] = α[t] + β[t]·A[t-1]

and differs from the others only in how (α, β) come from one step of the rollout (`coefficients`) and how its results
come from A (`readout`). Both are plain functions of a `Step`, which `equations.compile` compiles for each backend: an
equation is written once and runs as Triton code, as Numba code and on PyTorch tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.equations.primitives import multiply_tensors


class Step(NamedTuple):
    """What an equation may look at: one step of every environment that is being computed."""

    inputs: Any
    """The estimator's own inputs at t, in the order of `Recurrence.inputs`; 0 for one that was not given."""
    next_inputs: Any
    """The first `Recurrence.num_lookahead` inputs at the next step of the trajectory; 0 where the trajectory ends."""
    next_value: Any
    """NV[t] of the boundary rule: the value after step t; 0 where the step terminated."""
    continues: Any
    """Whether the trajectory goes on, inside the rollout, to the step whose state enters this one."""
    gamma: Any
    """Discount of step t."""
    decay: Any
    """γλ of step t."""
    params: Any
    """Further scalars, in the order of `Recurrence.params`."""


@dataclass(frozen=True, eq=False)
class Recurrence:
    """The description of an estimator.

    Attributes:
        name: Its own; how torch.compile and the disk cache know it.
        inputs: Names of its per-step inputs, those that it reads at t+1 too first.
        num_lookahead: How many of the inputs are read at t+1 too. The first of these continues the value stream.
        outputs: Names of its results.
        coefficients: ``step -> (α, β)``.
        readout: ``(step, A, A_after) -> results``, in the order of `outputs`. A_after is A[t+1] where the trajectory
            continues, else 0.
        params: Names of scalars beyond γ and λ.
        backward: Whether A[t] depends on A[t+1]; else on A[t-1].
    """

    name: str
    inputs: tuple[str, ...]
    num_lookahead: int
    outputs: tuple[str, ...]
    coefficients: Callable[[Step], tuple[Any, Any]]
    readout: Callable[[Step, Any, Any], tuple[Any, ...]]
    params: tuple[str, ...] = ()
    backward: bool = True

    def __post_init__(self) -> None:
        """Make it known by name. A module may define one of its own again, as a notebook does."""
        known = RECURRENCES.get(self.name)
        if known is not None and known.coefficients.__module__ != self.coefficients.__module__:
            raise ValueError(f"name: got {self.name!r}, which another recurrence has, expected a name of its own")
        RECURRENCES[self.name] = self


RECURRENCES: dict[str, Recurrence] = {}
"""All recurrences by name, which is how they pass through torch.compile."""

Stream = torch.Tensor | None
"""A per-step tensor, if there is one."""


class Expectation(NamedTuple):
    """NV[t] = Σ_a probs·values over the last dimension; an action of probability 0 does not count."""

    probs: torch.Tensor
    values: torch.Tensor

    def sum_over_actions(self, dtype: torch.dtype) -> torch.Tensor:
        """NV of every step, computed in `dtype`. A step whose NV is not read has gradients of 0, whatever it holds."""
        probs = self.probs.to(dtype)
        values = torch.where((self.probs != 0) | self.values.isfinite(), self.values, 0).to(dtype)
        differentiated = self.probs.requires_grad or self.values.requires_grad
        return (multiply_tensors(probs, values) if differentiated else probs * values).sum(-1)


# -- the plain recurrence, α and β as they are given: what every gradient is made of -----------------------------------


def read_factors(step: Step) -> tuple[Any, Any]:
    """α and β."""
    alpha, beta = step.inputs
    return alpha, beta


def read_state(step: Step, state: Any, after: Any) -> tuple[Any, ...]:
    """Return the state itself: a readout for one result."""
    return (state,)


LINEAR_BACKWARD = Recurrence("linear_backward", ("alpha", "beta"), 0, ("states",), read_factors, read_state)
LINEAR_FORWARD = Recurrence("linear_forward", ("alpha", "beta"), 0, ("states",), read_factors, read_state, (), False)
