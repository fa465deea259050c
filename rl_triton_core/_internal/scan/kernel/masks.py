"""Masked steps that are passed over: what a step sees of the last valid one before it, in scan order.

What it sees of its neighbour is a tuple (whether nothing passes from there, *inputs that are read ahead), of numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_triton_core._internal.scan.kernel.operators import apply_transition, combine, shift_chunks, take_last_chunk
from rl_triton_core._internal.scan.kernel.tiles import load_flags, load_numbers


@triton.jit
def carry_last_valid(values, valid, carried, CONFIG: tl.constexpr):
    """The value of the last valid step before each chunk; what was carried into the tile where it has none."""
    if CONFIG.CHUNKS == 1:
        return carried
    else:
        value = tl.zeros_like(values[0])  # [CHUNKS, BLOCK_LANES]
        missing = value + 1.0
        for i in tl.static_range(len(values)):
            value = tl.where(valid[i], values[i], value)
            missing = tl.where(valid[i], 0.0, missing)
        value, missing = tl.associative_scan((value, missing), 0, combine)
        return shift_chunks(apply_transition(value, missing, carried), carried, CONFIG)


@triton.jit
def take_last_neighbor(neighbor):
    """What the next tile's first step sees of its neighbour."""
    last = ()
    for j in tl.static_range(len(neighbor)):
        last = last + (take_last_chunk(neighbor[j]),)
    return last


@triton.jit
def find_nearest_valid(mask, place, t, CONFIG: tl.constexpr):
    """The valid step of each lane that comes last in scan order up to step t, and whether there is one."""
    LOOK: tl.constexpr = 4 * CONFIG.CHUNKS << CONFIG.LOG_UNROLL
    nearest = place.first * 0 + place.lane * 0 - 1
    missing = (place.lane < place.lanes) & (nearest < 0)
    look = tl.arange(0, LOOK)[:, None]  # [LOOK, 1]
    while tl.max(missing.to(tl.int32)) > 0:
        steps = t + look if CONFIG.BACKWARD else t - look  # [LOOK, BLOCK_LANES]
        there = (steps >= place.first) & (steps < place.end)
        valid = load_flags(mask, place, steps, there & (place.lane < place.lanes))
        distance = tl.min(tl.where(valid, look, LOOK), axis=0)[None, :]
        nearest = tl.where(missing & (distance < LOOK), t + distance if CONFIG.BACKWARD else t - distance, nearest)
        t = t + LOOK if CONFIG.BACKWARD else t - LOOK
        missing = missing & (nearest < 0) & ((t < place.end) if CONFIG.BACKWARD else (t >= place.first))
    return nearest, nearest >= 0


@triton.jit
def find_neighbor(carried, streams, place, t, CONFIG: tl.constexpr):
    """What a segment would carry had its program scanned those before it; `carried` if no step up to t is valid."""
    NUM_LOOKAHEAD: tl.constexpr = CONFIG.NUM_LOOKAHEAD
    t, there = find_nearest_valid(streams.mask, place, t, CONFIG)
    done = load_flags(None, place, t, there)
    if not (CONFIG.BACKWARD or CONFIG.STARTS_AT):
        done = load_flags(streams.terminated, place, t, there) | load_flags(streams.truncated, place, t, there)
    found = (tl.where(there, tl.where(done, 1.0, 0.0), carried[0]),)
    for j in tl.static_range(NUM_LOOKAHEAD):
        if (CONFIG.INPUT_MASK >> j) & 1:
            found = found + (load_numbers(streams.inputs[j], place, t, there, CONFIG.DTYPE),)
        else:
            found = found + (carried[j + 1],)
    return found
