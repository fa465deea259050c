"""A search for the quickest launch on the GPU at hand, in place of the table's.

Nothing is searched unless `tune` is called, or RL_TRITON_AUTOTUNE is 1 in the environment: then at the first call of
each kind. What is found counts for calls of that kind in this process.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, ParamSpec

import torch

from rl_triton_core._internal.arguments.validation import read_switch
from rl_triton_core._internal.launch.fast_path import forget_plans
from rl_triton_core._internal.launch.table import Launch, balance_segments, count_busy_warps, next_power_of_2

P = ParamSpec("P")

Candidate = tuple[Launch, int]
"""A launch, and the number of segments."""

MAX_BYTES_PER_THREAD = 320
"""The most bytes of a chunk that a thread is to hold."""
MAX_NARROW_PROGRAMS = 512
"""The most programs of fewer than 32 lanes, which read parts of what memory hands out at once."""
CAPTURED, REPLAYS = 10, 5


class Rollout(NamedTuple):
    """What decides which launches are candidates."""

    steps: int
    lanes: int
    bytes_per_step: int
    """Of every step, how many a thread holds."""
    layout: str
    groups: int
    on_gpu: bool


class Timing(NamedTuple):
    """A launch, over how many segments time is split, and how long the device takes."""

    launch: Launch
    segments: int
    microseconds: float


class Search(threading.local):
    """What this thread has timed since `tune` was called, None where it was not."""

    timings: list[Timing] | None = None


SEARCH = Search()
FOUND_LAUNCHES: dict[Hashable, Candidate] = {}


def tune(function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> list[Timing]:
    """Time every launch that a call on a GPU could have; calls of its kind then have the quickest, in this process.

    A kind is an estimator, a shape, a layout, dtypes and which per-step tensors are given. Takes long where the kernels
    are not on disk: dozens are compiled. Results may change in their last bits.

    Args:
        function: An estimator, such as `compute_gae`, or a function that calls one.
        args: Its arguments.
        kwargs: Its arguments by name.

    Returns:
        The launches that were timed, the quickest first.

    Raises:
        ValueError: The call launches nothing to choose for: its tensors are not on a GPU, it takes `cu_seqlens`, or a
            CUDA graph is being captured.
    """
    forget_plans()
    SEARCH.timings = []
    try:
        function(*args, **kwargs)
        timings = SEARCH.timings
    finally:
        SEARCH.timings = None
    if not timings:
        raise ValueError(
            f"function: got a call of {function!r} that launches nothing to choose for, "
            "expected an estimator's, of tensors on a GPU, without cu_seqlens and outside of CUDA graphs"
        )
    return timings


def select_launch(key: Hashable, default: Candidate, rollout: Rollout, run: Callable[[Candidate], Any]) -> Candidate:
    """The launch that was found for a key, or is found now if that is asked for; else the default.

    Args:
        key: What calls have in common that have the same launch.
        default: The table's launch.
        rollout: The rollout that the candidates follow from.
        run: Makes a launch.
    """
    always = read_switch("RL_TRITON_AUTOTUNE", "0")
    wanted = SEARCH.timings is not None or (always and key not in FOUND_LAUNCHES)
    if wanted and not (rollout.on_gpu and torch.cuda.is_current_stream_capturing()):
        timings = time_candidates(default, rollout, run)
        FOUND_LAUNCHES[key] = timings[0][:2] if timings else default
        if SEARCH.timings is not None:
            SEARCH.timings += timings
    return FOUND_LAUNCHES.get(key, default)


def is_searching() -> bool:
    """Whether a launch was found, or one is asked for: else the default holds for every call."""
    return bool(FOUND_LAUNCHES) or SEARCH.timings is not None or read_switch("RL_TRITON_AUTOTUNE", "0")


def time_candidates(default: Candidate, rollout: Rollout, run: Callable[[Candidate], Any]) -> list[Timing]:
    """Time the default and all other launches that a rollout could have; the quickest first."""
    from triton.runtime.errors import TritonError

    found = []
    for candidate in dict.fromkeys([default, *launch_candidates(*rollout[:-1])]):
        with suppress(RuntimeError, TritonError):  # it needs more than the GPU has
            found.append(Timing(*candidate, device_time(partial(run, candidate))))
    return sorted(found, key=lambda timing: timing.microseconds)


def device_time(call: Callable[[], Any]) -> float:
    """Microseconds on the device, from a graph of several calls."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    call()
    graph = torch.cuda.CUDAGraph()
    times: list[float] = []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CAPTURED):
            call()
    for _ in range(1 + REPLAYS):
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[1:]) / CAPTURED


def launch_candidates(steps: int, lanes: int, bytes_per_step: int, layout: str, groups: int = 1) -> Iterator[Candidate]:
    """Launches whose tiles are not much larger than the rollout, with as many segments as make sense."""
    for unroll in (4, 8, 16):
        if unroll > max(steps, 4) or unroll * bytes_per_step > MAX_BYTES_PER_THREAD:
            continue
        for launch in (
            env_major_launches(unroll, steps) if layout == "env-major" else time_major_launches(unroll, groups * lanes)
        ):
            if launch.block_lanes <= max(16, 2 * lanes) and launch.steps < 2 * max(steps, unroll):
                for segments in segment_counts(steps, groups * -(-lanes // launch.block_lanes), launch):
                    yield launch, segments


def env_major_launches(unroll: int, steps: int) -> Iterator[Launch]:
    """All of a warp's threads along the steps, as far as there are steps; or those of several warps."""
    chunks = min(32, next_power_of_2(-(-steps // unroll)))
    for warps in (1, 4, 8):
        yield Launch(32 * warps // chunks, chunks, unroll, warps)
    for warps in (2, 4, 8):
        yield Launch(1, 32 * warps, unroll, warps)


def time_major_launches(unroll: int, lanes: int) -> Iterator[Launch]:
    """A warp's threads along the lanes, or some of them, and warps along the steps."""
    for block_lanes in (4, 8, 16, 32):
        if block_lanes == 32 or lanes <= MAX_NARROW_PROGRAMS * block_lanes:
            for warps in (1, 2, 4, 8, 16):
                chunks = 32 * warps // block_lanes
                if unroll * chunks > 4:
                    yield Launch(block_lanes, chunks, unroll, warps)


def segment_counts(steps: int, programs: int, launch: Launch) -> list[int]:
    """None, and with few programs what keeps a GPU busy, and twice that."""
    tiles = -(-steps // launch.steps)
    warps, busy = programs * launch.num_warps, count_busy_warps()
    wanted = {1} if steps <= 8192 else set()
    wanted |= {min(tiles, 1024, x * busy // (2 * warps)) for x in (2, 4) if 4 * warps <= busy and tiles >= 8}
    return sorted({balance_segments(tiles, number) for number in wanted if number})
