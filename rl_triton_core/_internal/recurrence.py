"""What an estimator is: a name, its inputs and outputs, and two small equations.

Every estimator is a first-order linear recurrence per environment, backward or forward in time,

    A[t] = α[t] + β[t]·A[t+1]        A[t] = α[t] + β[t]·A[t-1]

and differs from the others only in how (α, β) come from one step of the rollout (`coefficients`) and how its results
come from A (`readout`). Both are plain functions of a `Step` that use ``+ - *`` and the names of
`primitives`; each backend binds those names to its own operations (`bind_names`), so an equation is written
once and runs as Triton code, as Numba code and on PyTorch tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.primitives import multiply_tensors


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


@dataclass(eq=False)
class Problem:
    """One call, validated: what a backend needs to fill `outputs`, and nothing else.

    Every tensor has the two dimensions of the rollout, environments and steps, and perhaps one of features. What is
    given per environment alone is expanded in time. With `cu_seqlens`, what is given per step is one flat row of
    sequences, and what is given per sequence is [num_sequences, num_steps], expanded in time.
    """

    recurrence: Recurrence
    like: torch.Tensor
    """The input that set shape and device."""
    inputs: tuple[Stream, ...]
    outputs: tuple[Stream, ...]
    time_dim: int
    gamma: float | torch.Tensor = 1.0
    lambda_: float = 1.0
    params: tuple[float, ...] = ()
    next_values: Stream | Expectation = None
    bootstrap: float | torch.Tensor = 0.0
    terminated: Stream = None
    truncated: Stream = None
    mask: Stream = None
    initial: Stream = None
    """The state that enters the first step of the scan."""
    previous_done: Stream = None
    """Forward: whether the step before the rollout ended its episode."""
    cu_seqlens: Stream = None
    """Where in the flat row each sequence starts, and the row's end: [num_sequences + 1]."""
    skip: bool = True
    starts_at: bool = False
    """Forward: the flags say that a step starts an episode, not that it ends one."""

    shape: tuple[int, int, int] = field(init=False)
    """(groups, steps, lanes). A lane is a row of its own; lanes of a group lie side by side in memory.

    Environments are the lanes of one group, or groups whose lanes are features. Sequences are lanes of one group, each
    with some of the steps.
    """
    dtype: torch.dtype = field(init=False)
    """What the arithmetic is done in: int64 for integers, float64 if any real input is float64, else float32."""

    def __post_init__(self) -> None:
        """Derive the shape and the dtype."""
        self.shape = self.find_shape()
        self.dtype = self.find_dtype()

    def find_shape(self) -> tuple[int, int, int]:
        """See `shape`."""
        if self.cu_seqlens is not None:
            return 1, self.like.shape[0], self.cu_seqlens.shape[0] - 1
        envs, steps = self.like.shape[1 - self.time_dim], self.like.shape[self.time_dim]
        return (1, steps, envs) if self.like.ndim == 2 else (envs, steps, self.like.shape[2])

    def find_dtype(self) -> torch.dtype:
        """See `dtype`."""
        if not self.like.dtype.is_floating_point:
            return torch.int64
        streams = (*self.inputs, self.gamma, self.bootstrap, *self.ahead, self.initial)
        wide = any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in streams)
        return torch.float64 if wide else torch.float32

    @property
    def ahead(self) -> tuple[Stream, ...]:
        """What the next values are made of."""
        return self.next_values if isinstance(self.next_values, Expectation) else (self.next_values,)

    def names_of(self, dtype: torch.dtype) -> str:
        """The arguments that have a dtype, for a message."""
        given: dict[str, Any] = dict(zip(self.recurrence.inputs, self.inputs, strict=True))
        given |= {"gamma": self.gamma, "bootstrap_values": self.bootstrap, "initial": self.initial}
        given |= dict(zip(("next values", "next action values"), self.ahead, strict=False))
        return ", ".join(name for name, x in given.items() if isinstance(x, torch.Tensor) and x.dtype == dtype)

    def find_strides(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """(group, step, lane) strides. Flags are shared by the features, the flat row by its sequences."""
        own, dims = tensor.stride(), self.like.ndim
        if len(own) == 1 or (dims == 1 and isinstance(self.next_values, Expectation)):
            return 0, own[0], 0
        env, step = own[1 - self.time_dim], own[self.time_dim]
        if dims < 3:
            return 0, step, env
        return env, step, own[2] if len(own) == 3 else 0

    def view_as_lanes(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as [groups, steps, lanes], in place. A flat row is one lane."""
        if tensor.ndim == 1:
            return tensor[None, :, None]
        if self.like.ndim == 2:
            return (tensor if self.time_dim == 0 else tensor.transpose(0, 1)).unsqueeze(0)
        tensor = tensor if self.time_dim == 1 else tensor.transpose(0, 1)
        return tensor if tensor.ndim == 3 else tensor.unsqueeze(2).expand(self.shape)

    def restore_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of `view_as_lanes`."""
        if self.like.ndim == 1:
            return tensor[0, :, 0]
        if self.like.ndim == 2:
            return tensor.squeeze(0) if self.time_dim == 0 else tensor.squeeze(0).transpose(0, 1)
        return tensor if self.time_dim == 1 else tensor.transpose(0, 1)


def bind_names(function: Any, name: str | None = None, **names: Any) -> Any:
    """Copy a function with some of its global names bound to something else."""
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, name or function.__name__)
    copy.__module__ = function.__module__
    copy.__qualname__ = copy.__name__
    copy.__annotations__ = {}
    return copy
