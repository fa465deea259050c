"""Normalisation on CUDA and ROCm: one launch for the moments, one for their merge and application."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rl_triton_core._internal.launch.kernels import KernelCall, explain_float64, launch_kernels
from rl_triton_core._internal.launch.table import next_power_of_2
from rl_triton_core._internal.moments import kernel as kernels
from rl_triton_core._internal.moments.rule import Exchange, Task

BLOCK, NUM_WARPS = 2048, 8
"""Elements of a tile, and the warps that share them."""
PROGRAMS = 512
"""At most, since each program of the second launch reads what each of the first has left."""


def run(task: Task, exchange: Exchange | None) -> None:
    """Fill the output."""
    if task.values.dtype == torch.float64:
        raise explain_float64("advantages")
    launch_kernels(list_launches(task, exchange), task.values.device)


def list_launches(task: Task, exchange: Exchange | None) -> Iterator[KernelCall]:
    """The launches, in order."""
    rows, columns = task.values.shape
    width = BLOCK if rows == 1 else min(BLOCK, next_power_of_2(columns))  # that of the matrix if it is narrow
    height = BLOCK // width
    number = -(-rows // height) * -(-columns // width)
    programs, block = min(number, PROGRAMS), {"BLOCK_ROWS": height, "BLOCK_COLUMNS": width}
    new = task.values.new_empty if number else task.values.new_zeros
    parts = own = new((max(1, programs), 3), dtype=torch.float64)
    tensors = (task.values, task.mask, task.out)
    values, mask, out = ((None, 0, 0) if x is None else (x, *x.stride()) for x in tensors)
    sizes = rows, columns, number
    arguments: tuple[Any, ...]
    if number:
        arguments, constants = (*values, *mask, *sizes, parts), block | {"WEIGHTED": False}
        yield KernelCall(kernels.moments, programs, arguments, constants, NUM_WARPS, own)
    if exchange is not None:
        arguments, constants = (parts, len(parts), parts.new_empty((1, 3))), {"PARTS": round_capacity(parts)}
        yield KernelCall(kernels.merge, 1, arguments, constants, NUM_WARPS, own)
        parts = exchange(arguments[-1])
    if number:
        arguments = *values, *mask, *out, *sizes, parts, len(parts), *task.rule
        constants = block | {"PARTS": round_capacity(parts)}
        yield KernelCall(kernels.standardize, programs, arguments, constants, NUM_WARPS, own)


def round_capacity(parts: torch.Tensor) -> int:
    """A size that holds the parts: the same for all numbers of programs, so that few variants arise."""
    return max(PROGRAMS, next_power_of_2(len(parts)))
