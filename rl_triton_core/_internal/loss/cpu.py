"""The losses on the CPU: one compiled pass over spans of elements, which threads share.

Spans are those of the minibatch, and are added in their order: results do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from rl_triton_core._internal.equations.compile import PYTHON, compile_equation
from rl_triton_core._internal.equations.numba import (
    bind_code,
    compile_and_keep,
    compile_inner,
    literals_of,
    numba_language,
)
from rl_triton_core._internal.launch.recording import ByReference, RecordedLaunch, ResolvedLaunch, record_launch
from rl_triton_core._internal.launch.threads import run_chunks
from rl_triton_core._internal.loss import serial as kernels
from rl_triton_core._internal.loss.equations import (
    HEADS,
    STATISTICS,
    Choices,
    Coefficients,
    compile_equations,
    compute_terms,
    multiply_or_zero,
    summarize_terms,
)
from rl_triton_core._internal.loss.problem import LossProblem, Results, Stream, Streams
from rl_triton_core._internal.moments.cpu import merge_moments, scalar_standardizer, view_mask
from rl_triton_core._internal.moments.rule import Rule
from rl_triton_core._internal.moments.serial import compute_moments

SPAN = 1 << 13
"""Elements of a span: enough to pay for handing it to a thread."""
SCALARS = {torch.float32: np.float32, torch.float64: np.float64}
ABSENT = {dtype: {n: np.empty((0,) * n, scalar) for n in (1, 2)} for dtype, scalar in SCALARS.items()}
"""What stands for an array of one dimension, or of two, that is not given."""
NO_FLAGS, NO_OFFSETS = np.empty(0, np.uint8), np.empty(0, np.int64)


def compute_loss(problem: LossProblem) -> Results:
    """Compute a loss and its gradients."""
    gradients = problem.allocate_gradients()
    loss, statistics = (problem.like.new_empty(shape, dtype=problem.dtype) for shape in ((), len(STATISTICS)))
    fill_results(problem, gradients, loss, statistics)
    if can_repeat(problem):
        record_launch(RecordedLaunch(partial(resolve_launch, problem, gradients, loss, statistics)))
    return Results(loss, statistics, [x for x in gradients if x is not None])


def can_repeat(problem: LossProblem) -> bool:
    """Whether arguments like these need no check and no exchange between ranks. Offsets are checked in every call."""
    if problem.streams.cu_seqlens is not None or problem.exchange is not None:
        return False
    return not any(isinstance(x, torch.Tensor) for x in problem.coefficients)


def resolve_launch(problem: LossProblem, *results: Any) -> ResolvedLaunch:
    """A function that computes losses of other tensors and numbers, and the problem's as its arguments."""
    tensors = problem.values, *problem.streams, *problem.inputs, *problem.old_inputs
    forms = [None if x is None else (x.shape, x.stride()) for x in tensors]
    numbers = tuple(problem.coefficients), problem.normalizer, None if problem.rule is None else tuple(problem.rule)
    shell = LossProblem(
        problem.choices, (), Streams(), sizes=problem.sizes, length=problem.length, per_sequence=problem.per_sequence,
        wanted=problem.wanted,
    )  # fmt: skip
    repeat = partial(repeat_loss, shell, forms, len(problem.inputs))
    gradients, *others = results
    return ResolvedLaunch(
        repeat, (pass_by_reference(tensors), numbers, pass_by_reference(gradients), *pass_by_reference(others))
    )


def pass_by_reference(tensors: Sequence[Stream]) -> tuple[ByReference | None, ...]:
    """Tensors that a launch takes as objects."""
    return tuple(None if x is None else ByReference(x) for x in tensors)


def take_form(x: torch.Tensor, form: tuple[Any, Any]) -> torch.Tensor:
    """A tensor without its graph, as a view of a shape and strides."""
    x = x.detach() if x.requires_grad else x
    return x if x.shape == form[0] else x.as_strided(*form)


def repeat_loss(shell: LossProblem, forms: Any, num_inputs: int, tensors: Any, numbers: Any, *results: Any) -> None:
    """Fill the results of a problem like one that was recorded."""
    views = [None if x is None else take_form(x, form) for x, form in zip(tensors, forms, strict=True)]
    first = 1 + len(Streams._fields)
    values, streams, networks = views[0], views[1:first], tuple(x for x in views[first:] if x is not None)
    coefficients, normalizer, rule = numbers
    problem = LossProblem(
        shell.choices,
        networks[:num_inputs],
        Streams(*streams),
        values,
        networks[num_inputs:],
        shell.sizes,
        Coefficients(*coefficients),
        shell.length,
        shell.per_sequence,
        normalizer,
        None if rule is None else Rule(*rule),
        wanted=shell.wanted,
    )
    fill_results(problem, *results)


def fill_results(
    problem: LossProblem, gradients: Sequence[Stream], loss: torch.Tensor, statistics: torch.Tensor
) -> None:
    """Write the loss, the statistics and the gradients that are wanted."""
    size, dtype = problem.like.shape[0], problem.dtype
    staged = [x if x is None or x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x in gradients]
    arguments = marshal_arguments(problem, staged)
    moments = find_moments(problem, arguments)
    divisor = find_divisor(problem, moments[0])
    scaling = 0.0, 1.0
    if problem.rule is not None:
        if problem.exchange is not None:
            moments = merge_moments(problem.exchange(torch.tensor([moments], dtype=torch.float64)).tolist())
        scaling = scalar_standardizer(*moments, *problem.rule)
    share = 1 / divisor if divisor else 0.0
    shared = shared_gradient(problem, gradients)
    spans = [(first, min(first + SPAN, size)) for first in range(0, size, SPAN)]
    totals = np.empty((len(spans), kernels.TOTALS))
    sums_by_y = np.zeros((len(spans), 0 if shared is None else shared.shape[0]))
    evaluate_heads, write_gradients = compile_head(describe_head(problem, arguments))
    evaluate_terms = compile_terms(Choices("none", *problem.choices[1:]), SCALARS[dtype])
    inputs = arguments.network, arguments.old_network, arguments.actions

    def compute_span(span: tuple[int, int]) -> None:
        first, count = span[0], span[1] - span[0]
        tiles = -(-count // kernels.TILE)
        scratch = np.empty((tiles, kernels.ROWS, kernels.TILE), SCALARS[dtype])
        state = np.empty((tiles, len(arguments.network[0]), kernels.STATES, kernels.TILE), SCALARS[dtype])
        evaluate_heads(*inputs, arguments.streams, arguments.sequences, scaling, first, count, scratch, state)
        evaluate_terms(scratch, count, tuple(arguments.coefficients), share, totals[first // SPAN])
        if any(problem.wanted):
            by_y = sums_by_y[first // SPAN]
            write_gradients(*inputs, first, count, scratch, state, arguments.gradients, by_y)

    run_chunks(compute_span, spans)
    if shared is not None:
        shared.copy_(torch.from_numpy(sums_by_y.sum(0)))
    for gradient, stage in zip(gradients, staged, strict=True):
        if gradient is not None and gradient is not shared and stage is not gradient:
            gradient.copy_(stage)  # type: ignore[arg-type]
    first, *others = summarize_totals(problem, totals, divisor)
    loss.numpy()[...] = np.array(first, SCALARS[dtype])
    statistics.numpy()[:] = np.array(others, SCALARS[dtype])


def shared_gradient(problem: LossProblem, gradients: Sequence[Stream]) -> Stream:
    """The gradient by what all elements have in common, if it is wanted."""
    pairs = zip(problem.differentiable, gradients, strict=True)
    return next((gradient for x, gradient in pairs if x.ndim == 1), None)


def find_divisor(problem: LossProblem, weight: float) -> float:
    """What the loss is divided by: the sum of the weights, unless the call says otherwise."""
    if problem.streams.normalizer is not None:
        return float(problem.streams.normalizer)
    return weight if problem.normalizer is None else problem.normalizer


def summarize_totals(problem: LossProblem, totals: np.ndarray, divisor: float) -> Sequence[float]:
    """The loss and the statistics, from sums over all spans."""
    if len(totals) == 1:
        (sums,) = totals.tolist()
    else:
        sums = totals.sum(0).tolist()
        sums[kernels.LEAST] = float(totals[:, kernels.LEAST].min())
        sums[kernels.LARGEST] = float(totals[:, kernels.LARGEST].max())
    coefficients = Coefficients(*map(float, problem.coefficients))
    moments = sums[kernels.MOMENTS : kernels.LEAST]
    count = kernels.WEIGHT_SUM
    result: Sequence[float] = scalar_summary(
        sums[:count], sums[count], moments, sums[kernels.LEAST :], divisor, coefficients, math.nan
    )
    return result


scalar_summary = compile_equation(summarize_terms, PYTHON)

# -- arguments --------------------------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    """What the kernel takes first, as NumPy arrays and numbers. What is absent is an array of size 0."""

    network: tuple[tuple[np.ndarray, ...], np.ndarray]
    """The x of each distribution, and y, with one row if elements share it."""
    old_network: tuple[tuple[np.ndarray, ...], np.ndarray]
    actions: np.ndarray
    streams: tuple[np.ndarray, ...]
    sequences: tuple[Any, ...]
    gradients: tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]
    coefficients: Coefficients


def marshal_arguments(problem: LossProblem, gradients: Sequence[Stream]) -> Arguments:
    """A problem as kernel arguments, without copies where dtypes allow."""
    dtype, streams = problem.dtype, problem.streams
    absent = ABSENT[dtype]

    def as_array(x: Stream, ndim: int = 1) -> np.ndarray:
        if x is None:
            return absent[ndim]
        x = x if x.dtype == dtype else x.to(dtype)
        if x.ndim != ndim:
            x = x.reshape(-1) if ndim == 1 else x.view(1, -1)
        return x.numpy()

    def as_network(tensors: Sequence[torch.Tensor]) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        parts = problem.split_inputs(tensors)
        if not tensors:
            parts = [(torch.zeros(1, 1, dtype=dtype).expand(problem.like.shape[0], 1),)]
        return tuple(as_array(part[0], 2) for part in parts), as_array(parts[0][1] if len(parts[0]) > 1 else None, 2)

    network = as_network(problem.inputs)
    actions = network[0][0]
    if streams.actions is not None:
        actions = streams.actions.long().numpy() if problem.head.indexed else as_array(streams.actions, 2)
    floating = streams.mask is not None and streams.mask.is_floating_point()
    flags = NO_FLAGS if streams.mask is None or floating else view_mask(streams.mask)
    offsets = NO_OFFSETS if streams.cu_seqlens is None else streams.cu_seqlens.long().numpy()
    ordered = streams.old_log_probs, streams.advantages, streams.ref_log_probs, problem.values, streams.returns
    return Arguments(
        network,
        as_network(problem.old_inputs) if problem.old_inputs else network,
        actions,
        (*map(as_array, (*ordered, streams.old_values)), flags, as_array(streams.mask if floating else None)),
        (offsets, as_array(streams.scale), problem.length, problem.per_sequence),
        marshal_gradients(problem, gradients, as_array),
        Coefficients(*map(float, problem.coefficients)),
    )


def marshal_gradients(problem: LossProblem, gradients: Sequence[Stream], as_array: Any) -> Any:
    """Where to write the gradients by x, y and the values."""
    num_inputs = len(problem.inputs)
    by_values = gradients[num_inputs] if problem.values is not None else None
    if problem.head.indexed:
        given = [
            torch.empty(0, x.shape[1]) if g is None else g for x, g in zip(problem.inputs, gradients, strict=False)
        ]
        return (
            tuple(as_array(part[0], 2) for part in problem.split_inputs(given)),
            as_array(None, 2),
            as_array(by_values),
        )
    by_x, by_y = (*gradients[:num_inputs], None, None)[:2]
    return (as_array(by_x, 2),), as_array(None if by_y is None or by_y.ndim == 1 else by_y, 2), as_array(by_values)


def find_moments(problem: LossProblem, arguments: Arguments) -> tuple[float, float, float]:
    """The sum of the weights of the mask, and mean and M2 of the advantages if they are normalised."""
    *_, flags, weights = arguments.streams
    if problem.rule is not None:
        mask, moments = weights if len(weights) else flags, np.empty(3)
        values, masked = arguments.streams[1][None], len(mask) > 0
        compute_moments(values, masked, len(weights) > 0, mask[None], 0, len(values[0]), moments)
        count, mean, m2 = moments.tolist()
        return count, mean, m2
    if len(flags):
        return float(np.count_nonzero(flags)), 0.0, 0.0
    return float(weights.sum(dtype=np.float64) if len(weights) else problem.like.shape[0]), 0.0, 0.0


# -- compilation ------------------------------------------------------------------------------------------------------


class HeadVariant(NamedTuple):
    """What the compiled code of a head depends on."""

    head: str
    has_old: bool
    float64: bool
    parts: int
    contiguous: bool
    """Whether all matrices are."""


def describe_head(problem: LossProblem, arguments: Arguments) -> HeadVariant:
    """The variant that takes these arguments."""
    (xs, y), (old_xs, old_y), (by_xs, by_y, _) = arguments.network, arguments.old_network, arguments.gradients
    matrices = *xs, y, *old_xs, old_y, *by_xs, by_y, arguments.actions
    contiguous = all(x.flags.c_contiguous for x in matrices)
    return HeadVariant(
        problem.choices.head, bool(problem.old_inputs), problem.dtype == torch.float64, len(xs), contiguous
    )


def describe_types(variant: HeadVariant) -> tuple[Any, Any]:
    """Numba's types of the arguments of `evaluate_heads` and `write_gradients`."""
    real = numba.float64 if variant.float64 else numba.float32
    layout = "C" if variant.contiguous else "A"

    def array(dtype: Any, ndim: int, writable: bool = False, layout: str = "C") -> Any:
        return numba.types.Array(dtype, ndim, layout, readonly=not writable)

    def matrices(writable: bool = False) -> Any:
        return numba.types.UniTuple(array(real, 2, writable, layout), variant.parts)

    integers, pairs = numba.int64, numba.types.UniTuple
    network = numba.types.Tuple([matrices(), array(real, 2, False, layout)])
    actions = array(integers if HEADS[variant.head].indexed else real, 2, False, layout)
    streams = numba.types.Tuple([*[array(real, 1)] * 6, array(numba.uint8, 1), array(real, 1)])
    sequences = numba.types.Tuple([array(integers, 1), array(real, 1), integers, numba.boolean])
    gradients = numba.types.Tuple([matrices(True), array(real, 2, True, layout), array(real, 1, True)])
    span = integers, integers, array(real, 3, True), array(real, 4, True)
    inputs = network, network, actions
    scaling = pairs(numba.float64, 2)
    return (
        numba.void(*inputs, streams, sequences, scaling, *span),
        numba.void(*inputs, *span, gradients, array(numba.float64, 1, True)),
    )


@cache
def compile_head(variant: HeadVariant) -> tuple[Any, Any]:
    """`evaluate_heads` and `write_gradients` with a head's equations in them."""
    kind = np.float64 if variant.float64 else np.float32
    names = compile_equations(Choices(variant.head), numba_language(kind, contracts=True), (multiply_or_zero,))
    names |= compile_readers(kind) | {"HAS_OLD": variant.has_old}
    names |= {key: names[name] for key, name in (INDEXED if HEADS[variant.head].indexed else PLAIN).items()}
    for key in ("read_columns", "add_sums", "add_readout", "find_slopes"):
        names[key] = compile_inner(getattr(kernels, key), kind, names, SOURCE)
    first, second = describe_types(variant)
    return (
        compile_kernel(kernels.evaluate_heads, first, kind, names),
        compile_kernel(kernels.write_gradients, second, kind, names),
    )


@cache
def compile_readers(kind: type) -> dict[str, Any]:
    """What every head takes to read and write, by name."""
    names: dict[str, Any] = {}
    for key in READERS:
        names[key] = compile_inner(getattr(kernels, key), kind, names, SOURCE)
    return names


@cache
def compile_terms(choices: Choices, kind: type) -> Any:
    """`evaluate_terms` with the equations that a call chooses in it."""
    language = numba_language(kind, contracts=True)
    names = compile_equations(choices, language, (compute_terms,))
    names["find_extremes"] = compile_inner(kernels.find_extremes, kind, {}, SOURCE)
    real = numba.from_dtype(np.dtype(kind))
    numbers = numba.types.UniTuple(real, len(Coefficients._fields))
    totals = numba.types.Array(numba.float64, 1, "C")
    signature = numba.void(numba.types.Array(real, 3, "C"), numba.int64, numbers, real, totals)
    return compile_kernel(kernels.evaluate_terms, signature, kind, names)


def compile_kernel(function: Any, signature: Any, kind: type, names: dict[str, Any]) -> Any:
    """A function that Python calls, kept on disk between processes."""
    options = {"pipeline_class": literals_of(kind, (float,)), "fastmath": {"reassoc"}}
    return compile_and_keep(bind_code(function, kind, names, SOURCE), signature, **options)


INDEXED = {"read_actions": "read_choices", "action_exists": "is_in_range", "find_peaks": "find_largest"}
PLAIN = {"read_actions": "read_dimension", "action_exists": "is_any", "find_peaks": "use_zero"}
"""What the helpers of a head are, if its actions are indices, and if not."""
READERS = (
    "weight_of",
    "fill_zero",
    "read_stream",
    "read_weights",
    "read_streams",
    "read_column",
    "write_column",
    "write_stream",
    "add_column",
    *INDEXED.values(),
    *PLAIN.values(),
)
"""What has no equation in it, in an order in which each calls only those before."""
SOURCE = Path(str(kernels.__file__)).read_bytes()
