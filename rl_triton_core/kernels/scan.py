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
from rl_triton_core.recurrence import Step, bind


@triton.jit
def select(condition, chosen, otherwise):
    """The primitive of equations."""
    return tl.where(condition, chosen, otherwise)


def equation(function: Any) -> Any:
    """A plain function of primitives as a Triton function.

    The interpreter looks for `tl` in its module, the compiler for the names in annotations.
    """
    return triton.jit(bind(function, select=select, tl=tl, Any=tl.constexpr(Any)))


transition = equation(boundaries.transition)


@triton.jit
def combine(alpha, beta, alpha_next, beta_next):
    """(α', β')∘(α, β) = (α' + β'·α, β'·β), where a factor of 0 lets nothing through, NaN and overflow included."""
    passed = tl.where((beta_next == 0) | (alpha == 0), 0.0, beta_next * alpha)
    return alpha_next + passed, tl.where((beta_next == 0) | (beta == 0), 0.0, beta_next * beta)


@triton.jit
def both(a, b):
    """Logical and of 0.0 and 1.0."""
    return a * b


@triton.jit
def address(stream, group, t, lane):
    """Pointers to elements of a stream."""
    return stream[0] + (group * stream[1] + t * stream[2] + lane * stream[3])


@triton.jit
def load(stream, group, t, lane, where):
    """Elements of a stream as float32, 0 elsewhere."""
    return tl.load(address(stream, group, t, lane), mask=where, other=0).to(tl.float32)


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
    return tl.sum(tl.where(chosen, tile, 0.0), axis=1)[:, None]


@triton.jit
def carry_on(alpha, beta, carried):
    """α + β·A for the state A that was carried in."""
    return alpha + tl.where((beta == 0) | (carried == 0), 0.0, beta * carried)


@triton.jit
def skip_masked(following, valid_next, ahead, unseen, BLOCK_TIME: tl.constexpr):
    """What follows each step when masked steps are passed over: a scan of its own.

    Takes the values at t+1 and whether that step is valid, and, from the tiles before, the last valid values and whether
    there were none (1.0). Returns the values at the next valid step, those to carry on, whether there is no such step,
    and that to carry on.
    """
    masked = tl.where(valid_next, 0.0, 1.0)
    found = ()
    carried = ()
    for i in tl.static_range(len(following)):
        value, passed = tl.associative_scan((tl.where(valid_next, following[i], 0.0), masked), 1, combine)
        value = carry_on(value, passed, ahead[i])
        found = found + (value,)
        carried = carried + (at_end(value, BLOCK_TIME),)
    none = tl.associative_scan(masked, 1, both) * unseen
    return found, carried, none != 0, at_end(none, BLOCK_TIME)


@triton.jit
def scan_backward(
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
    params,
    outputs,
    steps,
    lanes,
    COEFFICIENTS: tl.constexpr,
    READOUT: tl.constexpr,
    FOLLOWED: tl.constexpr,
    SKIP: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
):
    """A[t] = α[t] + β[t]·A[t+1]. `decay` is γλ, or λ if γ is per step."""
    lane_blocks = tl.cdiv(lanes, BLOCK_LANES)
    group = (tl.program_id(0) // lane_blocks).to(tl.int64)
    lane = (tl.program_id(0) % lane_blocks).to(tl.int64) * BLOCK_LANES + tl.arange(0, BLOCK_LANES)[:, None]
    state = tl.zeros([BLOCK_LANES, 1], tl.float32)
    unseen = state + 1.0
    ahead = ()
    for _ in tl.static_range(FOLLOWED):
        ahead = ahead + (state,)

    for start in range(0, steps, BLOCK_TIME):
        t = (steps - 1 - start).to(tl.int64) - tl.arange(0, BLOCK_TIME)[None, :]
        inside = (t >= 0) & (lane < lanes)
        inner = inside & (t < steps - 1)
        nowhere = inside & (t < 0)
        valid = inside

        now = ()
        for i in tl.static_range(len(inputs)):
            now = now + (load(inputs[i], group, t, lane, inside),)
        following = ()
        for i in tl.static_range(FOLLOWED):
            following = following + (load(inputs[i], group, t + 1, lane, inner),)
        last = t == steps - 1
        sealed = nowhere

        if mask is not None:
            valid = flag(mask, group, t, lane, inside)
            valid_next = flag(mask, group, t + 1, lane, inner)
            if SKIP:
                following, ahead, last, unseen = skip_masked(following, valid_next, ahead, unseen, BLOCK_TIME)
            else:
                sealed = inner & (valid_next == 0)

        gamma_now = gamma_number
        decay_now = decay
        ended = flag(terminated, group, t, lane, inside)
        if gamma is not None:
            gamma_now = load(gamma, group, t, lane, inside)
            decay_now = gamma_now * decay
            ended = ended | (gamma_now == 0)
        cut = flag(truncated, group, t, lane, inside)

        if next_values is not None:
            value_ahead = load(next_values, group, t, lane, inside)
            value_at_cut = value_ahead
        else:
            value_ahead = following[0] if FOLLOWED else tl.where(inside, 0.0, 0.0)
            if bootstrap is not None:
                value_at_cut = load(bootstrap, group, t, lane, inside & (cut | last))
            else:
                value_at_cut = bootstrap_number
        next_value, continues = transition(ended, cut, last, sealed, value_ahead, value_at_cut)

        kept = ()
        for i in tl.static_range(FOLLOWED):
            kept = kept + (tl.where(continues, following[i], 0.0),)
        step = Step(now, kept, next_value, continues, gamma_now, decay_now, params)
        alpha, beta = COEFFICIENTS(step)
        alpha = tl.where(valid, alpha, 0.0)
        beta = tl.where(valid, beta, 1.0 if SKIP else 0.0)
        alpha, beta = tl.associative_scan((alpha, beta), 1, combine)
        scanned = carry_on(alpha, beta, state)
        state = at_end(scanned, BLOCK_TIME)

        results = READOUT(step, scanned)
        for i in tl.static_range(len(outputs)):
            if outputs[i] is not None:
                tl.store(address(outputs[i], group, t, lane), tl.where(valid, results[i], 0.0), mask=inside)
