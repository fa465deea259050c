"""What modules keep on the host, which a graph keeps as it was: numbers, functions, random states."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributions import Distribution
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

NUMBERS = (NoneType, bool, int, float, complex, str, bytes, Enum, np.generic, np.dtype)
SETTINGS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial, type, property, staticmethod, classmethod)
PLAIN = (*NUMBERS, *SETTINGS, *FUNCTIONS)
"""What counts as it is; tuples of such, too."""
USUAL = frozenset(PLAIN)
"""Looking for a class itself takes less time than looking for all that it derives from."""
RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
OPAQUE = (Tensor, Optimizer, LRScheduler, GradScaler, Distribution, ModuleType, *RANDOM)
"""Of what the type alone counts: it is known by other means, or made again in every step."""
SEQUENCES = (list, tuple)
INTERNAL = vars(nn.Module()).keys() - {"training"}
"""Attributes of every module: its parts, tensors and hooks, which are looked at by themselves."""
BASES = {*nn.Module.__mro__, *dict.__mro__, *list.__mro__, NoneType}
"""Classes of which nothing is looked at."""
MOST = 256
"""Items of a container that is looked into: a larger one is data."""
DEEPEST = 3
"""Objects and containers between a module and what counts."""
MISSING: Any = object()
"""In the place of an item, or of its description."""


class Plain(NamedTuple):
    """The description of a value that counts as it is."""

    kind: type
    value: Any


class Change(NamedTuple):
    """An item that is another than it was, as it is now: perhaps it is MISSING."""

    holder: Holder
    key: Any
    before: Any
    """The description of what it was."""
    now: Any

    def __str__(self) -> str:
        """Its name."""
        return f"{self.holder.name}.{self.key}"


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

    def describe(self) -> dict[Any, Any]:
        """What is there."""
        return {key: describe(self.items[key]) for key in self.list_keys()}

    def put(self, key: Any, value: Any) -> None:
        """Set an item, or delete it where it is to be MISSING; a list ends there then."""
        if isinstance(self.owner, type):
            delattr(self.owner, key) if value is MISSING else setattr(self.owner, key, value)
        elif isinstance(self.items, list):
            self.items[key:] = [] if value is MISSING else [value, *self.items[key + 1 :]]
        elif value is MISSING:
            del self.items[key]
        else:
            self.items[key] = value


def is_plain(x: Any) -> bool:
    """Whether a value counts as it is."""
    return (
        type(x) in USUAL or isinstance(x, PLAIN) or (isinstance(x, tuple) and len(x) <= MOST and all(map(is_plain, x)))
    )


def describe(x: Any) -> Any:
    """What of a value counts, besides what is in it."""
    if is_plain(x):
        return Plain(type(x), x)
    is_short = isinstance(x, np.ndarray) and x.nbytes <= MOST and not x.dtype.hasobject
    return (x.dtype.str, x.shape, x.tobytes()) if is_short else type(x)


class Scripted:
    """The numbers and the like among the attributes of a scripted module, which has no dictionary of them."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        """Find their names."""
        self.kept: Any = module._c
        self.names = [x for x in module._concrete_type.get_attributes() if is_plain(self[x])]

    def __getitem__(self, name: str) -> Any:
        """The value; a list is another one whenever it is read."""
        value = self.kept.getattr(name)
        return tuple(value) if isinstance(value, list) else value

    def __setitem__(self, name: str, value: Any) -> None:
        """Set it."""
        self.kept.setattr(name, value)

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        return iter(self.names)

    def __len__(self) -> int:
        """Their number."""
        return len(self.names)


def find_items(x: Any) -> Any:
    """What is looked into: a container, or the attributes of an object; None if nothing is.

    An object with a tensor that has a history is one that a step has made.
    """
    if is_plain(x) or isinstance(x, OPAQUE):
        return None
    if isinstance(x, torch.jit.ScriptModule):
        return Scripted(x)
    if isinstance(x, (dict, *SEQUENCES)):
        return x if len(x) <= MOST else None
    own = getattr(x, "__dict__", None)
    if not isinstance(own, dict) or isinstance(x, nn.Module):
        return own
    return None if any(isinstance(y, Tensor) and y.grad_fn is not None for y in own.values()) else own


def list_getters(holders: Iterable[Holder]) -> list[list[tuple[Callable[[Any], tuple[Any, ...]], Any]]]:
    """How items are read of which the value, the type and the identity is compared, and where."""
    getters: list[list[Any]] = [[], [], []]
    for holder in holders:
        keys: list[list[Any]] = [[], [], []]
        for key in holder.list_keys():
            x = holder.items[key]
            keys[0 if is_plain(x) else 1 if isinstance(x, OPAQUE) else 2].append(key)
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


class Source(NamedTuple):
    """Random numbers of the host, and how their state is read and set."""

    owner: Any
    read: Callable[[], Any]
    set_state: Callable[[Any], Any]

    @property
    def name(self) -> str:
        """What a reason calls them."""
        return getattr(self.owner, "__name__", type(self.owner).__name__)

    def find_place(self) -> Any:
        """By what one of PyTorch's generators is known: operations are given other objects of it."""
        return getattr(self.owner, "_cdata", None)


def find_source(x: Any) -> Source:
    """Random numbers of a module, or of an object."""
    if isinstance(x, np.random.Generator):
        return Source(x, lambda: x.bit_generator.state, partial(setattr, x.bit_generator, "state"))
    return Source(x, *((x.getstate, x.setstate) if hasattr(x, "getstate") else (x.get_state, x.set_state)))


class Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The places of generators from which operations of PyTorch draw inside, in this thread and in backward passes."""

    def __init__(self) -> None:
        """None yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the generator of an operation with random results on the host."""
        results = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Generator)]
            on_host = any(isinstance(x, Tensor) and x.device.type == "cpu" for x in pytree.tree_leaves(results))
            self.places += [find_source(x).find_place() for x in given or [torch.default_generator] * on_host]
        return results


def as_bytes(state: Any) -> bytes:
    """A random state, to be compared."""
    return pickle.dumps(state.numpy() if isinstance(state, Tensor) else state)


class HostState:
    """What modules keep on the host: their attributes, and what is in containers and objects among these.

    Attributes:
        parts: The modules and all in them; those in plain containers too, if they are on the same device.
        generators: Of the device's random numbers, those that modules hold.
        sources: Of random numbers of the host, those of all and those that modules hold.
        shared: Those from which other threads have drawn, while a step did not: their state is left alone.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        """Look for it, and remember how it is."""
        self.holders: list[Holder] = []
        self.generators: list[torch.Generator] = []
        self.shared: list[Source] = []
        own = [random, np.random, *[torch.default_generator] * (device.type != "cpu")]
        self.sources = [*map(find_source, own)]
        registered, found = list_parts(modules), dict[int, Any]()
        for x in registered:
            self.look_into(x, "", 0, found, device)
        parts = [x.owner for x in self.holders if isinstance(x.owner, nn.Module)]
        homes = [{y.device for y in (*x._parameters.values(), *x._buffers.values()) if y is not None} for x in parts]
        self.parts = [x for x, home in zip(parts, homes, strict=True) if x in registered or home <= {device}]
        self.getters, self.sized = list_getters(self.holders), [x.items for x in self.holders]
        kinds = dict.fromkeys(kind for x in self.holders for kind in type(x.owner).__mro__ if kind not in BASES)
        self.functions = [kind.__dict__ for kind in kinds]
        self.holders += [Holder(kind.__name__, kind.__dict__, kind) for kind in kinds]
        self.known = self.read()

    def look_into(self, x: Any, name: str, depth: int, found: dict[int, Any], device: torch.device) -> None:
        """Note what is there, and look into what is in it."""
        if id(x) in found or depth > DEEPEST or len(found) > MOST * MOST:
            return
        found[id(x)], items = x, find_items(x)
        if isinstance(x, torch.Generator) and x.device == device:
            self.generators.append(x)
        elif isinstance(x, RANDOM):
            self.sources.append(find_source(x))
        elif items is not None:
            holder = Holder(name, x, None) if items is x else Holder(type(x).__name__, items, x)
            self.holders.append(holder)
            inside = [(items[key], f"{holder.name}.{key}") for key in holder.list_keys()]
            inside += [(part, "") for part in x._modules.values()] if isinstance(x, nn.Module) else []
            for value, path in inside:
                if not is_plain(value):
                    self.look_into(value, path, 0 if isinstance(value, nn.Module) else depth + 1, found, device)

    def read(self) -> tuple[list[Any], list[Any]]:
        """What is compared by its value, and what by its identity."""
        plain, opaque, others = [[get(items) for get, items in x] for x in self.getters]
        modes, sizes = [x.training for x in self.parts], [*map(len, self.sized)]  # scripted modules have no attribute
        functions = [[*x.values()] for x in self.functions]
        return [plain, [*map(type, chain(*opaque))], modes, sizes, functions], [*chain(*others)]

    def is_known(self) -> bool:
        """Whether all is as it was."""
        try:
            values, objects = self.read()
            return bool(values == self.known[0]) and all(map(is_, objects, self.known[1]))
        except Exception:  # something is missing, or can not be compared
            return False

    def describe(self) -> tuple[Any, ...]:
        """All that counts: modules with their modes, and holders with the names of what they have."""
        items = [(x.name, *item) for x in self.holders for item in x.describe().items()]
        return *items, *[(x, "training", x.training) for x in self.parts]

    def list_changes(self, before: list[dict[Any, Any]]) -> list[Change]:
        """What is another than it was."""
        changes = []
        for holder, old in zip(self.holders, before, strict=True):
            new = holder.describe()
            keys = [key for key in old | new if old.get(key, MISSING) != new.get(key, MISSING)]
            now = [holder.items[key] if key in new else MISSING for key in keys]
            changes += [Change(holder, key, old.get(key, MISSING), x) for key, x in zip(keys, now, strict=True)]
        return changes

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """After what happens inside, random states and what is plain are those of before."""
        before, states = [x.describe() for x in self.holders], [x.read() for x in self.sources]
        try:
            yield
        finally:
            for x in self.list_changes(before):
                if x.before is MISSING or isinstance(x.before, Plain):
                    x.holder.put(x.key, getattr(x.before, "value", MISSING))
            for source, state in zip(self.sources, states, strict=True):
                if source not in self.shared:
                    source.set_state(state)

    def watch(self, call: Callable[[], Any], can_repeat: bool = True) -> tuple[Any, list[Change]]:
        """Make a call; raise if it draws the host's random numbers, return its results and what it has changed.

        Where other threads may have drawn them, the call is repeated to see who does: PyTorch's operations are seen as
        they draw, and numbers of NumPy and Python are not the call's if one of the two calls draws none. One that can
        not be repeated is such that a call before it drew none.
        """
        before = [x.describe() for x in self.holders]
        results, drawn = self.list_drawn(call)
        if drawn and threading.active_count() > 1:
            with Drawn() as seen:
                again = self.list_drawn(call)[1] if can_repeat else []
            own = [x for x in drawn if x in again and x.find_place() in (None, *seen.places)]
            self.shared, drawn = [x for x in drawn if x not in own], own
        if drawn:
            raise RuntimeError(f"the step draws from {drawn[0].name} on the host, which no graph repeats")
        return results, self.list_changes(before)

    def list_drawn(self, call: Callable[[], Any]) -> tuple[Any, list[Source]]:
        """Make a call; return its results, and the random numbers with another state after it."""
        states = [as_bytes(x.read()) for x in self.sources]
        results = call()
        return results, [x for x, state in zip(self.sources, states, strict=True) if as_bytes(x.read()) != state]
