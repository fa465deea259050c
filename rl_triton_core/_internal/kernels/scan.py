"""The parallel scan over time, for Triton: one skeleton for every estimator, layout and length.

A program takes a tile of [CHUNKS, BLOCK_LANES] chunks, each of UNROLL steps in a row that one thread holds in its
registers. It walks over each chunk, scans the chunks of a lane in parallel, and goes on with the carried state to the
next tile of the same lanes. Where lanes are few, time is split into segments: a first launch folds each of them into
one transition, and in a second one every program enters its segment with what the segments before it pass on.

Chunks and the steps of a tuple count in scan order; t counts in memory. Streams are tuples (pointer, group stride, step
stride, lane stride), (pointer,) if they have the strides that most have, or None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rl_triton_core import boundaries
from rl_triton_core._internal.primitives import PRIMITIVES
from rl_triton_core._internal.recurrence import Step, bind


@triton.jit
def select(condition, chosen, otherwise):
    """The primitive of equations."""
    return tl.where(condition, chosen, otherwise)


@triton.jit
def minimum(x, bound):
    """The primitive of equations; NaN stays."""
    return tl.where(x > bound, bound, x)


@triton.jit
def exp(x):
    """The primitive of equations, to one unit in the last place: errors of a faster one add up over the steps.

    exp(x) = 2ⁿ·exp(r), where n·ln 2 is subtracted in two parts and exp(r) is a polynomial (that of Cephes, expf).
    """
    x = tl.where(x > 89.0, 89.0, tl.where(x < -104.0, -104.0, x))
    n = tl.floor(x * 1.44269504 + 0.5)
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, x))
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(r, p, 8.3334519073e-3)
    p = tl.fma(r, p, 4.1665795894e-2)
    p = tl.fma(r, p, 1.6666665459e-1)
    p = tl.fma(r, p, 5.0000001201e-1)
    half = n.to(tl.int32) >> 1
    return (1.0 + tl.fma(r * r, p, r)) * power_of_2(half) * power_of_2(n.to(tl.int32) - half)


@triton.jit
def power_of_2(n):
    """2ⁿ for -127 < n < 128, from its bits."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


def equation(function: Any) -> Any:
    """A plain function of primitives as a Triton function.

    The interpreter looks for `tl` in its module, the compiler for the names in annotations.
    """
    primitives = {name: globals()[name] for name in PRIMITIVES}
    return triton.jit(bind(function, **primitives, tl=tl, Any=tl.constexpr(Any)))


apply_boundary_rule = equation(boundaries.apply_boundary_rule)


@triton.jit
def combine(alpha, beta, alpha_next, beta_next):
    """(α', β')∘(α, β) = (α' + β'·α, β'·β), where a factor of 0 lets nothing through, NaN and overflow included."""
    return alpha_next + passed(beta_next, alpha), passed(beta_next, beta)


@triton.jit
def combine_exactly(alpha, beta, rest, alpha_next, beta_next, rest_next):
    """`combine` with factors β + rest: what rounding takes from a product is kept, and does not add up over steps."""
    product = passed(beta_next, beta)
    error = tl.fma(beta_next, beta, -product) + (beta_next * rest + rest_next * beta)
    through = passed(beta_next, alpha) + tl.where(rest_next == 0, 0, rest_next * alpha)
    return alpha_next + through, product, where_rounded(product, error)


@triton.jit
def where_rounded(product, error):
    """The rounding error of a product; none where it is 0 or overflowed."""
    return tl.where((product == 0) | (tl.abs(product) == float("inf")), 0, error)


@triton.jit
def passed(factor, state):
    """factor·state, where a 0 on either side is 0."""
    return tl.where((factor == 0) | (state == 0), 0, factor * state)


class Place(NamedTuple):
    """Where a tile lies."""

    group: Any
    lane: Any
    """[1, BLOCK_LANES]."""
    start: Any
    """The first step of each chunk in memory, [CHUNKS, 1 or BLOCK_LANES]."""
    end: Any
    """The end of the lane."""
    lanes: Any
    strides: Any
    """Those of streams that have none of their own."""


@triton.jit
def strides_of(stream, place):
    """The group, step and lane strides of a stream."""
    if len(stream) == 1:
        return place.strides
    else:
        return (stream[1], stream[2], stream[3])


@triton.jit
def address(stream, place, t, ALIGNED: tl.constexpr = 1):
    """Pointers to elements of a stream, whose group and lane strides are multiples of ALIGNED."""
    group, step, lane = strides_of(stream, place)
    group = place.group * (group // ALIGNED) * ALIGNED
    lane = place.lane * (lane // ALIGNED) * ALIGNED
    return stream[0] + (group + t * step + lane)


@triton.jit
def load(stream, place, t, where, DTYPE: tl.constexpr):
    """Elements of a stream, 0 elsewhere and where there is no stream."""
    if stream is None:
        return tl.where(where, 0, 0).to(DTYPE)
    else:
        return tl.load(address(stream, place, t), mask=where, other=0).to(DTYPE)


@triton.jit
def flag(stream, place, t, where):
    """Flags as booleans; none is set where there is no stream."""
    if stream is None:
        return where & (where == 0)
    else:
        return tl.load(address(stream, place, t), mask=where, other=0) != 0


@triton.jit
def in_scan_order(steps, BACKWARD: tl.constexpr):
    """A chunk's steps from memory order to scan order, or the other way."""
    scanned = ()
    for i in tl.static_range(len(steps)):
        scanned = scanned + (steps[len(steps) - 1 - i if BACKWARD else i],)
    return scanned


@triton.jit
def unpacked(tile, LOG_UNROLL: tl.constexpr):
    """The elements along the last dimension as tiles of their own; each thread holds them all, and nothing moves."""
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
        parts = even + odd
    even = ()
    odd = ()
    for i in tl.static_range(len(parts)):
        first, second = tl.split(parts[i])
        even = even + (first,)
        odd = odd + (second,)
    return even + odd


@triton.jit
def packed(parts, LOG_UNROLL: tl.constexpr):
    """The inverse of `unpacked`."""
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
def everywhere(place, truth: tl.constexpr):
    """One boolean for a tile's chunks."""
    return tl.full([place.start.shape[0], place.lane.shape[1]], truth, tl.int1)


@triton.jit
def inside(place, t, EVEN: tl.constexpr):
    """Whether steps are there; all are where tiles fit EVENly."""
    if EVEN:
        return everywhere(place, True)
    else:
        return (t < place.end) & (place.lane < place.lanes)


@triton.jit
def step_of(place, i: tl.constexpr, UNROLL: tl.constexpr, BACKWARD: tl.constexpr):
    """The t of each chunk's step i."""
    return place.start + (UNROLL - 1 - i if BACKWARD else i)


@triton.jit
def converted(loaded, DTYPE: tl.constexpr):
    """Numbers in the arithmetic's type, flags as booleans."""
    return loaded != 0 if DTYPE == tl.int1 else loaded.to(DTYPE)


@triton.jit
def unrolled(place, UNROLL: tl.constexpr):
    """A tile's place, and its steps in the order of memory, with a last dimension for those of a chunk."""
    t = place.start[:, :, None] + tl.arange(0, UNROLL)[None, None, :]
    return Place(place.group, place.lane[:, :, None], t, place.end[:, :, None], place.lanes, place.strides), t


@triton.jit
def fetch(
    stream,
    place,
    DTYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    LOG_UNROLL: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """A tuple of the chunks' steps in scan order, 0 where they are not inside; an empty one if there is no stream."""
    UNROLL: tl.constexpr = 1 << LOG_UNROLL
    steps = ()
    if stream is None:
        pass
    elif VECTOR:
        whole, t = unrolled(place, UNROLL)
        pointers = address(stream, whole, t, VECTOR)
        if EVEN:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=inside(whole, t, EVEN), other=0)
        steps = in_scan_order(unpacked(converted(tile, DTYPE), LOG_UNROLL), BACKWARD)
    else:
        pointers = address(stream, place, place.start)
        step = tl.cast(strides_of(stream, place)[1], tl.int64)
        for i in tl.static_range(UNROLL):
            at = UNROLL - 1 - i if BACKWARD else i
            if EVEN:
                loaded = tl.load(pointers + at * step)
            else:
                loaded = tl.load(pointers + at * step, mask=inside(place, place.start + at, EVEN), other=0)
            steps = steps + (converted(loaded, DTYPE),)
    return steps


BLOCK_ACTIONS = tl.constexpr(4)
"""Actions that a thread reads at once."""


@triton.jit
def turned(tile):
    """[CHUNKS, BLOCK_LANES] with its dimensions swapped: the first but the last is that along which threads lie."""
    return tl.trans(tile) if len(tile.shape) == 2 else tile


@triton.jit
def of_actions(stream, place, t, start, actions, EVEN: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements of a block of actions, in a last dimension; 0 for those that there are not, unless it is FULL."""
    across = (place.group * (stream[1] // ALIGNED) + place.lane * (stream[3] // ALIGNED)) * ALIGNED
    at = tl.expand_dims(turned(across + t * (stream[2] // ALIGNED) * ALIGNED), -1)
    action = start + tl.arange(0, BLOCK_ACTIONS)
    for _ in tl.static_range(len(at.shape) - 1):
        action = tl.expand_dims(action, 0)
    pointers = stream[0] + (at + action * stream[4])
    if EVEN and FULL:
        return tl.load(pointers)
    elif EVEN:
        return tl.load(pointers, mask=action < actions, other=0)
    else:
        there = tl.expand_dims(turned(inside(place, t, EVEN)), -1)
        return tl.load(pointers, mask=there if FULL else there & (action < actions), other=0)


@triton.jit
def expectation(
    expected, place, t, DTYPE: tl.constexpr, EVEN: tl.constexpr, ACTIONS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Σ_a probability·value of (probabilities, values, number of actions), which is compiled in as ACTIONS or 0."""
    if len(t.shape) == 3:
        total = tl.zeros([t.shape[0], place.lane.shape[1], t.shape[2]], DTYPE)
    else:
        total = tl.zeros([t.shape[0], place.lane.shape[1]], DTYPE)
    if ACTIONS:  # without a loop, all loads are on their way at once
        for start in tl.static_range(0, ACTIONS, BLOCK_ACTIONS):
            total += of_block(expected, place, t, start, DTYPE, EVEN, start + BLOCK_ACTIONS <= ACTIONS, ALIGNED)
    else:
        for start in range(0, expected[2], BLOCK_ACTIONS):
            total += of_block(expected, place, t, start, DTYPE, EVEN, False, ALIGNED)
    return total


@triton.jit
def of_block(
    expected, place, t, start, DTYPE: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr
):
    """The part of an expectation that a block of actions makes. An action of probability 0 does not count."""
    probs, values, actions = expected
    prob = of_actions(probs, place, t, start, actions, EVEN, FULL, ALIGNED).to(DTYPE)
    value = of_actions(values, place, t, start, actions, EVEN, FULL, ALIGNED).to(DTYPE)
    return turned(tl.sum(tl.where(prob == 0, 0, prob * value), axis=len(t.shape)))


@triton.jit
def fetch_expected(
    expected,
    place,
    DTYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIONS: tl.constexpr,
    ALIGNED: tl.constexpr,
    LOG_UNROLL: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """`fetch` of an expectation over actions."""
    UNROLL: tl.constexpr = 1 << LOG_UNROLL
    steps = ()
    if VECTOR:
        whole, t = unrolled(place, UNROLL)
        tile = expectation(expected, whole, t, DTYPE, EVEN, ACTIONS, ALIGNED)
        steps = in_scan_order(unpacked(tile, LOG_UNROLL), BACKWARD)
    else:
        for i in tl.static_range(UNROLL):
            t = step_of(place, i, UNROLL, BACKWARD)
            steps = steps + (expectation(expected, place, t, DTYPE, EVEN, ACTIONS, ALIGNED),)
    return steps


@triton.jit
def given(steps, place, DTYPE: tl.constexpr, LOG_UNROLL: tl.constexpr):
    """What `fetch` got, or zeros."""
    if len(steps) == 0:
        for _ in tl.static_range(1 << LOG_UNROLL):
            steps = steps + (everywhere(place, False).to(DTYPE),)
    return steps


@triton.jit
def before_chunks(place, first, LOG_UNROLL: tl.constexpr, BACKWARD: tl.constexpr):
    """The step before each chunk, in scan order, and whether there is one."""
    if BACKWARD:
        t = place.start + (1 << LOG_UNROLL)
        return t, (t < place.end) & (place.lane < place.lanes)
    else:
        t = place.start - 1
        return t, (t >= first) & (t < place.end) & (place.lane < place.lanes)


@triton.jit
def read(
    inputs,
    next_values,
    expected,
    bootstrap,
    terminated,
    truncated,
    mask,
    gamma,
    place,
    first,
    BACKWARD: tl.constexpr,
    INPUTS: tl.constexpr,
    GIVEN: tl.constexpr,
    NUM_LOOKAHEAD: tl.constexpr,
    SKIP: tl.constexpr,
    STARTS_AT: tl.constexpr,
    DTYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIONS: tl.constexpr,
    ALIGNED: tl.constexpr,
    LOG_UNROLL: tl.constexpr,
):
    """Everything that a tile needs from memory, except bootstrap values where few of them are read."""
    now = ()
    for j in tl.static_range(INPUTS):
        if (GIVEN >> j) & 1:
            now = now + (fetch(inputs[j], place, DTYPE, VECTOR, EVEN, LOG_UNROLL, BACKWARD),)
        else:
            now = now + (fetch(None, place, DTYPE, VECTOR, EVEN, LOG_UNROLL, BACKWARD),)
    done = fetch(terminated, place, tl.int1, VECTOR, EVEN, LOG_UNROLL, BACKWARD)
    cut = fetch(truncated, place, tl.int1, VECTOR, EVEN, LOG_UNROLL, BACKWARD)
    valid = fetch(mask, place, tl.int1, VECTOR, EVEN, LOG_UNROLL, BACKWARD)
    discounts = fetch(gamma, place, DTYPE, VECTOR, EVEN, LOG_UNROLL, BACKWARD)
    if expected is not None:
        values_next = fetch_expected(expected, place, DTYPE, VECTOR, EVEN, ACTIONS, ALIGNED, LOG_UNROLL, BACKWARD)
    else:
        values_next = fetch(next_values, place, DTYPE, VECTOR, EVEN, LOG_UNROLL, BACKWARD)
    values_at_cut = fetch(bootstrap, place, DTYPE, VECTOR, EVEN, LOG_UNROLL, BACKWARD)
    edge = ()
    if mask is None or not SKIP:
        t, there = before_chunks(place, first, LOG_UNROLL, BACKWARD)
        for j in tl.static_range(NUM_LOOKAHEAD):
            if (GIVEN >> j) & 1:
                edge = edge + (load(inputs[j], place, t, there, DTYPE),)
            else:
                edge = edge + (load(None, place, t, there, DTYPE),)
        if not BACKWARD and not STARTS_AT:
            edge = edge + (flag(terminated, place, t, there) | flag(truncated, place, t, there),)
        if mask is not None:
            edge = edge + (there & (flag(mask, place, t, there) == 0),)
    return now, done, cut, valid, discounts, values_next, values_at_cut, edge


@triton.jit
def tile_place(tile, tiles, row, first, CHUNKS: tl.constexpr, LOG_UNROLL: tl.constexpr, BACKWARD: tl.constexpr):
    """Where the tile of a program's lanes is that is scanned as number `tile`."""
    chunk = tl.arange(0, CHUNKS)[:, None]
    if BACKWARD:
        start = first + (((tiles - 1 - tile) * CHUNKS + (CHUNKS - 1 - chunk)) << LOG_UNROLL)
    else:
        start = first + ((tile * CHUNKS + chunk) << LOG_UNROLL)
    return Place(row.group, row.lane, start, row.end, row.lanes, row.strides)


@triton.jit
def store(
    stream, place, steps, VECTOR: tl.constexpr, EVEN: tl.constexpr, LOG_UNROLL: tl.constexpr, BACKWARD: tl.constexpr
):
    """The inverse of `fetch`."""
    UNROLL: tl.constexpr = 1 << LOG_UNROLL
    if VECTOR:
        whole, t = unrolled(place, UNROLL)
        pointers = address(stream, whole, t, VECTOR)
        tile = packed(in_scan_order(steps, BACKWARD), LOG_UNROLL)
        if EVEN:
            tl.store(pointers, tile)
        else:
            tl.store(pointers, tile, mask=inside(whole, t, EVEN))
    else:
        pointers = address(stream, place, place.start)
        step = tl.cast(strides_of(stream, place)[1], tl.int64)
        for i in tl.static_range(UNROLL):
            at = UNROLL - 1 - i if BACKWARD else i
            if EVEN:
                tl.store(pointers + at * step, steps[i])
            else:
                tl.store(pointers + at * step, steps[i], mask=inside(place, place.start + at, EVEN))


@triton.jit
def at_end(chunks):
    """The element of each lane's last chunk, [1, BLOCK_LANES]."""
    CHUNKS: tl.constexpr = chunks.shape[0]
    if CHUNKS == 1:
        return chunks
    else:
        last = tl.arange(0, CHUNKS)[:, None] == CHUNKS - 1
        return tl.sum(tl.where(last, chunks, 0), axis=0)[None, :]


@triton.jit
def carry_on(alpha, beta, carried):
    """α + β·A for the state A that was carried in."""
    return alpha + passed(beta, carried)


@triton.jit
def follow(before, last, known, before_next, last_next, known_next):
    """The last but one of a run of elements, and the last: by scanning with this, elements move by one."""
    return tl.where(known_next != 0, before_next, last), last_next, known + (1 - known)


@triton.jit
def shifted(chunks, carried, IN_WARP: tl.constexpr):
    """The chunks' elements one chunk later, after the one carried in."""
    CHUNKS: tl.constexpr = chunks.shape[0]
    if CHUNKS == 1:
        return carried
    else:
        chunk = tl.arange(0, CHUNKS)[:, None]
        if IN_WARP:
            index = tl.broadcast_to(tl.maximum(chunk - 1, 0), [CHUNKS, chunks.shape[1]])
            before = tl.gather(chunks, index, 0)
        else:
            known = tl.zeros([CHUNKS, chunks.shape[1]], tl.int32)
            before, _, _ = tl.associative_scan((chunks, chunks, known), 0, follow)
        return tl.where(chunk == 0, carried, before)


@triton.jit
def scanned_chunks(alpha, beta, rest, DTYPE: tl.constexpr):
    """The transitions from the first chunk of each lane to the end of every chunk."""
    if alpha.shape[0] == 1:
        return alpha, beta, rest
    elif DTYPE.is_floating():
        return tl.associative_scan((alpha, beta, rest), 0, combine_exactly)
    else:
        alpha, beta = tl.associative_scan((alpha, beta), 0, combine)
        return alpha, beta, rest


@triton.jit
def applied(alpha, beta, rest, state, DTYPE: tl.constexpr):
    """The state after a transition."""
    if DTYPE.is_floating():
        return carry_on(alpha, beta, state) + tl.where(rest == 0, 0, rest * state)
    else:
        return carry_on(alpha, beta, state)


@triton.jit
def entering(alpha, beta, rest, state, DTYPE: tl.constexpr, IN_WARP: tl.constexpr):
    """The state that enters each chunk, from the chunks' transitions and the state that enters the first."""
    alpha, beta, rest = scanned_chunks(alpha, beta, rest, DTYPE)
    return shifted(applied(alpha, beta, rest, state, DTYPE), state, IN_WARP)


@triton.jit
def leaving(alpha, beta, rest, state, DTYPE: tl.constexpr):
    """The state that leaves the last chunk."""
    alpha, beta, rest = scanned_chunks(alpha, beta, rest, DTYPE)
    return applied(at_end(alpha), at_end(beta), at_end(rest), state, DTYPE)


@triton.jit
def after_segments(
    folds, row, rows, exists, segment, state, SEGMENTS: tl.constexpr, PARALLEL: tl.constexpr, DTYPE: tl.constexpr
):
    """The state that enters a segment, from the folds of those before it, [3, SEGMENTS, rows]."""
    if PARALLEL:
        earlier = tl.arange(0, SEGMENTS)[:, None]
        alpha, beta, rest = load_fold(folds, row, rows, exists & (earlier < segment), earlier, SEGMENTS)
        state = leaving(alpha, beta, rest, state, DTYPE)
    else:
        for earlier in tl.range(0, segment, loop_unroll_factor=8):
            alpha, beta, rest = load_fold(folds, row, rows, exists, earlier, SEGMENTS)
            state = applied(alpha, beta, rest, state, DTYPE)
    return state


@triton.jit
def load_fold(folds, row, rows, where, segment, SEGMENTS: tl.constexpr):
    """Transitions of segments; those that change nothing elsewhere."""
    at = folds + segment * rows + row
    size = SEGMENTS * rows
    alpha = tl.load(at, mask=where, other=0)
    beta = tl.load(at + size, mask=where, other=1)
    rest = tl.load(at + 2 * size, mask=where, other=0)
    return alpha, beta, rest


@triton.jit
def over_chunks(alpha, beta, rest, alphas, betas, rests, DTYPE: tl.constexpr):
    """A transition, and after it those of all chunks."""
    alphas, betas, rests = scanned_chunks(alphas, betas, rests, DTYPE)
    if DTYPE.is_floating():
        return combine_exactly(alpha, beta, rest, at_end(alphas), at_end(betas), at_end(rests))
    else:
        alpha, beta = combine(alpha, beta, at_end(alphas), at_end(betas))
        return alpha, beta, rest


@triton.jit
def last_valid(values, valid, carried, CHUNKS: tl.constexpr, IN_WARP: tl.constexpr):
    """What enters each chunk of the last valid value before it. `values` and `valid` have the chunks' steps."""
    if CHUNKS == 1:
        return carried
    else:
        value = tl.zeros_like(values[0])
        missing = value + 1.0
        for i in tl.static_range(len(values)):
            value = tl.where(valid[i], values[i], value)
            missing = tl.where(valid[i], 0.0, missing)
        value, missing = tl.associative_scan((value, missing), 0, combine)
        return shifted(carry_on(value, missing, carried), carried, IN_WARP)


@triton.jit
def nearest_valid(mask, place, t, first, LOOK: tl.constexpr, BACKWARD: tl.constexpr):
    """The valid step of each lane that comes last in scan order up to step t, and whether there is one."""
    nearest = first * 0 + place.lane * 0 - 1
    missing = (place.lane < place.lanes) & (nearest < 0)
    look = tl.arange(0, LOOK)[:, None]
    while tl.max(missing.to(tl.int32)) > 0:
        steps = t + look if BACKWARD else t - look
        there = (steps >= first) & (steps < place.end)
        valid = flag(mask, place, steps, there & (place.lane < place.lanes))
        distance = tl.min(tl.where(valid, look, LOOK), axis=0)[None, :]
        nearest = tl.where(missing & (distance < LOOK), t + distance if BACKWARD else t - distance, nearest)
        t = t + LOOK if BACKWARD else t - LOOK
        missing = missing & (nearest < 0) & ((t < place.end) if BACKWARD else (t >= first))
    return nearest, nearest >= 0


@triton.jit
def carried_in(
    carried,
    inputs,
    terminated,
    truncated,
    mask,
    place,
    t,
    first,
    GIVEN: tl.constexpr,
    NUM_LOOKAHEAD: tl.constexpr,
    DTYPE: tl.constexpr,
    LOOK: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """What a segment would carry had its program scanned those before it; as much as `carried` if none is valid."""
    t, there = nearest_valid(mask, place, t, first, LOOK, BACKWARD)
    over = flag(terminated, place, t, there) | flag(truncated, place, t, there)
    found = (tl.where(there, tl.where(over, 1.0, 0.0), carried[0]),)
    for j in tl.static_range(NUM_LOOKAHEAD):
        if (GIVEN >> j) & 1:
            found = found + (load(inputs[j], place, t, there, DTYPE),)
        else:
            found = found + (carried[j + 1],)
    return found


@triton.jit
def advanced(alpha, beta, state):
    """One step: α + β·A, where a factor of 0 lets nothing through."""
    return tl.where(beta == 0, alpha, alpha + beta * state)


@triton.jit
def folded(alphas, betas, DTYPE: tl.constexpr):
    """The transition over all steps of each chunk."""
    alpha = alphas[0]
    beta = betas[0]
    rest = tl.zeros_like(beta)
    severed = beta == 0
    for i in tl.static_range(1, len(alphas)):
        alpha = advanced(alphas[i], betas[i], alpha)
        severed = severed | (betas[i] == 0)
        product = betas[i] * beta
        if DTYPE.is_floating():
            rest = tl.fma(betas[i], rest, tl.fma(betas[i], beta, -product))
        beta = product
    beta = tl.where(severed, 0, beta)
    return alpha, beta, where_rounded(beta, rest) if DTYPE.is_floating() else rest


@triton.jit
def scan(
    inputs,
    next_values,
    expected,
    bootstrap,
    bootstrap_number,
    terminated,
    truncated,
    mask,
    gamma,
    gamma_number,
    decay,
    scalars,
    initial,
    previous_done,
    outputs,
    offsets,
    folds,
    strides,
    steps,
    lanes,
    COEFFICIENTS: tl.constexpr,
    READOUT: tl.constexpr,
    BACKWARD: tl.constexpr,
    INPUTS: tl.constexpr,
    GIVEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WANTED: tl.constexpr,
    NUM_LOOKAHEAD: tl.constexpr,
    SKIP: tl.constexpr,
    STARTS_AT: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIONS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ONE_TILE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    LOG_UNROLL: tl.constexpr,
):
    """A[t] = α[t] + β[t]·A[neighbour of t]. `decay` is γλ, or λ if γ is per step.

    GIVEN and WANTED have a bit for each input and output that is there; the others stand for nothing. With `offsets`,
    lane i has the steps from offsets[i] to offsets[i + 1]. With SEGMENTS > 1, the launch that FOLDs leaves each
    segment's transition in `folds`, [3, SEGMENTS, groups·lanes], for the launch that does not.
    """
    UNROLL: tl.constexpr = 1 << LOG_UNROLL
    TILE: tl.constexpr = CHUNKS * UNROLL
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    DENSE: tl.constexpr = (bootstrap is not None) and (truncated is not None) and BACKWARD and not (VECTOR or ONE_TILE)
    IN_WARP: tl.constexpr = VECTOR and CHUNKS <= 32
    IN_SCAN: tl.constexpr = VECTOR and CHUNKS > 1
    lane_blocks = tl.cdiv(lanes, BLOCK_LANES)
    group = (tl.program_id(0) // lane_blocks).to(INDEX)
    lane = (tl.program_id(0) % lane_blocks).to(INDEX) * BLOCK_LANES + tl.arange(0, BLOCK_LANES)[None, :]
    exists = lane < lanes
    first = tl.zeros([1, 1], INDEX)
    end = first + steps
    tiles = 1 if ONE_TILE else tl.cdiv(steps, TILE)
    if offsets is not None:
        first = tl.load(offsets + lane, mask=exists, other=0).to(INDEX)
        end = tl.load(offsets + lane + 1, mask=exists, other=0).to(INDEX)
        rises = (0 <= first) & (first <= end) & (end <= steps)
        whole = ((lane > 0) | (first == 0)) & ((lane != lanes - 1) | (end == steps))
        tl.device_assert(rises & whole, "cu_seqlens: expected offsets from 0 to the number of steps, rising")
        tiles = tl.maximum(tl.cdiv(tl.max(end - first), TILE), 1)  # one of an empty lane too: it is read ahead
    lanes_place = Place(group, lane, first, end, lanes, strides)

    state = load(initial, lanes_place, 0, exists, DTYPE)
    alpha_before = tl.zeros([1, BLOCK_LANES], DTYPE)
    beta_before = alpha_before + 1
    rest_before = alpha_before
    begin = 0
    if SEGMENTS > 1:
        segment = tl.program_id(1)
        of_segment = tl.cdiv(tiles, tl.num_programs(1))
        begin = segment * of_segment
        tiles_end = tl.minimum(begin + of_segment, tiles)
        rows = (tl.num_programs(0) // lane_blocks).to(INDEX) * lanes
        row = group * lanes + lane
        if not FOLD:
            state = after_segments(folds, row, rows, exists, segment, state, SEGMENTS, IN_SCAN, DTYPE)
    else:
        tiles_end = tiles
    # Of the neighbours: whether there is none (backward) or it departed (forward), and the values that are followed.
    zero = tl.zeros([1, BLOCK_LANES], tl.float32)
    left = flag(previous_done, lanes_place, 0, exists)
    carried = (zero + 1.0 if BACKWARD else tl.where(left, 1.0, 0.0),)
    for _ in tl.static_range(NUM_LOOKAHEAD):
        carried = carried + (zero,)
    if SEGMENTS > 1 and mask is not None and SKIP:
        edge_of_segment = first + ((tiles - begin) * TILE if BACKWARD else begin * TILE - 1)
        departing = (None, None) if BACKWARD or STARTS_AT else (terminated, truncated)
        carried = carried_in(
            carried,
            inputs,
            *departing,
            mask,
            lanes_place,
            edge_of_segment,
            first,
            GIVEN,
            NUM_LOOKAHEAD,
            DTYPE,
            4 * TILE,
            BACKWARD,
        )
    value_at_end = bootstrap_number
    if BACKWARD and bootstrap is not None:
        value_at_end = load(bootstrap, lanes_place, end - 1, exists & (first < end), DTYPE)

    streams = (inputs, next_values, expected, bootstrap if DENSE else None, terminated, truncated, mask, gamma)
    place = tile_place(tl.minimum(begin, tiles - 1), tiles, lanes_place, first, CHUNKS, LOG_UNROLL, BACKWARD)
    loaded = read(
        *streams,
        place,
        first,
        BACKWARD,
        INPUTS,
        GIVEN,
        NUM_LOOKAHEAD,
        SKIP,
        STARTS_AT,
        DTYPE,
        VECTOR,
        EVEN,
        ACTIONS,
        ALIGNED,
        LOG_UNROLL,
    )
    for tile in range(begin, tiles_end):
        now, done, cut, valid, discounts, values_next, values_at_cut, edge = loaded
        place = tile_place(tile, tiles, lanes_place, first, CHUNKS, LOG_UNROLL, BACKWARD)
        if not ONE_TILE:  # on its way while this tile is computed
            next_tile = tl.minimum(tile + 1, tiles_end - 1)
            ahead = tile_place(next_tile, tiles, lanes_place, first, CHUNKS, LOG_UNROLL, BACKWARD)
            loaded = read(
                *streams,
                ahead,
                first,
                BACKWARD,
                INPUTS,
                GIVEN,
                NUM_LOOKAHEAD,
                SKIP,
                STARTS_AT,
                DTYPE,
                VECTOR,
                EVEN,
                ACTIONS,
                ALIGNED,
                LOG_UNROLL,
            )
        given_now = ()
        for j in tl.static_range(INPUTS):
            given_now = given_now + (given(now[j], place, DTYPE, LOG_UNROLL),)
        now = given_now
        done = given(done, place, tl.int1, LOG_UNROLL)
        cut = given(cut, place, tl.int1, LOG_UNROLL)
        if mask is None:
            for i in tl.static_range(UNROLL):
                valid = valid + (inside(place, step_of(place, i, UNROLL, BACKWARD), EVEN),)
        departs = ()
        for i in tl.static_range(UNROLL):
            if BACKWARD or STARTS_AT:
                departs = departs + (everywhere(place, False),)
            else:
                departs = departs + (done[i] | cut[i],)

        # of the step before, in scan order: whether its episode is over, and the values that are followed
        before = ()
        severed = everywhere(place, False)
        if mask is not None and SKIP:
            overs = ()
            for i in tl.static_range(UNROLL):
                overs = overs + (tl.where(departs[i], 1.0, 0.0),)
            before = before + (last_valid(overs, valid, carried[0], CHUNKS, IN_WARP),)
            for j in tl.static_range(NUM_LOOKAHEAD):
                before = before + (last_valid(now[j], valid, carried[j + 1], CHUNKS, IN_WARP),)
        else:
            there = before_chunks(place, first, LOG_UNROLL, BACKWARD)[1]
            over = everywhere(place, False)
            if not BACKWARD:
                over = left & (there == 0)
                if not STARTS_AT:
                    over = over | edge[NUM_LOOKAHEAD]
            before = before + (over,)
            for j in tl.static_range(NUM_LOOKAHEAD):
                before = before + (edge[j],)
            if mask is not None:
                severed = edge[len(edge) - 1]

        kept = ()
        alphas = ()
        betas = ()
        for i in tl.static_range(UNROLL):
            t = step_of(place, i, UNROLL, BACKWARD)
            none_or_over = before[0] != 0
            if BACKWARD and not (mask is not None and SKIP):
                none_or_over = t == end - 1 if i == 0 or not EVEN else everywhere(place, False)
            ended = done[i]
            gamma_now = gamma_number
            decay_now = decay
            if gamma is not None:
                gamma_now = discounts[i]
                decay_now = gamma_now * decay
                ended = ended | (gamma_now == 0)
            next_inputs = ()
            if BACKWARD:
                if len(values_next) > 0:
                    value_ahead = values_next[i]
                    value_at_cut = value_ahead
                else:
                    value_ahead = before[1] if NUM_LOOKAHEAD else tl.zeros_like(now[0][i])
                    value_at_cut = value_at_end
                    if DENSE:
                        value_at_cut = values_at_cut[i]
                    elif bootstrap is not None and (truncated is not None or (mask is not None and SKIP)):
                        where = (cut[i] | none_or_over) & inside(place, t, EVEN)
                        value_at_cut = load(bootstrap, place, t, where, DTYPE)
                next_value, continues = apply_boundary_rule(
                    ended, cut[i], none_or_over, severed, value_ahead, value_at_cut
                )
                for j in tl.static_range(NUM_LOOKAHEAD):
                    next_inputs = next_inputs + (tl.where(continues, before[j + 1], 0),)
            else:
                starts = none_or_over | severed
                if STARTS_AT:
                    starts = starts | ended | cut[i]
                continues = starts == 0
                next_value = 0
            own = ()
            for j in tl.static_range(INPUTS):
                own = own + (now[j][i],)
            step = Step(own, next_inputs, next_value, continues, gamma_now, decay_now, scalars)
            alpha, beta = COEFFICIENTS(step)
            kept = kept + ((own, next_inputs, next_value, continues, gamma_now, decay_now),)
            alphas = alphas + (tl.where(valid[i], alpha, 0).to(DTYPE),)
            betas = betas + (tl.where(valid[i], beta, 1).to(DTYPE),)

            after = ()
            if mask is not None and SKIP:
                after = after + (tl.where(valid[i], tl.where(departs[i], 1.0, 0.0), before[0]),)
                for j in tl.static_range(NUM_LOOKAHEAD):
                    after = after + (tl.where(valid[i], now[j][i], before[j + 1]),)
            else:
                after = after + (departs[i],)
                for j in tl.static_range(NUM_LOOKAHEAD):
                    after = after + (now[j][i],)
                if mask is not None:
                    severed = valid[i] == 0
                    if BACKWARD:
                        severed = severed & (t < end)
            before = after

        if FOLD:
            alpha, beta, rest = folded(alphas, betas, DTYPE)
            alpha_before, beta_before, rest_before = over_chunks(
                alpha_before, beta_before, rest_before, alpha, beta, rest, DTYPE
            )
        else:
            if CHUNKS > 1:
                alpha, beta, rest = folded(alphas, betas, DTYPE)
                scanned = entering(alpha, beta, rest, state, DTYPE, IN_WARP)
            else:
                scanned = state
            results = ()
            for i in tl.static_range(UNROLL):
                own, next_inputs, next_value, continues, gamma_now, decay_now = kept[i]
                step = Step(own, next_inputs, next_value, continues, gamma_now, decay_now, scalars)
                after = tl.where(continues, scanned, 0)
                scanned = advanced(alphas[i], betas[i], scanned)
                results = results + (READOUT(step, scanned, after),)
            if not ONE_TILE:
                state = at_end(scanned)
            for k in tl.static_range(OUTPUTS):
                if (WANTED >> k) & 1:
                    result = ()
                    for i in tl.static_range(UNROLL):
                        result = result + (tl.where(valid[i], results[i][k], 0),)
                    store(outputs[k], place, result, VECTOR, EVEN, LOG_UNROLL, BACKWARD)
        if mask is not None and SKIP and not ONE_TILE:
            last = ()
            for j in tl.static_range(NUM_LOOKAHEAD + 1):
                last = last + (at_end(before[j]),)
            carried = last
    if FOLD:
        at = folds + segment * rows + row
        tl.store(at, alpha_before, mask=exists)
        tl.store(at + SEGMENTS * rows, beta_before, mask=exists)
        tl.store(at + 2 * SEGMENTS * rows, rest_before, mask=exists)
