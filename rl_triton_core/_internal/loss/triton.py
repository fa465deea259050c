"""The losses on CUDA and ROCm: one launch for values and gradients, another to add up what its programs leave.

A launch before them weighs the elements, if there is a mask or if advantages are normalised. A minibatch that one tile
holds takes one launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.equations.triton import TRITON
from rl_triton_core._internal.launch.fast_path import with_fast_path
from rl_triton_core._internal.launch.kernels import KernelCall, explain_float64, launch_kernels
from rl_triton_core._internal.launch.launcher import forbid_plan
from rl_triton_core._internal.launch.table import next_power_of_2
from rl_triton_core._internal.loss import kernel as kernels
from rl_triton_core._internal.loss.equations import PARTS, STATISTICS, Choices, compile_equations, compute_terms
from rl_triton_core._internal.loss.problem import LossProblem, Results, Stream
from rl_triton_core._internal.moments import kernel as moments

NUM_WARPS = 4
TILE_ELEMENTS, TILE_NUMBERS, FEW_NUMBERS = 128, 4096, 2
"""Elements of a tile, twice as many if there are few network outputs for each; and the most of its numbers."""
MAX_CHUNKS, SHARED_CHUNK = 10, 32
"""The most of an element's numbers, and the numbers of one whose gradients are sums over the elements."""
MAX_PROGRAMS = 512
"""`finish_sums` reads what each of them left at once."""
WEIGH_BLOCK, SCALE_BLOCK = 1024, 1024


class Tiles(NamedTuple):
    """How a minibatch is cut."""

    chunk: int
    """Numbers of an element that are read at once."""
    block: int
    """Elements of a tile."""
    number: int
    programs: int
    """That share the tiles."""
    num_warps: int


def cut_tiles(problem: LossProblem) -> Tiles:
    """Tiles that hold all network outputs for some elements, where possible an element per thread.

    A chunk is what a thread reads at once, or more where that is too little of an element. Twice the warps make one
    tile of a minibatch that has two.
    """
    size, widest = problem.like.shape[0], max(problem.sizes)
    numbers = sum(problem.sizes) * (2 if problem.old_inputs else 1)
    chunk = max(math.gcd(widest, 4), next_power_of_2(-(-widest // MAX_CHUNKS)))
    if any(x.ndim == 1 for x in problem.inputs):
        chunk = min(SHARED_CHUNK, next_power_of_2(widest))
    few = 2 if numbers <= FEW_NUMBERS else 1
    block = max(1, min(few * TILE_ELEMENTS, TILE_NUMBERS // next_power_of_2(numbers)))
    double = 2 if block < size <= 2 * block else 1
    number = -(-size // (double * block))
    return Tiles(chunk, double * block, number, min(number, MAX_PROGRAMS), double * NUM_WARPS)


def compute_loss(problem: LossProblem) -> Results:
    """Compute a loss and its gradients."""
    if problem.dtype == torch.float64:
        raise explain_float64("arguments of the loss")
    gradients = problem.allocate_gradients()
    loss = problem.like.new_empty((), dtype=torch.float32)
    statistics = problem.like.new_empty(len(STATISTICS), dtype=torch.float32)
    launch_kernels(list_launches(problem, gradients, loss, statistics), problem.like.device)
    return Results(loss, statistics, [x for x in gradients if x is not None])


def list_launches(
    problem: LossProblem, gradients: Sequence[Stream], loss: torch.Tensor, statistics: torch.Tensor
) -> Iterator[KernelCall]:
    """The launches, in order."""
    tiles, like, size, streams = cut_tiles(problem), problem.like, problem.like.shape[0], problem.streams
    divisor: Any = problem.normalizer if streams.normalizer is None else streams.normalizer
    if divisor is None and streams.mask is None:
        divisor = float(size)
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    own_moments = all_ranks_moments = None
    if (divisor is None or problem.rule is not None) and (tiles.number > 1 or problem.exchange is not None):
        blocks = -(-size // WEIGH_BLOCK)
        programs = min(blocks, MAX_PROGRAMS)
        all_ranks_moments = own_moments = like.new_empty((programs, 3), dtype=torch.float64)
        arguments = streams.advantages, 0, 1, streams.mask, 0, 1, 1, size, blocks, own_moments
        constants = {"BLOCK_ROWS": 1, "BLOCK_COLUMNS": WEIGH_BLOCK, "WEIGHTED": True}
        yield KernelCall(moments.moments, programs, arguments, constants, NUM_WARPS, own_moments)
        if problem.exchange is not None:
            whole, capacity = own_moments.new_empty((1, 3)), {"PARTS": next_power_of_2(programs)}
            yield KernelCall(moments.merge, 1, (own_moments, programs, whole), capacity, NUM_WARPS)
            all_ranks_moments = problem.exchange(whole)
    num_own, num_ranks = (0 if x is None else len(x) for x in (own_moments, all_ranks_moments))
    shared = next((x for given, x in zip(problem.inputs, gradients, strict=False) if given.ndim == 1), None)
    partials = shared_partials = None
    if tiles.number > 1:
        partials = like.new_empty((kernels.NUM_SUMS.value + 2, tiles.programs), dtype=torch.float64)
        if shared is not None:
            shared_partials = like.new_empty((len(shared), tiles.programs), dtype=torch.float64)
    numbers = tuple(
        read_elsewhere(x, like.device) for x in (*problem.coefficients, 0.0 if divisor is None else divisor)
    )
    written = [given if x is None else x for given, x in zip(problem.inputs, gradients, strict=False)]
    networks = [split_network(problem, x) for x in (problem.inputs, problem.old_inputs, written)]
    (xs, y), (old_xs, old_y), (by_xs, _) = networks
    arguments = (
        *(xs, y, old_xs, old_y, streams.actions),
        *(streams.old_log_probs, streams.advantages, streams.ref_log_probs),
        *(problem.values, streams.returns, streams.old_values),
        *(streams.mask, streams.scale, streams.cu_seqlens, problem.length or None),
        0 if streams.cu_seqlens is None else streams.cu_seqlens.shape[0] - 1,
        by_xs,
        gradients[1] if y is not None and shared is None else None,
        gradients[-1] if problem.values is not None else None,
        shared,
        numbers,
        tuple(problem.rule or (0.0, 0.0, 0.0, 0.0)),
        *(own_moments, num_own, all_ranks_moments, num_ranks, size),
        *(partials, shared_partials, loss, statistics),
    )
    config = kernels.LossConfig(
        **describe_problem(problem, gradients, networks),
        POINTERS=sum(1 << i for i, x in enumerate(numbers) if isinstance(x, torch.Tensor)),
        HAS_DIVISOR=divisor is not None,
        PARTS=next_power_of_2(max(num_own, num_ranks, 1)),
        ONE_TILE=tiles.number == 1,
        CHUNK=tiles.chunk,
        BLOCK=tiles.block,
    )
    constants, equations = {"CONFIG": config}, (problem.choices, compile_chosen)
    yield KernelCall(kernels.compute_tiles, tiles.programs, arguments, constants, tiles.num_warps, partials, *equations)
    if tiles.number > 1:
        arguments = partials, shared_partials, tiles.programs, shared, numbers, own_moments, num_own, loss, statistics
        constants = {name: getattr(config, name) for name in ("POINTERS", "HAS_DIVISOR", "PARTS")}
        constants["PROGRAMS"] = next_power_of_2(tiles.programs)
        programs = 1 + (0 if shared is None else len(shared))
        yield KernelCall(kernels.finish_sums, programs, arguments, constants, NUM_WARPS, shared_partials)


def read_elsewhere(x: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    """A number as it is; of a tensor on another device, where frameworks keep those of schedules, its number."""
    if not isinstance(x, torch.Tensor) or x.device == device:
        return x
    forbid_plan()
    return float(x)


Network = tuple[tuple[torch.Tensor, ...], Stream]
"""Network outputs: the xs, by distribution, and y."""


def split_network(problem: LossProblem, tensors: Sequence[torch.Tensor]) -> Network:
    """Network outputs, from their tensors, or something in the place of nothing."""
    if not tensors:
        return (problem.like,), None
    parts = problem.split_inputs(tensors)
    return tuple([x[0] for x in parts]), parts[0][1] if len(parts[0]) > 1 else None


def describe_problem(problem: LossProblem, gradients: Sequence[Stream], networks: Sequence[Network]) -> dict[str, Any]:
    """What a `LossConfig` says of the problem. Its strides tell how many numbers one instruction may read."""
    streams, actions = problem.streams, problem.streams.actions
    ys = [0 if y is None or y.ndim == 1 else y.stride(0) for _, y in networks[:2]]
    xs = gradients[: len(problem.inputs)] if problem.head.indexed else gradients[:1]
    wanted = sum(1 << i for i, x in enumerate(xs) if x is not None)
    if len(xs) == 1 and wanted:
        wanted = (1 << len(problem.sizes)) - 1
    search = 0 if streams.cu_seqlens is None else max(1, (streams.cu_seqlens.shape[0] - 1).bit_length())
    return {
        "INDEXED": problem.head.indexed,
        "HAS_ACTIONS": actions is not None,
        "HAS_OLD": bool(problem.old_inputs),
        "WANTED": wanted,
        "SEARCH": search,
        "PER_SEQUENCE": problem.per_sequence,
        "NORMALIZE": problem.rule is not None,
        "WIDTHS": problem.sizes,
        "STRIDES": tuple([tuple([x.stride(0) for x in xs]) for xs, _ in networks]),
        "Y_STRIDES": (*ys, 0 if actions is None else actions.stride(0)),
    }


@cache
def compile_chosen(choices: Choices) -> dict[str, Any]:
    """The equations of a call as Triton functions, by the kernel's names for them; None for absent ones."""
    equations = dict.fromkeys(PARTS) | compile_equations(choices, TRITON, (compute_terms,))
    return {name.upper(): equation for name, equation in equations.items()}


@with_fast_path
def scale_gradients(gradients: tuple[torch.Tensor, ...], factor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Multiply by a number in place."""
    sizes = tuple(x.numel() for x in gradients)
    if not sizes or not max(sizes):
        return gradients
    programs = min(-(-max(sizes) // SCALE_BLOCK), 4 * MAX_PROGRAMS)
    call = KernelCall(kernels.scale_gradients, programs, (gradients, sizes, factor), {"BLOCK": SCALE_BLOCK}, NUM_WARPS)
    launch_kernels([call], factor.device)
    return gradients
