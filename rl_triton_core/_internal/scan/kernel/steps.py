"""The steps of a tile: what is loaded of them, what equations see of each, and the transitions that these make.

The neighbour of a step is the one before it in scan order: t+1 backward, t-1 forward. What a step sees of it is a tuple
(whether nothing passes from there, *inputs that are read ahead), and in mask mode ``reset`` whether it is masked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rl_triton_core import boundaries
from rl_triton_core._internal.equations.compile import compile_equation
from rl_triton_core._internal.equations.triton import TRITON
from rl_triton_core._internal.scan.kernel.expectation import load_expectations
from rl_triton_core._internal.scan.kernel.masks import carry_last_valid
from rl_triton_core._internal.scan.kernel.tiles import (
    fill_chunks,
    is_inside,
    load_flags,
    load_numbers,
    load_steps,
    locate_neighbor,
    locate_step,
    or_zeros,
)
from rl_triton_core._internal.scan.recurrence import Step

apply_boundary_rule = compile_equation(boundaries.apply_boundary_rule, TRITON)


class Streams(NamedTuple):
    """What is read at every step."""

    inputs: Any
    next_values: Any
    expected: Any
    bootstrap: Any
    terminated: Any
    truncated: Any
    mask: Any
    gamma: Any


class Numbers(NamedTuple):
    """What all steps of a lane have in common."""

    value_at_end: Any
    """The bootstrap value behind the last step."""
    gamma: Any
    decay: Any
    """γλ, or λ if γ is per step."""
    params: Any


class Tile(NamedTuple):
    """What a tile has of every stream: its chunks' steps, an empty tuple where there is no stream."""

    inputs: Any
    terminated: Any
    truncated: Any
    valid: Any
    gamma: Any
    next_values: Any
    bootstrap: Any
    """Empty also where few of them are read, which are loaded when they are."""
    neighbor_inputs: Any
    """Of the step before each chunk: the inputs that are read ahead; empty where masked steps are passed over."""
    neighbor_flags: Any
    """Whether it ended its episode, if flags say that; with a mask, whether it is masked."""


@triton.jit
def load_tile(streams, place, CONFIG: tl.constexpr):
    """Everything that a tile needs from memory, except bootstrap values where few of them are read."""
    inputs = ()
    for j in tl.static_range(len(streams.inputs)):
        if (CONFIG.INPUT_MASK >> j) & 1:
            inputs = inputs + (load_steps(streams.inputs[j], place, CONFIG.DTYPE, CONFIG),)
        else:
            inputs = inputs + ((),)
    terminated = load_steps(streams.terminated, place, tl.int1, CONFIG)
    truncated = load_steps(streams.truncated, place, tl.int1, CONFIG)
    valid = load_steps(streams.mask, place, tl.int1, CONFIG)
    gamma = load_steps(streams.gamma, place, CONFIG.DTYPE, CONFIG)
    if streams.expected is not None:
        next_values = load_expectations(streams.expected, place, CONFIG)
    else:
        next_values = load_steps(streams.next_values, place, CONFIG.DTYPE, CONFIG)
    bootstrap = ()
    if CONFIG.BACKWARD and streams.truncated is not None and not (CONFIG.VECTOR or CONFIG.ONE_TILE):
        bootstrap = load_steps(streams.bootstrap, place, CONFIG.DTYPE, CONFIG)
    neighbor_inputs = ()
    neighbor_flags = ()
    if streams.mask is None or not CONFIG.SKIP:
        neighbor_inputs, neighbor_flags = load_neighbor(streams, place, CONFIG)
    return Tile(inputs, terminated, truncated, valid, gamma, next_values, bootstrap, neighbor_inputs, neighbor_flags)


@triton.jit
def load_neighbor(streams, place, CONFIG: tl.constexpr):
    """Of the step before each chunk: the inputs that are read ahead, and `Tile.neighbor_flags`."""
    NUM_LOOKAHEAD: tl.constexpr = CONFIG.NUM_LOOKAHEAD
    t, there = locate_neighbor(place, CONFIG)
    inputs = ()
    for j in tl.static_range(NUM_LOOKAHEAD):
        if (CONFIG.INPUT_MASK >> j) & 1:
            inputs = inputs + (load_numbers(streams.inputs[j], place, t, there, CONFIG.DTYPE),)
        else:
            inputs = inputs + (load_numbers(None, place, t, there, CONFIG.DTYPE),)
    flags = ()
    if not CONFIG.BACKWARD and not CONFIG.STARTS_AT:
        done = load_flags(streams.terminated, place, t, there) | load_flags(streams.truncated, place, t, there)
        flags = flags + (done,)
    if streams.mask is not None:
        flags = flags + (there & (load_flags(streams.mask, place, t, there) == 0),)
    return inputs, flags


@triton.jit
def complete_tile(tile, place, streams, CONFIG: tl.constexpr):
    """A tile with zeros for streams that there are not, and without a mask all steps valid that are inside."""
    UNROLL: tl.constexpr = 1 << CONFIG.LOG_UNROLL
    inputs = ()
    for j in tl.static_range(len(tile.inputs)):
        inputs = inputs + (or_zeros(tile.inputs[j], place, CONFIG.DTYPE, CONFIG),)
    terminated = or_zeros(tile.terminated, place, tl.int1, CONFIG)
    truncated = or_zeros(tile.truncated, place, tl.int1, CONFIG)
    valid = tile.valid
    if streams.mask is None:
        for i in tl.static_range(UNROLL):
            valid = valid + (is_inside(place, locate_step(place, i, CONFIG), CONFIG),)
    _, _, _, _, gamma, next_values, bootstrap, neighbor_inputs, neighbor_flags = tile
    return Tile(inputs, terminated, truncated, valid, gamma, next_values, bootstrap, neighbor_inputs, neighbor_flags)


@triton.jit
def is_done(tile, place, i: tl.constexpr, CONFIG: tl.constexpr):
    """Forward: whether a step ended its episode, if flags say that. Backward, the boundary rule decides instead."""
    if CONFIG.BACKWARD or CONFIG.STARTS_AT:
        return fill_chunks(place, False)
    else:
        return tile.terminated[i] | tile.truncated[i]


@triton.jit
def enter_tile(tile, place, carried, previous_done, streams, CONFIG: tl.constexpr):
    """What the first step of each chunk sees of its neighbour, and whether that is masked."""
    UNROLL: tl.constexpr = 1 << CONFIG.LOG_UNROLL
    masked = fill_chunks(place, False)  # [CHUNKS, BLOCK_LANES]
    if streams.mask is not None and CONFIG.SKIP:
        done = ()
        for i in tl.static_range(UNROLL):
            done = done + (tl.where(is_done(tile, place, i, CONFIG), 1.0, 0.0),)
        neighbor = (carry_last_valid(done, tile.valid, carried[0], CONFIG),)
        for j in tl.static_range(len(carried) - 1):
            neighbor = neighbor + (carry_last_valid(tile.inputs[j], tile.valid, carried[j + 1], CONFIG),)
    else:
        cut = fill_chunks(place, False)
        if not CONFIG.BACKWARD:
            cut = previous_done & (locate_neighbor(place, CONFIG)[1] == 0)
            if not CONFIG.STARTS_AT:
                cut = cut | tile.neighbor_flags[0]
        neighbor = (cut,) + tile.neighbor_inputs
        if streams.mask is not None:
            masked = tile.neighbor_flags[len(tile.neighbor_flags) - 1]
    return neighbor, masked


@triton.jit
def load_next_value(tile, place, neighbor, is_last, i: tl.constexpr, streams, numbers, CONFIG: tl.constexpr):
    """V[t+1] as it stands in the rollout, and the bootstrap value where the trajectory is cut."""
    if len(tile.next_values) > 0:
        return tile.next_values[i], tile.next_values[i]
    else:
        next_value = neighbor[1] if CONFIG.NUM_LOOKAHEAD else tl.zeros_like(tile.inputs[0][i])
        bootstrap = numbers.value_at_end
        if len(tile.bootstrap) > 0:
            bootstrap = tile.bootstrap[i]
        elif streams.bootstrap is not None and (
            streams.truncated is not None or (streams.mask is not None and CONFIG.SKIP)
        ):
            t = locate_step(place, i, CONFIG)
            where = (tile.truncated[i] | is_last) & is_inside(place, t, CONFIG)
            bootstrap = load_numbers(streams.bootstrap, place, t, where, CONFIG.DTYPE)
        return next_value, bootstrap


@triton.jit
def observe_step(tile, place, neighbor, masked, i: tl.constexpr, streams, numbers, CONFIG: tl.constexpr):
    """What equations see of a step, whose neighbour may be masked."""
    NUM_LOOKAHEAD: tl.constexpr = CONFIG.NUM_LOOKAHEAD
    gamma = numbers.gamma
    decay = numbers.decay
    terminated = tile.terminated[i]
    if streams.gamma is not None:
        gamma = tile.gamma[i]
        decay = gamma * numbers.decay
        terminated = terminated | (gamma == 0)
    cut = neighbor[0] != 0
    next_inputs = ()
    next_value = 0
    if CONFIG.BACKWARD:
        if streams.mask is None or not CONFIG.SKIP:
            t = locate_step(place, i, CONFIG)
            cut = t == place.end - 1 if i == 0 or not CONFIG.EVEN else fill_chunks(place, False)
        values = load_next_value(tile, place, neighbor, cut, i, streams, numbers, CONFIG)
        next_value, continues = apply_boundary_rule(terminated, tile.truncated[i], cut, masked, *values)
        for j in tl.static_range(NUM_LOOKAHEAD):
            next_inputs = next_inputs + (tl.where(continues, neighbor[j + 1], 0),)
    else:
        starts = cut | masked
        if CONFIG.STARTS_AT:
            starts = starts | terminated | tile.truncated[i]
        continues = starts == 0
    inputs = ()
    for j in tl.static_range(len(tile.inputs)):
        inputs = inputs + (tile.inputs[j][i],)
    return Step(inputs, next_inputs, next_value, continues, gamma, decay, numbers.params)


@triton.jit
def pass_step(tile, place, neighbor, masked, i: tl.constexpr, streams, CONFIG: tl.constexpr):
    """What the step after step i sees of its neighbour, and whether that is masked."""
    NUM_LOOKAHEAD: tl.constexpr = CONFIG.NUM_LOOKAHEAD
    done = is_done(tile, place, i, CONFIG)
    valid = tile.valid[i]
    if streams.mask is not None and CONFIG.SKIP:
        after = (tl.where(valid, tl.where(done, 1.0, 0.0), neighbor[0]),)
        for j in tl.static_range(NUM_LOOKAHEAD):
            after = after + (tl.where(valid, tile.inputs[j][i], neighbor[j + 1]),)
    else:
        after = (done,)
        for j in tl.static_range(NUM_LOOKAHEAD):
            after = after + (tile.inputs[j][i],)
        if streams.mask is not None:
            masked = valid == 0
            if CONFIG.BACKWARD:
                masked = masked & (locate_step(place, i, CONFIG) < place.end)
    return after, masked


@triton.jit
def compute_transitions(
    tile, place, neighbor, masked, streams, numbers, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr
):
    """What equations see of all steps, their α and β, and what the step after the last sees of its neighbour."""
    UNROLL: tl.constexpr = 1 << CONFIG.LOG_UNROLL
    steps = ()
    alphas = ()
    betas = ()
    for i in tl.static_range(UNROLL):
        step = observe_step(tile, place, neighbor, masked, i, streams, numbers, CONFIG)
        alpha, beta = COEFFICIENTS(step)  # [CHUNKS, BLOCK_LANES], or numbers
        steps = steps + (step,)
        alphas = alphas + (tl.where(tile.valid[i], alpha, 0).to(CONFIG.DTYPE),)
        betas = betas + (tl.where(tile.valid[i], beta, 1).to(CONFIG.DTYPE),)
        neighbor, masked = pass_step(tile, place, neighbor, masked, i, streams, CONFIG)
    return steps, alphas, betas, neighbor
