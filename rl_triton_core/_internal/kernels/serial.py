"""The serial walk over time that Numba compiles, and the operations it needs.

The cpu backend binds per estimator what is `bound` below. What depends on the arguments that are there (None or an
array, how many inputs) is decided while compiling, by the overloads below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from rl_triton_core._internal.recurrence import Step

BLOCK, FEW = 1024, 8
"""Lanes walked together where they lie side by side: long rows for vector instructions. And what no such row is."""


def bound(*_: Any) -> Any:
    """Stands for what the backend binds."""
    raise NotImplementedError


coefficients = readout = apply_boundary_rule = zeros = enter = step = bound
DIRECTION = 0


def backward_side_by_side(arguments, span):
    """A[t] = α[t] + β[t]·A[t+1] for the lanes of `span`: (first group, its end, first lane, its end)."""
    inputs, mask, zero, steps, all_bits = arguments[0], arguments[5], *arguments[15:]
    first_group, end_group, first_lane, end_lane = span
    state = np.full(BLOCK, zero)
    memory = np.empty(BLOCK, np.bool_), np.empty(BLOCK, np.bool_), rows(zeros(zero))
    for group in range(first_group, end_group):
        for left in range(first_lane, end_lane, BLOCK):
            width = min(BLOCK, end_lane - left)
            forget(mask, memory)
            for j in range(width):
                state[j] = enter(arguments, group, left + j)[0]
            for position in range(steps):
                t = steps + ((-1 - position) & all_bits)
                for j in range(width):
                    lane = left + j
                    last, sealed, next_inputs = neighbour(mask, memory, inputs, position, group, t, lane, j, zero)
                    after = step(arguments, group, t, lane, (state[j], last, sealed, next_inputs))
                    state[j] = after[0]
                    remember(mask, memory, j, after)


def forward_side_by_side(arguments, span):
    """A[t] = α[t] + β[t]·A[t-1] for the lanes of `span`."""
    zero, steps = arguments[15:17]
    first_group, end_group, first_lane, end_lane = span
    state = np.full(BLOCK, zero)
    over = np.empty(BLOCK, np.bool_)
    for group in range(first_group, end_group):
        for left in range(first_lane, end_lane, BLOCK):
            width = min(BLOCK, end_lane - left)
            for j in range(width):
                state[j], over[j] = enter(arguments, group, left + j)
            for t in range(steps):
                for j in range(width):
                    state[j], over[j] = step(arguments, group, t, left + j, (state[j], over[j]))


def apart(arguments, span):
    """Either for lanes that lie apart: one after the other, always the next beside the one that is not yet done."""
    offsets, steps = arguments[14], arguments[16]
    first_group, end_group, first_lane, end_lane = span
    for group in range(first_group, end_group):
        lane, t, left = first_lane, 0, 0
        carry = enter(arguments, group, lane)
        for k in range(end_lane - first_lane):  # in the direction of the steps: the processor reads ahead
            next_lane = first_lane + k if DIRECTION > 0 else end_lane - 1 - k
            first, end = start_of(offsets, 0, next_lane), end_of(offsets, steps, next_lane)
            next_t, next_left = first if DIRECTION > 0 else end - 1, end - first
            next_carry = enter(arguments, group, next_lane)
            both = min(left, next_left)
            for i in range(both):
                carry = step(arguments, group, t + DIRECTION * i, lane, carry)
                next_carry = step(arguments, group, next_t + DIRECTION * i, next_lane, next_carry)
            t, left = t + DIRECTION * both, left - both
            if left == 0:
                lane, t, left, carry = next_lane, next_t + DIRECTION * both, next_left - both, next_carry
        for i in range(left):
            carry = step(arguments, group, t + DIRECTION * i, lane, carry)


def enter_backward(arguments, group, lane):
    """Behind a lane's last step. As literals, its flags would have the step compiled twice."""
    none, sealed = types.boolean(True), types.boolean(False)
    return at(arguments[10], arguments[15], group, 0, lane), none, sealed, zeros(arguments[15])


def step_backward(arguments, group, t, lane, after):
    """One step. `after` is (A[t+1], whether there is no step after, whether that is masked and severs, its inputs)."""
    inputs, next_values, bootstrap, terminated, truncated, mask, gamma, decay = arguments[:8]
    params, skip, _, _, _, outputs, _, zero, _, _ = arguments[8:]
    state, last, sealed, next_inputs = after
    if not flag(mask, True, group, t, lane):
        clear(outputs, group, t, lane, zero)
        return after if skip else (state, False, True, next_inputs)
    gamma_now, decay_now, ended = discount(gamma, decay, group, t, lane)
    next_value, continues = apply_boundary_rule(
        flag(terminated, False, group, t, lane) | ended,
        flag(truncated, False, group, t, lane),
        last,
        sealed,
        at(next_values, first(next_inputs, zero), group, t, lane),
        at(next_values, at(bootstrap, zero, group, t, lane), group, t, lane),
    )
    now = each(inputs, group, t, lane, zero)
    here = Step(now, keep(continues, next_inputs, zero), next_value, continues, gamma_now, decay_now, params)
    alpha, beta = coefficients(here)
    result = alpha + select(beta == zero, zero, beta * state)
    store(outputs, group, t, lane, readout(here, result, select(continues, state, zero)))
    return result, False, False, as_many(now, next_inputs)


def enter_forward(arguments, group, lane):
    """Before a lane's first step."""
    return at(arguments[10], arguments[15], group, 0, lane), flag(arguments[11], False, group, 0, lane)


def step_forward(arguments, group, t, lane, before):
    """One step. `before` is (A[t-1], whether the step before ended its episode)."""
    inputs, _, _, terminated, truncated, mask, gamma, decay = arguments[:8]
    params, skip, _, _, starts_at, outputs, _, zero, _, _ = arguments[8:]
    state, over = before
    if not flag(mask, True, group, t, lane):
        clear(outputs, group, t, lane, zero)
        return state, over | (not skip)
    flagged = flag(terminated, False, group, t, lane) | flag(truncated, False, group, t, lane)
    continues = (over | (flagged & starts_at)) == False  # noqa: E712
    gamma_now, decay_now, _ = discount(gamma, decay, group, t, lane)
    here = Step(each(inputs, group, t, lane, zero), (), zero, continues, gamma_now, decay_now, params)
    alpha, beta = coefficients(here)
    result = alpha + select(beta == zero, zero, beta * state)
    store(outputs, group, t, lane, readout(here, result, select(continues, state, zero)))
    return result, flagged & (not starts_at)


# -- operations, by what is there -------------------------------------------------------------------------------------


INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of functions that only compiled code calls."""


def overloaded(function: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """An operation of compiled code whose implementation is chosen by the types of its arguments."""

    def operation(*_: Any) -> Any:
        raise NotImplementedError

    function.__annotations__ = {}  # Numba compares them with those of the implementation
    overload(operation, jit_options=INNER)(function)
    return operation


def unrolled(parameters: str, statements: Iterable[str], **namespace: Any) -> Callable[..., Any]:
    """A function of these statements: Numba cannot loop over a tuple of arrays and None.

    It is named by them, since Numba links by name what processes of their own have left in the disk cache.
    """
    code = f"({parameters}):\n    " + "\n    ".join(statements or ["pass"])
    name = f"unrolled_{sha256(code.encode()).hexdigest()[:16]}"
    namespace["unsigned"] = types.uintp  # an index taken as it is; a signed one might count from the end
    exec(f"def {name}{code}", namespace)
    function: Callable[..., Any] = namespace[name]
    return function


def element(name: str, array: Any, t: str = "t") -> str:
    """The element of an array: [groups, steps, lanes], [groups, lanes] or [steps]."""
    index = {3: ("group", t, "lane"), 2: ("group", "lane"), 1: (t,)}[array.ndim]
    return f"{name}[{', '.join(f'unsigned({i})' for i in index)}]"


def elements(name: str, arrays: Any, t: str = "t") -> str:
    """The element of each array as a tuple, zero for None."""
    values = (
        f"{element(f'{name}[{i}]', array, t) if isinstance(array, types.Array) else 'zero'}, "
        for i, array in enumerate(arrays)
    )
    return f"({''.join(values)})"


@overloaded
def select(condition: Any, chosen: Any, otherwise: Any) -> Callable[..., Any]:
    """The primitive of equations. A literal does not widen: float32 goes before float64, and floats before integers."""
    kinds = [kind for kind in (chosen, otherwise) if isinstance(kind, types.Float)] or [types.int64]
    narrow = min(kinds, key=lambda kind: kind.bitwidth)
    return lambda condition, chosen, otherwise: narrow(chosen) if condition else narrow(otherwise)


@overloaded
def minimum(x: Any, bound: Any) -> Callable[..., Any]:
    """The primitive of equations; NaN stays."""
    return lambda x, bound: bound if x > bound else x


@overloaded
def exp(x: Any) -> Callable[..., Any]:
    """The primitive of equations."""
    return lambda x: np.exp(x)  # noqa: PLW0108


@overloaded
def at(stream: Any, absent: Any, group: Any, t: Any, lane: Any) -> Callable[..., Any]:
    """One element of a stream: an array, a number for all steps, or None."""
    if isinstance(stream, types.Array):
        return unrolled("stream, absent, group, t, lane", [f"return {element('stream', stream)}"])
    if isinstance(stream, types.NoneType):
        return lambda stream, absent, group, t, lane: absent
    return lambda stream, absent, group, t, lane: stream


@overloaded
def flag(flags: Any, absent: Any, group: Any, t: Any, lane: Any) -> Callable[..., Any]:
    """Whether a flag is set."""
    if isinstance(flags, types.NoneType):
        return lambda flags, absent, group, t, lane: absent
    return unrolled("flags, absent, group, t, lane", [f"return {element('flags', flags)} != 0"])


@overloaded
def discount(gamma: Any, decay: Any, group: Any, t: Any, lane: Any) -> Callable[..., Any]:
    """γ and γλ of a step, and whether a discount of 0 ends the trajectory. `decay` is λ if γ is per step."""
    if not isinstance(gamma, types.Array):
        return lambda gamma, decay, group, t, lane: (gamma, decay, False)
    statements = [f"now = {element('gamma', gamma)}", "return now, now * decay, now == 0"]
    return unrolled("gamma, decay, group, t, lane", statements)


@overloaded
def first(values: Any, absent: Any) -> Callable[..., Any]:
    """The first of a tuple."""
    return (lambda values, absent: values[0]) if len(values) else (lambda values, absent: absent)


@overloaded
def each(arrays: Any, group: Any, t: Any, lane: Any, zero: Any) -> Callable[..., Any]:
    """One element of every array, 0 for None."""
    return unrolled("arrays, group, t, lane, zero", [f"return {elements('arrays', arrays)}"])


@overloaded
def keep(continues: Any, values: Any, zero: Any) -> Callable[..., Any]:
    """The values, or zeros where the trajectory ends."""
    kept = "".join(f"values[{i}] if continues else zero, " for i in range(len(values)))
    return unrolled("continues, values, zero", [f"return ({kept})"])


@overloaded
def store(outputs: Any, group: Any, t: Any, lane: Any, results: Any) -> Callable[..., Any]:
    """Write the results for which there is an output."""
    wanted = [(i, output) for i, output in enumerate(outputs) if isinstance(output, types.Array)]
    statements = [f"{element(f'outputs[{i}]', output)} = results[{i}]" for i, output in wanted]
    return unrolled("outputs, group, t, lane, results", statements)


@overloaded
def clear(outputs: Any, group: Any, t: Any, lane: Any, zero: Any) -> Callable[..., Any]:
    """Write 0 to every output."""
    wanted = [(i, output) for i, output in enumerate(outputs) if isinstance(output, types.Array)]
    statements = [f"{element(f'outputs[{i}]', output)} = zero" for i, output in wanted]
    return unrolled("outputs, group, t, lane, zero", statements)


@overloaded
def as_many(values: Any, like: Any) -> Callable[..., Any]:
    """The first values of a tuple, as many as another has."""
    return unrolled("values, like", [f"return ({''.join(f'values[{i}], ' for i in range(len(like)))})"])


# -- what follows, of lanes side by side: read at t+1, or remembered where steps between may be masked -----------------


@overloaded
def rows(values: Any) -> Callable[..., Any]:
    """A row for each of a tuple."""
    return unrolled(
        "values",
        [f"return ({''.join(f'np.full(BLOCK, values[{i}]), ' for i in range(len(values)))})"],
        np=np,
        BLOCK=BLOCK,
    )


@overloaded
def neighbour(mask: Any, memory: Any, inputs: Any, position: Any, group: Any, t: Any, lane: Any, j: Any, zero: Any):
    """Of the step after: whether there is none, whether it is masked and severs, and its inputs that are followed."""
    _, _, rows = memory
    parameters = "mask, memory, inputs, position, group, t, lane, j, zero"
    if isinstance(mask, types.NoneType):
        next_inputs = elements("inputs", list(inputs)[: len(rows)], "t + (position > 0)")
        return unrolled(parameters, [f"return position == 0, False, {next_inputs}"])
    next_inputs = "".join(f"memory[2][{i}][j], " for i in range(len(rows)))
    return unrolled(parameters, [f"return memory[0][j], memory[1][j], ({next_inputs})"])


@overloaded
def forget(mask: Any, memory: Any) -> Callable[..., Any]:
    """There is no step after."""
    statements = ["memory[0][:] = True", "memory[1][:] = False"]
    return unrolled("mask, memory", [] if isinstance(mask, types.NoneType) else statements)


@overloaded
def remember(mask: Any, memory: Any, j: Any, after: Any) -> Callable[..., Any]:
    """What the step before will find."""
    next_inputs = [f"memory[2][{i}][j] = after[3][{i}]" for i in range(len(memory[2]))]
    statements = ["memory[0][j] = after[1]", "memory[1][j] = after[2]", *next_inputs]
    return unrolled("mask, memory, j, after", [] if isinstance(mask, types.NoneType) else statements)


# -- a lane's steps: all of the window, or those of a sequence that lies between two offsets ---------------------------


@overloaded
def start_of(offsets: Any, default: Any, lane: Any) -> Callable[..., Any]:
    """First step of a lane."""
    if isinstance(offsets, types.NoneType):
        return lambda offsets, default, lane: default
    return unrolled("offsets, default, lane", ["return offsets[unsigned(lane)]"])


@overloaded
def end_of(offsets: Any, default: Any, lane: Any) -> Callable[..., Any]:
    """One past the last step of a lane."""
    if isinstance(offsets, types.NoneType):
        return lambda offsets, default, lane: default
    return unrolled("offsets, default, lane", ["return offsets[unsigned(lane + 1)]"])
