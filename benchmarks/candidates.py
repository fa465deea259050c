"""Launches that a rollout could have, and how long the device takes for one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rl_triton_core._internal.launch.table import Candidate, Launch, balance_segments, count_busy_warps

MAX_BYTES_PER_THREAD = 320
"""The most bytes of a chunk that a thread is to hold."""
MAX_NARROW_PROGRAMS = 512
"""The most programs of fewer than 32 lanes, which read parts of what memory hands out at once."""
CAPTURED, REPLAYS = 10, 5


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


def launch_candidates(steps: int, lanes: int, bytes_per_step: int, layout: str) -> Iterator[Candidate]:
    """Launches whose tiles are not much larger than the rollout, with as many segments as make sense."""
    for unroll in (4, 8, 16):
        if unroll > max(steps, 4) or unroll * bytes_per_step > MAX_BYTES_PER_THREAD:
            continue
        for launch in (
            env_major_launches(unroll, steps) if layout == "env-major" else time_major_launches(unroll, lanes)
        ):
            if launch.block_lanes <= max(16, 2 * lanes) and launch.steps < 2 * max(steps, unroll):
                for segments in segment_counts(steps, -(-lanes // launch.block_lanes), launch):
                    yield launch, segments


def env_major_launches(unroll: int, steps: int) -> Iterator[Launch]:
    """All of a warp's threads along the steps, as far as there are steps; or those of several warps."""
    chunks = min(32, max(1, -(-steps // unroll)))
    chunks = 1 << (chunks - 1).bit_length()
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
