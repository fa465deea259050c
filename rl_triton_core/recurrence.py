"""What an estimator is: a name, its inputs and outputs, and two small equations.

Every estimator is a first-order linear recurrence per environment,

    A[t] = α[t] + β[t]·A[t+1],

and differs from the others only in how (α, β) come from one step of the rollout (`coefficients`) and how its results
come from A (`readout`). Both are plain functions of a `Step` that use ``+ - *`` and the names of
`rl_triton_core.primitives`; each backend binds those names to its own operations (`bind`), so an equation is written
once and runs as Triton code, as Numba code and on PyTorch tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch


class Step(NamedTuple):
    """What an equation may look at: one step of every environment that is being computed."""

    inputs: Any
    """The estimator's own inputs at t, in the order of `Recurrence.inputs`."""
    following: Any
    """The first `Recurrence.followed` inputs at the next step of the trajectory; 0 where the trajectory ends."""
    next_value: Any
    """NV[t] of the boundary rule: the value after step t; 0 where the step terminated."""
    continues: Any
    """Whether the trajectory goes on from t to t+1 inside the window."""
    gamma: Any
    """Discount of step t."""
    decay: Any
    """γλ of step t."""
    params: Any
    """Further scalars, in the order of `Recurrence.params`."""


@dataclass(frozen=True)
class Recurrence:
    """The description of an estimator.

    Attributes:
        name: Its own; how torch.compile and the disk cache know it.
        inputs: Names of its per-step inputs, those that it reads at t+1 too first.
        followed: How many of the inputs are read at t+1 too. The first of these continues the value stream.
        outputs: Names of its results.
        coefficients: ``step -> (α, β)``.
        readout: ``(step, A) -> results``, in the order of `outputs`.
        params: Names of scalars beyond γ and λ.
    """

    name: str
    inputs: tuple[str, ...]
    followed: int
    outputs: tuple[str, ...]
    coefficients: Callable[[Step], tuple[Any, Any]]
    readout: Callable[[Step, Any], tuple[Any, ...]]
    params: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Make it known by name."""
        if self.name in RECURRENCES:
            raise ValueError(f"name: got {self.name!r}, which another recurrence has, expected a name of its own")
        RECURRENCES[self.name] = self


RECURRENCES: dict[str, Recurrence] = {}
"""All recurrences by name, which is how they pass through torch.compile."""


@dataclass(frozen=True)
class Problem:
    """One call, validated: what a backend needs to fill `outputs`, and nothing else.

    Per-step tensors have two dimensions, time at `time_dim`; `bootstrap` may have one (the window's edge only).
    """

    recurrence: Recurrence
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor | None, ...]
    time_dim: int
    gamma: float | torch.Tensor
    lambda_: float
    params: tuple[float, ...]
    next_values: torch.Tensor | None
    bootstrap: float | torch.Tensor
    terminated: torch.Tensor | None
    truncated: torch.Tensor | None
    mask: torch.Tensor | None
    skip: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """(groups, steps, lanes): a lane is a row of its own, lanes of a group lie side by side in memory."""
        rows = self.inputs[0].shape
        return 1, rows[self.time_dim], rows[1 - self.time_dim]

    @property
    def dtype(self) -> torch.dtype:
        """What the arithmetic is done in: float64 if any real input is float64, else float32."""
        streams = (*self.inputs, self.gamma, self.bootstrap, self.next_values)
        wide = any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in streams)
        return torch.float64 if wide else torch.float32

    def strides(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """(group, step, lane) strides of a per-step tensor; the window's edge does not move in time."""
        if tensor.ndim == 1:
            return 0, 0, tensor.stride(0)
        return 0, tensor.stride(self.time_dim), tensor.stride(1 - self.time_dim)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as [groups, steps, lanes], in place."""
        if tensor.ndim == 1:
            return tensor.expand(self.shape)
        return tensor.movedim(self.time_dim, 0).unsqueeze(0)

    def unview(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of `view`."""
        return tensor.squeeze(0).movedim(0, self.time_dim)


def bind(function: Any, name: str | None = None, **names: Any) -> Any:
    """Copy a function with some of its global names bound to something else."""
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, name or function.__name__)
    copy.__module__ = function.__module__
    copy.__qualname__ = copy.__name__
    copy.__annotations__ = {}
    return copy
