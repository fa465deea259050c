"""The CPU backend: one serial loop over time, compiled by Numba, no temporaries, environments over threads.

Arithmetic in float32 (float64 for float64 inputs) in the equation's own order of operations, one rounding each, so
that it equals a NumPy or PyTorch loop bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from rl_triton_core import boundaries
from rl_triton_core._internal.backends import Backend
from rl_triton_core._internal.kernels import serial
from rl_triton_core._internal.moments import Exchange, Task
from rl_triton_core._internal.primitives import PRIMITIVES
from rl_triton_core._internal.recurrence import Problem, Recurrence, bind

PARALLEL_FROM = 1 << 17
"""Elements per thread from which another thread pays."""


def unavailable(device: torch.device) -> str | None:
    """It runs on CPU tensors."""
    return None if device.type == "cpu" else f"it runs on CPU tensors only, got {device}"


def run(problem: Problem) -> None:
    """Fill the problem's outputs."""
    dtype = problem.dtype
    results = [stage(out, dtype) for out in problem.outputs]
    arguments = marshal(problem, dtype, results)
    kernel = compiled(problem.recurrence, variant(arguments))
    parts = max(1, min(torch.get_num_threads(), problem.like.numel() // PARALLEL_FROM))
    spans = split(problem.shape, arguments.offsets, parts)
    together(partial(kernel, tuple(arguments)), spans)
    for out, result in zip(problem.outputs, results, strict=True):
        if out is not None and result is not None and result is not out:
            out.copy_(result)


def stage(out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Where to compute a result: in place if it has the dtype of the arithmetic."""
    return out if out is None or out.dtype == dtype else torch.empty_like(out, dtype=dtype)


def split(shape: tuple[int, int, int], offsets: np.ndarray | None, parts: int) -> list[tuple[int, int, int, int]]:
    """The rows as (first group, end, first lane, end), in parts of nearly equal size."""
    groups, steps, lanes = shape
    if groups >= parts:
        edges = [groups * i // parts for i in range(parts + 1)]
        return [(low, high, 0, lanes) for low, high in pairwise(edges)]
    edges = [lanes * i // parts for i in range(parts + 1)]
    if offsets is not None:
        edges = [0, *np.searchsorted(offsets, [steps * i // parts for i in range(1, parts)]).tolist(), lanes]
    return [(0, groups, low, high) for low, high in pairwise(edges) if low < high]


def together(work: Callable[[Any], None], parts: Sequence[Any]) -> None:
    """Do the work on every part at once, on the first of them in this thread."""
    jobs = [threads(torch.get_num_threads()).submit(work, part) for part in parts[1:]]
    work(parts[0])
    for job in jobs:
        job.result()


@cache
def threads(number: int) -> ThreadPoolExecutor:
    """The worker threads, started when a call is first large enough."""
    return ThreadPoolExecutor(number, thread_name_prefix="rl_triton_core")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=threads.cache_clear)  # a fork has none of its parent's threads


# -- arguments --------------------------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    """What the kernel takes, as NumPy arrays and numbers; None is compiled away."""

    inputs: tuple[np.ndarray | None, ...]
    next_values: np.ndarray | None
    bootstrap: np.ndarray | np.number
    terminated: np.ndarray | None
    truncated: np.ndarray | None
    mask: np.ndarray | None
    gamma: np.ndarray | np.number
    decay: np.number
    params: tuple[np.number, ...]
    skip: np.bool_
    initial: np.ndarray | None
    previous_done: np.ndarray | None
    starts_at: np.bool_
    outputs: tuple[np.ndarray | None, ...]
    offsets: np.ndarray | None
    zero: np.number
    steps: np.int64
    all_bits: np.int64
    """-1, which the compiler must not know: it would see that rows are walked backward, and not use vectors."""


def marshal(problem: Problem, dtype: torch.dtype, results: list[torch.Tensor | None]) -> Arguments:
    """A problem as kernel arguments, without copies where dtypes allow."""
    real: Any = SCALARS[dtype]

    def stream(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return array(problem, x if x.dtype == dtype else x.to(dtype))
        return None if x is None else real(x)

    def flags(x: torch.Tensor | None) -> np.ndarray | None:
        if x is None:
            return None
        flags = array(problem, x if x.dtype in in_place else x != 0)
        return flags.view(np.uint8) if flags.dtype == np.bool_ else flags

    given = {x.dtype for x in (getattr(problem, name) for name in FLAGS) if x is not None}
    in_place = (torch.float32,) if given == {torch.float32} else (torch.bool, torch.uint8)  # so that few variants arise
    per_step = isinstance(problem.gamma, torch.Tensor)
    return Arguments(
        inputs=tuple(map(stream, problem.inputs)),
        next_values=stream(problem.next_values),
        bootstrap=edge(stream(problem.bootstrap)),
        terminated=flags(problem.terminated),
        truncated=flags(problem.truncated),
        mask=flags(problem.mask),
        gamma=stream(problem.gamma),
        decay=real(problem.lambda_ if per_step else problem.gamma * problem.lambda_),
        params=tuple(map(real, problem.params)),
        skip=np.bool_(problem.skip),
        initial=edge(stream(problem.initial)),
        previous_done=edge(flags(problem.previous_done)),
        starts_at=np.bool_(problem.starts_at),
        outputs=tuple(map(stream, results)),
        offsets=None if problem.cu_seqlens is None else problem.cu_seqlens.numpy().astype(np.int64, copy=False),
        zero=real(0),
        steps=np.int64(problem.shape[1]),
        all_bits=np.int64(-1),
    )


SCALARS = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}


FLAGS = ("terminated", "truncated", "mask", "previous_done")


def array(problem: Problem, tensor: torch.Tensor) -> np.ndarray:
    """A tensor as [groups, steps, lanes] over the same memory, or as [steps] if lanes are parts of one flat row."""
    x = (tensor.detach() if tensor.requires_grad else tensor).numpy()
    if x.ndim == 1:
        return x
    if problem.like.ndim < 3:
        return (x if problem.time_dim == 0 else x.T)[None]
    x = x if problem.time_dim == 1 else x.swapaxes(0, 1)
    return x if x.ndim == 3 else np.broadcast_to(x[..., None], problem.shape)


def edge(x: Any) -> Any:
    """An array that is constant in time as [groups, lanes]."""
    constant = isinstance(x, np.ndarray) and x.ndim == 3 and x.strides[1] == 0
    return np.ascontiguousarray(x[:, 0]) if constant else x


# -- compilation ------------------------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """What the compiled code depends on."""

    apart: bool
    """Whether lanes are walked one after the other, not side by side."""
    layout: str
    """Of the arrays of all steps: "C", or "A" for any strides; so that few variants arise."""
    kinds: tuple[Any, ...]
    """Of each argument, or of each in a tuple of them."""


def variant(arguments: Arguments) -> Variant:
    """The variant that takes these arguments."""
    kinds = [tuple(map(kind, x)) if isinstance(x, tuple) else kind(x) for x in arguments]
    apart = lie_apart(next(x for x in arguments.outputs if x is not None))
    return Variant(apart, "C" if not apart and contiguous(arguments) else "A", tuple(kinds))


def lie_apart(x: np.ndarray) -> bool:
    """Whether lanes are few, or further from each other than steps are."""
    return x.ndim == 1 or x.shape[2] < serial.FEW or x.strides[1] <= x.strides[2]


def contiguous(arguments: Arguments) -> bool:
    """Whether all arrays of all steps are."""
    flat = [x for field in arguments for x in (field if isinstance(field, tuple) else (field,))]
    return all(x.flags.c_contiguous for x in flat if isinstance(x, np.ndarray) and x.ndim != 2)


def kind(argument: Any) -> str | None:
    """The type code and the number of dimensions of an array or a NumPy number."""
    return None if argument is None else f"{argument.dtype.char}{argument.ndim}"


def signature(wanted: Variant) -> Any:
    """Numba types of the arguments of a variant."""

    def type_of(kind: Any, writable: bool) -> Any:
        if isinstance(kind, tuple):
            return numba.types.Tuple([type_of(x, writable) for x in kind])
        if kind is None:
            return numba.types.none
        element, ndim = numba.from_dtype(np.dtype(kind[0])), int(kind[1])
        layout = "C" if ndim == 2 else wanted.layout
        return numba.types.Array(element, ndim, layout, readonly=not writable) if ndim else element

    types = [type_of(x, name == "outputs") for name, x in zip(Arguments._fields, wanted.kinds, strict=True)]
    return numba.void(numba.types.Tuple(types), numba.types.UniTuple(numba.types.int64, 4))


@cache
def compiled(recurrence: Recurrence, wanted: Variant) -> Any:
    """The loop with an estimator's equations in it; kept on disk between processes."""
    direction = "backward" if recurrence.backward else "forward"
    name = f"{recurrence.name}_{fingerprint(recurrence, wanted)}"

    def part(function: Any, **names: Any) -> Any:
        return numba.njit(**serial.INNER, forceinline=True)(bind(function, f"{name}_{function.__name__}", **names))

    zeros = as_many_zeros(recurrence.num_lookahead)
    equations = {
        "coefficients": equation(recurrence.coefficients),
        "readout": equation(recurrence.readout),
        "apply_boundary_rule": equation(boundaries.apply_boundary_rule),
    }
    kernel = bind(
        serial.apart if wanted.apart else getattr(serial, f"{direction}_side_by_side"),
        name,
        step=part(getattr(serial, f"step_{direction}"), **equations),
        enter=part(getattr(serial, f"enter_{direction}"), zeros=zeros),
        zeros=zeros,
        DIRECTION=-1 if recurrence.backward else 1,
    )
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit([signature(wanted)], cache=True, **options)(kernel)
    except RuntimeError:  # no directory to keep it in
        return numba.njit([signature(wanted)], **options)(kernel)


@cache
def equation(function: Any) -> Any:
    """A plain function of primitives as Numba's, one for all variants: it is compiled once."""
    primitives = {name: getattr(serial, name) for name in PRIMITIVES}
    return numba.njit(**serial.INNER)(bind(function, f"{function.__name__}_{digest(code_of(function))}", **primitives))


@cache
def as_many_zeros(number: int) -> Any:
    """A function of a zero, which it returns so many times."""
    return numba.njit(**serial.INNER)(serial.unrolled("zero", [f"return ({'zero, ' * number})"]))


def fingerprint(recurrence: Recurrence, wanted: Variant) -> str:
    """Names a compiled variant: changes with its types and with all code that goes into it."""
    codes = [code_of(x) for x in (recurrence.coefficients, recurrence.readout, boundaries.apply_boundary_rule)]
    return digest((SOURCE, codes, recurrence.num_lookahead, recurrence.backward, wanted))


def code_of(function: Any) -> Any:
    """What a function without inner functions does."""
    code = function.__code__
    return code.co_code, code.co_consts, code.co_names


def digest(parts: Any) -> str:
    """A short name for what has a repr."""
    return sha256(repr(parts).encode()).hexdigest()[:16]


SOURCE = Path(serial.__file__).read_bytes()


def normalize(task: Task, exchange: Exchange | None) -> None:
    """Fill the output of a normalisation."""
    from rl_triton_core._internal.backends import cpu_moments

    cpu_moments.run(task, exchange)


BACKEND = Backend(run=run, unavailable=unavailable, normalize=normalize)
