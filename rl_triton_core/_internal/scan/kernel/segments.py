"""Segments of time, for few long lanes: one launch folds each into a transition, the next scans each after those."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rl_triton_core._internal.scan.kernel.operators import apply_exactly, leave_chunks


class Segment(NamedTuple):
    """The part of its lanes that a program scans."""

    index: Any
    begin: Any
    """The first tile."""
    end: Any
    """The tile after the last."""
    row: Any
    """The number of each lane among those of all groups, of which there are `rows`."""
    rows: Any


@triton.jit
def locate_segment(place, tiles, CONFIG: tl.constexpr):
    """A program's segment: all tiles where time is not split."""
    if CONFIG.SEGMENTS > 1:
        lane_blocks = tl.cdiv(place.lanes, CONFIG.BLOCK_LANES)
        rows = (tl.num_programs(0) // lane_blocks).to(place.lane.dtype) * place.lanes
        index = tl.program_id(1)
        size = tl.cdiv(tiles, tl.num_programs(1))
        begin = index * size
        return Segment(index, begin, tl.minimum(begin + size, tiles), place.group * place.lanes + place.lane, rows)
    else:
        return Segment(0, 0, tiles, 0, 0)


@triton.jit
def store_fold(folds, fold, place, segment, CONFIG: tl.constexpr):
    """Leave a segment's transition in `folds`, [3, SEGMENTS, rows]."""
    at = folds + segment.index * segment.rows + segment.row
    size = CONFIG.SEGMENTS * segment.rows
    exists = place.lane < place.lanes
    tl.store(at, fold[0], mask=exists)
    tl.store(at + size, fold[1], mask=exists)
    tl.store(at + 2 * size, fold[2], mask=exists)


@triton.jit
def load_folds(folds, segment, index, where, CONFIG: tl.constexpr):
    """Transitions of segments; those that change nothing elsewhere."""
    at = folds + index * segment.rows + segment.row
    size = CONFIG.SEGMENTS * segment.rows
    alpha = tl.load(at, mask=where, other=0)
    beta = tl.load(at + size, mask=where, other=1)
    rest = tl.load(at + 2 * size, mask=where, other=0)
    return alpha, beta, rest


@triton.jit
def enter_segment(folds, place, segment, state, CONFIG: tl.constexpr):
    """The state that enters a segment, from the state that enters the first and the folds of those before it."""
    exists = place.lane < place.lanes
    if CONFIG.VECTOR and CONFIG.CHUNKS > 1:
        earlier = tl.arange(0, CONFIG.SEGMENTS)[:, None]  # [SEGMENTS, 1]; its folds are [SEGMENTS, BLOCK_LANES]
        fold = load_folds(folds, segment, earlier, exists & (earlier < segment.index), CONFIG)
        state = leave_chunks(*fold, state, CONFIG.DTYPE)
    else:
        for earlier in tl.range(0, segment.index, loop_unroll_factor=8):
            state = apply_exactly(*load_folds(folds, segment, earlier, exists, CONFIG), state, CONFIG.DTYPE)
    return state
