"""What a user has changed in an object of a framework: an adapter that goes around a method asks whether it may."""

import sys
from abc import ABC
from collections.abc import Iterable, Sequence, Set
from functools import lru_cache
from numbers import Number
from types import FunctionType
from typing import Any

from torch import nn

from rl_triton_core.capture import Snapshot
from rl_triton_core.reach import Reach, describe_foreign, is_written_in, list_functions, list_read, locate
from rl_triton_core.reach import find_override as find_override  # noqa: PLC0414 - adapters have it from here

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
HOOKS_OF_ALL = [vars(nn.modules.module)[f"_global{name}"] for name in HOOKS]  # those of all modules
LIBRARIES = (
    *("torch", "numpy", "numba", "gymnasium", "packaging", "tensordict", "tree", "typing_extensions", "rl_triton_core"),
    "rl_triton_adapters",
    *sys.stdlib_module_names - {"abc", "unittest"},  # classes that a user's call makes, and mocks
)  # packages whose functions are no user's, besides the framework's
ADAPTERS = __name__.partition(".")[0]
PREFIX = f"{ADAPTERS}."
UNREAD = {*dir(type("", (), {}))} - {"__getattribute__", "__setattr__"}  # methods that make, compare and show objects
REACHED: dict[Any, tuple[Reach, str]] = {}
NAMES: dict[Any, Any] = {}  # what functions of a framework read of objects, and ours do not


def find_replaced(functions: Iterable[Any], things: Iterable[Any], packages: tuple[str, ...]) -> str:
    """Find a function of a library that some of a framework, or methods of things, call and that is not the library's.

    Things are objects, or their classes. Empty if there is none.
    """
    return reach(functions, things, packages)[1]


def reach(functions: Iterable[Any], things: Iterable[Any], packages: Any, closed: Any = ()) -> tuple[Reach, str]:
    """As `find_replaced`, with all that was looked at: another object, as soon as any of it is another one."""
    kinds = dict.fromkeys(x if isinstance(x, type) else type(x) for x in things)
    known, why = REACHED.get(key := (packages, closed, *functions, *kinds), (None, ""))
    if known is None or not known.holds():
        known = Reach(functions, kinds, packages, LIBRARIES, closed)
        found = ((name, key, x) for name, _, own in known.places.values() for key, x in own.items())
        why = next(filter(None, (describe_foreign(*x, {*packages, *LIBRARIES}) for x in found)), "")
        known.places.clear()
        REACHED[key] = known, why  # until something of it changes
        REACHED.pop(next(iter(REACHED)) if len(REACHED) > 64 else None, None)
    return known, why


def find_own(things: Sequence[Any], functions: Sequence[Any], packages: tuple[str, ...], *ours: Any) -> str:
    """Say which method of some objects, that functions of a framework are or call, is somebody's own; else nothing.

    The objects, or classes, may derive from the framework's; an adapter goes around the functions. `ours` runs in their
    place: methods that it calls, and those that these call, do not count.
    """
    kinds: list[Any] = [x if isinstance(x, type) else type(x) for x in things]
    key = (packages, ours, *functions, *kinds)
    names = NAMES.get(key)
    if names is None:
        own = tuple(y.__name__ for x in functions for y in list_functions(x))
        called = {name for kind in kinds for name in list_read(kind, ours, packages, own)}
        names = NAMES[key] = frozenset({*Reach(functions, kinds, packages, LIBRARIES).names, *own} - called)
        NAMES.pop(next(iter(NAMES)) if len(NAMES) > 64 else None, None)
    return next(filter(None, (describe_own(x, names, packages) for x in things)), "")


def describe_own(thing: Any, names: Set[str], packages: tuple[str, ...]) -> str:
    """What is said of a method of one of these names, or of an operator, that an object has and no library wrote."""
    kind: Any = thing if isinstance(thing, type) else type(thing)
    own = getattr(thing, "__dict__", {}) if kind is not thing else {}
    kind = getattr(kind, "__ray_actor_class__", kind)  # Ray wraps all methods of its actors
    for name in own.keys() & list_methods(kind, frozenset(names)):
        if callable(own[name]) and not is_written_in((ADAPTERS,), own[name]):
            return f"this {kind.__name__} has its own {name}{locate(own[name])}"
    owners, bases = split_bases(kind, packages)
    if owners and not bases:
        return f"{kind.__name__} derives from no class of {packages[0]}"
    for owner in owners:
        others = [x for x in kind.__mro__ if not x.__module__.startswith(PREFIX)]  # ours call what is behind
        for name, x in vars(owner).items():
            is_read = name in names or name[:2] == "__"
            if is_read and name not in UNREAD and owner is next(y for y in others if name in vars(y)):
                is_hidden = hasattr(x, "__set__") or any(hasattr(y, name) for y in bases)
                if is_hidden and (callable(x) or hasattr(x, "__get__")):
                    return f"{owner.__name__} has its own {name}{locate(x)}"
    return ""


@lru_cache(maxsize=256)
def list_methods(kind: Any, names: frozenset[str]) -> frozenset[str]:
    """Those of some names that are a class's methods."""
    return frozenset(x for x in names if callable(getattr(kind, x, None)))


@lru_cache(maxsize=256)
def split_bases(kind: Any, packages: tuple[str, ...]) -> tuple[list[type], list[type]]:
    """The classes that one derives from, in their order, `object` and `ABC` apart: users', and those of libraries."""
    known = {*packages, *LIBRARIES}
    bases = [x for x in kind.__mro__ if x.__module__.partition(".")[0] in known and ".examples." not in x.__module__]
    bases = [x for x in bases if x is not object]
    return [x for x in kind.__mro__[:-1] if x not in bases and x is not ABC], bases


def list_stock(kind: type, name: str, packages: tuple[str, ...]) -> tuple[Any, ...]:
    """What a framework's classes have of a name that a class derives from."""
    return tuple(vars(x)[name] for x in kind.__mro__ if x.__module__.startswith(packages) and name in vars(x))


def find_settings(
    thing: Any, functions: Iterable[Any], packages: tuple[str, ...], inputs: Iterable[str], things: Iterable[Any] = ()
) -> tuple[str, list[Any]]:
    """What functions of a framework call of libraries, and read of numbers and the like from an object.

    Attributes that are inputs do not count, and `things` are further objects whose methods may be called. Returns which
    of it is a user's, empty if nothing is; and all of it, to be compared.
    """
    kind: Any = type(thing)
    codes = tuple(y for x in functions for y in list_functions(x))
    known, why = reach(codes, [thing, *things], packages)
    names = list_read(kind, codes, packages)
    computed = [x for x in names if isinstance(getattr(kind, x, None), property)]
    reasons = (f"{kind.__name__} computes {x}" for x in computed if isinstance(getattr(thing, x), Number))
    own = {name: vars(thing).get(name, ...) for name in names if name not in inputs}
    plain = {name: x for name, x in own.items() if x is None or isinstance(x, Number | str) or callable(x)}
    return why or next(reasons, ""), [plain, known]


def make_snapshot(things: Sequence[Any], packages: tuple[str, ...]) -> Snapshot:
    """What modules among some objects have, hooks among it, and what a user's classes have that they derive from."""
    modules: list[Any] = [x for x in things if isinstance(x, nn.Module)]
    own = [vars(y).values() for x in things for y in split_bases(x.__class__, packages)[0]]
    inside = [getattr(x, name) for x in modules for name in ("__dict__", "_modules", *HOOKS)]
    return Snapshot([*HOOKS_OF_ALL, *inside, *own], [], [])


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module does more than its `forward`, for this module or for all."""
    return any(module.__dict__[name] for name in HOOKS) or any(HOOKS_OF_ALL)


def list_modules(module: nn.Module) -> list[nn.Module]:
    """A module and all modules in it, some more than once: `nn.Module.modules` takes longer, since it makes names."""
    found = [module]
    for x in found:
        found += [part for part in x._modules.values() if part is not None]
    return found


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
