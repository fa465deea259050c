"""Copies of a framework's functions in which a name means something else: no hook is needed, and nothing is patched."""

from collections.abc import Mapping
from functools import update_wrapper
from types import FunctionType
from typing import Any


def rebound(function: Any, names: Mapping[str, Any], closure: tuple[Any, ...] | None = None) -> FunctionType:
    """A copy of a function, in which these global names mean other things. Nobody else's do.

    Args:
        function: What is copied.
        names: Objects by the names they get.
        closure: Cells in the place of the function's own.
    """
    scope = {**function.__globals__, **names} if names else function.__globals__
    cells = function.__closure__ if closure is None else closure
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(copy, function)
    return copy
