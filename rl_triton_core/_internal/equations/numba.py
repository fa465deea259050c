"""Equations as Numba's functions: options and names of what is compiled."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of functions that only compiled code calls."""


def describe_code(function: Any) -> Any:
    """What a function without inner functions does."""
    code = function.__code__
    return code.co_code, code.co_consts, code.co_names


def hash_text(parts: Any) -> str:
    """A short name for what has a repr."""
    return sha256(repr(parts).encode()).hexdigest()[:16]
