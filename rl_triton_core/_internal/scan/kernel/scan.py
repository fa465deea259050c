"""The parallel scan over time, for Triton: one kernel for every estimator, layout and length.

A program loads a tile of its lanes, computes the transition of every step, walks over each chunk of steps, scans the
chunks of a lane in parallel, and goes on with the carried state to the next tile. With few lanes, time is split into
segments: the first launch folds each segment into one transition, the second scans each segment from the combined
result of the earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from rl_triton_core._internal.scan.kernel.masks import find_neighbor, take_last_neighbor
from rl_triton_core._internal.scan.kernel.operators import (
    advance_state,
    append_chunks,
    apply_exactly,
    enter_chunks,
    fold_steps,
    leave_chunks,
    take_last_chunk,
)
from rl_triton_core._internal.scan.kernel.steps import (
    Numbers,
    Streams,
    complete_tile,
    compute_transitions,
    enter_tile,
    load_tile,
)
from rl_triton_core._internal.scan.kernel.tiles import (
    count_tiles,
    load_flags,
    load_numbers,
    locate_lanes,
    locate_tile,
    store_steps,
)
from rl_triton_core._internal.scan.recurrence import Step


@dataclass(frozen=True)
class KernelConfig:
    """What is compiled in beside equations. Plain values: where Triton asks for a constant, annotate it as one."""

    BACKWARD: bool
    """Whether the scan runs against time."""
    INPUT_MASK: int
    """A bit for each input that is there; the others stand for nothing."""
    OUTPUT_MASK: int
    """A bit for each output that is wanted."""
    NUM_LOOKAHEAD: int
    """How many of the inputs are read at the next step too."""
    SKIP: bool
    """Whether masked steps are passed over; else they end episodes."""
    STARTS_AT: bool
    """Forward: whether flags say that a step starts an episode; else that it ends one."""
    DTYPE: Any
    """The arithmetic's type."""
    WIDE: bool
    """Whether offsets need 64 bits."""
    VECTOR: int
    """Divides all strides between lanes where steps lie side by side in memory; 0 where lanes do."""
    TOGETHER: bool
    """Whether one load reads a tile's steps; where lanes lie side by side, it is compiled several times as fast."""
    EVEN: bool
    """Whether tiles fill the rollout."""
    ACTIONS: int
    """The number of actions of an expectation, 0 where it is only known at run time."""
    ALIGNED: int
    """Divides all strides between the steps of an expectation."""
    ONE_TILE: bool
    """Whether one tile has all steps."""
    SEGMENTS: int
    """Room for the folds of so many segments; 1 where time is not split."""
    FOLD: bool
    """Whether this launch folds segments, for another one that scans them."""
    EXCLUSIVE: bool
    """Whether one scan finds what is before every chunk, in place of a scan and a shift; where both cross warps."""
    BLOCK_LANES: int
    CHUNKS: int
    LOG_UNROLL: int
    """A tile is [CHUNKS, BLOCK_LANES] chunks of 2^LOG_UNROLL steps."""


# -- segments of time --------------------------------------------------------------------------------------------------


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


# -- the scan ----------------------------------------------------------------------------------------------------------


@triton.jit
def load_value_at_end(bootstrap, bootstrap_number, place, CONFIG: tl.constexpr):
    """The bootstrap value behind each lane's last step."""
    if CONFIG.BACKWARD and bootstrap is not None:
        exists = (place.lane < place.lanes) & (place.first < place.end)
        return load_numbers(bootstrap, place, place.end - 1, exists, CONFIG.DTYPE)
    else:
        return bootstrap_number


@triton.jit
def carry_neighbor(previous_done, streams, place, segment, tiles, CONFIG: tl.constexpr):
    """What the first step of a segment sees of its neighbour where masked steps are passed over."""
    TILE: tl.constexpr = CONFIG.CHUNKS << CONFIG.LOG_UNROLL
    NUM_LOOKAHEAD: tl.constexpr = CONFIG.NUM_LOOKAHEAD
    zero = tl.zeros(place.lane.shape, tl.float32)  # [1, BLOCK_LANES]
    carried = (zero + 1.0 if CONFIG.BACKWARD else tl.where(previous_done, 1.0, 0.0),)
    for _ in tl.static_range(NUM_LOOKAHEAD):
        carried = carried + (zero,)
    if CONFIG.SEGMENTS > 1 and streams.mask is not None and CONFIG.SKIP:
        t = place.first + ((tiles - segment.begin) * TILE if CONFIG.BACKWARD else segment.begin * TILE - 1)
        carried = find_neighbor(carried, streams, place, t, CONFIG)
    return carried


@triton.jit
def scan_steps(steps, alphas, betas, state, READOUT: tl.constexpr, CONFIG: tl.constexpr):
    """The results of all steps, and the state after each chunk."""
    UNROLL: tl.constexpr = 1 << CONFIG.LOG_UNROLL
    if CONFIG.CHUNKS > 1:
        state = enter_chunks(*fold_steps(alphas, betas, CONFIG.DTYPE), state, CONFIG)
    results = ()
    for i in tl.static_range(UNROLL):
        step = Step(*steps[i])  # Triton 3.6 forgets the names of what lies in a tuple
        after = tl.where(step.continues, state, 0)
        state = advance_state(alphas[i], betas[i], state)
        results = results + (READOUT(step, state, after),)
    return results, state


@triton.jit
def store_results(outputs, place, results, valid, CONFIG: tl.constexpr):
    """Write the outputs that are wanted, 0 where masked."""
    UNROLL: tl.constexpr = 1 << CONFIG.LOG_UNROLL
    for k in tl.static_range(len(outputs)):
        if (CONFIG.OUTPUT_MASK >> k) & 1:
            result = ()  # UNROLL times [CHUNKS, BLOCK_LANES]
            for i in tl.static_range(UNROLL):
                result = result + (tl.where(valid[i], results[i][k], 0),)
            store_steps(outputs[k], place, result, CONFIG)


@triton.jit
def scan(
    inputs, next_values, expected, bootstrap, bootstrap_number, terminated, truncated, mask,
    gamma, gamma_number, decay, scalars, initial, previous_done, outputs, offsets, folds, strides, steps, lanes,
    COEFFICIENTS: tl.constexpr, READOUT: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """A[t] = α[t] + β[t]·A[neighbour of t].

    Streams are described in `tiles`. `decay` is γλ, or λ if γ is per step. `scalars` are `Step.params`, a name that
    Triton's own launch needs. With `offsets`, lane i has the steps from offsets[i] to offsets[i + 1]. With segments,
    the launch that folds leaves their transitions in `folds`, for the launch that does not.
    """
    lanes_place = locate_lanes(offsets, strides, steps, lanes, CONFIG)
    tiles = count_tiles(lanes_place, offsets, steps, CONFIG)
    segment = locate_segment(lanes_place, tiles, CONFIG)
    streams = Streams(inputs, next_values, expected, bootstrap, terminated, truncated, mask, gamma)

    state = load_numbers(initial, lanes_place, 0, lanes_place.lane < lanes, CONFIG.DTYPE)  # [1, BLOCK_LANES]
    if CONFIG.SEGMENTS > 1 and not CONFIG.FOLD:
        state = enter_segment(folds, lanes_place, segment, state, CONFIG)
    nothing = tl.zeros(lanes_place.lane.shape, CONFIG.DTYPE)  # [1, BLOCK_LANES]
    fold = nothing, nothing + 1, nothing  # the transition of no step
    was_done = load_flags(previous_done, lanes_place, 0, lanes_place.lane < lanes)
    carried = carry_neighbor(was_done, streams, lanes_place, segment, tiles, CONFIG)
    value_at_end = load_value_at_end(bootstrap, bootstrap_number, lanes_place, CONFIG)
    numbers = Numbers(value_at_end, gamma_number, decay, scalars)

    loaded = load_tile(streams, locate_tile(lanes_place, tl.minimum(segment.begin, tiles - 1), tiles, CONFIG), CONFIG)
    for number in range(segment.begin, segment.end):
        place = locate_tile(lanes_place, number, tiles, CONFIG)  # of [CHUNKS, BLOCK_LANES] chunks, UNROLL steps each
        tile = loaded
        if not CONFIG.ONE_TILE:  # on its way while this tile is computed
            next_place = locate_tile(lanes_place, tl.minimum(number + 1, segment.end - 1), tiles, CONFIG)
            loaded = load_tile(streams, next_place, CONFIG)
        tile = complete_tile(tile, place, streams, CONFIG)
        neighbor, masked = enter_tile(tile, place, carried, was_done, streams, CONFIG)
        seen, alphas, betas, neighbor = compute_transitions(
            tile, place, neighbor, masked, streams, numbers, COEFFICIENTS, CONFIG
        )
        if CONFIG.FOLD:
            fold = append_chunks(*fold, *fold_steps(alphas, betas, CONFIG.DTYPE), CONFIG.DTYPE)
        else:
            results, last = scan_steps(seen, alphas, betas, state, READOUT, CONFIG)  # last: [CHUNKS, BLOCK_LANES]
            if not CONFIG.ONE_TILE:
                state = take_last_chunk(last)
            store_results(outputs, place, results, tile.valid, CONFIG)
        if mask is not None and CONFIG.SKIP and not CONFIG.ONE_TILE:
            carried = take_last_neighbor(neighbor)
    if CONFIG.FOLD:
        store_fold(folds, fold, lanes_place, segment, CONFIG)
