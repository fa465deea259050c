"""A validated call of an estimator: all that a backend needs, the outputs that it fills, and the run itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from rl_triton_core._internal.arguments.validation import find_precision, is_stream
from rl_triton_core._internal.backend import choose_backend
from rl_triton_core._internal.launch.launcher import mark_numbers
from rl_triton_core._internal.scan.layout import Layout
from rl_triton_core._internal.scan.recurrence import Expectation, Recurrence, Stream


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

    decay: float | torch.Tensor = field(init=False)
    """γλ, or λ where γ is a tensor."""
    shape: tuple[int, int, int] = field(init=False)
    """(groups, steps, lanes). A lane is a row of its own; lanes of a group lie side by side in memory.

    Environments are the lanes of one group, or groups whose lanes are features. Sequences are lanes of one group, each
    with some of the steps.
    """
    dtype: torch.dtype = field(init=False)
    """What the arithmetic is done in: int64 for integers, float64 if any real input is float64, else float32."""

    def __post_init__(self) -> None:
        """Derive the decay, the shape and the dtype."""
        self.decay = self.lambda_ if is_stream(self.gamma) else self.gamma * self.lambda_
        if self.cu_seqlens is not None:
            self.shape = 1, self.like.shape[0], self.cu_seqlens.shape[0] - 1
        else:
            envs, steps = self.like.shape[1 - self.time_dim], self.like.shape[self.time_dim]
            self.shape = (1, steps, envs) if self.like.ndim == 2 else (envs, steps, self.like.shape[2])
        streams = (*self.inputs, self.gamma, self.bootstrap, *self.ahead, self.initial)
        is_real = self.like.dtype.is_floating_point
        self.dtype = find_precision(filter(is_stream, streams)) if is_real else torch.int64

    @property
    def ahead(self) -> tuple[Stream, ...]:
        """What the next values are made of."""
        return self.next_values if isinstance(self.next_values, Expectation) else (self.next_values,)

    def mark_numbers(self) -> None:
        """Let the numbers be known to a recording of this call."""
        self.bootstrap, self.gamma, self.decay, *params = mark_numbers(
            (self.bootstrap, self.gamma, self.decay, *self.params)
        )
        self.params = tuple(params)

    def names_of(self, dtype: torch.dtype) -> str:
        """The arguments that have a dtype, for a message."""
        given: dict[str, Any] = dict(zip(self.recurrence.inputs, self.inputs, strict=True))
        given |= {"gamma": self.gamma, "bootstrap_values": self.bootstrap, "initial": self.initial}
        given |= dict(zip(("next values", "next action values"), self.ahead, strict=False))
        return ", ".join(name for name, x in given.items() if isinstance(x, torch.Tensor) and x.dtype == dtype)

    def find_strides(self, own: tuple[int, ...]) -> tuple[int, int, int]:
        """(group, step, lane) strides of a tensor's own. Flags are shared by features, the flat row by sequences."""
        dims = self.like.ndim
        if len(own) == 1 or (dims == 1 and isinstance(self.next_values, Expectation)):
            return 0, own[0], 0
        env, step = own[1 - self.time_dim], own[self.time_dim]
        if dims < 3:
            return 0, step, env
        return env, step, own[2] if len(own) == 3 else 0

    @cached_property
    def layout(self) -> Layout:
        """Where its tensors lie; once it has its outputs."""
        return Layout(self)

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


# -- the run of a problem ----------------------------------------------------------------------------------------------

Results = tuple[Any, ...]
"""The results in the order of `Recurrence.outputs`, None for each that is not wanted."""
STREAMS = (
    *("gamma", "bootstrap", "next_values", "initial", "terminated", "truncated", "mask", "previous_done", "cu_seqlens"),
)
"""The fields of a problem that may be tensors, beside its inputs and outputs."""


def list_tensors(problem: Problem) -> tuple[torch.Tensor, ...]:
    """All tensors that a problem reads."""
    streams = (*problem.inputs, *problem.ahead, *(getattr(problem, name) for name in STREAMS))
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
        chosen.scan.run(problem)
