"""Expectations over actions, Σ_a probability·value, summed while they are loaded.

An expectation is a tuple (probabilities, values, number of actions), of streams with an action stride at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_triton_core._internal.scan.kernel.tiles import is_inside, locate_step, reorder_steps, split_steps, unroll_place
from rl_triton_core._internal.scan.layout import ACTIONS_AT_ONCE

BLOCK_ACTIONS = tl.constexpr(ACTIONS_AT_ONCE)
"""Actions that a thread loads at once."""


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
