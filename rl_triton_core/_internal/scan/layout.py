"""Where the tensors of a scan lie in memory, and what follows from their sizes and strides: each fact is found once."""

from __future__ import annotations

from typing import Any

import torch

from rl_triton_core._internal.scan.recurrence import Expectation

Stream = tuple[Any, ...]
"""A tensor and its (group, step, lane) strides, without these if they are those of the tensor that most are like."""
ACTIONS_AT_ONCE = 4
"""Actions of an expectation that a thread of a GPU loads at once."""
WIDE = 1 << 30
"""Offsets from which on they need 64 bits."""


class Layout:
    """The tensors of a problem, its outputs included, as streams."""

    def __init__(self, problem: Any) -> None:
        self.problem, self.shape = problem, problem.shape
        self.groups, self.steps, self.lanes = problem.shape
        self.is_packed = problem.cu_seqlens is not None
        self.length = -(-self.steps // self.lanes) if self.is_packed else self.steps
        """Of a row, or on average of a sequence."""
        self.common = problem.like.stride()
        self.strides: tuple[int, int, int] = problem.find_strides(self.common)
        _, step, lane = self.strides
        self.is_env_major = self.is_packed or self.lanes == 1 or abs(step) < abs(lane)
        """Whether a lane's steps lie closer than a step's lanes. A lane of its own has nothing beside it."""
        if step == lane and self.lanes > 1:  # of a single step
            self.is_env_major = problem.time_dim == 1
        self.sizes: list[int] = [*problem.shape, *self.strides]
        """All that kernels of a shape's own may know, and general ones do not."""
        self.kinds: list[Any] = []
        """Of every stream its dtype, and which of its own strides are 1; None for those that there are not."""
        self.bytes_per_step = 0
        """That a thread holds: numbers and results as it computes them, flags as it loads them."""
        self.across = self.note_strides(self.strides)
        """Bits of the strides between lanes and groups of what is read or written at every step."""
        self.furthest = self.find_reach(self.strides)
        locate, placeholder = self.locate, (problem.like,)  # Triton 3.6 has trouble with None inside a tuple
        self.inputs = tuple([locate(x, True) or placeholder for x in problem.inputs])
        self.expected = self.locate_expectation(problem.next_values)
        self.next_values = None if self.expected else locate(problem.next_values, True)
        self.bootstrap = locate(problem.bootstrap)
        self.terminated = locate(problem.terminated, True, is_flag=True)
        self.truncated = locate(problem.truncated, True, is_flag=True)
        self.mask = locate(problem.mask, True, is_flag=True)
        self.gamma = locate(problem.gamma, True)
        self.initial = locate(problem.initial)
        self.previous_done = locate(problem.previous_done)
        self.outputs = tuple([locate(x, True) or placeholder for x in problem.outputs])
        self.kinds.append(None if problem.cu_seqlens is None else problem.cu_seqlens.dtype)
        self.order = "env-major" if self.is_env_major else "time-major"  # the part of the launch table
        self.is_dense = self.strides[1 if self.is_env_major else 2] == 1
        """Whether steps lie side by side in memory, or lanes where it is not env-major."""
        self.is_wide = self.furthest >= WIDE
        """Whether offsets need 64 bits."""
        del self.problem  # which has this layout: in a circle, results would stay until garbage is collected

    def locate(self, x: Any, per_step: bool = False, is_flag: bool = False) -> Stream | None:
        """A tensor as a stream; None for anything else."""
        if not isinstance(x, torch.Tensor):
            self.kinds.append(None)
            return None
        self.sizes.append(x.data_ptr() & 15)
        if per_step:
            self.bytes_per_step += x.itemsize if is_flag else self.problem.dtype.itemsize
        own = x.stride()
        strides = self.strides if own == self.common else self.problem.find_strides(own)
        if strides == self.strides:
            self.kinds.append(x.dtype)
            return (x,)
        if per_step:
            self.across |= self.note_strides(strides)
        self.describe(x, strides)
        return x, *strides

    def locate_expectation(self, expected: Any) -> tuple[Any, ...] | None:
        """An expectation as (probabilities, values, number of actions), streams with an action stride; or None."""
        self.num_actions = 0
        self.action_strides = 0
        """Bits of the strides between the steps, lanes and groups of an expectation."""
        if not isinstance(expected, Expectation):
            return None
        self.num_actions = expected.probs.shape[-1]
        self.bytes_per_step += 2 * ACTIONS_AT_ONCE * self.problem.dtype.itemsize
        streams = []
        for x in expected:
            *others, action = x.stride()
            strides = group, step, lane = self.problem.find_strides(tuple(others))
            self.action_strides |= group | step | lane
            self.sizes.append(x.data_ptr() & 15)
            self.describe(x, (*strides, action))
            streams.append((x, *strides, action))
        self.sizes.append(self.num_actions)
        return *streams, self.num_actions

    def describe(self, x: torch.Tensor, strides: tuple[int, ...]) -> None:
        """Note a stream that has strides of its own."""
        self.sizes += strides
        dense = strides[1 if self.is_env_major else 2] == 1
        self.kinds += (x.dtype, dense, strides[3:] == (1,))
        self.furthest = max(self.furthest, self.find_reach(strides))

    def find_reach(self, strides: tuple[int, ...]) -> int:
        """How far from its first element a stream reaches, at most."""
        sizes = (*self.shape, max(self.num_actions, 1)) if len(strides) > 3 else self.shape
        return sum([abs(stride) * size for stride, size in zip(strides, sizes, strict=True)])

    def note_strides(self, strides: tuple[int, ...]) -> int:
        """Bits of a stream's strides between lanes and groups, where there are several."""
        group, _, lane = strides
        return (group if self.groups > 1 else 0) | (lane if self.lanes > 1 else 0)


def find_vector_width(bits: int) -> int:
    """4 where that divides all strides that have these bits, so that four steps are read at once; else 1."""
    return 1 if bits & 3 else 4
