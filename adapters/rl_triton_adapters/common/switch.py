"""The switch of all adapters: with RL_TRITON=0 in the environment, each computes what its framework computes."""

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Place = tuple[Any, str, Any, Any]
"""A package or class, the name of an attribute, what the framework has there, and what of ours is to be there."""


def find_off_switch() -> str:
    """Why every adapter leaves its work to its framework; empty if the environment does not ask for it.

    Raises:
        ValueError: RL_TRITON is neither 0 nor 1.
    """
    flag = os.environ.get("RL_TRITON", "")
    if flag not in ("", "0", "1"):
        raise ValueError(f"RL_TRITON: got {flag!r}, expected 0 or 1")
    return "RL_TRITON=0 in the environment" if flag == "0" else ""


def check_enabled(enabled: Any, name: str = "enabled") -> bool:
    """The argument, or the key of a configuration, of this name, which has to be a bool."""
    if not isinstance(enabled, bool):
        raise TypeError(f"{name}: got {type(enabled).__name__}, expected a bool")
    return enabled


def with_switch(stock: Callable[..., Any]) -> Callable[[Function], Function]:
    """A decorator of a function of ours: while the switch is off, the framework's is called, which has no `backend`."""

    def decorate(ours: Function) -> Function:
        @wraps(ours)
        def call(*args: Any, **kwargs: Any) -> Any:
            if find_off_switch():
                kwargs.pop("backend", None)
                return stock(*args, **kwargs)
            return ours(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def find_places(package: str, ours: Iterable[Any]) -> list[Place]:
    """The places of classes, called Triton and the name of a stock one, in a package and those in it."""
    inside = [x for name, x in [*sys.modules.items()] if name.startswith(f"{package}.") and hasattr(x, "__path__")]
    pairs = [(stock, x) for x in ours for stock in getattr(x, "__mro__", ()) if f"Triton{stock.__name__}" == x.__name__]
    return [(owner, stock.__name__, stock, x) for owner in (sys.modules[package], *inside) for stock, x in pairs]


def replace_stock(places: Iterable[Place], back: bool = False) -> ExitStack:
    """Put ours where stock is, or the other way. The end of what is returned takes that back."""
    undo = ExitStack()
    for place in places:
        owner, name, *pair = place
        if vars(owner).get(name) is pair[back]:
            setattr(owner, name, pair[not back])
            undo.callback(replace_stock, [place], not back)
    return undo
