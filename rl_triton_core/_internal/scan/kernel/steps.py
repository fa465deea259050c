"""The steps of a tile: what is loaded of them, what equations see of each, and the transitions that these make.

The neighbour of a step is the one before it in scan order: t+1 backward, t-1 forward. What a step sees of it is a tuple
(whether nothing passes from there, *inputs that are read ahead), and in mask mode ``reset`` whether it is masked.

An expectation over actions is a tuple (probabilities, values, number of actions), of streams with an action stride at
the end, and is summed while it is loaded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rl_triton_core import boundaries
from rl_triton_core._internal.equations.compile import compile_equation
from rl_triton_core._internal.equations.triton import TRITON
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
    reorder_steps,
    split_steps,
    unroll_place,
)
from rl_triton_core._internal.scan.layout import ACTIONS_AT_ONCE
from rl_triton_core._internal.scan.recurrence import Step

apply_boundary_rule = compile_equation(boundaries.apply_boundary_rule, TRITON)
BLOCK_ACTIONS = tl.constexpr(ACTIONS_AT_ONCE)
"""Actions that a thread loads at once."""


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
def transpose_tile(tile):
    """[CHUNKS, BLOCK_LANES] with its dimensions swapped: the first but the last is that along which threads lie."""
    return tl.trans(tile) if len(tile.shape) == 2 else tile


@triton.jit
def load_actions(stream, place, t, start, actions, FULL: tl.constexpr, CONFIG: tl.constexpr):
    """Elements of a block of actions, in a last dimension; 0 for those that there are not, unless it is FULL."""
    ALIGNED: tl.constexpr = CONFIG.ALIGNED
    across = (place.group * (stream[1] // ALIGNED) + place.lane * (stream[3] // ALIGNED)) * ALIGNED
    at = tl.expand_dims(transpose_tile(across + t * (stream[2] // ALIGNED) * ALIGNED), -1)
    action = start + tl.arange(0, BLOCK_ACTIONS)  # [BLOCK_ACTIONS], in the last dimension
    for _ in tl.static_range(len(at.shape) - 1):
        action = tl.expand_dims(action, 0)
    pointers = stream[0] + (at + action * stream[4])
    if CONFIG.EVEN and FULL:
        return tl.load(pointers)
    elif CONFIG.EVEN:
        return tl.load(pointers, mask=action < actions, other=0)
    else:
        there = tl.expand_dims(transpose_tile(is_inside(place, t, CONFIG)), -1)
        return tl.load(pointers, mask=there if FULL else there & (action < actions), other=0)


@triton.jit
def sum_block(expected, place, t, start, FULL: tl.constexpr, CONFIG: tl.constexpr):
    """The part of an expectation that a block of actions makes. An action of probability 0 does not count."""
    probs, values, actions = expected
    prob = load_actions(probs, place, t, start, actions, FULL, CONFIG).to(CONFIG.DTYPE)
    value = load_actions(values, place, t, start, actions, FULL, CONFIG).to(CONFIG.DTYPE)
    return transpose_tile(tl.sum(tl.where(prob == 0, 0, prob * value), axis=len(t.shape)))


@triton.jit
def sum_actions(expected, place, t, CONFIG: tl.constexpr):
    """The expectations of steps t."""
    ACTIONS: tl.constexpr = CONFIG.ACTIONS
    if len(t.shape) == 3:
        total = tl.zeros([t.shape[0], place.lane.shape[1], t.shape[2]], CONFIG.DTYPE)
    else:
        total = tl.zeros([t.shape[0], place.lane.shape[1]], CONFIG.DTYPE)
    if ACTIONS:  # without a loop, all loads are on their way at once
        for start in tl.static_range(0, ACTIONS, BLOCK_ACTIONS):
            total += sum_block(expected, place, t, start, start + BLOCK_ACTIONS <= ACTIONS, CONFIG)
    else:
        for start in range(0, expected[2], BLOCK_ACTIONS):
            total += sum_block(expected, place, t, start, False, CONFIG)
    return total


@triton.jit
def load_expectations(expected, place, CONFIG: tl.constexpr):
    """`load_steps` of an expectation."""
    UNROLL: tl.constexpr = 1 << CONFIG.LOG_UNROLL
    steps = ()
    if CONFIG.VECTOR:
        whole, t = unroll_place(place, CONFIG)
        steps = reorder_steps(split_steps(sum_actions(expected, whole, t, CONFIG), CONFIG), CONFIG)
    else:
        for i in tl.static_range(UNROLL):
            steps = steps + (sum_actions(expected, place, locate_step(place, i, CONFIG), CONFIG),)
    return steps


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
