"""What a graph depends on besides the step's function: inputs, modules, hooks, settings, places in memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from numbers import Integral, Real
from operator import is_, methodcaller
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from rl_triton_core._internal.arguments.validation import is_number
from rl_triton_core._internal.capture.host import HostState
from rl_triton_core._internal.capture.optimizers import describe_settings, list_step_hooks
from rl_triton_core._internal.capture.snapshot import Snapshot

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOKS = [vars(module_hooks)[f"_global{name}"] for name in HOOKS]
"""Hooks of all modules."""
FURTHER = ("state_dict", "with_kwargs", "always_called")
INSIDE = [name for name, x in vars(nn.Module()).items() if isinstance(x, dict) and not any(y in name for y in FURTHER)]
"""Where a module has parts, tensors and hooks; what else it knows of hooks is of these."""


def describe_leaf(x: Any) -> Hashable:
    """What of an input a graph depends on: not on the device, since tensors are copied to the graph's."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    if is_number(x):
        return Integral if isinstance(x, Integral) else Real
    known: Hashable = x
    return known


def describe_context() -> Hashable:
    """What of this thread a graph depends on."""
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def describe_mode(parts: Iterable[nn.Module], optimizers: Iterable[Optimizer], tensors: Iterable[Tensor]) -> Hashable:
    """What else a graph depends on: hooks, frozen parameters, settings."""
    frozen = tuple([not x.requires_grad for x in tensors])
    settings = tuple([describe_settings(x) for x in optimizers])
    return tuple(list_hooks(parts, optimizers, tensors)), frozen, settings


def list_places(parts: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> Iterator[Any]:
    """The dictionaries and lists in which modules have parts, tensors and hooks, and optimizers all that they have."""
    yield from GLOBAL_HOOKS
    yield from (getattr(x, name) for x in parts for name in INSIDE)
    for x in optimizers:
        yield from (*list_step_hooks(x), vars(x), x.param_groups, *x.param_groups, x.state, *x.state.values())
        yield from (group["params"] for group in x.param_groups)


def list_hooks(parts: Iterable[nn.Module], optimizers: Iterable[Optimizer], tensors: Iterable[Tensor]) -> Iterator[int]:
    """The hooks that a step runs, by PyTorch's numbers: no two in a process have the same."""
    kinds: list[dict[int, Any] | None] = [*GLOBAL_HOOKS]
    for part in parts:
        kinds += (getattr(part, name) for name in HOOKS)
    for x in tensors:
        kinds += x._backward_hooks, x._post_accumulate_grad_hooks
    for optimizer in optimizers:
        kinds += list_step_hooks(optimizer)
    return chain.from_iterable(filter(None, kinds))


def name_context() -> str:
    """What is active around a step and calls Python at every operation, as no graph does; empty if nothing is."""
    if torch.is_anomaly_enabled():
        return "anomaly detection is on"
    saved_tensor_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if saved_tensor_hooks:
        return "hooks of saved tensors are active"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is active"
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(not isinstance(mode, DeviceContext) for mode in modes):  # which a default device is
        return "a TorchFunctionMode is active"
    return ""


def list_tensors(parts: Iterable[nn.Module], optimizers: Iterable[Optimizer], extra: Iterable[Tensor]) -> list[Tensor]:
    """Parameters and buffers of parts of modules, parameters of optimizers, and further ones, each once."""
    found: dict[int, Tensor | None] = {}
    for part in parts:
        for own in (part._parameters, part._buffers):
            for x in own.values() if own else ():
                found[id(x)] = x
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for x in group["params"]:
                found[id(x)] = x  # most are those of the modules
    return [x for x in (*found.values(), *extra) if x is not None]


class State:
    """Stands for all that modules keep on the host, in a graph's key; while there is none with it, it is forgotten."""


class Contents:
    """The parts of modules and the tensors that a step has, and what modules keep on the host.

    They are listed again only where something is another than before.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self.host = HostState([], torch.device("cpu"))
        self.tensors: list[Tensor] = []
        self.found: list[Any] = []
        self.places: list[Any] = []
        """The dictionaries that have, or may get, parts and tensors; scripted modules' are of classes of their own."""
        self.states: WeakValueDictionary[Hashable, State] = WeakValueDictionary()
        self.described: tuple[Any, ...] = ()
        self.state: State | None = None
        """The same where what was found last is the same."""
        self.changed = ""
        """What has changed last of what modules keep on the host."""
        self.key: tuple[Hashable, ...] = ()
        self.snapshot: Snapshot | None = None
        self.repeats, self.patience = 0, 1
        """How often the key was the same, and has to be before a snapshot is made: more often where none holds long."""

    def holds(self) -> bool:
        """Whether `key` is known to be what `describe` would find, and tensors to lie where they lay."""
        if self.snapshot is None:
            return False
        if self.snapshot.holds() and self.host.is_known():
            self.repeats += 1
            return True
        self.patience = 1 if self.repeats > 16 * self.patience else 2 * self.patience
        self.snapshot, self.repeats = None, 0
        return False

    def describe(self, modules: list[nn.Module], optimizers: list[Optimizer], extra: list[Tensor]) -> None:
        """Look at everything that a graph depends on besides inputs and the thread, after `find`."""
        if self.state is None:
            before, self.described = self.described, self.host.describe()
            pairs = zip(self.described, before, strict=False)
            changed = [f"{x[0]}.{x[1]}" for x, old in pairs if x != old and isinstance(x, tuple)]
            self.changed = next(iter(changed), self.changed)
            self.state = self.states.setdefault(self.described, State())
        parts, key = self.host.parts, (self.state, describe_mode(self.host.parts, optimizers, self.tensors))
        self.repeats, self.key = self.repeats + 1 if key == self.key else 0, key
        if self.repeats >= self.patience and not any(isinstance(x, torch.jit.ScriptModule) for x in parts):
            places, kept = [modules, optimizers, extra, *list_places(parts, optimizers)], list_kept(optimizers)
            self.snapshot, self.repeats = Snapshot(places, self.tensors, [*self.tensors, *kept]), 0

    def find(
        self, modules: list[nn.Module], optimizers: list[Optimizer], extra: list[Tensor], device: torch.device
    ) -> list[Tensor]:
        """The tensors."""
        found = self.collect(modules, optimizers, extra)
        if len(found) != len(self.found) or not all(map(is_, found, self.found)) or not self.host.is_known():
            self.host = HostState(modules, device)
            self.tensors = list_tensors(self.host.parts, optimizers, extra)
            self.places = [own for x in self.host.parts for own in (x._modules, x._parameters, x._buffers)]
            self.found = self.collect(modules, optimizers, extra)
            self.state = self.snapshot = None  # of the host as it was
        return self.tensors

    def collect(self, modules: list[nn.Module], optimizers: list[Optimizer], extra: list[Tensor]) -> list[Any]:
        """All of them, as they are known, each as often as it is there."""
        learned = [group["params"] for x in optimizers for group in x.param_groups]
        inside = chain.from_iterable(map(methodcaller("values"), filter(None, self.places)))
        return [*modules, *chain.from_iterable(learned), *extra, *inside]


def list_kept(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """The tensors of optimizers' states."""
    states = chain.from_iterable(getattr(optimizer, "state", {}).values() for optimizer in optimizers)
    return [x for x in chain.from_iterable(map(dict.values, states)) if isinstance(x, Tensor)]


def find_pointers(tensors: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> tuple[int, ...]:
    """Where the tensors lie that a graph knows by their addresses, those of the optimizers' states among them."""
    return tuple([x.data_ptr() for x in (*tensors, *list_kept(optimizers))])
