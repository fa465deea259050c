"""What modules keep on the host, which a graph keeps as it was: numbers, functions, random states."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Optimizer

NUMBERS = (NoneType, bool, int, float, complex, str, bytes, Enum, np.generic, np.dtype)
SETTINGS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial, type, property, staticmethod, classmethod)
PLAIN = (*NUMBERS, *SETTINGS, *FUNCTIONS)
"""What counts as it is; tuples of such, too."""
RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
OPAQUE = (Tensor, Optimizer, Distribution, ModuleType, *RANDOM)
"""Of what the type alone counts: it is known by other means, or made anew in every step."""
SEQUENCES = (list, tuple, deque)
INTERNAL = vars(nn.Module()).keys() - {"training"}
"""Attributes of every module: its parts, tensors and hooks, which are looked at by themselves."""
BASES = {*nn.Module.__mro__, *dict.__mro__, *list.__mro__}
"""Classes of which nothing is looked at."""
MOST = 256
"""Items of a container that is looked into: a larger one is data."""
DEEPEST = 3
"""Objects and containers between a module and what counts."""
MISSING: Any = object()


@lru_cache(MOST)
def is_kind(kind: type, kinds: tuple[type, ...]) -> bool:
    """Whether a class is one of these, or derives from one."""
    return issubclass(kind, kinds)


def is_plain(x: Any) -> bool:
    """Whether a value counts as it is."""
    return is_kind(type(x), PLAIN) or (isinstance(x, tuple) and len(x) <= MOST and all(map(is_plain, x)))


def describe(x: Any) -> Hashable:
    """What of a value counts, besides what is in it."""
    if is_plain(x):
        return type(x), x
    is_short = isinstance(x, np.ndarray) and x.nbytes <= MOST and not x.dtype.hasobject
    return (x.dtype.str, x.shape, x.tobytes()) if is_short else type(x)


def find_items(x: Any) -> Any:
    """What is looked into: a container, or the attributes of an object; None if nothing is.

    An object with a tensor that has a history is one that a step has made.
    """
    if is_plain(x) or is_kind(type(x), OPAQUE):
        return None
    if isinstance(x, (dict, *SEQUENCES)):
        return x if len(x) <= MOST else None
    own = getattr(x, "__dict__", None)
    if not isinstance(own, dict) or isinstance(x, nn.Module):
        return own
    return None if any(isinstance(y, Tensor) and y.grad_fn is not None for y in own.values()) else own


class Kept(NamedTuple):
    """In the place of a value that a copy is not to keep alive."""

    description: Hashable

    @classmethod
    def of(cls, x: Any) -> Kept:
        """That of a value."""
        return x if isinstance(x, Kept) else cls(describe(x))


class Holder(NamedTuple):
    """Where something is kept: a container, or the attributes of an object or a class."""

    name: str
    items: Any
    owner: Any
    """Whose attributes they are; None for a container."""

    def list_keys(self) -> list[Any]:
        """The names, or places, of what counts."""
        hidden = INTERNAL if isinstance(self.owner, nn.Module) else ()
        keys = range(len(self.items)) if isinstance(self.items, SEQUENCES) else self.items
        return [key for key in keys if key not in hidden]

    def copy(self) -> dict[Any, Any]:
        """What is there now."""
        items = [(key, self.items[key]) for key in self.list_keys()]
        return {key: x if is_plain(x) else Kept.of(x) for key, x in items}

    def put(self, key: Any, value: Any) -> None:
        """Set an item, or delete it."""
        if isinstance(self.owner, type):
            delattr(self.owner, key) if value is MISSING else setattr(self.owner, key, value)
        elif value is MISSING:
            del self.items[key]
        elif isinstance(self.items, dict) or key < len(self.items):
            self.items[key] = value
        else:
            self.items.append(value)


class Change(NamedTuple):
    """An item that is another than before; it may have been missing, or be missing now."""

    holder: Holder
    key: Any
    before: Any
    after: Any


def list_getters(holders: Iterable[Holder]) -> list[list[tuple[Callable[[Any], tuple[Any, ...]], Any]]]:
    """How items are read of which the value, the type and the identity is compared, and where."""
    getters: list[list[Any]] = [[], [], []]
    for holder in holders:
        keys: list[list[Any]] = [[], [], []]
        for key in holder.list_keys():
            x = holder.items[key]
            keys[0 if is_plain(x) else 1 if is_kind(type(x), OPAQUE) else 2].append(key)
        for each, own in zip(getters, keys, strict=True):
            if own:
                each.append((itemgetter(*own, own[0]), holder.items))  # of a single one it would return no tuple
    return getters


def list_parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules and all modules in them, each once: `nn.Module.modules` takes longer, since it makes names."""
    found: dict[nn.Module, None] = {}
    waiting = [*modules]
    for module in waiting:
        if module not in found:
            found[module] = None
            if module._modules:
                waiting += [x for x in module._modules.values() if x is not None]
    return [*found]


def list_devices(module: nn.Module) -> list[torch.device]:
    """Where a module has tensors of its own."""
    return [x.device for own in (module._parameters, module._buffers) for x in own.values() if x is not None]


def as_bytes(state: Any) -> bytes:
    """A random state, to be compared."""
    return pickle.dumps(state.numpy() if isinstance(state, Tensor) else state)


class HostState:
    """What modules keep on the host: their attributes, and what is in containers and objects among these.

    Attributes:
        parts: The modules and all in them; those in plain containers too, if they are on the same device.
        generators: The random numbers that they hold.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        """Look for it, and remember how it is."""
        self.device = device
        self.holders: list[Holder] = []
        self.generators: list[Any] = []
        registered, found = list_parts(modules), set[int]()
        for x in registered:
            self.look_into(x, "", 0, found)
        parts = [x.owner for x in self.holders if isinstance(x.owner, nn.Module)]
        self.parts = [x for x in parts if x in registered or {device}.issuperset(list_devices(x))]
        self.scripted = [x for x in self.parts if isinstance(x, torch.jit.ScriptModule)]  # whose mode is no attribute
        self.getters, self.sized = list_getters(self.holders), [x.items for x in self.holders]
        kinds = dict.fromkeys(kind for x in self.holders for kind in type(x.owner).__mro__ if kind not in BASES)
        classes = [Holder(kind.__name__, kind.__dict__, kind) for kind in kinds if kind is not NoneType]
        self.holders += classes
        self.functions = [x.items for x in classes]
        self.known = self.read()

    def look_into(self, x: Any, name: str, depth: int, found: set[int]) -> None:
        """Note what is there, and look into what is in it."""
        items = find_items(x)
        if id(x) in found or depth > DEEPEST or len(found) > MOST * MOST:
            return
        if items is None:
            self.generators += [x] if is_kind(type(x), RANDOM) and x not in self.generators else []
            return
        found.add(id(x))
        holder = Holder(name, x, None) if items is x else Holder(type(x).__name__, items, x)
        self.holders.append(holder)
        inside = [(items[key], f"{holder.name}.{key}") for key in holder.list_keys()]
        inside += [(part, "") for part in x._modules.values()] if isinstance(x, nn.Module) else []
        for value, path in inside:
            if not is_plain(value):
                self.look_into(value, path, 0 if isinstance(value, nn.Module) else depth + 1, found)

    def read(self) -> tuple[list[Any], list[Any]]:
        """What is compared by its value, and what by its identity."""
        plain, opaque, others = [[get(items) for get, items in x] for x in self.getters]
        modes, sizes = [x.training for x in self.scripted], [*map(len, self.sized)]
        functions = [[*x.values()] for x in self.functions]
        return [plain, [*map(type, chain(*opaque))], modes, sizes, functions], [*chain(*others)]

    def is_known(self) -> bool:
        """Whether all is as it was."""
        try:
            values, objects = self.read()
            return values == self.known[0] and all(map(is_, objects, self.known[1]))
        except Exception:  # something is missing, or can not be compared
            return False

    def describe(self) -> tuple[Hashable, ...]:
        """All that counts, by its names."""
        places = [(x.name, key, describe(x.items[key])) for x in self.holders for key in x.list_keys()]
        return *places, *[("", "training", x.training) for x in self.scripted], *self.parts

    def save(self) -> list[dict[Any, Any]]:
        """What is there, to be compared or put back."""
        return [x.copy() for x in self.holders]

    def list_changes(self, saved: list[dict[Any, Any]]) -> list[Change]:
        """What is another than it was."""
        changes = []
        for holder, before in zip(self.holders, saved, strict=True):
            now = holder.copy()
            for key in {**before, **now}:
                old, new = (x.get(key, MISSING) for x in (before, now))
                if old is not new and Kept.of(old) != Kept.of(new):
                    changes.append(Change(holder, key, old, MISSING if new is MISSING else holder.items[key]))
        return changes

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """After what happens inside, numbers, functions and random states are those of before."""
        saved, sources = self.save(), self.list_sources()
        states = [get() for _, get, _ in sources]
        try:
            yield
        finally:
            for change in reversed(self.list_changes(saved)):
                if not isinstance(change.before, Kept):
                    change.holder.put(change.key, change.before)
            for (*_, put), state in zip(sources, states, strict=True):
                put(state)

    @contextmanager
    def note_changes(self) -> Iterator[list[Change]]:
        """Raise if random numbers are drawn on the host inside; yield a list of what is another after it."""
        saved, sources, changes = self.save(), self.list_sources(), list[Change]()
        before = [as_bytes(get()) for _, get, _ in sources]
        yield changes
        for (name, get, _), state in zip(sources, before, strict=True):
            if as_bytes(get()) != state:
                raise RuntimeError(f"the step draws random numbers of {name} on the host, which no graph repeats")
        changes += self.list_changes(saved)

    def list_sources(self) -> list[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
        """Random states of the host: whose they are, how they are read and how they are set."""
        sources: list[Any] = [("Python", random.getstate, random.setstate)]
        sources.append(("NumPy", np.random.get_state, np.random.set_state))  # noqa: NPY002
        if self.device.type != "cpu":
            sources.append(("PyTorch", torch.get_rng_state, torch.set_rng_state))
        for x in self.generators:
            name = f"a {type(x).__name__}"
            if isinstance(x, np.random.Generator):
                source = x.bit_generator
                sources.append((name, partial(getattr, source, "state"), partial(setattr, source, "state")))
            elif not isinstance(x, torch.Generator):
                numpy = isinstance(x, np.random.RandomState)
                sources.append((name, x.get_state, x.set_state) if numpy else (name, x.getstate, x.setstate))
            elif x.device != self.device:
                sources.append((name, x.get_state, x.set_state))
        return sources

    def list_generators(self) -> list[torch.Generator]:
        """Those of the device's random numbers, which a graph can draw from."""
        return [x for x in self.generators if isinstance(x, torch.Generator) and x.device == self.device]
