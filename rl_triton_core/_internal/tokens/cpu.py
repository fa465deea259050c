"""Log-probabilities of tokens on the CPU: compiled passes over spans of rows, which threads share.

Logits of two bytes are converted span by span, so that no second tensor of their size arises.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch

from rl_triton_core._internal.arguments.validation import narrow_flags
from rl_triton_core._internal.equations.compile import compile_equation
from rl_triton_core._internal.equations.numba import (
    SCALARS,
    compile_inner,
    compile_kernel,
    make_load,
    make_store,
    numba_language,
)
from rl_triton_core._internal.launch.threads import run_chunks
from rl_triton_core._internal.tokens import equations
from rl_triton_core._internal.tokens import serial as kernels
from rl_triton_core._internal.tokens.problem import TokenProblem, TokenResults, Upstream, view_rows

SPAN = 1 << 16
"""About so many logits are a span: enough to pay for handing it to a thread."""
NO_FLAGS = np.empty(0, np.uint8)
Span = tuple[int, int, int, int]
"""The index of the outer dimension, from where to where in the inner one, and the first token's place among all."""


def run(problem: TokenProblem, results: TokenResults) -> None:
    """Fill the results."""
    rows, dtype = view_rows(problem.logits), problem.dtype
    evaluate, _ = compile_rows(SCALARS[dtype])
    numbers = torch.empty((4, problem.tokens.numel()), dtype=dtype, device="cpu")
    common = list_common(problem, numbers)

    def evaluate_span(span: Span) -> None:
        x = take_span(rows, span, dtype)
        evaluate(x.data_ptr(), x.stride(0), span[3], len(x), *common)

    run_chunks(evaluate_span, list_spans(rows))
    for out, result in zip(results, numbers, strict=True):
        if out is not None:
            out.copy_(result.view(out.shape))


def differentiate(problem: TokenProblem, results: TokenResults, upstream: Upstream, gradient: torch.Tensor) -> None:
    """Fill the gradient by the logits, which may be their memory."""
    rows, dtype = view_rows(problem.logits), problem.dtype
    out = view_rows(gradient).view(rows.shape)
    _, differentiate_rows = compile_rows(SCALARS[dtype])
    zeros = torch.zeros_like(results.log_probs)
    numbers = torch.stack([zeros if x is None else x.to(dtype) for x in (*results, *upstream)]).view(6, -1)
    common = list_common(problem, numbers)

    def differentiate_span(span: Span) -> None:
        x, own = take_span(rows, span, dtype), out[span[0], span[1] : span[2]]
        target = own if own.dtype == dtype else x
        differentiate_rows(x.data_ptr(), x.stride(0), target.data_ptr(), target.stride(0), span[3], len(x), *common)
        if target is not own:
            own.copy_(target)

    run_chunks(differentiate_span, list_spans(rows))
    if out.data_ptr() != gradient.data_ptr():
        gradient.copy_(out.view(gradient.shape))


def list_common(problem: TokenProblem, numbers: torch.Tensor) -> tuple[Any, ...]:
    """What the spans of a call share."""
    size = problem.logits.shape[-1]
    flags: Any = NO_FLAGS if problem.mask is None else narrow_flags(problem.mask).reshape(-1).numpy().view(np.uint8)
    width = min(kernels.BLOCK, 1 << (size - 1).bit_length())
    tokens = problem.tokens.long().reshape(-1).numpy()
    inverse = SCALARS[problem.dtype](1 / problem.temperature)
    return size, width, tokens, np.ascontiguousarray(flags), inverse, numbers.numpy()


def list_spans(rows: torch.Tensor) -> list[Span]:
    """Spans of rows."""
    outer, inner, size = rows.shape
    step = max(1, SPAN // size)
    return [(i, j, min(j + step, inner), i * inner + j) for i in range(outer) for j in range(0, inner, step)]


def take_span(rows: torch.Tensor, span: Span, dtype: torch.dtype) -> torch.Tensor:
    """A span's logits in the type of the arithmetic, in place if they have that."""
    x = rows[span[0], span[1] : span[2]]
    return x if x.dtype == dtype else x.to(dtype, memory_format=torch.contiguous_format)


@cache
def compile_rows(kind: type) -> tuple[Any, Any]:
    """`evaluate_rows` and `differentiate_rows` for a type of the arithmetic."""
    real, language = numba.from_dtype(np.dtype(kind)), numba_language(kind, contracts=True)
    names: dict[str, Any] = {"load": make_load(real), "store": make_store(real)}
    names["narrow"] = compile_inner(getattr(kernels, f"narrow_to_{kind.__name__}"), kind, names)
    for equation in EQUATIONS:
        names[equation.__name__] = compile_equation(equation, language)
    for inner in (kernels.read_block, kernels.find_largest, kernels.add_block, kernels.find_slopes):
        names[inner.__name__] = compile_inner(inner, kind, names, fastmath={"reassoc"})
    integer, array = numba.int64, numba.types.Array
    common = array(integer, 1, "C"), array(numba.uint8, 1, "C"), real, array(real, 2, "C")
    return tuple(
        compile_kernel(kernel, numba.void(*[integer] * count, *common), kind, names, fastmath={"reassoc"})
        for kernel, count in ((kernels.evaluate_rows, 6), (kernels.differentiate_rows, 8))
    )


EQUATIONS = equations.weigh_logit, equations.shift_sums, equations.read_sums, equations.differentiate_logit
