"""Numbers that remember which arguments they are made of, so that a recorded launch can take other numbers.

A recorded call gets its numbers as `TracedNumber`. Checks and products keep track of them (`claim`, ``*``). A number
that is used in any other way is marked as escaped: what was made of it is unknown, so it counts as a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Trace:
    """What is known about the numbers among the arguments of one call, by their positions."""

    positions: set[int]
    checks: dict[int, Callable[[Any], float]] = field(default_factory=dict)
    """Each returns an argument as a float, or raises the error that the call would raise."""
    escaped: set[int] = field(default_factory=set)

    def compute(self, factors: Sequence[tuple[int, ...]], arguments: dict[int, Any]) -> tuple[float, ...]:
        """Check other arguments, and compute from them what was computed from those that were traced."""
        numbers = {position: check(arguments[position]) for position, check in self.checks.items()}
        results = []
        for positions in factors:
            product = numbers[positions[0]]
            for position in positions[1:]:
                product = product * numbers[position]
            results.append(product)
        return tuple(results)


class TracedNumber(float):
    """An argument, or a product of several."""

    trace: Trace
    factors: tuple[int, ...]
    """Positions of the arguments."""
    given: Any
    """The argument itself."""

    def __new__(cls, given: Any, factors: tuple[int, ...], trace: Trace) -> TracedNumber:
        """Trace a number."""
        self = super().__new__(cls, given)
        self.given, self.factors, self.trace = given, factors, trace
        return self

    def claim(self, check: Callable[[Any], float]) -> TracedNumber:
        """Check the argument, now and whenever another takes its place."""
        number = check(self.given)
        (position,) = self.factors
        self.trace.checks[position] = check
        return TracedNumber(number, self.factors, self.trace)

    def __mul__(self, other: Any) -> Any:
        """Multiply; by 1.0 too, which changes nothing."""
        if isinstance(other, TracedNumber) and other.trace is self.trace:
            product = untrace(self) * untrace(other)
            return TracedNumber(product, self.factors + other.factors, self.trace)
        return self if type(other) is float and other == 1.0 else escape(self) * other

    __rmul__ = __mul__


def untrace(x: Any) -> Any:
    """Return a number without its trace, or a tuple with such; anything else as it is."""
    if type(x) is tuple:
        return tuple(map(untrace, x))
    return float.__pos__(x) if type(x) is TracedNumber else x


def escape(number: TracedNumber) -> float:
    """Mark a number as used in a way that is not traced."""
    number.trace.escaped.update(number.factors)
    return float.__pos__(number)


def escaping(name: str) -> Callable[..., Any]:
    """An operation of float that marks its number as escaped."""
    operation = getattr(float, name)

    def apply(number: TracedNumber, *others: Any) -> Any:
        return operation(escape(number), *others)

    return apply


KEPT = {"__new__", "__getattribute__", "__repr__", "__mul__", "__rmul__", "__getnewargs__", "__getformat__", "fromhex"}
for _name in vars(float).keys() - KEPT:
    if callable(getattr(float, _name)):
        setattr(TracedNumber, _name, escaping(_name))
