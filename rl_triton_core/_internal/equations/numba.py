"""Functions that Numba compiles: their options and names, and where they are kept on disk.

Numba prefers the folder beside the source, where `pip uninstall` leaves what it finds: the package could be imported
still. Ours go to the user's cache folder. That is decided for these functions alone, not for others of the process.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from typing import Any

import numba
from numba.core.caching import FunctionCache

INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of functions that only compiled code calls."""


def describe_code(function: Any) -> Any:
    """What a function without inner functions does."""
    code = function.__code__
    return code.co_code, code.co_consts, code.co_names


def hash_text(parts: Any) -> str:
    """A short name for what has a repr."""
    return sha256(repr(parts).encode()).hexdigest()[:16]


class Folders(FunctionCache._impl_class):  # type: ignore[misc]
    """Where a function may be kept: beside the source only where there is no other place."""

    _locator_classes = sorted(FunctionCache._impl_class._locator_classes, key=lambda x: "InTree" in x.__name__)


class UserCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of a function, in one of these folders."""

    _impl_class = Folders


def compile_and_keep(function: Any, signature: Any = None, **options: Any) -> Any:
    """Compile a function for a signature, or for each that comes, and keep it on disk if there is a place for it."""
    compiled = numba.njit(nogil=True, error_model="numpy", **options)(function)
    with suppress(RuntimeError):  # no folder can be written
        compiled._cache = UserCache(function)
    if signature is None:
        return compiled
    compiled.compile(signature)
    return compiled.overloads[signature.args].entry_point
