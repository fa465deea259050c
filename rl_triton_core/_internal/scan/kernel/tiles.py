"""Tiles of a rollout: where they lie in memory, and how their steps are loaded and stored.

A tile has [CHUNKS, BLOCK_LANES] chunks of consecutive steps. One thread holds all steps of a chunk: in the code, a
tuple of blocks, one for each step, in scan order. Chunks count in scan order too; t counts in memory.

A stream is a tuple (pointer, group stride, step stride, lane stride), (pointer,) if it has the strides that most have,
or None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Place(NamedTuple):
    """Where a tile lies."""

    group: Any
    lane: Any
    """[1, BLOCK_LANES]."""
    start: Any
    """The first step of each chunk in memory, [CHUNKS, 1 or BLOCK_LANES]."""
    first: Any
    """The lane's first step."""
    end: Any
    """The end of the lane's steps."""
    lanes: Any
    strides: Any
    """Those of streams that have none of their own."""


@triton.jit
def locate_lanes(offsets, strides, steps, lanes, CONFIG: tl.constexpr):
    """The program's lanes. They have all steps of the rollout, or with `offsets` those between two of them."""
    INDEX: tl.constexpr = tl.int64 if CONFIG.WIDE else tl.int32
    lane_blocks = tl.cdiv(lanes, CONFIG.BLOCK_LANES)
    group = (tl.program_id(0) // lane_blocks).to(INDEX)
    block = (tl.program_id(0) % lane_blocks).to(INDEX)
    lane = block * CONFIG.BLOCK_LANES + tl.arange(0, CONFIG.BLOCK_LANES)[None, :]  # [1, BLOCK_LANES]
    first = tl.zeros([1, 1], INDEX)
    end = first + steps
    if offsets is not None:
        exists = lane < lanes
        first = tl.load(offsets + lane, mask=exists, other=0).to(INDEX)
        end = tl.load(offsets + lane + 1, mask=exists, other=0).to(INDEX)
        rises = (0 <= first) & (first <= end) & (end <= steps)
        whole = ((lane > 0) | (first == 0)) & ((lane != lanes - 1) | (end == steps))
        tl.device_assert(rises & whole, "cu_seqlens: expected offsets from 0 to the number of steps, rising")
    return Place(group, lane, first, first, end, lanes, strides)


@triton.jit
def count_tiles(lanes_place, offsets, steps, CONFIG: tl.constexpr):
    """How many tiles the longest of a program's lanes has."""
    TILE: tl.constexpr = CONFIG.CHUNKS << CONFIG.LOG_UNROLL
    if offsets is not None:  # one of an empty lane too: it is loaded ahead
        return tl.maximum(tl.cdiv(tl.max(lanes_place.end - lanes_place.first), TILE), 1)
    elif CONFIG.ONE_TILE:
        return 1
    else:
        return tl.cdiv(steps, TILE)


@triton.jit
def locate_tile(lanes_place, tile, tiles, CONFIG: tl.constexpr):
    """The place of the tile of a program's lanes that is scanned as number `tile`."""
    chunk = tl.arange(0, CONFIG.CHUNKS)[:, None]  # [CHUNKS, 1]
    group, lane, _, first, end, lanes, strides = lanes_place
    if CONFIG.BACKWARD:
        chunk = (tiles - 1 - tile) * CONFIG.CHUNKS + (CONFIG.CHUNKS - 1 - chunk)
    else:
        chunk = tile * CONFIG.CHUNKS + chunk
    return Place(group, lane, first + (chunk << CONFIG.LOG_UNROLL), first, end, lanes, strides)


@triton.jit
def locate_step(place, i: tl.constexpr, CONFIG: tl.constexpr):
    """The t of each chunk's step i."""
    LAST: tl.constexpr = (1 << CONFIG.LOG_UNROLL) - 1
    return place.start + (LAST - i if CONFIG.BACKWARD else i)


@triton.jit
def locate_neighbor(place, CONFIG: tl.constexpr):
    """The step before each chunk, in scan order, and whether there is one."""
    if CONFIG.BACKWARD:
        t = place.start + (1 << CONFIG.LOG_UNROLL)
        return t, (t < place.end) & (place.lane < place.lanes)
    else:
        t = place.start - 1
        return t, (t >= place.first) & (t < place.end) & (place.lane < place.lanes)


@triton.jit
def unroll_place(place, CONFIG: tl.constexpr):
    """A tile's place and its t in the order of memory, with a dimension for a chunk's steps: the last or the first."""
    group, lane, start, first, end, lanes, strides = place
    step = tl.arange(0, 1 << CONFIG.LOG_UNROLL)
    if CONFIG.VECTOR:
        t = start[:, :, None] + step[None, None, :]  # [CHUNKS, 1 or BLOCK_LANES, UNROLL]
        return Place(group, lane[:, :, None], t, first, end[:, :, None], lanes, strides), t
    else:
        t = start[None, :, :] + step[:, None, None]
        return Place(group, lane[None, :, :], t, first, end[None, :, :], lanes, strides), t


@triton.jit
def fill_chunks(place, truth: tl.constexpr):
    """One boolean for a tile's chunks."""
    return tl.full([place.start.shape[0], place.lane.shape[1]], truth, tl.int1)


@triton.jit
def is_inside(place, t, CONFIG: tl.constexpr):
    """Whether steps are there; all are where tiles fill the rollout."""
    if CONFIG.EVEN:
        return fill_chunks(place, True)
    else:
        return (t < place.end) & (place.lane < place.lanes)


@triton.jit
def get_strides(stream, place):
    """The group, step and lane strides of a stream."""
    if len(stream) == 1:
        return place.strides
    else:
        return (stream[1], stream[2], stream[3])


@triton.jit
def get_pointers(stream, place, t, ALIGNED: tl.constexpr = 1):
    """Pointers to elements of a stream, whose group and lane strides are multiples of ALIGNED."""
    group, step, lane = get_strides(stream, place)
    group = place.group * (group // ALIGNED) * ALIGNED
    lane = place.lane * (lane // ALIGNED) * ALIGNED
    start = stream[0]
    if start.dtype.element_ty == tl.int1:  # Triton itself converts each pointer, and what is loaded
        start = start.to(tl.pointer_type(tl.int8), bitcast=True)
    return start + (group + t * step + lane)


@triton.jit
def load_numbers(stream, place, t, where, DTYPE: tl.constexpr):
    """Elements of a stream, 0 elsewhere and where there is no stream."""
    if stream is None:
        return tl.where(where, 0, 0).to(DTYPE)
    else:
        return tl.load(get_pointers(stream, place, t), mask=where, other=0).to(DTYPE)


@triton.jit
def load_flags(stream, place, t, where):
    """Flags as booleans; none is set where there is no stream."""
    if stream is None:
        return where & (where == 0)
    else:
        return tl.load(get_pointers(stream, place, t), mask=where, other=0) != 0


@triton.jit
def convert_loaded(loaded, DTYPE: tl.constexpr):
    """Numbers in the arithmetic's type, flags as booleans."""
    return loaded != 0 if DTYPE == tl.int1 else loaded.to(DTYPE)


@triton.jit
def reorder_steps(steps, CONFIG: tl.constexpr):
    """A chunk's steps from memory order to scan order, or the other way."""
    reordered = ()
    for i in tl.static_range(len(steps)):
        reordered = reordered + (steps[len(steps) - 1 - i if CONFIG.BACKWARD else i],)
    return reordered


@triton.jit
def split_steps(tile, CONFIG: tl.constexpr):
    """The elements along the last dimension as blocks of their own; each thread holds them all, and nothing moves."""
    LOG_UNROLL: tl.constexpr = CONFIG.LOG_UNROLL
    parts = (tile,)
    for _ in tl.static_range(LOG_UNROLL - 1):
        even = ()
        odd = ()
        for i in tl.static_range(len(parts)):
            part = parts[i]
            pairs = tl.reshape(part, [part.shape[0], part.shape[1], part.shape[2] // 2, 2])
            first, second = tl.split(pairs)
            even = even + (first,)
            odd = odd + (second,)
        parts = even + odd  # twice as many, each with half the steps
    even = ()
    odd = ()
    for i in tl.static_range(len(parts)):
        first, second = tl.split(parts[i])
        even = even + (first,)
        odd = odd + (second,)
    return even + odd


@triton.jit
def join_steps(parts, CONFIG: tl.constexpr):
    """The inverse of `split_steps`."""
    LOG_UNROLL: tl.constexpr = CONFIG.LOG_UNROLL
    half: tl.constexpr = len(parts) // 2
    tiles = ()
    for i in tl.static_range(half):
        tiles = tiles + (tl.join(parts[i], parts[i + half]),)
    for _ in tl.static_range(LOG_UNROLL - 1):
        joined = ()
        for i in tl.static_range(len(tiles) // 2):
            pairs = tl.join(tiles[i], tiles[i + len(tiles) // 2])
            joined = joined + (tl.reshape(pairs, [pairs.shape[0], pairs.shape[1], pairs.shape[2] * 2]),)
        tiles = joined
    return tiles[0]


@triton.jit
def locate_steps(stream, place, CONFIG: tl.constexpr):
    """Pointers to the steps of a tile, and whether they are inside.

    [CHUNKS, BLOCK_LANES, UNROLL] where steps lie side by side in memory; where lanes do, [UNROLL, CHUNKS, BLOCK_LANES].
    """
    whole, t = unroll_place(place, CONFIG)
    if CONFIG.VECTOR:
        pointers = get_pointers(stream, whole, t, CONFIG.VECTOR)
    else:
        step = tl.cast(get_strides(stream, place)[1], tl.int64)
        at = tl.arange(0, 1 << CONFIG.LOG_UNROLL) * step
        pointers = get_pointers(stream, place, place.start)[None, :, :] + at[:, None, None]
        # Triton spreads threads by what it takes to be contiguous: along lanes, of which each has one, then chunks.
        pointers = tl.multiple_of(tl.max_contiguous(pointers, [1, 2, 4]), [1, 1, 1])
    return pointers, is_inside(whole, t, CONFIG)


@triton.jit
def locate_one(stream, place, i: tl.constexpr, CONFIG: tl.constexpr):
    """Pointers to the chunks' steps of scan order i, [CHUNKS, BLOCK_LANES], and whether they are inside."""
    at = (1 << CONFIG.LOG_UNROLL) - 1 - i if CONFIG.BACKWARD else i
    step = tl.cast(get_strides(stream, place)[1], tl.int64)
    return get_pointers(stream, place, place.start) + at * step, is_inside(place, place.start + at, CONFIG)


@triton.jit
def load_steps(stream, place, DTYPE: tl.constexpr, CONFIG: tl.constexpr):
    """The chunks' steps, 0 where they are not inside; an empty tuple if there is no stream."""
    steps = ()
    if stream is None:
        pass
    elif CONFIG.TOGETHER:
        pointers, inside = locate_steps(stream, place, CONFIG)
        tile = tl.load(pointers) if CONFIG.EVEN else tl.load(pointers, mask=inside, other=0)
        tile = convert_loaded(tile, DTYPE)
        if not CONFIG.VECTOR:
            tile = tl.permute(tile, (1, 2, 0))
        steps = reorder_steps(split_steps(tile, CONFIG), CONFIG)
    else:
        for i in tl.static_range(1 << CONFIG.LOG_UNROLL):
            pointers, inside = locate_one(stream, place, i, CONFIG)
            loaded = tl.load(pointers) if CONFIG.EVEN else tl.load(pointers, mask=inside, other=0)
            steps = steps + (convert_loaded(loaded, DTYPE),)
    return steps


@triton.jit
def store_steps(stream, place, steps, CONFIG: tl.constexpr):
    """The inverse of `load_steps`."""
    if CONFIG.TOGETHER:
        pointers, inside = locate_steps(stream, place, CONFIG)
        tile = join_steps(reorder_steps(steps, CONFIG), CONFIG)
        if not CONFIG.VECTOR:
            tile = tl.permute(tile, (2, 0, 1))
        tl.store(pointers, tile, mask=None if CONFIG.EVEN else inside)
    else:
        for i in tl.static_range(1 << CONFIG.LOG_UNROLL):
            pointers, inside = locate_one(stream, place, i, CONFIG)
            tl.store(pointers, steps[i], mask=None if CONFIG.EVEN else inside)


@triton.jit
def or_zeros(steps, place, DTYPE: tl.constexpr, CONFIG: tl.constexpr):
    """What `load_steps` returned, or zeros if there is no stream."""
    UNROLL: tl.constexpr = 1 << CONFIG.LOG_UNROLL
    if len(steps) == 0:
        for _ in tl.static_range(UNROLL):
            steps = steps + (fill_chunks(place, False).to(DTYPE),)
    return steps
