"""The switch of all adapters: with RL_TRITON=0 in the environment, each computes what its framework computes."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


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
