"""The CPU backend: one serial loop over time, compiled by Numba, without temporaries.

Arithmetic in float32 (float64 for float64 inputs) in the equation's own order of operations, one rounding each, so
that it equals a NumPy or PyTorch loop bit for bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numba
import torch
from numba import types

from rl_triton_core import boundaries
from rl_triton_core._internal.arguments.validation import BYTE_DTYPES, narrow_flags
from rl_triton_core._internal.equations.compile import bind_names, compile_equation
from rl_triton_core._internal.equations.disk import hash_file, hash_text
from rl_triton_core._internal.equations.numba import INNER, SCALARS, compile_and_keep, numba_language
from rl_triton_core._internal.launch.launcher import RecordedLaunch, ResolvedLaunch, record_launch
from rl_triton_core._internal.launch.threads import get_num_threads, run_chunks
from rl_triton_core._internal.scan import serial, serial_memory
from rl_triton_core._internal.scan.problem import Problem
from rl_triton_core._internal.scan.recurrence import Recurrence, Stream
from rl_triton_core._internal.scan.serial_memory import Arguments, StreamType, make_loader

MIN_ELEMENTS_PER_CHUNK = 1 << 16
"""Elements from which it pays to hand a part of the work to another thread."""
CHUNKS_PER_THREAD = 4
Chunk = tuple[int, int, int, int]
"""First group and end of the groups, first lane and end of the lanes."""
SUPPORTS_EXPECTATION = False


def unavailable(device: torch.device) -> str | None:
    """It runs on CPU tensors."""
    return None if device.type == "cpu" else f"it runs on CPU tensors only, got {device}"


def run(problem: Problem) -> None:
    """Fill the problem's outputs."""
    dtype = problem.dtype
    results = [x if x is None or x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x in problem.outputs]
    call = Call(problem, results)
    walk, numbers = prepare_walk(problem, call), tuple(call.numbers)
    walk(tuple([x.data_ptr() for x in call.tensors]), numbers)
    if problem.cu_seqlens is None:  # offsets are checked anew for every call
        record_launch(RecordedLaunch(lambda: ResolvedLaunch(walk, (tuple(call.tensors), numbers))))
    for out, result in zip(problem.outputs, results, strict=True):
        if out is not None and result is not None and result is not out:
            out.copy_(result)


def prepare_walk(problem: Problem, call: Call) -> Any:
    """A function of addresses and numbers that walks all rows of problems like this one."""
    compiled = compile_walk(problem.recurrence, call.variant)
    table = array("q", call.words)
    address, _ = table.buffer_info()
    groups, _, lanes = problem.shape
    chunks = min(CHUNKS_PER_THREAD * get_num_threads(), problem.like.numel() // MIN_ELEMENTS_PER_CHUNK)
    if get_num_threads() == 1 or chunks < 2:
        walk: Any = partial(compiled, address, 0, groups, 0, lanes)
    else:
        walk = partial(walk_chunks, compiled, address, split_rows(problem, chunks))
    walk.table = table  # as long as the function, which knows its address, so long the table lives
    return walk


def walk_chunks(compiled: Any, table: int, chunks: Sequence[Chunk], addresses: Any, numbers: Any) -> None:
    """Walk all rows, several threads taking turns."""
    run_chunks(lambda chunk: compiled(table, *chunk, addresses, numbers), chunks)


def split_rows(problem: Problem, number: int) -> list[Chunk]:
    """Split the rows into chunks of nearly equal size."""
    groups, steps, lanes = problem.shape
    if groups >= number:
        edges = [groups * i // number for i in range(number + 1)]
        return [(low, high, 0, lanes) for low, high in pairwise(edges)]
    edges = [lanes * i // number for i in range(number + 1)]
    if problem.cu_seqlens is not None:
        wanted = problem.cu_seqlens.new_tensor([steps * i // number for i in range(1, number)])
        edges = [0, *torch.searchsorted(problem.cu_seqlens, wanted).tolist(), lanes]
    return [(0, groups, low, high) for low, high in pairwise(edges) if low < high]


# -- arguments --------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What the compiled code knows of an argument."""

    dtype: torch.dtype
    is_stream: bool


DTYPES = (torch.uint8, torch.int64, torch.float32, torch.float64)
STREAM_KINDS = {dtype: Kind(dtype, is_stream=True) for dtype in DTYPES}
STREAM_KINDS[torch.bool] = STREAM_KINDS[torch.uint8]
NUMBER_KINDS = {dtype: Kind(dtype, is_stream=False) for dtype in (torch.bool, *DTYPES)}


class Variant(NamedTuple):
    """What the compiled code depends on."""

    is_serial: bool
    """Whether lanes are walked one after the other, not side by side."""
    is_contiguous: bool
    """Whether lanes lie side by side in all tensors; known only where they are walked side by side."""
    dtype: torch.dtype
    """That of the arithmetic."""
    kinds: Arguments
    """Of each argument a `Kind`, None, or a tuple of these."""
    num_tensors: int
    num_numbers: int


class Call:
    """The arguments of a walk, in the order of the fields of `Arguments`."""

    def __init__(self, problem: Problem, results: Sequence[torch.Tensor | None]) -> None:
        self.problem = problem
        _, step, lane = problem.find_strides(next(x for x in results if x is not None).stride())
        are_few = problem.cu_seqlens is not None or problem.shape[2] < serial.MIN_LANES_TO_VECTORIZE
        self.is_serial = are_few or step <= lane  # further from each other than steps are
        self.is_contiguous = not self.is_serial
        self.tensors: list[torch.Tensor] = []
        self.words: list[int] = []
        """Strides of the tensors, and numbers that are no floats."""
        self.numbers: list[float] = []
        flags = problem.terminated, problem.truncated, problem.mask, problem.previous_done
        is_float = all(x is None or x.dtype == torch.float32 for x in flags)
        self.flag_dtypes = (torch.float32,) if is_float else BYTE_DTYPES
        """Those in which flags are read as they are; so that few variants arise."""
        self.real_dtypes = (problem.dtype,)
        add_value, add_number, add_flags = self.add_value, self.add_number, self.add_flags
        offsets = problem.cu_seqlens  # found by lane
        kinds = Arguments(
            inputs=tuple(map(add_value, problem.inputs)),
            next_values=add_value(problem.next_values),
            bootstrap=add_value(problem.bootstrap),
            terminated=add_flags(problem.terminated),
            truncated=add_flags(problem.truncated),
            mask=add_flags(problem.mask),
            gamma=add_value(problem.gamma),
            decay=add_value(problem.decay),
            params=tuple(map(add_value, problem.params)),
            skip=add_number(problem.skip, torch.bool),
            initial=add_value(problem.initial),
            previous_done=add_flags(problem.previous_done),
            starts_at=add_number(problem.starts_at, torch.bool),
            outputs=tuple(map(add_value, results)),
            offsets=None if offsets is None else self.add_tensor(offsets.to(torch.int64), lambda own: (0, 0, *own)),
            zero=add_value(0.0),
            zeros=tuple([add_value(0.0) for _ in range(problem.recurrence.num_lookahead)]),
            steps=add_number(problem.shape[1], torch.int64),
        )
        self.variant = Variant(
            self.is_serial, self.is_contiguous, problem.dtype, kinds, len(self.tensors), len(self.numbers)
        )

    def add_value(self, x: Any) -> Kind | None:
        """Add a stream or a number in the dtype of the arithmetic."""
        if isinstance(x, torch.Tensor):
            return self.add_stream(x, self.real_dtypes)
        return None if x is None else self.add_number(x, self.real_dtypes[0])

    def add_flags(self, flags: Stream) -> Kind | None:
        """Add flags."""
        if flags is None:
            return None
        return self.add_stream(narrow_flags(flags, self.flag_dtypes), self.flag_dtypes)

    def add_stream(self, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> Kind:
        """Add a tensor in one of these dtypes, whose elements are found by group, step and lane."""
        dim = self.problem.time_dim
        if not self.is_serial and x.stride(dim) == 0:  # constant in time: lanes side by side
            x = x.select(dim, 0).contiguous().unsqueeze(dim).expand_as(x)
        return self.add_tensor(x if x.dtype in dtypes else x.to(dtypes[0]), self.problem.find_strides)

    def add_tensor(self, x: torch.Tensor, strides: Any) -> Kind:
        """Add a tensor that has the strides that a function tells."""
        x = x.resolve_neg()
        size, (group, step, lane) = x.element_size(), strides(x.stride())
        if lane != 1:
            self.is_contiguous = False
        self.tensors.append(x)
        self.words += (size * group, size * step, size * lane)
        return STREAM_KINDS[x.dtype]

    def add_number(self, x: float, dtype: torch.dtype) -> Kind:
        """Add a number."""
        if dtype.is_floating_point:
            self.numbers.append(x)
        else:
            self.words.append(int(x))
        return NUMBER_KINDS[dtype]


# -- compilation ------------------------------------------------------------------------------------------------------

ELEMENTS = {torch.bool: types.boolean, torch.uint8: types.uint8, torch.int64: types.int64}
ELEMENTS |= {torch.float32: types.float32, torch.float64: types.float64}


@cache
def compile_walk(recurrence: Recurrence, variant: Variant) -> Any:
    """The walk with an estimator's equations in it; kept on disk between processes."""
    language = numba_language(SCALARS[variant.dtype])
    equations = recurrence.coefficients, recurrence.readout, boundaries.apply_boundary_rule
    coefficients, readout, apply_boundary_rule = compiled = [compile_equation(x, language) for x in equations]
    code = SOURCES, [x.__name__ for x in compiled], recurrence.num_lookahead, recurrence.backward, variant
    name = f"{recurrence.name}_{hash_text(code)}"
    walk_side_by_side, enter, step = serial.BACKWARD if recurrence.backward else serial.FORWARD
    names: dict[str, Any] = {
        "load_arguments": make_loader(find_types(variant)),
        "coefficients": coefficients,
        "readout": readout,
        "apply_boundary_rule": apply_boundary_rule,
        "DIRECTION": -1 if recurrence.backward else 1,
        "HAS_MASK": variant.kinds.mask is not None,
        "GAMMA_VARIES": variant.kinds.gamma.is_stream,
        "NUM_LOOKAHEAD": recurrence.num_lookahead,
    }

    def bind_part(function: Any, **options: Any) -> Any:
        return numba.njit(**INNER, **options)(bind_names(function, f"{name}_{function.__name__}", **names))

    names["read_discount"] = bind_part(serial.read_discount, inline="always")
    names["follow_recurrence"] = bind_part(serial.follow_recurrence, inline="always")
    names["enter"] = bind_part(enter, inline="always")
    names["step"] = bind_part(step, forceinline=True)
    walk = bind_names(serial.walk_rows_serially if variant.is_serial else walk_side_by_side, name, **names)
    return compile_entry(walk, variant.num_tensors, variant.num_numbers)


def compile_entry(walk: Any, num_addresses: int, num_numbers: int) -> Any:
    """A bound walk as a function that Python calls, with as little as possible between."""
    addresses, numbers = types.UniTuple(types.int64, num_addresses), types.UniTuple(types.float64, num_numbers)
    signature = types.void(*[types.int64] * 5, addresses, numbers)
    return compile_and_keep(walk, signature)


def find_types(variant: Variant) -> Arguments:
    """The Numba types of the arguments."""

    def type_of(kind: Any, output: int = 0) -> Any:
        if kind is None:
            return types.none
        if not isinstance(kind, Kind):
            return tuple(map(type_of, kind))
        element = ELEMENTS[kind.dtype]
        return StreamType(element, variant.is_contiguous, output) if kind.is_stream else element

    outputs = tuple(type_of(kind, i) for i, kind in enumerate(variant.kinds.outputs, 1))
    return Arguments(*map(type_of, variant.kinds))._replace(outputs=outputs)


SOURCES = [hash_file(str(module.__file__)) for module in (serial, serial_memory)]
