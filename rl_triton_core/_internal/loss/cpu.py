"""The losses on the CPU: one compiled pass over spans of elements, which threads share.

Spans are those of the minibatch, and are added in their order: results do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_byte
from functools import cache
from itertools import chain
from typing import Any

import numba
import numpy as np
import torch

from rl_triton_core._internal.arguments.validation import narrow_flags
from rl_triton_core._internal.equations import numba as numba_code
from rl_triton_core._internal.equations.compile import PYTHON, compile_equation
from rl_triton_core._internal.equations.primitives import multiply_or_zero
from rl_triton_core._internal.launch.launcher import RecordedLaunch, ResolvedLaunch, record_launch
from rl_triton_core._internal.launch.threads import run_chunks
from rl_triton_core._internal.loss import equations, reference
from rl_triton_core._internal.loss import serial as kernels
from rl_triton_core._internal.loss.equations import HEADS, Choices
from rl_triton_core._internal.loss.problem import LossProblem, Results, Stream
from rl_triton_core._internal.moments.cpu import find_standardizer
from rl_triton_core._internal.moments.serial import compute_moments

SPAN = 1 << 13
"""Elements of a span: enough to pay for handing it to a thread."""
NO_MASK = np.empty(0, np.uint8)
scale_gradients = reference.scale_gradients


def compute_loss(problem: LossProblem) -> Results:
    """Compute a loss and its gradients."""
    gradients, dtype = problem.allocate_gradients(), problem.dtype
    staged = [x if x is None or x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x in gradients]
    loss, statistics = (problem.like.new_empty(shape, dtype=dtype) for shape in ((), len(equations.STATISTICS)))
    tensors, given = list_tensors(problem, staged, loss, statistics), problem.streams.normalizer
    coefficients = tuple([float(x) if isinstance(x, torch.Tensor) else x for x in problem.coefficients])
    divisor = problem.normalizer if given is None else float(given)
    numbers = coefficients, divisor, None if problem.rule is None else tuple(problem.rule)
    run = LossPass(problem, tensors)
    run(tuple([0 if x is None else x.data_ptr() for x in tensors]), *numbers)
    if problem.streams.cu_seqlens is None and problem.exchange is None:  # offsets are checked anew for every call
        arguments = tuple([0 if x is None else x for x in tensors]), *numbers
        record_launch(RecordedLaunch(lambda: ResolvedLaunch(run, arguments)))
    for gradient, stage in zip(gradients, staged, strict=True):
        if gradient is not None and stage is not None and stage is not gradient:
            gradient.copy_(stage)
    return Results(loss, statistics, [x for x in gradients if x is not None])


def list_tensors(
    problem: LossProblem, gradients: Sequence[Stream], loss: torch.Tensor, statistics: torch.Tensor
) -> list[Stream]:
    """What a pass reads and writes, by its places in memory; without copies where dtypes allow."""
    streams, mask, num_inputs = problem.streams, problem.streams.mask, len(problem.inputs)
    is_weighted = mask is not None and mask.is_floating_point()

    def take(x: Stream, dtype: torch.dtype = problem.dtype) -> Stream:
        return x if x is None or x.dtype == dtype else x.to(dtype)

    def split(tensors: Sequence[Stream]) -> tuple[Sequence[Stream], Stream]:
        if problem.head.indexed and any(x is not None for x in tensors):
            return [x for (x,) in problem.split_inputs(tensors)], None  # type: ignore[arg-type]
        x, y, *_ = *tensors, None, None
        return [x] * len(problem.sizes), y

    def repeat(y: Stream) -> Stream:
        return y if y is None or y.ndim > 1 else y.expand(problem.like.shape[0], -1)

    (xs, y), (old_xs, old_y) = (split([*map(take, x)]) for x in (problem.inputs, problem.old_inputs))
    by_xs, by_y = split(gradients[:num_inputs])
    is_shared = by_y is not None and by_y.ndim == 1
    ordered = streams.old_log_probs, streams.advantages, streams.ref_log_probs, problem.values, streams.returns
    return [
        *map(take, (*ordered, streams.old_values)),
        None if mask is None or is_weighted else narrow_flags(mask),
        take(mask) if is_weighted else None,
        take(streams.scale),
        take(streams.cu_seqlens, torch.int64),
        take(streams.actions, torch.int64 if problem.head.indexed else problem.dtype),
        repeat(y),
        repeat(old_y),
        None if is_shared else by_y,
        None if problem.values is None else gradients[num_inputs],
        by_y if is_shared else None,
        loss,
        statistics,
        *chain.from_iterable(zip(xs, old_xs, by_xs, strict=True)),
    ]


class LossPass:
    """A function of addresses and numbers that computes losses of tensors like those of a problem."""

    def __init__(self, problem: LossProblem, tensors: Sequence[Stream]) -> None:
        """Keep what a problem has beside addresses and numbers. Its tensors are in the order of their places."""
        self.size, self.kind = problem.like.shape[0], numba_code.SCALARS[problem.dtype]
        self.strides = np.array([0 if x is None or x.ndim == 0 else x.stride(0) for x in tensors])
        self.widths = np.array(problem.sizes)
        offsets = tensors[kernels.OFFSETS]
        self.offsets = None if offsets is None else offsets.numpy()
        self.length, self.per_sequence, self.exchange = problem.length, problem.per_sequence, problem.exchange
        self.is_differentiated = any(problem.wanted)
        self.evaluate, self.write_gradients = compile_head(problem.choices.head, bool(problem.old_inputs), self.kind)
        self.evaluate_terms = compile_terms(Choices("sampled", *problem.choices[1:]), self.kind)

    def __call__(self, addresses: tuple[int, ...], coefficients: Any, divisor: Any, rule: Any) -> None:
        """Write the loss, the statistics and the gradients that are wanted; a divisor of None is the weights' sum."""
        moments = self.find_moments(addresses, rule is not None)
        divisor = moments[0] if divisor is None else divisor
        scaling = (0.0, 1.0) if rule is None else find_standardizer(moments, rule, self.exchange)
        share = 1 / divisor if divisor else 0.0
        spans = [(first, min(SPAN, self.size - first)) for first in range(0, self.size, SPAN)]
        totals = np.empty((len(spans), kernels.TOTALS))
        sums_by_y = np.zeros((len(spans), self.widths[0] if addresses[kernels.SHARED] else 0))
        tensors = np.array(addresses), self.strides, self.widths

        def compute_span(span: tuple[int, int]) -> None:
            index, tiles = span[0] // SPAN, -(-span[1] // kernels.TILE)
            scratch = np.empty((tiles, kernels.ROWS, kernels.TILE), self.kind)
            state = np.empty((tiles, len(self.widths), kernels.STATES, kernels.TILE), self.kind)
            sequences = self.length, self.find_sequence(span[0])
            self.evaluate(*tensors, sequences, self.per_sequence, scaling, *span, scratch, state)
            self.evaluate_terms(scratch, span[1], coefficients, share, totals[index])
            if self.is_differentiated:
                self.write_gradients(*tensors, *span, scratch, state, sums_by_y[index])

        run_chunks(compute_span, spans)
        sums, count = totals.sum(0).tolist(), kernels.WEIGHT_SUM
        weighted = sums[:count], sums[count], sums[kernels.MOMENTS : kernels.LEAST]
        extremes = float(totals[:, kernels.LEAST].min()), float(totals[:, kernels.LARGEST].max())
        first, *others = summarize_terms(*weighted, extremes, divisor, equations.Coefficients(*coefficients), math.nan)
        self.view(addresses[kernels.LOSS], 1)[0] = first
        self.view(addresses[kernels.STATISTICS], len(others))[:] = others
        if addresses[kernels.SHARED]:
            self.view(addresses[kernels.SHARED], self.widths[0])[:] = sums_by_y.sum(0)

    def find_moments(self, addresses: tuple[int, ...], normalized: bool) -> tuple[float, float, float]:
        """The sum of the weights of the mask, and mean and M2 of the advantages if they are normalised."""
        flags, weights = addresses[kernels.FLAGS], addresses[kernels.WEIGHTS]
        mask = self.view(flags, self.size, np.uint8) if flags else self.view(weights, self.size) if weights else NO_MASK
        if normalized:
            values, moments = self.view(addresses[kernels.ADVANTAGE], self.size)[None], np.empty(3)
            compute_moments(values, bool(flags or weights), bool(weights), mask[None], 0, self.size, moments)
            count, mean, m2 = moments.tolist()
            return count, mean, m2
        counts: Any = np.count_nonzero(mask) if flags else mask.sum(dtype=np.float64) if weights else self.size
        return float(counts), 0.0, 0.0

    def find_sequence(self, element: int) -> int:
        """The sequence of an element, 0 where there are none."""
        if self.offsets is not None:
            return int(np.searchsorted(self.offsets, element, side="right")) - 1
        return element // self.length if self.length else 0

    def view(self, address: int, size: int, kind: Any = None) -> Any:
        """Numbers at an address."""
        dtype: Any = np.dtype(kind or self.kind)
        memory: Any = (c_byte * (dtype.itemsize * size)).from_address(address)
        return np.frombuffer(memory, dtype)


summarize_terms = compile_equation(equations.summarize_terms, PYTHON)

# -- compilation ------------------------------------------------------------------------------------------------------


@cache
def compile_head(head: str, has_old: bool, kind: type) -> tuple[Any, Any]:
    """`evaluate_heads` and `write_gradients` with a head's equations in them."""
    language = numba_code.numba_language(kind, contracts=True)
    names = equations.compile_equations(Choices(head), language, (multiply_or_zero,))
    names |= compile_readers(kind) | {"HAS_OLD": has_old}
    names |= {key: names[name] for key, name in (INDEXED if HEADS[head].indexed else PLAIN).items()}
    for key in ("read_columns", "add_sums", "add_readout", "find_slopes"):
        names[key] = numba_code.compile_inner(getattr(kernels, key), kind, names)
    integer, real, pairs = numba.int64, numba.from_dtype(np.dtype(kind)), numba.types.UniTuple

    def array(dtype: Any, ndim: int) -> Any:
        return numba.types.Array(dtype, ndim, "C")

    tensors, scratch = [array(integer, 1)] * 3, (integer, integer, array(real, 3), array(real, 4))
    sequences, scaling = pairs(integer, 2), pairs(numba.float64, 2)
    first = numba.void(*tensors, sequences, numba.boolean, scaling, *scratch)
    second = numba.void(*tensors, *scratch, array(numba.float64, 1))
    return (
        numba_code.compile_kernel(kernels.evaluate_heads, first, kind, names, fastmath={"reassoc"}),
        numba_code.compile_kernel(kernels.write_gradients, second, kind, names, fastmath={"reassoc"}),
    )


@cache
def compile_readers(kind: type) -> dict[str, Any]:
    """What every head takes to read and write, by name."""
    real = numba.from_dtype(np.dtype(kind))
    names: dict[str, Any] = {"load": numba_code.make_load(real), "store": numba_code.make_store(real)}
    names |= {"load_integer": numba_code.make_load(numba.int64), "load_byte": numba_code.make_load(numba.uint8)}
    for key in READERS:
        names[key] = numba_code.compile_inner(getattr(kernels, key), kind, names)
    return names


@cache
def compile_terms(choices: Choices, kind: type) -> Any:
    """`evaluate_terms` with the equations that a call chooses in it."""
    language = numba_code.numba_language(kind, contracts=True)
    names = equations.compile_equations(choices, language, (equations.compute_terms,))
    names["find_extremes"] = numba_code.compile_inner(kernels.find_extremes, kind, {})
    real = numba.from_dtype(np.dtype(kind))
    numbers = numba.types.UniTuple(real, len(equations.Coefficients._fields))
    totals = numba.types.Array(numba.float64, 1, "C")
    signature = numba.void(numba.types.Array(real, 3, "C"), numba.int64, numbers, real, totals)
    return numba_code.compile_kernel(kernels.evaluate_terms, signature, kind, names, fastmath={"reassoc"})


INDEXED = {"read_actions": "read_choices", "action_exists": "is_in_range", "find_peaks": "find_largest"}
PLAIN = {"read_actions": "read_numbers", "action_exists": "is_any", "find_peaks": "use_zero"}
"""What the helpers of a head are, if its actions are indices, and if not."""
READERS = (
    *("fill_zero", "read_numbers", "write_numbers", "read_weights", "read_streams", "add_column"),
    *(*INDEXED.values(), "is_any", "use_zero"),
)
"""What has no equation in it, in an order in which each calls only those before."""
