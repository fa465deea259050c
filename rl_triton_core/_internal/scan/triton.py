"""The Triton backend: CUDA and ROCm tensors, one fused kernel per call, or two launches of it for few long rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from rl_triton_core._internal.equations.compile import compile_equation
from rl_triton_core._internal.equations.triton import TRITON
from rl_triton_core._internal.launch import kernels, table
from rl_triton_core._internal.launch.kernels import GeneralSettings, Launches, PreparedLaunch
from rl_triton_core._internal.launch.launcher import record_kernel, unmark_numbers
from rl_triton_core._internal.launch.table import Launch
from rl_triton_core._internal.scan.kernel import scan
from rl_triton_core._internal.scan.layout import find_vector_width
from rl_triton_core._internal.scan.problem import Problem

INTERPRETED = isinstance(scan.scan, InterpretedFunction)
COMPILES = not INTERPRETED
MAX_UNROLLED_ACTIONS = 16
"""Up to so many actions, their number is compiled into the kernel."""
MAX_UNROLLED_BY_GENERAL_KERNELS = 4
"""The same of general kernels, which with more would keep registers in memory."""
SUPPORTS_EXPECTATION = True


def unavailable(device: torch.device) -> str | None:
    """It runs on CUDA and ROCm tensors, and on CPU tensors in Triton's interpreter."""
    if device.type == "cuda" or (device.type == "cpu" and INTERPRETED):
        return None
    hint = "; CPU tensors need TRITON_INTERPRET=1 in the environment" if device.type == "cpu" else ""
    return f"it runs on CUDA and ROCm tensors, got {device}{hint}"


def run(problem: Problem) -> None:
    """Fill the problem's outputs."""
    if problem.dtype == torch.float64:
        raise kernels.explain_float64(problem.names_of(torch.float64))
    with kernels.device_guard(problem.like.device):
        if not COMPILES:
            for call in build_launches(problem, *choose_launch(problem)):
                scan.scan[call.grid](*unmark_numbers(call.arguments), **call.options)
            return
        arguments = kernel_arguments(problem)
        launches, folds = find_launches(problem), None
        if launches[0].folds is not None:
            folds = problem.like.new_empty(launches[0].folds, dtype=problem.dtype)
        arguments = *arguments[:FOLDS], folds, *arguments[FOLDS + 1 :]
        for kernel, grid, constants, _ in launches:
            given = (*arguments, *constants)
            kernel[(*grid, 1)](*unmark_numbers(given))
            record_kernel(kernel, grid, given, folds)


def find_launches(problem: Problem) -> Launches:
    """Launches by kernels of the shape's own, or general ones."""
    layout = problem.layout
    facts = layout.is_env_major, layout.is_dense, layout.is_wide, tuple(layout.kinds)
    form = problem.like.device, problem.recurrence, problem.skip, problem.starts_at, *facts  # all but sizes and numbers
    variants = kernels.VARIANTS.get(form)
    if variants is None:
        variants = kernels.VARIANTS[form] = kernels.Variants()
    find_general = partial(find_general_launches, problem, variants)

    def prepare() -> tuple[int, Callable[[], Launches]]:
        row, segments = choose_launch(problem)
        return 1 if segments == 1 else 2, partial(compile_own, problem, row, segments)

    return variants.find(tuple(layout.sizes), problem.like, prepare, find_general)


def compile_own(problem: Problem, row: Launch, segments: int) -> Launches:
    """Compile the kernels of a shape."""
    return tuple(
        PreparedLaunch(
            scan.scan.warmup(*unmark_numbers(call.arguments), grid=call.grid, **call.options),
            call.grid,
            call.arguments[CONSTANTS:],
            None if call.folds is None else tuple(call.folds.shape),
        )
        for call in build_launches(problem, row, segments)
    )


def find_general_launches(problem: Problem, variants: kernels.Variants) -> Launches:
    """Launches by general kernels, which are compiled if there is room for more."""
    layout = problem.layout
    length, groups, lanes, number = layout.length, layout.groups, layout.lanes, layout.num_actions
    rows = table.find_general_rows(layout.bytes_per_step, layout.order)
    row, segments = rows.choose(length, groups, lanes)
    unrolled = number if number <= MAX_UNROLLED_BY_GENERAL_KERNELS else 0
    one_tile = length <= table.SHORT <= row.steps and problem.cu_seqlens is None
    wanted = GeneralSettings(row, unrolled, 1 if segments == 1 else 2, one_tile)
    settings, compiled = variants.find_general(wanted, GeneralSettings(rows.long), partial(compile_general, problem))
    grid = (groups * -(-lanes // settings.row.block_lanes), segments if settings.num_kernels == 2 else 1)
    folds = (3, GENERAL_SEGMENTS, groups, lanes) if settings.num_kernels == 2 else None
    return tuple([PreparedLaunch(kernel, grid, constants, folds) for kernel, constants in compiled])


def compile_general(problem: Problem, settings: GeneralSettings) -> tuple[tuple[Any, tuple[Any, ...]], ...]:
    """Compile general kernels; return them with their constants."""
    compiled = []
    for call in build_launches(problem, settings.row, settings.num_kernels, settings):
        given = generalize_arguments(problem, call.arguments)
        compiled.append((scan.scan.warmup(*given, grid=(1, 1), **call.options), call.arguments[CONSTANTS:]))
    return tuple(compiled)


def generalize_arguments(problem: Problem, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What stands for a kernel's arguments while a general kernel is compiled."""
    is_env_major = problem.layout.is_env_major
    size = (1 << 40) + 1 if problem.layout.is_wide else 3  # Triton sees nothing of these but their type

    def general_strides(strides: Sequence[int]) -> tuple[int, ...]:
        _, step, lane, *action = strides
        known = (False, step == 1 and is_env_major, lane == 1 and not is_env_major, action == [1])
        return tuple(1 if is_one else size for is_one in known[: len(strides)])

    def generalize(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return kernels.Address(x.dtype)
        if not isinstance(x, tuple):
            return size if type(x) is int else unmark_numbers(x)
        if len(x) > 1 and isinstance(x[0], torch.Tensor):
            return kernels.Address(x[0].dtype), *general_strides(x[1:])
        return tuple(map(generalize, x))

    given = [*map(generalize, arguments[:CONSTANTS]), *arguments[CONSTANTS:]]
    given[STRIDES] = general_strides(arguments[STRIDES])
    for i in NUMBERS:
        given[i] = unmark_numbers(arguments[i])
    return tuple(given)


def choose_launch(problem: Problem) -> tuple[Launch, int]:
    """The table's launch, and the number of segments of time."""
    layout, (groups, _, lanes) = problem.layout, problem.shape
    return table.choose_launch(layout.length, groups, lanes, layout.bytes_per_step, layout.order)


class ScanLaunch(NamedTuple):
    """A launch to be made."""

    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    folds: torch.Tensor | None


def build_launches(
    problem: Problem, row: Launch, segments: int, general: GeneralSettings | None = None
) -> Iterator[ScanLaunch]:
    """The launch, or with segments the one that folds them and the one that uses the folds."""
    groups, _, lanes = problem.shape
    grid = (groups * triton.cdiv(lanes, row.block_lanes), segments)
    width, folds = 1, None
    if segments > 1:
        scanned = row.chunks > 1 and problem.layout.is_env_major  # with all threads along the segments
        width = table.next_power_of_2(max(segments, 32 * row.num_warps if scanned else 1))
        width = width if general is None else GENERAL_SEGMENTS
        folds = problem.like.new_empty((3, width, groups, lanes), dtype=problem.dtype)
    equations = problem.recurrence.coefficients, problem.recurrence.readout
    arguments = *kernel_arguments(problem, folds), *(compile_equation(x, TRITON) for x in equations)
    checked = kernels.CHECKED if problem.cu_seqlens is not None else {}  # the kernel asserts that offsets are in order
    for fold in (True, False) if segments > 1 else (False,):
        config = kernel_config(problem, row, width, fold, general)
        options = {"num_warps": row.num_warps, **kernels.FUSED, **checked}
        yield ScanLaunch(grid, (*arguments, config), options, folds)


FOLDS, STRIDES, CONSTANTS = map(scan.scan.arg_names.index, ("folds", "strides", "COEFFICIENTS"))
NUMBERS = tuple(map(scan.scan.arg_names.index, ("bootstrap_number", "gamma_number", "decay", "scalars")))
"""Where these stand among the kernel's arguments."""
GENERAL_SEGMENTS = table.next_power_of_2(table.MAX_SEGMENTS)
"""Segments that general kernels have room for."""


def kernel_arguments(problem: Problem, folds: torch.Tensor | None = None) -> tuple[Any, ...]:
    """A problem as kernel arguments: streams, None, or numbers."""
    layout, none = problem.layout, 0.0 if problem.dtype.is_floating_point else 0
    return (
        *(layout.inputs, layout.next_values, layout.expected),
        *(layout.bootstrap, problem.bootstrap if layout.bootstrap is None else none),
        *(layout.terminated, layout.truncated, layout.mask),
        *(layout.gamma, problem.gamma if layout.gamma is None else none, problem.decay, problem.params),
        *(layout.initial, layout.previous_done, layout.outputs, problem.cu_seqlens, folds),
        *(layout.strides, layout.steps, layout.lanes),
    )


def kernel_config(
    problem: Problem, row: Launch, segments: int = 1, fold: bool = False, general: GeneralSettings | None = None
) -> scan.KernelConfig:
    """What is compiled into the kernel, beside the equations; into a general one nothing that only some sizes have."""
    layout, number = problem.layout, problem.layout.num_actions
    is_whole = general is None and problem.cu_seqlens is None
    return scan.KernelConfig(
        BACKWARD=problem.recurrence.backward,
        INPUT_MASK=presence_bits(problem.inputs),
        OUTPUT_MASK=presence_bits(problem.outputs),
        NUM_LOOKAHEAD=problem.recurrence.num_lookahead,
        SKIP=problem.skip,
        STARTS_AT=problem.starts_at,
        DTYPE=tl.float32 if problem.dtype.is_floating_point else tl.int64,
        WIDE=layout.is_wide,
        VECTOR=(find_vector_width(layout.across) if general is None else 1) if layout.is_env_major else 0,
        TOGETHER=layout.is_env_major or (row.chunks > 1 and row.unroll > 4),  # others compile fast and run faster
        EVEN=is_whole and layout.steps % row.steps == 0 and layout.lanes % row.block_lanes == 0,
        ACTIONS=(number if number <= MAX_UNROLLED_ACTIONS else 0) if general is None else general.num_actions,
        ALIGNED=find_vector_width(layout.action_strides) if general is None and number else 1,
        ONE_TILE=is_whole and layout.steps <= row.steps if general is None else general.one_tile,
        SEGMENTS=segments,
        FOLD=fold,
        EXCLUSIVE=number > 0 and row.chunks >= 16,
        BLOCK_LANES=row.block_lanes,
        CHUNKS=row.chunks,
        LOG_UNROLL=row.unroll.bit_length() - 1,
    )


def presence_bits(streams: Sequence[Any]) -> int:
    """A bit for each stream that is there."""
    return sum([1 << i for i, stream in enumerate(streams) if stream is not None])
