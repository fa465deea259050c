"""The one table of launch settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from operator import le
from typing import NamedTuple

import torch


class Launch(NamedTuple):
    """Settings of one launch. A tile has `block_lanes` lanes of `chunks`·`unroll` steps."""

    block_lanes: int
    chunks: int
    unroll: int
    num_warps: int

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.chunks * self.unroll


class Limits(NamedTuple):
    """Up to where a row of the table is for a rollout."""

    steps: float = float("inf")
    lanes: float = float("inf")
    bytes_per_step: float = float("inf")
    """Of inputs, flags and results, which a thread holds for all steps of its chunk."""


Table = Mapping[str, Sequence[tuple[Limits, Launch]]]

# For memory in which steps lie side by side, and for memory in which lanes do. The first row that fits is taken.
TABLE: Table = {
    "env-major": (
        (Limits(steps=8), Launch(64, 2, 4, 4)),
        (Limits(steps=16), Launch(64, 2, 8, 4)),
        (Limits(steps=32), Launch(32, 4, 8, 4)),
        (Limits(steps=64), Launch(16, 8, 8, 4)),
        (Limits(steps=128, lanes=1024, bytes_per_step=32), Launch(4, 32, 4, 4)),
        (Limits(steps=128, lanes=8191, bytes_per_step=16), Launch(8, 16, 8, 4)),
        (Limits(steps=128, lanes=8191, bytes_per_step=32), Launch(4, 32, 4, 4)),
        (Limits(steps=128, bytes_per_step=10), Launch(4, 8, 16, 1)),
        (Limits(steps=128, bytes_per_step=18), Launch(8, 16, 8, 4)),
        (Limits(steps=128, bytes_per_step=32), Launch(4, 32, 4, 4)),
        (Limits(steps=128), Launch(1, 32, 4, 1)),
        (Limits(steps=512, lanes=256), Launch(1, 128, 4, 4)),
        (Limits(steps=512, lanes=1024, bytes_per_step=10), Launch(1, 32, 16, 1)),
        (Limits(steps=512, lanes=1024, bytes_per_step=16), Launch(1, 64, 8, 2)),
        (Limits(steps=512, lanes=1024), Launch(1, 128, 4, 4)),
        (Limits(steps=1024, lanes=1024, bytes_per_step=60), Launch(1, 128, 8, 4)),
        (Limits(steps=8192, lanes=1024, bytes_per_step=10), Launch(1, 128, 16, 4)),
        (Limits(steps=8192, lanes=1024, bytes_per_step=20), Launch(1, 128, 8, 4)),
        (Limits(steps=8192, lanes=1024), Launch(1, 128, 4, 4)),
        (Limits(lanes=8, bytes_per_step=10), Launch(1, 128, 16, 4)),
        (Limits(lanes=8, bytes_per_step=20), Launch(1, 128, 8, 4)),
        (Limits(lanes=1024, bytes_per_step=18), Launch(1, 32, 16, 1)),
        (Limits(lanes=1024), Launch(1, 128, 4, 4)),
        (Limits(steps=1024, bytes_per_step=16), Launch(1, 32, 16, 1)),
        (Limits(bytes_per_step=18), Launch(1, 32, 8, 1)),
        (Limits(), Launch(1, 32, 4, 1)),
    ),
    "time-major": (
        (Limits(steps=8), Launch(32, 1, 8, 1)),
        (Limits(steps=32, bytes_per_step=32), Launch(32, 1, 8, 1)),
        (Limits(steps=128, lanes=1024), Launch(8, 16, 8, 4)),
        (Limits(steps=512, lanes=1024, bytes_per_step=32), Launch(8, 32, 16, 8)),
        (Limits(steps=512, lanes=1024, bytes_per_step=60), Launch(8, 64, 8, 16)),
        (Limits(steps=1024, lanes=256, bytes_per_step=20), Launch(4, 64, 16, 8)),
        (Limits(lanes=1024, bytes_per_step=10), Launch(32, 4, 16, 4)),
        (Limits(steps=2048, lanes=1024, bytes_per_step=32), Launch(32, 4, 8, 4)),
        (Limits(lanes=1024, bytes_per_step=20), Launch(32, 4, 8, 4)),
        (Limits(lanes=1024, bytes_per_step=32), Launch(16, 2, 8, 1)),
        (Limits(lanes=1024), Launch(32, 4, 4, 4)),
        (Limits(steps=1024, lanes=8191, bytes_per_step=20), Launch(16, 8, 16, 4)),
        (Limits(steps=128, lanes=8191, bytes_per_step=32), Launch(16, 16, 8, 8)),
        (Limits(steps=128, lanes=8191, bytes_per_step=60), Launch(32, 16, 8, 16)),
        (Limits(lanes=8191, bytes_per_step=20), Launch(32, 8, 16, 8)),
        (Limits(lanes=8191, bytes_per_step=32), Launch(32, 8, 8, 8)),
        (Limits(lanes=8191), Launch(32, 16, 4, 16)),
        (Limits(steps=128, bytes_per_step=16), Launch(32, 1, 16, 1)),
        (Limits(bytes_per_step=10), Launch(32, 4, 16, 4)),
        (Limits(bytes_per_step=20), Launch(32, 4, 8, 4)),
        (Limits(), Launch(32, 4, 4, 4)),
    ),
}

MAX_SEGMENTS = 512
WARPS_PER_MULTIPROCESSOR = 16
"""What keeps one busy. Where a launch has an eighth of it or less, time is split into segments until it has."""
MULTIPROCESSORS = 132
"""Of an H200, for which launches are chosen where there is no GPU."""


def find_launch(steps: int, lanes: int, bytes_per_step: int, layout: str, table: Table = TABLE) -> Launch:
    """The table's row for a rollout."""
    rollout = steps, lanes, bytes_per_step
    return next(launch for limits, launch in table[layout] if all(map(le, rollout, limits)))


def narrow_launch(launch: Launch, steps: int, lanes: int) -> Launch:
    """A launch for few lanes: its threads lie along more steps, and there are fewer where the row has no more.

    Each thread has a chunk: where several have the same one, Triton 3.6 keeps kilobytes of it in memory.
    """
    block_lanes = min(launch.block_lanes, next_power_of_2(lanes))
    if block_lanes == launch.block_lanes:
        return launch
    chunks = min(32 * launch.num_warps // block_lanes, next_power_of_2(-(-steps // launch.unroll)))
    num_warps = max(1, block_lanes * chunks // 32)
    return Launch(32 * num_warps // chunks, chunks, launch.unroll, num_warps)


def count_segments(steps: int, programs: int, launch: Launch) -> int:
    """Over how many programs the steps of a row are split: 1, or as many as keep the GPU busy."""
    tiles = -(-steps // launch.steps)
    wanted = count_busy_warps() // (programs * launch.num_warps)
    if wanted < 8 or tiles < 8:
        return 1
    return balance_segments(tiles, min(wanted, MAX_SEGMENTS))


def balance_segments(tiles: int, number: int) -> int:
    """Into how many segments of equally many tiles they go: at most `number`, and none is empty."""
    return -(-tiles // -(-tiles // min(tiles, number)))


def count_busy_warps() -> int:
    """How many warps keep the current GPU busy."""
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    return WARPS_PER_MULTIPROCESSOR * count_multiprocessors(index)


@cache
def count_multiprocessors(index: int | None) -> int:
    """The multiprocessors of a GPU, by its index; an H200's for None."""
    return MULTIPROCESSORS if index is None else int(torch.cuda.get_device_properties(index).multi_processor_count)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()
