"""The CPU backend: one serial loop over time, compiled by Numba, no temporaries, environments over threads.

Arithmetic in float32 (float64 for float64 inputs) in the equation's own order of operations, one rounding each, so
that it equals a NumPy or PyTorch loop bit for bit.
"""

from __future__ import annotations

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
from rl_triton_core.kernels import serial
from rl_triton_core.primitives import PRIMITIVES
from rl_triton_core.recurrence import Problem, Recurrence, bind

PARALLEL_FROM = 1 << 17
"""Elements per thread from which another thread pays."""


def unavailable(device: torch.device) -> str | None:
    """It runs on CPU tensors."""
    return None if device.type == "cpu" else f"it runs on CPU tensors only, got {device}"


def run(problem: Problem) -> None:
    """Fill the problem's outputs."""
    results = [stage(out, problem.dtype) for out in problem.outputs]
    arguments = marshal(problem, results)
    kernel = compiled(problem.recurrence, variant(arguments))
    groups, steps, lanes = problem.shape
    spans = split(groups, lanes, max(1, min(torch.get_num_threads(), groups * steps * lanes // PARALLEL_FROM)))
    if len(spans) == 1:
        kernel(tuple(arguments), spans[0])
    else:
        for job in [threads().submit(partial(kernel, tuple(arguments), span)) for span in spans]:
            job.result()
    for out, result in zip(problem.outputs, results, strict=True):
        if out is not None and result is not None and result is not out:
            out.copy_(result)


def stage(out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Where to compute a result: in place if it has the dtype of the arithmetic."""
    return out if out is None or out.dtype == dtype else torch.empty_like(out, dtype=dtype)


def split(groups: int, lanes: int, parts: int) -> list[tuple[int, int, int, int]]:
    """The rows as (first group, end, first lane, end), in parts of nearly equal size."""
    if groups >= parts:
        edges = [groups * i // parts for i in range(parts + 1)]
        return [(low, high, 0, lanes) for low, high in pairwise(edges)]
    edges = [lanes * i // parts for i in range(parts + 1)]
    return [(0, groups, low, high) for low, high in pairwise(edges) if low < high]


@cache
def threads() -> ThreadPoolExecutor:
    """The worker threads, started when a call is first large enough."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="rl_triton_core")


# -- arguments --------------------------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    """What the kernel takes, as NumPy arrays [groups, steps, lanes] and scalars; None is compiled away."""

    inputs: tuple[np.ndarray | None, ...]
    next_values: np.ndarray | None
    bootstrap: np.ndarray | np.number
    terminated: np.ndarray | None
    truncated: np.ndarray | None
    mask: np.ndarray | None
    gamma: np.ndarray | np.number
    decay: np.number
    params: tuple[np.number, ...]
    skip: bool
    initial: np.ndarray | None
    departed: np.ndarray | None
    starts_at: bool
    outputs: tuple[np.ndarray | None, ...]
    zero: np.number
    steps: int


def marshal(problem: Problem, results: list[torch.Tensor | None]) -> Arguments:
    """A problem as kernel arguments, without copies where dtypes allow."""
    real: Any = SCALARS[problem.dtype]

    def stream(x: Any) -> Any:
        return array(problem, x.to(problem.dtype)) if isinstance(x, torch.Tensor) else None if x is None else real(x)

    def flags(x: torch.Tensor | None) -> np.ndarray | None:
        if x is None:
            return None
        return array(problem, x if x.dtype in (torch.bool, torch.uint8) else x != 0).view(np.uint8)

    per_step = isinstance(problem.gamma, torch.Tensor)
    return Arguments(
        inputs=tuple(map(stream, problem.inputs)),
        next_values=stream(problem.next_values),
        bootstrap=stream(problem.bootstrap),
        terminated=flags(problem.terminated),
        truncated=flags(problem.truncated),
        mask=flags(problem.mask),
        gamma=stream(problem.gamma),
        decay=real(problem.lambda_ if per_step else problem.gamma * problem.lambda_),
        params=tuple(map(real, problem.params)),
        skip=problem.skip,
        initial=stream(problem.initial),
        departed=flags(problem.departed),
        starts_at=problem.starts_at,
        outputs=tuple(map(stream, results)),
        zero=real(0),
        steps=problem.shape[1],
    )


SCALARS = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}


def array(problem: Problem, tensor: torch.Tensor) -> np.ndarray:
    """A per-step tensor as a NumPy array [groups, steps, lanes] over the same memory."""
    x = tensor.detach().numpy()
    if problem.like.ndim == 2:
        return (x if problem.time_dim == 0 else x.T)[None]
    x = x if problem.time_dim == 1 else x.swapaxes(0, 1)
    return x if x.ndim == 3 else np.broadcast_to(x[..., None], problem.shape)


# -- compilation ------------------------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """What the compiled code depends on. Arrays are contiguous all, or strided all, so that few variants arise."""

    dtype: np.dtype[Any]
    layout: str
    fields: tuple[Any, ...]
    """Per argument, or tuple of arguments: None, "array" or "number"."""


EXPANDED = ("bootstrap", "initial", "departed")
FLAGS = ("terminated", "truncated", "mask", "departed")


def variant(arguments: Arguments) -> Variant:
    """The variant that takes these arguments."""
    contiguous = all(
        x.flags.c_contiguous
        for name, field in zip(arguments._fields, arguments, strict=True)
        for x in (field if isinstance(field, tuple) else (field,))
        if isinstance(x, np.ndarray) and name not in EXPANDED
    )
    fields = tuple(tuple(map(kind, x)) if isinstance(x, tuple) else kind(x) for x in arguments)
    return Variant(arguments.zero.dtype, "C" if contiguous else "A", fields)


def kind(argument: Any) -> str | None:
    """None, "array" or "number"."""
    return None if argument is None else "array" if isinstance(argument, np.ndarray) else "number"


def signature(wanted: Variant) -> Any:
    """Numba types of the arguments of a variant."""
    real = numba.from_dtype(wanted.dtype)
    names = Arguments._fields

    def types(name: str, kind: Any) -> Any:
        if isinstance(kind, tuple):
            return numba.types.Tuple([types(name, x) for x in kind])
        if kind is None:
            return numba.types.none
        if kind == "number":
            return SCALAR_TYPES.get(name, real)
        layout = "A" if name in EXPANDED else wanted.layout
        return numba.types.Array(numba.types.uint8 if name in FLAGS else real, 3, layout, readonly=name != "outputs")

    fields = (types(name, kind) for name, kind in zip(names, wanted.fields, strict=True))
    return numba.void(numba.types.Tuple(list(fields)), numba.types.UniTuple(numba.types.int64, 4))


SCALAR_TYPES = {"skip": numba.types.boolean, "starts_at": numba.types.boolean, "steps": numba.types.int64}


@cache
def compiled(recurrence: Recurrence, wanted: Variant) -> Any:
    """The loop with an estimator's equations in it; kept on disk between processes."""

    def equation(function: Any) -> Any:
        primitives = {name: getattr(serial, name) for name in PRIMITIVES}
        return numba.njit(bind(function, **primitives))

    rows = "".join(["np.full(BLOCK, zero), "] * recurrence.followed)
    kernel = bind(
        serial.walk_backward if recurrence.backward else serial.walk_forward,
        f"{recurrence.name}_{fingerprint(recurrence, wanted)}",
        coefficients=equation(recurrence.coefficients),
        readout=equation(recurrence.readout),
        transition=equation(boundaries.transition),
        empty_rows=equation(serial.unrolled("zero", [f"return ({rows})"], np=np, BLOCK=serial.BLOCK)),
    )
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit([signature(wanted)], cache=True, **options)(kernel)
    except RuntimeError:  # no directory to keep it in
        return numba.njit([signature(wanted)], **options)(kernel)


def fingerprint(recurrence: Recurrence, wanted: Variant) -> str:
    """Names a compiled variant: changes with its types and with all source that goes into it."""
    files = (serial.__file__, boundaries.__file__, recurrence.coefficients.__code__.co_filename)
    parts = (*(Path(file).read_bytes() for file in files if Path(file).exists()), str(wanted).encode())
    return sha256(b"\0".join(parts)).hexdigest()[:16]
