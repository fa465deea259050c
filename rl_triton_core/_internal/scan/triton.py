"""The Triton backend: CUDA and ROCm tensors, one fused kernel per call, or two launches of it for few long rows."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from rl_triton_core._internal.equations.compile import compile_equation
from rl_triton_core._internal.equations.triton import TRITON
from rl_triton_core._internal.launch import table as launch
from rl_triton_core._internal.launch.device import device_guard
from rl_triton_core._internal.launch.launcher import record_kernel
from rl_triton_core._internal.launch.recording import postpone_recording, unmark_numbers
from rl_triton_core._internal.launch.table import Launch
from rl_triton_core._internal.launch.tuning import Candidate, Window, is_searching, select_launch
from rl_triton_core._internal.launch.variants import (
    CALLS_BEFORE_OWN_KERNEL,
    MAX_FIRST_KERNELS,
    MIDDLE,
    SHORT,
    VARIANTS,
    Address,
    GeneralRows,
    GeneralSettings,
    Launches,
    PreparedLaunch,
    Variants,
)
from rl_triton_core._internal.scan.kernel import scan
from rl_triton_core._internal.scan.kernel.config import KernelConfig
from rl_triton_core._internal.scan.kernel.expectation import BLOCK_ACTIONS
from rl_triton_core._internal.scan.problem import Problem
from rl_triton_core._internal.scan.recurrence import Expectation, Recurrence, Stream

INTERPRETED = isinstance(scan.scan, InterpretedFunction)
COMPILES = not INTERPRETED
MAX_UNROLLED_ACTIONS = 16
"""Up to so many actions, their number is compiled into the kernel."""
MAX_UNROLLED_BY_GENERAL_KERNELS = 4
"""The same of general kernels, which with more would keep registers in memory."""


SUPPORTS_EXPECTATION = True
"""Whether `run` takes an `Expectation` as next values."""


def unavailable(device: torch.device) -> str | None:
    """It runs on CUDA and ROCm tensors, and on CPU tensors in Triton's interpreter."""
    if device.type == "cuda" or (device.type == "cpu" and INTERPRETED):
        return None
    hint = "; CPU tensors need TRITON_INTERPRET=1 in the environment" if device.type == "cpu" else ""
    return f"it runs on CUDA and ROCm tensors, got {device}{hint}"


def run(problem: Problem) -> None:
    """Fill the problem's outputs."""
    if problem.dtype == torch.float64:
        names = problem.names_of(torch.float64)
        raise TypeError(
            f"{names}: got dtype torch.float64 on the triton backend, expected float32, bfloat16 or float16 (the cpu "
            "and reference backends take float64; NumPy's arrays are float64 by default)"
        )
    with device_guard(problem.like.device):
        if COMPILES:
            launch_compiled(problem)
        else:
            for call in build_launches(problem, *choose_launch(problem)):
                scan.scan[call.grid](*unmark_numbers(call.arguments), **call.options)


def launch_compiled(problem: Problem) -> None:
    """Launch kernels of the shape's own, or general ones."""
    arguments = kernel_arguments(problem)
    form, sizes = describe_arguments(problem, arguments)
    variants = VARIANTS.get(form)
    if variants is None:
        variants = VARIANTS[form] = Variants(choose_general_rows(problem, form))
    launches = find_own_launches(problem, variants, sizes)
    if launches is None:
        postpone_recording()
        launches = find_general_launches(problem, variants, form, arguments)
    folds = None
    if launches[0].folds is not None:
        folds = problem.like.new_empty(launches[0].folds, dtype=problem.dtype)
    for kernel, grid, constants, _ in launches:
        given = (*arguments[:FOLDS], folds, *arguments[FOLDS + 1 :], *constants)
        kernel[(*grid, 1)](*unmark_numbers(given))
        record_kernel(kernel, grid, given, folds)


class Form(NamedTuple):
    """What general kernels know of a problem: all but its sizes and numbers."""

    device: torch.device
    recurrence: Recurrence
    skip: bool
    starts_at: bool
    is_env_major: bool
    is_dense: bool
    """Whether steps lie side by side in memory, or lanes where it is not env-major."""
    is_wide: bool
    """Whether offsets need 64 bits."""
    inputs: int
    outputs: int
    """A bit for each that is there."""
    streams: tuple[Any, ...]
    """For every stream its dtype, and whether it has strides of its own and which of those are 1."""


def describe_arguments(problem: Problem, arguments: tuple[Any, ...]) -> tuple[Form, Hashable]:
    """The form of a problem, and what kernels of a shape's own know beside it."""
    groups, steps, lanes = shape = problem.shape
    strides = arguments[STRIDES]
    is_env_major = abs(strides[1]) < abs(strides[2]) or problem.cu_seqlens is not None
    if strides[1] == strides[2]:  # of a single step or environment
        is_env_major = problem.time_dim == 1
    sizes: list[int] = [*shape, *strides]
    described: list[Any] = []
    furthest = abs(strides[0]) * groups + abs(strides[1]) * steps + abs(strides[2]) * lanes
    for stream in list_streams(arguments):
        if stream is None:
            described.append(None)
            continue
        x = stream[0]
        sizes.append(x.data_ptr() & 15)
        if len(stream) == 1:
            described.append(x.dtype)
        else:
            group, step, lane, *action = own = stream[1:]
            sizes += own
            described += (x.dtype, step == 1 if is_env_major else lane == 1, action == [1])
            furthest = max(
                furthest, abs(group) * groups + abs(step) * steps + abs(lane) * lanes + sum(map(abs, action))
            )
    if arguments[EXPECTED] is not None:
        sizes.append(arguments[EXPECTED][2])
    described.append(None if problem.cu_seqlens is None else problem.cu_seqlens.dtype)
    form = Form(
        problem.like.device,
        problem.recurrence,
        problem.skip,
        problem.starts_at,
        is_env_major,
        strides[1 if is_env_major else 2] == 1,
        furthest >= 1 << 30,
        presence_bits(problem.inputs),
        presence_bits(problem.outputs),
        tuple(described),
    )
    return form, tuple(sizes)


def list_streams(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The streams among a kernel's arguments, None for those that there are not."""
    expected = arguments[EXPECTED] or (None, None)
    return (
        *arguments[0],
        arguments[1],
        *expected[:2],
        *arguments[3:4],
        *arguments[5:9],
        *arguments[12:14],
        *arguments[14],
    )


def choose_general_rows(problem: Problem, form: Form) -> GeneralRows:
    """The rows of the launch table for general kernels."""
    order, held = "env-major" if form.is_env_major else "time-major", count_bytes_per_step(problem)
    many = 1 << 30
    windows = ((SHORT, many), (MIDDLE, many), (many, many), (many, 1))
    return GeneralRows(*(launch.find_launch(steps, lanes, held, order) for steps, lanes in windows))


def find_own_launches(problem: Problem, variants: Variants, sizes: Hashable) -> Launches | None:
    """The launches of a shape that has kernels of its own, or gets them now."""
    if is_searching() and problem.cu_seqlens is None:
        return compile_own(problem, choose_launch(problem))
    launches = variants.own.get(sizes)
    if launches is not None:
        return launches
    often = variants.count_call(sizes) >= CALLS_BEFORE_OWN_KERNEL and not is_capturing(problem.like)
    if not often and variants.num_first >= MAX_FIRST_KERNELS:
        return None
    row, segments = default_launch(problem)
    if not often and not variants.admit_first(1 if segments == 1 else 2):
        return None
    return variants.keep_own(sizes, compile_own(problem, (row, segments)))


def is_capturing(like: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured, during which no kernel should be compiled that is not needed."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


def compile_own(problem: Problem, candidate: Candidate) -> Launches:
    """Compile kernels for the very sizes of a problem."""
    return tuple(
        PreparedLaunch(
            scan.scan.warmup(*unmark_numbers(call.arguments), grid=call.grid, **call.options),
            call.grid,
            call.arguments[CONSTANTS:],
            None if call.folds is None else tuple(call.folds.shape),
        )
        for call in build_launches(problem, *candidate)
    )


def find_general_launches(problem: Problem, variants: Variants, form: Form, arguments: tuple[Any, ...]) -> Launches:
    """Launches by general kernels, which are compiled if there is room for more."""
    groups, steps, lanes = problem.shape
    length = steps if problem.cu_seqlens is None else -(-steps // lanes)
    rows = variants.rows
    row = rows.short if length <= SHORT else rows.middle if length <= MIDDLE else rows.long
    segments = launch.count_segments(length, groups * -(-lanes // row.block_lanes), row)
    if segments > 1:
        row = rows.split
        segments = launch.count_segments(length, groups * -(-lanes // row.block_lanes), row)
    number = 0 if arguments[EXPECTED] is None else arguments[EXPECTED][2]
    unrolled = number if number <= MAX_UNROLLED_BY_GENERAL_KERNELS else 0
    one_tile = length <= SHORT <= row.steps and problem.cu_seqlens is None
    wanted = GeneralSettings(row, unrolled, 1 if segments == 1 else 2, one_tile)
    settings, kernels = variants.find_general(wanted, partial(compile_general, problem, form, arguments))
    grid = (groups * -(-lanes // settings.row.block_lanes), segments if settings.num_kernels == 2 else 1)
    folds = (3, GENERAL_SEGMENTS, groups, lanes) if settings.num_kernels == 2 else None
    return tuple(PreparedLaunch(kernel, grid, constants, folds) for kernel, constants in kernels)


def compile_general(
    problem: Problem, form: Form, arguments: tuple[Any, ...], settings: GeneralSettings
) -> tuple[tuple[Any, tuple[Any, ...]], ...]:
    """Compile general kernels; return them with their constants."""
    is_split = settings.num_kernels == 2
    compiled = []
    for fold in (True, False) if is_split else (False,):
        config = general_config(problem, form, settings, fold)
        constants = (*compile_equations(problem.recurrence), config)
        given = generalize_arguments(problem, form, arguments, is_split)
        options = compile_options(problem, settings.row)
        compiled.append((scan.scan.warmup(*given, *constants, grid=(1, 1), **options), constants))
    return tuple(compiled)


def general_config(problem: Problem, form: Form, settings: GeneralSettings, fold: bool) -> KernelConfig:
    """What is compiled into a general kernel: nothing that only some sizes have."""
    width = GENERAL_SEGMENTS if settings.num_kernels == 2 else 1
    return replace(
        kernel_config(problem, settings.row, width, fold),
        WIDE=form.is_wide,
        VECTOR=1 if form.is_env_major else 0,
        EVEN=False,
        ACTIONS=settings.num_actions,
        ALIGNED=1,
        ONE_TILE=settings.one_tile,
    )


def generalize_arguments(problem: Problem, form: Form, arguments: tuple[Any, ...], is_split: bool) -> tuple[Any, ...]:
    """What stands for a kernel's arguments while a general kernel is compiled."""
    size = (1 << 40) + 1 if form.is_wide else 3  # Triton sees nothing of these but their type

    def general_strides(strides: Sequence[int]) -> tuple[int, ...]:
        _, step, lane, *action = strides
        known = (False, step == 1 and form.is_env_major, lane == 1 and not form.is_env_major, action == [1])
        return tuple(1 if is_one else size for is_one in known[: len(strides)])

    def generalize(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return Address(x.dtype)
        if not isinstance(x, tuple):
            return size if type(x) is int else unmark_numbers(x)
        if len(x) > 1 and isinstance(x[0], torch.Tensor):
            return Address(x[0].dtype), *general_strides(x[1:])
        return tuple(map(generalize, x))

    given = list(map(generalize, arguments))
    given[FOLDS] = Address(problem.dtype) if is_split else None
    given[STRIDES] = general_strides(arguments[STRIDES])
    for i in NUMBERS:
        given[i] = unmark_numbers(arguments[i])
    return tuple(given)


def choose_launch(problem: Problem) -> Candidate:
    """The launch that a search found, else the table's; and the number of segments of time."""
    default = default_launch(problem)
    if problem.cu_seqlens is not None or not is_searching():
        return default

    def run(candidate: Candidate) -> None:
        for call in build_launches(problem, *candidate):
            scan.scan[call.grid](*unmark_numbers(call.arguments), **call.options)

    groups, steps, lanes = problem.shape
    window = Window(steps, lanes, count_bytes_per_step(problem), memory_layout(problem), groups, problem.like.is_cuda)
    return select_launch(problem_key(problem), default, window, run)


def problem_key(problem: Problem) -> Hashable:
    """What problems have in common that have the same launch."""
    dtypes = tuple(x.dtype for x in per_step_tensors(problem))
    masked = problem.mask is not None and problem.skip
    held = count_bytes_per_step(problem)
    return problem.recurrence, problem.shape, memory_layout(problem), dtypes, held, masked, problem.like.device


def default_launch(problem: Problem) -> Candidate:
    """The table's launch, and the number of segments of time."""
    groups, steps, lanes = problem.shape
    length = steps if problem.cu_seqlens is None else triton.cdiv(steps, lanes)
    row = launch.find_launch(length, groups * lanes, count_bytes_per_step(problem), memory_layout(problem))
    if groups > 1:  # of features, which may be few
        row = row._replace(block_lanes=min(row.block_lanes, launch.next_power_of_2(lanes)))
    return row, launch.count_segments(length, groups * triton.cdiv(lanes, row.block_lanes), row)


class KernelCall(NamedTuple):
    """A launch to be made."""

    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    folds: torch.Tensor | None


def build_launches(problem: Problem, row: Launch, segments: int) -> Iterator[KernelCall]:
    """The launch, or with segments the one that folds them and the one that uses the folds."""
    groups, _, lanes = problem.shape
    grid = (groups * triton.cdiv(lanes, row.block_lanes), segments)
    width, folds = 1, None
    if segments > 1:
        scanned = row.chunks > 1 and memory_layout(problem) == "env-major"  # with all threads along the segments
        width = launch.next_power_of_2(max(segments, 32 * row.num_warps if scanned else 1))
        folds = problem.like.new_empty((3, width, groups, lanes), dtype=problem.dtype)
    for fold in (True, False) if segments > 1 else (False,):
        equations, config = compile_equations(problem.recurrence), kernel_config(problem, row, width, fold)
        given = (*kernel_arguments(problem, folds), *equations, config)
        yield KernelCall(grid, given, compile_options(problem, row), folds)


EXPECTED, FOLDS, STRIDES, CONSTANTS = map(scan.scan.arg_names.index, ("expected", "folds", "strides", "COEFFICIENTS"))
NUMBERS = tuple(map(scan.scan.arg_names.index, ("bootstrap_number", "gamma_number", "decay", "scalars")))
"""Where these stand among the kernel's arguments."""
GENERAL_SEGMENTS = launch.next_power_of_2(launch.MAX_SEGMENTS)
"""Segments that general kernels have room for."""


def kernel_arguments(problem: Problem, folds: Stream = None) -> tuple[Any, ...]:
    """A problem as kernel arguments: streams as (tensor, group stride, step stride, lane stride), None, or numbers.

    Those with the strides of the tensor that all are like go without, so that the kernel computes offsets once.
    """
    strides = problem.find_strides(problem.like)

    def locate_stream(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return None
        own = problem.find_strides(x)
        return (x,) if own == strides else (x, *own)

    def pass_number(x: Any) -> Any:
        return none if isinstance(x, torch.Tensor) else x

    none = 0.0 if problem.like.dtype.is_floating_point else 0

    stand_in = (problem.like,)  # Triton 3.6 has trouble with None inside a tuple
    return (
        tuple(locate_stream(x) or stand_in for x in problem.inputs),
        locate_stream(problem.next_values),
        expectation_arguments(problem),
        locate_stream(problem.bootstrap),
        pass_number(problem.bootstrap),
        locate_stream(problem.terminated),
        locate_stream(problem.truncated),
        locate_stream(problem.mask),
        locate_stream(problem.gamma),
        pass_number(problem.gamma),
        problem.decay,
        problem.params,
        locate_stream(problem.initial),
        locate_stream(problem.previous_done),
        tuple(locate_stream(x) or stand_in for x in problem.outputs),
        problem.cu_seqlens,
        folds,
        strides,
        problem.shape[1],
        problem.shape[2],
    )


def kernel_config(problem: Problem, row: Launch, segments: int = 1, fold: bool = False) -> KernelConfig:
    """What is compiled into the kernel, beside the equations."""
    _, steps, lanes = problem.shape
    whole = problem.cu_seqlens is None
    number, aligned = count_actions(problem)
    return KernelConfig(
        BACKWARD=problem.recurrence.backward,
        INPUT_MASK=presence_bits(problem.inputs),
        OUTPUT_MASK=presence_bits(problem.outputs),
        NUM_LOOKAHEAD=problem.recurrence.num_lookahead,
        SKIP=problem.skip,
        STARTS_AT=problem.starts_at,
        DTYPE=tl.float32 if problem.dtype.is_floating_point else tl.int64,
        WIDE=needs_int64_offsets(problem),
        VECTOR=stride_alignment(problem) if memory_layout(problem) == "env-major" else 0,
        EVEN=whole and steps % row.steps == 0 and lanes % row.block_lanes == 0,
        ACTIONS=number if number <= MAX_UNROLLED_ACTIONS else 0,
        ALIGNED=aligned,
        ONE_TILE=whole and steps <= row.steps,
        SEGMENTS=segments,
        FOLD=fold,
        EXCLUSIVE=isinstance(problem.next_values, Expectation) and row.chunks >= 16,
        BLOCK_LANES=row.block_lanes,
        CHUNKS=row.chunks,
        LOG_UNROLL=row.unroll.bit_length() - 1,
    )


def expectation_arguments(problem: Problem) -> tuple[Any, ...] | None:
    """An expectation as (probabilities, values, number of actions), streams with an action stride, or None."""
    if not isinstance(problem.next_values, Expectation):
        return None
    streams = ((x, *problem.find_strides(x[..., 0]), x.stride(-1)) for x in problem.next_values)
    return *streams, problem.next_values.probs.shape[-1]


def count_actions(problem: Problem) -> tuple[int, int]:
    """The number of actions, and 4 where that divides all strides between steps, else 1."""
    if not isinstance(problem.next_values, Expectation):
        return 0, 1
    strides = (stride for x in problem.next_values for stride in problem.find_strides(x[..., 0]))
    return problem.next_values.probs.shape[-1], vector_width(strides)


def memory_layout(problem: Problem) -> str:
    """Whether a lane's steps or a step's lanes lie closer. A lane of its own has nothing beside it."""
    _, step, lane = problem.find_strides(problem.like)
    alone = problem.cu_seqlens is not None or problem.shape[2] == 1
    return "env-major" if alone or abs(step) < abs(lane) else "time-major"


def per_step_tensors(problem: Problem) -> tuple[torch.Tensor, ...]:
    """The tensors that are read at every step."""
    return (*per_step_numbers(problem), *per_step_flags(problem))


def per_step_numbers(problem: Problem) -> Iterator[torch.Tensor]:
    """Those that are read as numbers."""
    return (x for x in (*problem.inputs, problem.gamma, problem.next_values) if isinstance(x, torch.Tensor))


def per_step_flags(problem: Problem) -> Iterator[torch.Tensor]:
    """Those that are read as flags."""
    return (x for x in (problem.terminated, problem.truncated, problem.mask) if x is not None)


def count_bytes_per_step(problem: Problem) -> int:
    """How many bytes of every step a thread holds: numbers and results as it computes them, flags as it loads them."""
    numbers = len([*per_step_numbers(problem), *wanted_outputs(problem)])
    if isinstance(problem.next_values, Expectation):
        numbers += 2 * BLOCK_ACTIONS.value
    return numbers * problem.dtype.itemsize + sum(x.itemsize for x in per_step_flags(problem))


def wanted_outputs(problem: Problem) -> Iterator[torch.Tensor]:
    """The outputs that are wanted."""
    return (x for x in problem.outputs if x is not None)


def stride_alignment(problem: Problem) -> int:
    """4 where that divides all strides between lanes and groups, so that four steps are read at once; else 1."""
    groups, _, lanes = problem.shape
    strides = map(problem.find_strides, (*per_step_tensors(problem), *wanted_outputs(problem)))
    several = ((group if groups > 1 else 0, lane if lanes > 1 else 0) for group, _, lane in strides)
    return vector_width(stride for pair in several for stride in pair)


def vector_width(strides: Iterable[int]) -> int:
    """4 where that divides all of them, else 1."""
    return 4 if math.gcd(4, *strides) == 4 else 1


def needs_int64_offsets(problem: Problem) -> bool:
    """Whether offsets into a tensor need 64 bits."""
    return any(
        sum(abs(stride) * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True)) >= 1 << 30
        for x in (*per_step_tensors(problem), *wanted_outputs(problem), *problem.ahead, problem.bootstrap)
        if isinstance(x, torch.Tensor)
    )


def compile_options(problem: Problem, row: Launch) -> dict[str, Any]:
    """How it is compiled. With `debug`, the kernel asserts that offsets are in order."""
    checked = {"debug": True, "sanitize_overflow": False} if problem.cu_seqlens is not None else {}
    return {"num_warps": row.num_warps, **checked}


def presence_bits(streams: Sequence[Stream]) -> int:
    """A bit for each stream that is there."""
    return sum(1 << i for i, stream in enumerate(streams) if stream is not None)


def compile_equations(recurrence: Recurrence) -> tuple[Any, Any]:
    """An estimator's equations as Triton functions."""
    return compile_equation(recurrence.coefficients, TRITON), compile_equation(recurrence.readout, TRITON)
