"""Copies of a framework's functions in which some names mean other objects: nothing of the framework is patched."""

from collections.abc import Mapping
from functools import update_wrapper
from types import FunctionType
from typing import Any

from rl_triton_adapters.common.overrides import PREFIX, find_override


def copy_function(function: Any, names: Mapping[str, Any], closure: tuple[Any, ...] | None = None) -> FunctionType:
    """Copy a function so that some of the global names it reads mean other objects, and perhaps with other cells."""
    scope = {**function.__globals__, **names} if names else function.__globals__
    cells = function.__closure__ if closure is None else closure
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(copy, function)
    return copy


class CopiedMethodsMixin:
    """Refuses a class in which a method of ours that is a copy precedes a user's, which it would not call."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Look for the methods behind all copies."""
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            own = vars(base).values() if base.__module__.startswith(PREFIX) else ()
            copies = [x for x in own if isinstance(x, FunctionType) and x.__module__ != base.__module__]
            packages = {x.__module__.partition(".")[0] for x in copies} | {"tensordict", "torch", __package__}
            hidden = find_override(cls, [x.__name__ for x in copies], tuple(packages), behind=base)
            if hidden:
                raise TypeError(f"{cls.__name__}: {hidden}, and got {base.__name__} in front of it, expected it behind")
