"""Copies of a framework's functions in which some names mean other objects: nothing of the framework is patched."""

from collections.abc import Mapping
from functools import update_wrapper
from types import FunctionType
from typing import Any


def copy_function(function: Any, names: Mapping[str, Any], closure: tuple[Any, ...] | None = None) -> FunctionType:
    """Copy a function so that some of the global names it reads mean other objects. The original stays as it is.

    Args:
        function: Function to copy.
        names: Objects by the global names that the copy finds them under.
        closure: Cells in the place of the function's own; None keeps these.
    """
    scope = {**function.__globals__, **names} if names else function.__globals__
    cells = function.__closure__ if closure is None else closure
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(copy, function)
    return copy
