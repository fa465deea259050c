"""The one table of launch settings."""

from __future__ import annotations

import csv
from functools import cache
from operator import le
from pathlib import Path
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


def read_table() -> dict[str, list[tuple[Limits, Launch]]]:
    """The rows of `launches.csv`, for memory in which steps lie side by side, and for memory in which lanes do."""
    table: dict[str, list[tuple[Limits, Launch]]] = {}
    lines = Path(__file__).with_name("launches.csv").read_text(encoding="utf-8").splitlines()
    for layout, *numbers in csv.reader(lines[1:]):
        row = Limits(*(float(x or "inf") for x in numbers[:3])), Launch(*map(int, numbers[3:]))
        table.setdefault(layout, []).append(row)
    return table


TABLE = read_table()
"""The first row that fits is taken."""
MAX_SEGMENTS = 512
WARPS_PER_MULTIPROCESSOR = 16
"""What keeps one busy. Where a launch has an eighth of it or less, time is split into segments until it has."""
MULTIPROCESSORS = 132
"""Of an H200, for which launches are chosen where there is no GPU."""


def find_launch(steps: int, lanes: int, bytes_per_step: int, layout: str) -> Launch:
    """The table's row for a rollout."""
    rollout = steps, lanes, bytes_per_step
    return next(launch for limits, launch in TABLE[layout] if all(map(le, rollout, limits)))


def choose_launch(steps: int, groups: int, lanes: int, bytes_per_step: int, layout: str) -> tuple[Launch, int]:
    """The table's launch for groups of lanes, and over how many programs the steps of a row are split."""
    row = find_launch(steps, groups * lanes, bytes_per_step, layout)
    if groups > 1:  # of features, which may be few
        row = narrow_launch(row, steps, lanes)
    return row, count_segments(steps, groups * -(-lanes // row.block_lanes), row)


SHORT, MIDDLE = 16, 128
"""Up to how many steps rows are short, and of middle length."""


class GeneralRows(NamedTuple):
    """The table's rows that general kernels take, for rows by their length and for those that are split."""

    short: Launch
    middle: Launch
    long: Launch
    split: Launch

    def choose(self, steps: int, groups: int, lanes: int) -> tuple[Launch, int]:
        """As `choose_launch`."""
        row = self.short if steps <= SHORT else self.middle if steps <= MIDDLE else self.long
        segments = count_segments(steps, groups * -(-lanes // row.block_lanes), row)
        if segments == 1:
            return row, 1
        return self.split, count_segments(steps, groups * -(-lanes // self.split.block_lanes), self.split)


@cache
def find_general_rows(bytes_per_step: int, layout: str) -> GeneralRows:
    """Those of a layout."""
    many = 1 << 30
    sizes = ((SHORT, many), (MIDDLE, many), (many, many), (many, 1))
    return GeneralRows(*(find_launch(*size, bytes_per_step, layout) for size in sizes))


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
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    wanted = WARPS_PER_MULTIPROCESSOR * count_multiprocessors(index) // (programs * launch.num_warps)
    if wanted < 8 or tiles < 8:
        return 1
    return balance_segments(tiles, min(wanted, MAX_SEGMENTS))


def balance_segments(tiles: int, number: int) -> int:
    """Into how many segments of equally many tiles they go: at most `number`, and none is empty."""
    return -(-tiles // -(-tiles // min(tiles, number)))


@cache
def count_multiprocessors(index: int | None) -> int:
    """The multiprocessors of a GPU, by its index; an H200's for None."""
    return MULTIPROCESSORS if index is None else int(torch.cuda.get_device_properties(index).multi_processor_count)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()
