"""Normalisation on CUDA and ROCm: one launch for the moments, one for their merge and application."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.launch.kernels import KernelCall, device_guard, launch_kernel
from rl_triton_core._internal.launch.table import next_power_of_2
from rl_triton_core._internal.moments import kernel as kernels
from rl_triton_core._internal.moments.rule import Exchange, Task

BLOCK, NUM_WARPS = 2048, 8
"""Elements of a tile, and the warps that share them."""
PROGRAMS = 512
"""At most, since each program of the second launch reads what each of the first has left."""


class Tiles(NamedTuple):
    """How a matrix is cut."""

    rows: int
    columns: int
    number: int

    @property
    def programs(self) -> int:
        """Programs that share the tiles."""
        return min(self.number, PROGRAMS)

    @property
    def constants(self) -> dict[str, int]:
        """What is compiled into a kernel."""
        return {"BLOCK_ROWS": self.rows, "BLOCK_COLUMNS": self.columns}


def choose_tiles(rows: int, columns: int) -> Tiles:
    """Tiles as wide as the matrix if that is narrow, all of one size; one shape for every row."""
    width = BLOCK if rows == 1 else min(BLOCK, next_power_of_2(columns))
    height = BLOCK // width
    return Tiles(height, width, -(-rows // height) * -(-columns // width))


def run(task: Task, exchange: Exchange | None) -> None:
    """Fill the output."""
    if task.values.dtype == torch.float64:
        raise TypeError(
            "advantages: got dtype float64 on the triton backend, expected float32, bfloat16 or float16 "
            "(the cpu and reference backends take float64)"
        )
    tiles = choose_tiles(*task.values.shape)
    new = task.values.new_empty if tiles.number else task.values.new_zeros
    parts = own = new((max(1, tiles.programs), 3), dtype=torch.float64)

    def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, int]) -> None:
        launch_kernel(KernelCall(kernel, programs, arguments, constants, NUM_WARPS, own), task.values.device)

    with device_guard(task.values.device):
        if tiles.number:
            constants = {**tiles.constants, "WEIGHTED": False}
            launch(kernels.moments, tiles.programs, moments_arguments(task, tiles, parts), constants)
        if exchange is not None:
            whole = parts.new_empty((1, 3))
            launch(kernels.merge, 1, (parts, len(parts), whole), {"PARTS": round_capacity(parts)})
            parts = exchange(whole)
        if tiles.number:
            constants = {**tiles.constants, "PARTS": round_capacity(parts)}
            launch(kernels.standardize, tiles.programs, standardize_arguments(task, tiles, parts), constants)


def moments_arguments(task: Task, tiles: Tiles, parts: torch.Tensor) -> tuple[Any, ...]:
    """Arguments of the first kernel."""
    return (*list_with_strides(task.values), *list_with_strides(task.mask), *task.values.shape, tiles.number, parts)


def standardize_arguments(task: Task, tiles: Tiles, parts: torch.Tensor) -> tuple[Any, ...]:
    """Arguments of the last kernel."""
    streams = (*list_with_strides(task.values), *list_with_strides(task.mask), *list_with_strides(task.out))
    return (*streams, *task.values.shape, tiles.number, parts, len(parts), *task.rule)


def list_with_strides(x: torch.Tensor | None) -> tuple[Any, ...]:
    """A matrix and its strides."""
    return (None, 0, 0) if x is None else (x, *x.stride())


def round_capacity(parts: torch.Tensor) -> int:
    """A size that holds the parts: the same for all numbers of programs, so that few variants arise."""
    return max(PROGRAMS, next_power_of_2(len(parts)))
