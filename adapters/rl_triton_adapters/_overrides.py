"""What a user has changed in an object of a framework: an adapter that goes around a method asks whether it may."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def find_override(thing: Any, names: Iterable[str], packages: Iterable[str], behind: type | None = None) -> str:
    """Find a method or property that is not the framework's, and say which; empty if there is none.

    Args:
        thing: An object of a framework's class, or of one that derives from it.
        names: What an adapter goes around. Those that the object does not have are left out.
        packages: Packages and modules of the framework, and of the decorators that it uses.
        behind: A class of ours that overrides these methods itself: those of the classes behind it count, as `super`
            finds them.
    """
    bases = type(thing).__mro__
    bases = bases if behind is None else bases[bases.index(behind) + 1 :]
    for name in names:
        if behind is None and name in vars(thing):
            return f"this {type(thing).__name__} has its own {name}"
        owner = next((base for base in bases if name in vars(base)), None)
        if owner is not None and not is_from(owner, name, tuple(packages)):
            return f"{owner.__name__} has its own {name}"
    return ""


def is_from(owner: type, name: str, packages: tuple[str, ...]) -> bool:
    """Whether a class, and all that one of its attributes is made of, was written in one of these packages."""
    modules = [owner.__module__, *(getattr(x, "__globals__", {}).get("__name__", "") for x in unwrap(vars(owner)[name]))]
    return all(any(f"{module}.".startswith(f"{package}.") for package in packages) for module in modules)


def unwrap(attribute: Any) -> Iterator[Any]:
    """The functions that an attribute of a class is made of: what decorators made, then what they were given."""
    if isinstance(attribute, property | cached_property):
        attribute = attribute.fget if isinstance(attribute, property) else attribute.func
    attribute = getattr(attribute, "__func__", attribute)
    while attribute is not None:
        yield attribute
        attribute = getattr(attribute, "__wrapped__", None)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module does more than its `forward`, for this module or for all."""
    everywhere = (getattr(torch.nn.modules.module, f"_global{name}") for name in HOOKS)
    return any(map(len, everywhere)) or any(len(getattr(module, name)) for name in HOOKS)
