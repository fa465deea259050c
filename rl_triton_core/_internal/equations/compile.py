"""How an equation becomes code of a backend."""

from __future__ import annotations

from types import FunctionType
from typing import Any


def bind_names(function: Any, name: str | None = None, **names: Any) -> Any:
    """Copy a function with some of its global names bound to something else."""
    copy = FunctionType(function.__code__, {**function.__globals__, **names}, name or function.__name__)
    copy.__module__ = function.__module__
    copy.__qualname__ = copy.__name__
    copy.__annotations__ = {}
    return copy
