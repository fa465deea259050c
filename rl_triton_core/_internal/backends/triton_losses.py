"""The losses on CUDA and ROCm: one launch for values and gradients, another to add up what its programs leave.

A launch before them weighs the elements, if there is a mask or if advantages are normalised. A minibatch that one tile
holds takes one launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.backends.triton import device_guard
from rl_triton_core._internal.kernels import losses as kernels
from rl_triton_core._internal.kernels import moments
from rl_triton_core._internal.kernels.launch import next_power_of_2
from rl_triton_core._internal.loss_equations import STATISTICS, Choices
from rl_triton_core._internal.loss_problem import LossProblem, Results, Stream

TILE_NUMBERS, TILE_ELEMENTS = 1024, 256
"""The most of a tile: what a network gives, and elements."""
NUM_WARPS = 4
MAX_PROGRAMS = 512
"""`finish_sums` reads what each of them left at once."""
WEIGH_BLOCK, SCALE_BLOCK = 1024, 1024
EQUATIONS = {
    "SUM_TERMS": "sums",
    "READOUT": "readout",
    "SLOPES": "slopes",
    "SUM_KL": "kl_sums",
    "READ_KL": "kl",
    "KL_SLOPES": "kl_slopes",
    "COMPUTE_TERMS": "compute_terms",
    "MULTIPLY": "multiply_or_zero",
    "INVERT": "invert_or_zero",
    "SUMMARIZE": "summarize_terms",
}


class Call(NamedTuple):
    """A launch to be made."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


class Tiles(NamedTuple):
    """How a minibatch is cut."""

    width: int
    """Numbers of each element, as a power of two."""
    block: int
    """Elements of a tile."""
    number: int

    @property
    def programs(self) -> int:
        """Programs that share the tiles."""
        return min(self.number, MAX_PROGRAMS)


def cut_tiles(problem: LossProblem) -> Tiles:
    """Tiles that hold a number of everything that a network gives for some elements."""
    width = next_power_of_2(max(problem.sizes)) if problem.inputs else 1
    numbers = width * len(problem.split_inputs(problem.inputs)) if problem.inputs else 1
    block = max(16, min(TILE_ELEMENTS, next_power_of_2(TILE_NUMBERS // numbers + 1) // 2))
    return Tiles(width, block, -(-problem.like.shape[0] // block))


def compute_loss(problem: LossProblem) -> Results:
    """Compute a loss and its gradients."""
    if problem.dtype == torch.float64:
        raise TypeError(
            "got dtype float64 among the arguments of a loss on the triton backend, expected float32, bfloat16 or "
            "float16 (the cpu and reference backends take float64)"
        )
    gradients = problem.allocate_gradients()
    loss = problem.like.new_empty((), dtype=torch.float32)
    statistics = problem.like.new_empty(len(STATISTICS), dtype=torch.float32)
    with device_guard(problem.like.device):
        for call in list_launches(problem, gradients, loss, statistics):
            call.kernel[(call.programs,)](*call.arguments, **call.constants, num_warps=NUM_WARPS)
    return Results(loss, statistics, [x for x in gradients if x is not None])


def list_launches(
    problem: LossProblem, gradients: Sequence[Stream], loss: torch.Tensor, statistics: torch.Tensor
) -> Iterator[Call]:
    """The launches, in order."""
    tiles, like, size = cut_tiles(problem), problem.like, problem.like.shape[0]
    divisor: Any = problem.normalizer if problem.streams.normalizer is None else problem.streams.normalizer
    if divisor is None and problem.streams.mask is None:
        divisor = float(size)
    arguments: tuple[Any, ...]
    parts = every = None
    if (divisor is None or problem.rule is not None) and (tiles.number > 1 or problem.exchange is not None):
        programs = min(-(-size // WEIGH_BLOCK), MAX_PROGRAMS)
        every = parts = like.new_empty((programs, 3), dtype=torch.float64)
        arguments = problem.streams.advantages, problem.streams.mask, size, parts
        yield Call(kernels.weigh_elements, programs, arguments, {"BLOCK": WEIGH_BLOCK})
        if problem.exchange is not None:
            own = parts.new_empty((1, 3))
            yield Call(moments.merge, 1, (parts, programs, own), {"PARTS": next_power_of_2(programs)})
            every = problem.exchange(own)
    capacity = 1 if parts is None or every is None else next_power_of_2(max(len(parts), len(every)))
    shared = next((x for given, x in zip(problem.inputs, gradients, strict=False) if given.ndim == 1), None)
    partials = shared_partials = None
    if tiles.number > 1:
        partials = like.new_empty((15, tiles.programs), dtype=torch.float64)
        if shared is not None:
            shared_partials = like.new_empty((len(shared), tiles.programs), dtype=torch.float64)
    numbers = tuple(
        read_elsewhere(x, like.device) for x in (*problem.coefficients, 0.0 if divisor is None else divisor)
    )
    sums = parts, 0 if parts is None else len(parts)
    arguments = (
        *head_arguments(problem),
        *stream_arguments(problem),
        *gradient_arguments(problem, gradients, shared),
        numbers,
        tuple(problem.rule or (0.0, 0.0, 0.0, 0.0)),
        *sums,
        every,
        0 if every is None else len(every),
        size,
        partials,
        shared_partials,
        loss,
        statistics,
    )
    config = kernels.LossConfig(
        **describe_problem(problem, gradients),
        POINTERS=sum(1 << i for i, x in enumerate(numbers) if isinstance(x, torch.Tensor)),
        HAS_DIVISOR=divisor is not None,
        PARTS=capacity,
        ONE_TILE=tiles.number == 1,
        WIDTH=tiles.width,
        BLOCK=tiles.block,
    )
    equations = compile_equations(problem.choices)
    yield Call(kernels.compute_tiles, tiles.programs, arguments, {**equations, "CONFIG": config})
    if tiles.number > 1:
        outputs = loss, statistics
        arguments = partials, shared_partials, tiles.programs, shared, numbers, *sums, *outputs
        common = {name: getattr(config, name) for name in ("POINTERS", "HAS_DIVISOR", "PARTS")}
        common["SUMMARIZE"] = equations["SUMMARIZE"]
        programs = 1 + (0 if shared is None else len(shared))
        yield Call(kernels.finish_sums, programs, arguments, {**common, "PROGRAMS": next_power_of_2(tiles.programs)})


def read_elsewhere(x: float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    """A number as it is; of a tensor on another device, where frameworks keep those of schedules, its number."""
    return float(x) if isinstance(x, torch.Tensor) and x.device != device else x


def head_arguments(problem: LossProblem) -> tuple[Any, ...]:
    """What the network gives, what the old one gave, and the actions."""
    actions = problem.streams.actions
    return (
        *network_arguments(problem, problem.inputs),
        *network_arguments(problem, problem.old_inputs),
        problem.sizes,
        actions,
        0 if actions is None else actions.stride(0),
    )


def network_arguments(problem: LossProblem, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The x of each distribution and the distance between their rows; and the same of y, 0 if they share one."""
    if not tensors:
        return (problem.like,), (0,), None, 0
    parts = problem.split_inputs(tensors)
    y = parts[0][1] if len(parts[0]) > 1 else None
    y_stride = 0 if y is None or y.ndim == 1 else y.stride(0)
    return tuple(x[0] for x in parts), tuple(x[0].stride(0) for x in parts), y, y_stride


def stream_arguments(problem: LossProblem) -> tuple[Any, ...]:
    """What there is one of per element, and the sequences."""
    streams = problem.streams
    offsets = streams.cu_seqlens
    return (
        streams.old_log_probs,
        streams.advantages,
        streams.ref_log_probs,
        problem.values,
        streams.returns,
        streams.old_values,
        streams.mask,
        streams.scale,
        offsets,
        problem.length or None,
        0 if offsets is None else offsets.shape[0] - 1,
    )


def gradient_arguments(problem: LossProblem, gradients: Sequence[Stream], shared: Stream) -> tuple[Any, ...]:
    """Where to write the gradients; in the tuples something stands in for what is not wanted."""
    by_values = gradients[-1] if problem.values is not None else None
    if not problem.inputs:
        return (problem.like,), (0,), None, by_values, None
    pairs = zip(problem.inputs, gradients, strict=False)
    parts = problem.split_inputs([x if gradient is None else gradient for x, gradient in pairs])
    by_y = gradients[1] if len(parts[0]) > 1 and shared is None else None
    return tuple(x[0] for x in parts), tuple(x[0].stride(0) for x in parts), by_y, by_values, shared


def describe_problem(problem: LossProblem, gradients: Sequence[Stream]) -> dict[str, Any]:
    """What a `LossConfig` says of the problem."""
    streams = problem.streams
    xs = gradients[: len(problem.inputs)] if problem.head.indexed else gradients[: min(1, len(problem.inputs))]
    wanted = sum(1 << i for i, x in enumerate(xs) if x is not None)
    if len(xs) == 1 and wanted:
        wanted = (1 << len(problem.sizes)) - 1
    search = 0 if streams.cu_seqlens is None else max(1, (streams.cu_seqlens.shape[0] - 1).bit_length())
    return {
        "INDEXED": problem.head.indexed,
        "HAS_ACTIONS": streams.actions is not None,
        "HAS_INPUTS": bool(problem.inputs),
        "HAS_OLD": bool(problem.old_inputs),
        "WANTED": wanted,
        "SEARCH": search,
        "PER_SEQUENCE": problem.per_sequence,
        "NORMALIZE": problem.rule is not None,
    }


@cache
def compile_equations(choices: Choices) -> dict[str, Any]:
    """The equations of a call as Triton functions, by the kernel's names for them."""
    equations = kernels.compile_equations(choices)
    return {constant: equations.get(name) for constant, name in EQUATIONS.items()}


def scale_gradients(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply by a number in place."""
    sizes = tuple(x.numel() for x in gradients)
    if not sizes or not max(sizes):
        return
    programs = min(-(-max(sizes) // SCALE_BLOCK), 4 * MAX_PROGRAMS)
    with device_guard(factor.device):
        kernels.scale_gradients[(programs,)](tuple(gradients), sizes, factor, BLOCK=SCALE_BLOCK, num_warps=NUM_WARPS)
