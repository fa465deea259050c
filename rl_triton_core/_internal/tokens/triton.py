"""Log-probabilities of tokens on CUDA and ROCm: one launch each way; forward another one where tokens are few."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rl_triton_core._internal.launch.kernels import KernelCall, explain_float64, launch_kernels
from rl_triton_core._internal.launch.table import next_power_of_2
from rl_triton_core._internal.tokens import kernel as kernels
from rl_triton_core._internal.tokens.problem import TokenProblem, TokenResults, Upstream, view_rows

MAX_THREADS = 256
"""Of a program."""
BYTES = 32
"""Of logits that a thread takes at once in the forward pass."""
PROGRAMS = 1024
"""Several share a token where there are fewer than so many."""


def cut_rows(num_tokens: int, size: int, each: int = 16) -> tuple[dict[str, int], int]:
    """Blocks, shared by so many programs that the device is busy, and warps; a thread has `each` logits of a block."""
    block = max(each, min(MAX_THREADS * each, next_power_of_2(size)))
    splits = max(1, min(-(-size // block), PROGRAMS // num_tokens))
    return {"BLOCK": block, "SPLITS": splits}, max(1, block // (32 * each))


def run(problem: TokenProblem, results: TokenResults) -> None:
    """Fill the results."""
    if problem.dtype == torch.float64:
        raise explain_float64("logits")
    launch_kernels(list_launches(problem, results), problem.logits.device)


def differentiate(problem: TokenProblem, results: TokenResults, upstream: Upstream, gradient: torch.Tensor) -> None:
    """Fill the gradient by the logits, which may be their memory."""
    rows = view_rows(gradient).view(view_rows(problem.logits).shape)
    launch_kernels([make_gradient_launch(problem, results, upstream, rows)], problem.logits.device)
    if rows.data_ptr() != gradient.data_ptr():
        gradient.copy_(rows.view(gradient.shape))


def list_launches(problem: TokenProblem, results: TokenResults) -> Iterator[KernelCall]:
    """The launches that fill the results."""
    num_tokens = problem.tokens.numel()
    each = BYTES // problem.logits.element_size()
    constants, num_warps = cut_rows(num_tokens, problem.logits.shape[-1], each)
    splits, partials = constants["SPLITS"], None
    if splits > 1:
        partials = problem.logits.new_empty((num_tokens, splits, 3), dtype=torch.float32)
    arguments = (*list_arguments(problem), *results, partials)
    width = 16 // problem.logits.element_size() if problem.logits.shape[-1] % 16 == 0 else 1
    own = constants | {"EACH": each, "WIDTH": width}
    yield KernelCall(kernels.evaluate, num_tokens * splits, arguments, own, num_warps, partials, checked=True)
    if splits > 1:
        own = constants | {"BLOCK": next_power_of_2(splits)}
        yield KernelCall(kernels.merge, num_tokens, arguments, own, 1, partials, checked=True)


def make_gradient_launch(
    problem: TokenProblem, results: TokenResults, upstream: Upstream, rows: torch.Tensor
) -> KernelCall:
    """The launch that fills the gradient, given as [rows, columns, V]."""
    num_tokens = problem.tokens.numel()
    constants, num_warps = cut_rows(num_tokens, problem.logits.shape[-1])
    given = [None if x is None else x.contiguous() for x in upstream]
    arguments = (*list_arguments(problem), *results[1:], *given, rows, *rows.stride()[:2])
    programs = num_tokens * constants["SPLITS"]
    return KernelCall(kernels.differentiate, programs, arguments, constants, num_warps, checked=True)


def list_arguments(problem: TokenProblem) -> tuple[Any, ...]:
    """The arguments that all kernels begin with."""
    rows, mask = view_rows(problem.logits), problem.mask
    size, tokens = problem.logits.shape[-1], problem.tokens.contiguous()
    mask = None if mask is None else mask.contiguous()
    return rows, *rows.stride()[:2], rows.shape[1], tokens, mask, size, problem.temperature
