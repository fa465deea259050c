"""The parallel scan over time, for Triton: one skeleton for every estimator, layout and length.

A program takes a tile of [BLOCK_LANES, BLOCK_TIME] elements, scans it along time, and walks with the carried state to
the next tile of the same lanes. Positions count in scan order: position 0 is the last step of the window.

Streams are tuples (pointer, group stride, step stride, lane stride), or None.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from rl_triton_core import boundaries
from rl_triton_core.primitives import PRIMITIVES
from rl_triton_core.recurrence import Step, bind


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


transition = equation(boundaries.transition)


@triton.jit
def combine(alpha, beta, alpha_next, beta_next):
    """(α', β')∘(α, β) = (α' + β'·α, β'·β), where a factor of 0 lets nothing through, NaN and overflow included."""
    passed = tl.where((beta_next == 0) | (alpha == 0), 0, beta_next * alpha)
    return alpha_next + passed, tl.where((beta_next == 0) | (beta == 0), 0, beta_next * beta)


@triton.jit
def combine_exactly(alpha, beta, rest, alpha_next, beta_next, rest_next):
    """`combine` with factors β + rest: what rounding takes from a product is kept, and does not add up over steps."""
    through = tl.where((beta_next == 0) | (alpha == 0), 0, beta_next * alpha)
    through += tl.where(rest_next == 0, 0, rest_next * alpha)
    product = tl.where((beta_next == 0) | (beta == 0), 0, beta_next * beta)
    error = tl.fma(beta_next, beta, -product) + (beta_next * rest + rest_next * beta)
    exact = (product == 0) | (tl.abs(product) == float("inf"))
    return alpha_next + through, product, tl.where(exact, 0, error)


@triton.jit
def address(stream, group, t, lane):
    """Pointers to elements of a stream."""
    return stream[0] + (group * stream[1] + t * stream[2] + lane * stream[3])


@triton.jit
def load(stream, group, t, lane, where, DTYPE: tl.constexpr):
    """Elements of a stream, 0 elsewhere and where there is no stream."""
    if stream is None:
        return tl.where(where, 0, 0).to(DTYPE)
    else:
        return tl.load(address(stream, group, t, lane), mask=where, other=0).to(DTYPE)


@triton.jit
def load_if(GIVEN: tl.constexpr, stream, group, t, lane, where, DTYPE: tl.constexpr):
    """`load` from a tuple of streams, in which another stands for one that is not given."""
    if GIVEN:
        return load(stream, group, t, lane, where, DTYPE)
    else:
        return load(None, group, t, lane, where, DTYPE)


@triton.jit
def flag(stream, group, t, lane, where):
    """Flags as booleans; none is set where there is no stream."""
    if stream is None:
        return where & (where == 0)
    else:
        return tl.load(address(stream, group, t, lane), mask=where, other=0) != 0


@triton.jit
def at_end(tile, BLOCK_TIME: tl.constexpr):
    """The element of each lane at the tile's last position, [BLOCK_LANES, 1]."""
    chosen = tl.arange(0, BLOCK_TIME)[None, :] == BLOCK_TIME - 1
    return tl.sum(tl.where(chosen, tile, 0), axis=1)[:, None]


@triton.jit
def carry_on(alpha, beta, carried):
    """α + β·A for the state A that was carried in."""
    return alpha + tl.where((beta == 0) | (carried == 0), 0, beta * carried)


@triton.jit
def shifted(tile, carried, BLOCK_LANES: tl.constexpr, BLOCK_TIME: tl.constexpr):
    """The tile's elements one position later, after the one carried in."""
    position = tl.arange(0, BLOCK_TIME)[None, :]
    index = tl.broadcast_to(tl.maximum(position - 1, 0), [BLOCK_LANES, BLOCK_TIME])
    return tl.where(position == 0, carried, tl.gather(tile, index, 1))


@triton.jit
def pass_over(values, valid, carried, BLOCK_TIME: tl.constexpr):
    """Each value that is not valid replaced by the last valid one before it, which may be one carried in: a scan.

    Returns the values, and those to carry on.
    """
    missing = tl.where(valid, 0.0, 1.0)
    found = ()
    kept = ()
    for i in tl.static_range(len(values)):
        value, passed = tl.associative_scan((tl.where(valid, values[i], 0.0), missing), 1, combine)
        value = carry_on(value, passed, carried[i])
        found = found + (value,)
        kept = kept + (at_end(value, BLOCK_TIME),)
    return found, kept


@triton.jit
def scan(
    inputs,
    next_values,
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
    departed,
    outputs,
    offsets,
    steps,
    lanes,
    COEFFICIENTS: tl.constexpr,
    READOUT: tl.constexpr,
    BACKWARD: tl.constexpr,
    LOOKS_AHEAD: tl.constexpr,
    INPUTS: tl.constexpr,
    GIVEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WANTED: tl.constexpr,
    FOLLOWED: tl.constexpr,
    SKIP: tl.constexpr,
    STARTS_AT: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
):
    """A[t] = α[t] + β[t]·A[neighbour of t]. `decay` is γλ, or λ if γ is per step.

    GIVEN and WANTED have a bit for each input and output that is there; the others stand for nothing. With `offsets`,
    lane i has the steps from offsets[i] to offsets[i + 1].
    """
    lane_blocks = tl.cdiv(lanes, BLOCK_LANES)
    group = (tl.program_id(0) // lane_blocks).to(tl.int64)
    lane = (tl.program_id(0) % lane_blocks).to(tl.int64) * BLOCK_LANES + tl.arange(0, BLOCK_LANES)[:, None]
    if offsets is None:
        first, length, longest = 0, steps, steps
    else:
        first = tl.load(offsets + lane, mask=lane < lanes, other=0).to(tl.int64)
        end = tl.load(offsets + lane + 1, mask=lane < lanes, other=0).to(tl.int64)
        rises = (0 <= first) & (first <= end) & (end <= steps)
        whole = ((lane > 0) | (first == 0)) & ((lane != lanes - 1) | (end == steps))
        tl.device_assert(rises & whole, "cu_seqlens: expected offsets from 0 to the number of steps, rising")
        length = end - first
        longest = tl.max(length)
    state = load(initial, group, 0, lane, lane < lanes, DTYPE)
    # Of the neighbours: whether there is none (backward) or it departed (forward), and the values that are followed.
    zero = tl.zeros([BLOCK_LANES, 1], tl.float32)
    carried = (zero + 1.0 if BACKWARD else tl.where(flag(departed, group, 0, lane, lane < lanes), 1.0, 0.0),)
    for _ in tl.static_range(FOLLOWED):
        carried = carried + (zero,)

    for start in range(0, longest, BLOCK_TIME):
        position = start + tl.arange(0, BLOCK_TIME)[None, :].to(tl.int64)
        inside = (position < length) & (lane < lanes)
        inner = inside & (position > 0)
        if BACKWARD:
            t = first + length - 1 - position
            neighbour = t + 1
        else:
            t = first + position
            neighbour = t - 1

        done = flag(terminated, group, t, lane, inside)
        cut = flag(truncated, group, t, lane, inside)
        valid = inside
        valid_before = inner
        if mask is not None:
            valid = flag(mask, group, t, lane, inside)
            valid_before = flag(mask, group, neighbour, lane, inner)
        severed = inner & (valid_before == 0)

        now = ()
        for i in tl.static_range(INPUTS):
            now = now + (load_if((GIVEN >> i) & 1, inputs[i], group, t, lane, inside, DTYPE),)
        if BACKWARD or STARTS_AT:
            over = tl.where(inner, 0.0, 0.0)
        else:
            departs = flag(terminated, group, neighbour, lane, inner) | flag(truncated, group, neighbour, lane, inner)
            over = tl.where(departs, 1.0, 0.0)
        before = (over,)
        for i in tl.static_range(FOLLOWED):
            before = before + (load_if((GIVEN >> i) & 1, inputs[i], group, neighbour, lane, inner, DTYPE),)
        if mask is not None and SKIP:
            before, carried = pass_over(before, valid_before, carried, BLOCK_TIME)
            severed = inside & (inside == 0)
            none_or_over = before[0] != 0
        else:
            none_or_over = tl.where(position == 0, carried[0], over) != 0

        gamma_now = gamma_number
        decay_now = decay
        if gamma is not None:
            gamma_now = load(gamma, group, t, lane, inside, DTYPE)
            decay_now = gamma_now * decay
            done = done | (gamma_now == 0)

        following = ()
        if BACKWARD:
            if next_values is not None:
                value_ahead = load(next_values, group, t, lane, inside, DTYPE)
                value_at_cut = value_ahead
            else:
                value_ahead = before[1] if FOLLOWED else tl.where(inside, 0.0, 0.0)
                if bootstrap is not None:
                    value_at_cut = load(bootstrap, group, t, lane, inside & (cut | none_or_over), DTYPE)
                else:
                    value_at_cut = bootstrap_number
            next_value, continues = transition(done, cut, none_or_over, severed, value_ahead, value_at_cut)
            for i in tl.static_range(FOLLOWED):
                following = following + (tl.where(continues, before[i + 1], 0),)
        else:
            starts = none_or_over | severed
            if STARTS_AT:
                starts = starts | done | cut
            continues = starts == 0
            next_value = 0

        step = Step(now, following, next_value, continues, gamma_now, decay_now, scalars)
        alpha, beta = COEFFICIENTS(step)
        alpha = tl.where(valid, alpha, 0)
        beta = tl.where(valid, beta, 1).to(DTYPE)
        if DTYPE.is_floating():
            alpha, beta, rest = tl.associative_scan((alpha, beta, tl.zeros_like(beta)), 1, combine_exactly)
            alpha += tl.where(rest == 0, 0, rest * state)
        else:
            alpha, beta = tl.associative_scan((alpha, beta), 1, combine)
        scanned = carry_on(alpha, beta, state)
        after = scanned
        if LOOKS_AHEAD:
            after = tl.where(continues, shifted(scanned, state, BLOCK_LANES, BLOCK_TIME), 0)
        state = at_end(scanned, BLOCK_TIME)

        results = READOUT(step, scanned, after)
        for i in tl.static_range(OUTPUTS):
            if (WANTED >> i) & 1:
                tl.store(address(outputs[i], group, t, lane), tl.where(valid, results[i], 0), mask=inside)
