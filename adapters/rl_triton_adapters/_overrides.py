"""What a user has changed in an object of a framework: an adapter that goes around a method asks whether it may."""

import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from inspect import unwrap as find_innermost
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
COMPILED = "_compiled_call_impl"
"""Where `nn.Module.compile` leaves what is called."""
HOOKS_OF_ALL = [vars(nn.modules.module)[f"_global{name}"] for name in HOOKS]
"""Those of all modules."""
KNOWN: dict[tuple[tuple[str, ...], type, str], Any] = {}
"""Attributes that were found to be a framework's, by its packages, their class and their name."""


def find_override(thing: Any, names: Iterable[str], packages: tuple[str, ...], behind: type | None = None) -> str:
    """Find a method or property that is not the framework's, and say which; empty if there is none.

    Args:
        thing: An object of a framework's class or of one that derives from it; or the class, without an object.
        names: What an adapter goes around. Those that the object does not have are left out.
        packages: Packages and modules of the framework, and of the decorators that it uses.
        behind: A class of ours that overrides these methods itself: those of the classes behind it count, as `super`
            finds them; all, where the object borrows our method.
    """
    kind = thing if isinstance(thing, type) else type(thing)
    bases = kind.__mro__[kind.__mro__.index(behind) + 1 if behind in kind.__mro__ else 0 :]
    own = getattr(thing, "__dict__", {}) if kind is not thing and behind is None else {}
    for name in names:
        if name in own:
            return f"this {kind.__name__} has its own {name}"
        for owner in bases:
            if name in owner.__dict__:
                if not is_from(packages, owner, name):
                    return f"{owner.__name__} has its own {name}"
                break
    return ""


def is_from(packages: tuple[str, ...], owner: type, name: str) -> bool:
    """Whether a class, and all that one of its attributes is made of, was written in one of these packages."""
    attribute, key = vars(owner)[name], (packages, owner, name)
    if "<locals>" in owner.__qualname__:  # a class that may be made at each call is not kept
        return is_written_in(packages, attribute, owner.__module__)
    if KNOWN.get(key) is not attribute and is_written_in(packages, attribute, owner.__module__):
        KNOWN[key] = attribute
    return KNOWN.get(key) is attribute


def is_written_in(packages: tuple[str, ...], attribute: Any, *modules: str) -> bool:
    """Whether all functions that an attribute of a class is made of, and these modules, are of these packages."""
    modules = *modules, *list_homes(attribute)
    return all(any(f"{module}.".startswith(f"{package}.") for package in packages) for module in modules)


def find_replaced(method: Any, packages: tuple[str, ...]) -> str:
    """Find a global function that a framework's method calls and that is not its own; empty if there is none."""
    *_, function = unwrap(method)
    scope = getattr(function, "__globals__", {})
    for name in list_names(function.__code__) if scope else ():
        x = scope.get(name)
        if callable(x) and not isinstance(x, type | BuiltinFunctionType) and not is_written_in(packages, x):
            return f"{scope['__name__']}.{name}"
    return ""


def list_homes(attribute: Any) -> list[str]:
    """The modules where the functions were written that an attribute of a class is made of; empty for what is none."""
    return [getattr(x, "__globals__", {}).get("__name__", "") for x in unwrap(attribute)]


def unwrap(attribute: Any) -> Iterator[Any]:
    """The functions that an attribute of a class is made of: what decorators made, then what they were given."""
    if isinstance(attribute, property | cached_property):
        attribute = attribute.fget if isinstance(attribute, property) else attribute.func
    attribute = getattr(attribute, "__func__", attribute)
    while attribute is not None:
        yield attribute
        attribute = getattr(attribute, "__wrapped__", None)


def find_settings(thing: Any, functions: Iterable[Any], packages: Any, inputs: Iterable[str]) -> tuple[str, list[Any]]:
    """What functions of a framework call by names of modules, and read of numbers and the like from an object.

    Args:
        thing: The object.
        functions: Functions and methods.
        packages: The framework's package, whose functions are followed, and others that are no user's.
        inputs: Attributes that do not count.

    Returns:
        Which of it is a user's, empty if nothing is; and all of it, to be compared.
    """
    codes = [find_innermost(getattr(x, "__func__", x)) for x in functions]
    names = dict.fromkeys(name for x in codes for name in list_names(x.__code__))
    called, known = list_called(codes, packages[0]), {*packages, *sys.stdlib_module_names}
    users = [name for name, x in called if not {y.partition(".")[0] for y in list_homes(x)} <= known]
    computed = [x for x in names if isinstance(getattr(type(thing), x, None), property)]
    reasons = [f"{name} is not that of {packages[0]}" for name in users]
    reasons += [f"{type(thing).__name__} computes {x}" for x in computed if isinstance(getattr(thing, x), Number)]
    own = {name: vars(thing).get(name, ...) for name in names if name not in inputs}
    plain = {name: x for name, x in own.items() if x is None or isinstance(x, Number | str) or callable(x)}
    return next(iter(reasons), ""), [called, plain]


def list_called(functions: Iterable[Any], package: str) -> list[tuple[str, Any]]:
    """The functions that these call and, with their names, where they look them up: `f`, `F.mse_loss`."""
    found: list[tuple[str, Any]] = []
    waiting = [*functions]
    for function in waiting:
        scopes, names = [function.__globals__], list_names(function.__code__)
        for scope in scopes:
            for name, x in ((name, scope.get(name)) for name in names):
                if isinstance(x, ModuleType):
                    scopes += [vars(x)] * all(vars(x) is not known for known in scopes)
                elif callable(x) and not isinstance(x, type | BuiltinFunctionType) and (name, x) not in found:
                    found.append((name, x))
                    waiting += [x] * (isinstance(x, FunctionType) and is_written_in((package,), x) and x not in waiting)
    return found


def list_names(code: CodeType) -> list[str]:
    """The names of variables of modules and of attributes that a function's code has."""
    inner = (name for x in code.co_consts if isinstance(x, CodeType) for name in list_names(x))
    return [*code.co_names, *inner]


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module does more than its `forward`, for this module or for all."""
    own: Any = module.__dict__
    ahead, behind, back_ahead, back_behind = (own[name] for name in HOOKS)
    return bool(ahead or behind or back_ahead or back_behind or any(HOOKS_OF_ALL))


def list_modules(module: nn.Module) -> list[nn.Module]:
    """A module and all modules in it, some more than once: `nn.Module.modules` takes longer, since it makes names."""
    found = [module]
    for x in found:
        found += [part for part in x._modules.values() if part is not None]
    return found


def apply_modules(modules: Iterable[nn.Module | None], x: Tensor) -> Tensor:
    """Call modules in turn, without gradients; those of perceptrons without what `nn.Module` does besides."""
    for module in modules:
        own: Any = module.__dict__
        is_plain = not (own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or own.get(COMPILED))
        kind = type(module) if is_plain else None
        if kind is nn.Linear:
            x = linear(x, own["_parameters"]["weight"], own["_parameters"]["bias"])
        elif kind is nn.Tanh:
            x = x.tanh()
        elif kind is nn.Sequential:
            x = apply_modules(own["_modules"].values(), x)
        else:
            x = module(x)  # type: ignore[misc]
    return x
