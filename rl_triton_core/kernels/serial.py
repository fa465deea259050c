"""The serial walk over time that Numba compiles, and the operations it needs.

`coefficients`, `readout`, `transition` and `empty_rows` are bound per estimator by the cpu backend. What depends on the
arguments that are there (None or an array, how many inputs) is decided while compiling, by the overloads below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from rl_triton_core.recurrence import Step

BLOCK = 16
"""Lanes walked side by side: enough to overlap their dependent arithmetic, few enough to stay in the L1 cache."""


def bound(*_: Any) -> Any:
    """Stands for what the backend binds."""
    raise NotImplementedError


coefficients = readout = transition = empty_rows = bound


def walk_backward(arguments, span):
    """A[t] = α[t] + β[t]·A[t+1] for the lanes of `span`: (first group, its end, first lane, its end)."""
    inputs, next_values, bootstrap, terminated, truncated, mask, gamma, decay = arguments[:8]
    params, skip, initial, _, _, outputs, zero, steps = arguments[8:]
    first_group, end_group, first_lane, end_lane = span
    state = np.full(BLOCK, zero)
    ahead = empty_rows(zero)
    last = np.empty(BLOCK, np.bool_)
    sealed = np.empty(BLOCK, np.bool_)
    for group in range(first_group, end_group):
        for left in range(first_lane, end_lane, BLOCK):
            width = min(BLOCK, end_lane - left)
            last[:] = True
            sealed[:] = False
            for j in range(width):
                state[j] = at(initial, zero, group, 0, left + j)
            for t in range(steps - 1, -1, -1):
                for j in range(width):
                    lane = left + j
                    if not flag(mask, True, group, t, lane):
                        clear(outputs, group, t, lane, zero)
                        if not skip:
                            last[j] = False
                            sealed[j] = True
                        continue
                    following = column(ahead, j)
                    gamma_now, decay_now, ended = discount(gamma, decay, group, t, lane)
                    next_value, continues = transition(
                        flag(terminated, False, group, t, lane) | ended,
                        flag(truncated, False, group, t, lane),
                        last[j],
                        sealed[j],
                        at(next_values, first(following, zero), group, t, lane),
                        at(next_values, at(bootstrap, zero, group, t, lane), group, t, lane),
                    )
                    now = each(inputs, group, t, lane, zero)
                    following = keep(continues, following, zero)
                    step = Step(now, following, next_value, continues, gamma_now, decay_now, params)
                    alpha, beta = coefficients(step)
                    after = state[j]
                    state[j] = alpha + select(beta == zero, zero, beta * after)
                    store(outputs, group, t, lane, readout(step, state[j], select(continues, after, zero)))
                    remember(ahead, j, now)
                    last[j] = False
                    sealed[j] = False


def walk_forward(arguments, span):
    """A[t] = α[t] + β[t]·A[t-1] for the lanes of `span`."""
    inputs, _, _, terminated, truncated, mask, gamma, decay = arguments[:8]
    params, skip, initial, departed, starts_at, outputs, zero, steps = arguments[8:]
    first_group, end_group, first_lane, end_lane = span
    state = np.full(BLOCK, zero)
    over = np.empty(BLOCK, np.bool_)
    for group in range(first_group, end_group):
        for left in range(first_lane, end_lane, BLOCK):
            width = min(BLOCK, end_lane - left)
            for j in range(width):
                state[j] = at(initial, zero, group, 0, left + j)
                over[j] = flag(departed, False, group, 0, left + j)
            for t in range(steps):
                for j in range(width):
                    lane = left + j
                    if not flag(mask, True, group, t, lane):
                        clear(outputs, group, t, lane, zero)
                        over[j] |= not skip
                        continue
                    flagged = flag(terminated, False, group, t, lane) | flag(truncated, False, group, t, lane)
                    continues = (over[j] | (flagged & starts_at)) == False  # noqa: E712
                    gamma_now, decay_now, _ = discount(gamma, decay, group, t, lane)
                    step = Step(each(inputs, group, t, lane, zero), (), zero, continues, gamma_now, decay_now, params)
                    alpha, beta = coefficients(step)
                    before = state[j]
                    state[j] = alpha + select(beta == zero, zero, beta * before)
                    store(outputs, group, t, lane, readout(step, state[j], select(continues, before, zero)))
                    over[j] = flagged & (not starts_at)


# -- operations, by what is there -------------------------------------------------------------------------------------


def overloaded(function: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """An operation of compiled code whose implementation is chosen by the types of its arguments."""

    def operation(*_: Any) -> Any:
        raise NotImplementedError

    function.__annotations__ = {}  # Numba compares them with those of the implementation
    overload(operation)(function)
    return operation


def unrolled(parameters: str, statements: Iterable[str], **namespace: Any) -> Callable[..., Any]:
    """A function of these statements: Numba cannot loop over a tuple of arrays and None."""
    exec(f"def unrolled({parameters}):\n    " + "\n    ".join(statements or ["pass"]), namespace)
    function: Callable[..., Any] = namespace["unrolled"]
    return function


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
        return lambda stream, absent, group, t, lane: stream[group, t, lane]
    if isinstance(stream, types.NoneType):
        return lambda stream, absent, group, t, lane: absent
    return lambda stream, absent, group, t, lane: stream


@overloaded
def flag(flags: Any, absent: Any, group: Any, t: Any, lane: Any) -> Callable[..., Any]:
    """Whether a flag is set."""
    if isinstance(flags, types.NoneType):
        return lambda flags, absent, group, t, lane: absent
    return lambda flags, absent, group, t, lane: flags[group, t, lane] != 0


@overloaded
def discount(gamma: Any, decay: Any, group: Any, t: Any, lane: Any) -> Callable[..., Any]:
    """γ and γλ of a step, and whether a discount of 0 ends the trajectory. `decay` is λ if γ is per step."""
    if not isinstance(gamma, types.Array):
        return lambda gamma, decay, group, t, lane: (gamma, decay, False)

    def per_step(gamma, decay, group, t, lane):
        now = gamma[group, t, lane]
        return now, now * decay, now == 0

    return per_step


@overloaded
def first(values: Any, absent: Any) -> Callable[..., Any]:
    """The first of a tuple."""
    return (lambda values, absent: values[0]) if len(values) else (lambda values, absent: absent)


@overloaded
def each(arrays: Any, group: Any, t: Any, lane: Any, zero: Any) -> Callable[..., Any]:
    """One element of every array, 0 for None."""
    there = (isinstance(array, types.Array) for array in arrays)
    elements = "".join(f"arrays[{i}][group, t, lane], " if is_there else "zero, " for i, is_there in enumerate(there))
    return unrolled("arrays, group, t, lane, zero", [f"return ({elements})"])


@overloaded
def column(rows: Any, j: Any) -> Callable[..., Any]:
    """Element j of every row."""
    return unrolled("rows, j", [f"return ({''.join(f'rows[{i}][j], ' for i in range(len(rows)))})"])


@overloaded
def remember(rows: Any, j: Any, values: Any) -> Callable[..., Any]:
    """Write the first values to element j of the rows."""
    return unrolled("rows, j, values", [f"rows[{i}][j] = values[{i}]" for i in range(len(rows))])


@overloaded
def keep(continues: Any, values: Any, zero: Any) -> Callable[..., Any]:
    """The values, or zeros where the trajectory ends."""
    kept = "".join(f"values[{i}] if continues else zero, " for i in range(len(values)))
    return unrolled("continues, values, zero", [f"return ({kept})"])


@overloaded
def store(outputs: Any, group: Any, t: Any, lane: Any, results: Any) -> Callable[..., Any]:
    """Write the results for which there is an output."""
    wanted = [i for i, output in enumerate(outputs) if isinstance(output, types.Array)]
    statements = [f"outputs[{i}][group, t, lane] = results[{i}]" for i in wanted]
    return unrolled("outputs, group, t, lane, results", statements)


@overloaded
def clear(outputs: Any, group: Any, t: Any, lane: Any, zero: Any) -> Callable[..., Any]:
    """Write 0 to every output."""
    wanted = [i for i, output in enumerate(outputs) if isinstance(output, types.Array)]
    return unrolled("outputs, group, t, lane, zero", [f"outputs[{i}][group, t, lane] = zero" for i in wanted])
