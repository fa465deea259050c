"""The compiler of equations: of scans, losses and moments, for every backend.

An equation is a plain function of ``+ - * /``, comparisons, number literals, `primitives` and other equations. It is
compiled with the functions that it calls: primitives become the backend's own, other functions are compiled like it.
Its literals get the type of the arithmetic, so that they widen nothing.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

from rl_triton_core._internal.equations import primitives

Chosen = tuple[tuple[str, Any], ...]
"""Names in equations, and the equations that a call chooses for them."""


def bind_names(function: Any, name: str | None = None, **names: Any) -> Any:
    """Copy a function with some of its global names bound to something else."""
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, name or function.__name__)
    copy.__module__ = function.__module__
    copy.__qualname__ = copy.__name__
    copy.__annotations__ = {}
    return copy


@dataclass(frozen=True, eq=False)
class Language:
    """How a backend computes equations, for arithmetic of a type."""

    primitives: Mapping[Any, Any]
    """By primitive, the backend's own."""
    make: Callable[[Any, dict[str, Any]], Any] = lambda function, names: bind_names(function, **names)
    """Compile a function, given what it calls by name."""


@cache
def compile_equation(function: Any, language: Language, chosen: Chosen = ()) -> Any:
    """Compile an equation, and what it calls: of anything else that it reads, a backend would keep what that was."""
    choices, names = dict(chosen), {}
    read = {x.argval for x in dis.get_instructions(function) if x.opname == "LOAD_GLOBAL"}
    kept = [x for x in read & {*function.__globals__} if not callable(choices.get(x, function.__globals__[x]))]
    kept += [*function.__code__.co_freevars, *map(repr, function.__defaults__ or ())]
    if kept:
        raise TypeError(
            f"{function.__name__}: got {kept[0]} in an equation, expected literals, or params of its Recurrence"
        )
    for name in function.__code__.co_names:
        called = choices.get(name, function.__globals__.get(name))
        if isinstance(called, FunctionType):
            own = language.primitives.get(called)
            names[name] = compile_equation(called, language, chosen) if own is None else own
    return language.make(function, names)


def unbound(*_: Any) -> Any:
    """Stand for an equation that a call chooses, or a function that a backend binds."""
    raise NotImplementedError


PYTORCH = Language({x: x for x in primitives.PRIMITIVES})
"""Tensors."""
PYTHON = Language(
    {
        primitives.select: lambda condition, chosen, otherwise: chosen if condition else otherwise,
        primitives.exp: math.exp,
        primitives.log: math.log,
        primitives.safe_sqrt: math.sqrt,
    }
)
"""Python's own numbers."""
