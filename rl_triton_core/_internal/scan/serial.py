"""The serial walk over time that Numba compiles.

Every function here is compiled again for each estimator and each kind of arguments. The names that depend on these are
declared below; the cpu backend binds them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types

from rl_triton_core._internal.equations.compile import unbound
from rl_triton_core._internal.equations.numba import select
from rl_triton_core._internal.scan.recurrence import Step
from rl_triton_core._internal.scan.serial_memory import (
    LANES_PER_BLOCK,
    allocate_row,
    apply_to_each,
    read,
    read_flag,
    read_row,
    write,
    write_row,
)

MIN_LANES_TO_VECTORIZE = 8
"""Fewer lanes are walked one after the other, however they lie."""


load_arguments = coefficients = readout = apply_boundary_rule = enter = step = unbound
HAS_MASK = GAMMA_VARIES = False
NUM_LOOKAHEAD, DIRECTION = 0, 1


class Carry(NamedTuple):
    """What a step of a backward walk leaves to the step before it."""

    state: Any
    """A[t+1]."""
    is_last: Any
    """Whether there is no next step."""
    next_is_masked: Any
    """Whether the next step is masked, and severs."""
    next_inputs: Any
    """The next step's inputs that are read at t+1 too."""


class ForwardCarry(NamedTuple):
    """What a step of a forward walk leaves to the step after it."""

    state: Any
    """A[t-1]."""
    previous_done: Any
    """Whether the step before ended its episode."""


def walk_backward_side_by_side(table, first_group, end_group, first_lane, end_lane, addresses, numbers):
    """A[t] = α[t] + β[t]·A[t+1] for neighbouring lanes together."""
    arguments = load_arguments(table, addresses, numbers)
    inputs, zero, zeros, steps = arguments.inputs, arguments.zero, arguments.zeros, arguments.steps
    state, is_last, next_is_masked = allocate_row(zero), allocate_row(True), allocate_row(False)
    next_inputs = apply_to_each(allocate_row, (), (zeros,))
    for group in range(first_group, end_group):
        for start in range(first_lane, end_lane, LANES_PER_BLOCK):
            width = min(LANES_PER_BLOCK, end_lane - start)
            for j in range(width):
                write_row(j, enter(arguments, group, start + j).state, state)
                if HAS_MASK:
                    write_row(j, True, is_last)
                    write_row(j, False, next_is_masked)
            for position in range(steps):
                t = steps - 1 - position
                for j in range(width):
                    lane = start + j
                    if HAS_MASK:
                        remembered = apply_to_each(read_row, (j,), (next_inputs,))
                        after = Carry(read_row(j, state), read_row(j, is_last), read_row(j, next_is_masked), remembered)
                    else:
                        next_place = (group, t + (position > 0), lane)
                        found = apply_to_each(read, (next_place, zero), (inputs[:NUM_LOOKAHEAD],))
                        after = Carry(read_row(j, state), position == 0, types.boolean(False), found)
                    after = step(arguments, group, t, lane, after)
                    write_row(j, after.state, state)
                    if HAS_MASK:
                        write_row(j, after.is_last, is_last)
                        write_row(j, after.next_is_masked, next_is_masked)
                        apply_to_each(write_row, (j,), (after.next_inputs, next_inputs))


def walk_forward_side_by_side(table, first_group, end_group, first_lane, end_lane, addresses, numbers):
    """A[t] = α[t] + β[t]·A[t-1] for neighbouring lanes together."""
    arguments = load_arguments(table, addresses, numbers)
    state, previous_done = allocate_row(arguments.zero), allocate_row(False)
    for group in range(first_group, end_group):
        for start in range(first_lane, end_lane, LANES_PER_BLOCK):
            width = min(LANES_PER_BLOCK, end_lane - start)
            for j in range(width):
                before = enter(arguments, group, start + j)
                write_row(j, before.state, state)
                write_row(j, before.previous_done, previous_done)
            for t in range(arguments.steps):
                for j in range(width):
                    before = ForwardCarry(read_row(j, state), read_row(j, previous_done))
                    before = step(arguments, group, t, start + j, before)
                    write_row(j, before.state, state)
                    write_row(j, before.previous_done, previous_done)


def walk_rows_serially(table, first_group, end_group, first_lane, end_lane, addresses, numbers):
    """Either for lanes that lie apart: one after the other, always the next beside the one that is not yet done."""
    arguments = load_arguments(table, addresses, numbers)
    offsets, steps = arguments.offsets, arguments.steps
    for group in range(first_group, end_group):
        lane, t, remaining = first_lane, 0, 0
        carry = enter(arguments, group, lane)
        for k in range(end_lane - first_lane):  # in the direction of the steps: the processor reads ahead
            next_lane = first_lane + k if DIRECTION > 0 else end_lane - 1 - k
            first = types.int64(read((0, 0, next_lane), 0, offsets))
            end = types.int64(read((0, 0, next_lane + 1), steps, offsets))
            next_t, next_remaining = first if DIRECTION > 0 else end - 1, end - first
            next_carry = enter(arguments, group, next_lane)
            both = min(remaining, next_remaining)
            for i in range(both):
                carry = step(arguments, group, t + DIRECTION * i, lane, carry)
                next_carry = step(arguments, group, next_t + DIRECTION * i, next_lane, next_carry)
            t, remaining = t + DIRECTION * both, remaining - both
            if remaining == 0:
                lane, t, remaining = next_lane, next_t + DIRECTION * both, next_remaining - both
                carry = next_carry
        for i in range(remaining):
            carry = step(arguments, group, t + DIRECTION * i, lane, carry)


def enter_backward(arguments, group, lane):
    """Behind a lane's last step. As literals, its flags would have the step compiled twice."""
    state = read((group, 0, lane), arguments.zero, arguments.initial)
    return Carry(state, types.boolean(True), types.boolean(False), arguments.zeros)


def step_backward(arguments, group, t, lane, after):
    """One step of a backward walk."""
    place, zero = (group, t, lane), arguments.zero
    if not read_flag(place, True, arguments.mask):
        apply_to_each(write, (place, zero), (arguments.outputs,))
        return after if arguments.skip else Carry(after.state, False, True, after.next_inputs)
    gamma, decay, ended = read_discount(arguments, place)
    next_value, continues = apply_boundary_rule(
        read_flag(place, False, arguments.terminated) | ended,
        read_flag(place, False, arguments.truncated),
        after.is_last,
        after.next_is_masked,
        read(place, (*after.next_inputs, zero)[0], arguments.next_values),
        read(place, read(place, zero, arguments.bootstrap), arguments.next_values),
    )
    inputs = apply_to_each(read, (place, zero), (arguments.inputs,))
    next_inputs = apply_to_each(select, (continues,), (after.next_inputs, arguments.zeros))
    here = Step(inputs, next_inputs, next_value, continues, gamma, decay, arguments.params)
    state = follow_recurrence(arguments, place, here, after.state)
    return Carry(state, False, False, inputs[:NUM_LOOKAHEAD])


def enter_forward(arguments, group, lane):
    """Before a lane's first step."""
    place = (group, 0, lane)
    state = read(place, arguments.zero, arguments.initial)
    return ForwardCarry(state, read_flag(place, False, arguments.previous_done))


def step_forward(arguments, group, t, lane, before):
    """One step of a forward walk."""
    place, zero = (group, t, lane), arguments.zero
    if not read_flag(place, True, arguments.mask):
        apply_to_each(write, (place, zero), (arguments.outputs,))
        return ForwardCarry(before.state, before.previous_done | (not arguments.skip))
    done = read_flag(place, False, arguments.terminated) | read_flag(place, False, arguments.truncated)
    continues = (before.previous_done | (done & arguments.starts_at)) == False  # noqa: E712
    gamma, decay, _ = read_discount(arguments, place)
    inputs = apply_to_each(read, (place, zero), (arguments.inputs,))
    here = Step(inputs, (), zero, continues, gamma, decay, arguments.params)
    state = follow_recurrence(arguments, place, here, before.state)
    return ForwardCarry(state, done & (not arguments.starts_at))


def read_discount(arguments, place):
    """γ and γλ of a step, and whether a discount of 0 ends the trajectory."""
    gamma = read(place, arguments.zero, arguments.gamma)
    decay = gamma * arguments.decay if GAMMA_VARIES else arguments.decay
    return gamma, decay, GAMMA_VARIES & (gamma == arguments.zero)


def follow_recurrence(arguments, place, here, state):
    """A[t] from the state that the walk brings, and the results of the step."""
    zero = arguments.zero
    alpha, beta = coefficients(here)
    result = alpha + select(beta == zero, zero, beta * state)
    results = readout(here, result, select(here.continues, state, zero))
    apply_to_each(write, (place,), (results, arguments.outputs))
    return result


BACKWARD = walk_backward_side_by_side, enter_backward, step_backward
FORWARD = walk_forward_side_by_side, enter_forward, step_forward
