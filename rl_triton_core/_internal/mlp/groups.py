"""Networks and optimizers as they are, and tables of groups of networks for compiled code."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rl_triton_core._internal.capture.host import list_parts
from rl_triton_core._internal.capture.key import list_hooks, list_places
from rl_triton_core._internal.capture.snapshot import Snapshot
from rl_triton_core._internal.mlp import serial
from rl_triton_core._internal.mlp import serial_values as values
from rl_triton_core._internal.mlp.compile import Loss, find_functions
from rl_triton_core._internal.mlp.memory import WIDTH
from rl_triton_core._internal.mlp.networks import Layer, Unsupported, check_parameters, list_layers, make_layer_table
from rl_triton_core._internal.mlp.optimizers import FROZEN, Learning, ParameterTables, describe_learning, list_kept

TENSOR = attrgetter("shape", "dtype", "requires_grad")


class Facts(NamedTuple):
    """Networks and an optimizer as they are."""

    layers: list[Layer]
    ends: list[int]
    parameters: list[Any]
    learning: list[Learning]
    kept: list[list[Any]]
    key: tuple[Any, ...]
    """Equal where tables would be: of groups and tensors which they are, where they lie, and what they are like."""


def collect_facts(networks: Sequence[nn.Module], optimizer: Optimizer | None, further: Sequence[Any] = ()) -> Facts:
    """Read what tables are made of, each thing once; raise `Unsupported` if it cannot be compiled.

    Networks may share modules, and without an optimizer, which may have further parameters, they do not learn.
    """
    layers, ends = list_layers(*networks)
    weights = [x for layer in layers for x in (layer.linear.weight, layer.linear.bias)]
    parameters = [x for x in (*weights, *further) if x is not None]
    learning = [FROZEN] * len(parameters) if optimizer is None else describe_learning(optimizer, parameters)
    kept = [[]] * len(parameters) if optimizer is None else list_kept(optimizer, parameters, learning)
    if any(True for _ in list_hooks(list_parts(networks), [] if optimizer is None else [optimizer], parameters)):
        raise Unsupported("a module, parameter or optimizer has hooks")
    tensors = [x for x in chain(parameters, *kept) if isinstance(x, Tensor)]
    try:
        described = [f(x) for f in (id, Tensor.data_ptr, Tensor.stride, TENSOR) for x in tensors]
    except RuntimeError as error:
        raise Unsupported(f"a parameter or a state has no memory of its own: {error}") from None
    learned: list[Any] = [(x.states, id(x.group)) for x in learning]
    learned += [] if optimizer is None else [[*map(id, x["params"])] for x in optimizer.param_groups]
    return Facts(layers, ends, parameters, learning, kept, (layers, ends, learned, described))


def make_snapshot(parts: Collection[tuple[Any, ...]], facts: Collection[Facts]) -> Snapshot:
    """What all of this depends on; parts are as `collect_facts` takes them, facts what it found."""
    modules = list_parts(x for own, *_ in parts for x in own)
    optimizers = [x for _, x, *_ in parts if x is not None]
    parameters = [x for own in facts for x in own.parameters]
    states = (x for own in facts for kept in own.kept for x in kept if isinstance(x, Tensor))
    places = [*map(vars, (*modules, *optimizers)), *list_places(modules, optimizers)]
    return Snapshot(places, parameters if optimizers else [], [*parameters, *states], (Tensor.stride, Tensor.numel))


class GroupTables:
    """Groups of networks, some with optimizers, as tables; raises `Unsupported` if compiled code cannot read one."""

    loss: Loss | None = None
    first, apart = values.FIRST_INPUT, (values.ACTOR, values.NEXT_ACTOR)
    """Rows of scratch memory before what networks take; groups whose units stay while others run."""
    further: tuple[int, ...] = ()
    """What compiled code takes behind the addresses of tables."""
    spare = 0  # rows behind what networks take

    def __init__(self, update: Any, facts: dict[int, Facts], optimizers: dict[int, Optimizer | None]) -> None:
        check_parameters([], [x for group, own in facts.items() if group != values.JUDGES for x in own.parameters])
        for own in facts.values():
            check_parameters(own.layers, own.parameters)
        self.facts = facts
        self.sizes = {group: [len(own.layers[end].linear.weight) for end in own.ends] for group, own in facts.items()}
        self.own = {group: ParameterTables(optimizers.get(group), *own[2:5]) for group, own in facts.items()}
        self.learning = {group: own for group, own in self.own.items() if optimizers.get(group) is not None}
        self.width = self.count_inputs(0)  # of the group of those that take most
        self.numbers = np.empty(serial.NUM_NUMBERS, np.float32)

    def count_inputs(self, group: int) -> int:
        """How many numbers the networks of a group take."""
        count, *others = {x.linear.weight.shape[1] for x in self.facts[group].layers if x.source < 0}
        if others:
            raise Unsupported("the networks take other features")
        return int(count)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Those of functions, groups and scratch memory, and further ones; optimizers get states that they have not."""
        self.kept = [find_functions(self.loss)]
        return self.place({group: own.make_tables() for group, own in self.own.items()})

    @cached_property
    def second_lane(self) -> tuple[int, ...]:
        """Addresses for another thread, which has scratch memory and gradients of its own."""
        return self.place({group: own.copy_tables() for group, own in self.own.items()})

    def place(self, tables: dict[int, tuple[np.ndarray, np.ndarray]]) -> tuple[int, ...]:
        """Addresses with these tables of parameters."""
        units = {group: 3 * sum(len(x.linear.weight) for x in own.layers) for group, own in self.facts.items()}
        before = 2 * self.width + max([self.spare, *(units.get(group, 0) for group in self.apart)])
        rows = self.first + before + max(units.values())
        inputs = max(x.linear.weight.shape[1] for own in self.facts.values() for x in own.layers)
        scratch = torch.zeros(rows + inputs + WIDTH + 1, serial.TILE, dtype=torch.float32, device="cpu")
        memory, groups = scratch.data_ptr(), np.zeros((values.NUM_GROUPS, serial.COLUMNS), np.int64)
        start = memory + self.first * serial.ROW
        self.kept += scratch, groups
        for group, own in self.facts.items():
            by_inputs = start + self.width * serial.ROW if group == values.JUDGES else 0
            first = 2 * self.width if group in self.apart else before
            table = make_layer_table(own.layers, own.parameters, start, first, by_inputs)
            arrays = *table, np.array(own.ends), *tables[group]
            layers, kinks, ends, parameters, settings = (x.ctypes.data for x in arrays)
            row = layers, len(own.layers), kinks, parameters, len(own.parameters), settings, ends, len(own.ends)
            groups[group] = *row, memory + rows * serial.ROW, 0
            self.kept += arrays
        if values.ACTOR in self.facts and values.NEXT_ACTOR not in self.facts:
            groups[values.NEXT_ACTOR] = groups[values.ACTOR]
        return self.kept[0].ctypes.data, groups.ctypes.data, memory, *self.further


class RolloutTables(GroupTables):
    """What a compiled epoch reads: an actor and a critic."""

    def __init__(self, update: Any, facts: dict[int, Facts], optimizers: dict[int, Optimizer | None]) -> None:
        super().__init__(update, facts, optimizers)
        self.loss, (outputs, *others) = update.loss, self.sizes[0]
        per_action, is_shared = 2 if update.loss.is_wide else 1, update.log_std is not None
        nvec = [outputs // per_action] if update.nvec is None else update.nvec
        actions = len(nvec) if update.loss.head == "categorical" else sum(nvec)
        old_outputs = sum(nvec) * (2 if update.loss.head == "gaussian" else 1)
        if per_action * sum(nvec) != outputs or others != [1]:
            raise Unsupported(f"the networks have {self.sizes[0]} outputs, not {[per_action * sum(nvec), 1]}")
        if is_shared and update.log_std.numel() != outputs:
            raise Unsupported(f"log_std has shape {tuple(update.log_std.shape)}, not one number per action")
        self.first = serial.FIRST_SUM + serial.NUM_SUMS * len(nvec) + actions + old_outputs
        self.columns, self.nvec = (self.width, actions, 0, 0, 0, 0, outputs, old_outputs), np.array(nvec)
        shared = len(facts[0].parameters) - 1 if is_shared else -1
        self.further = self.nvec.ctypes.data, len(nvec), shared, self.numbers.ctypes.data


class ValueTables(GroupTables):
    """What compiled gradient steps read."""

    def __init__(self, update: Any, facts: dict[int, Facts], optimizers: dict[int, Optimizer | None]) -> None:
        critics, actor, pairs = facts[values.CRITICS], facts.get(values.ACTOR), [(values.CRITICS, values.TARGETS)]
        self.is_gaussian = actor is not None and len(actor.ends) == 2
        if actor is not None:
            ends = critics.ends if self.is_gaussian else critics.ends[:1]
            nothing: Any = [FROZEN] * len(critics.parameters), [[]] * len(critics.parameters), ()
            facts = facts | {values.JUDGES: Facts(critics.layers[: max(ends) + 1], ends, critics.parameters, *nothing)}
        if actor is not None and self.is_gaussian == (values.NEXT_ACTOR in facts):
            raise Unsupported("an actor that returns actions has a target, and no other has")
        pairs += [(values.ACTOR, values.NEXT_ACTOR)] if actor is not None and not self.is_gaussian else []
        super().__init__(update, facts, optimizers)
        for x, y in ((facts[x], facts[y]) for x, y in pairs):
            if x.ends != y.ends or [p.shape for p in x.parameters] != [p.shape for p in y.parameters]:
                raise Unsupported("targets are other networks than what they follow")
        actions, returned = self.sizes.get(values.ACTOR, [0])[0], self.sizes[values.CRITICS]
        count = max(update.quantiles, 1)
        if actor and ({*self.sizes[values.ACTOR]} != {actions} or {*returned} != {count}):
            raise Unsupported(f"the actor returns {self.sizes[values.ACTOR]}, the critics {returned}")
        features = self.count_inputs(values.ACTOR if actor else values.CRITICS)
        if self.width != features + actions:
            raise Unsupported("the networks take other features")
        if not actor and (len(returned) > 1 or returned[0] % count):
            raise Unsupported(f"critics return {returned}: without an actor, one returns {count} of each action")
        num_targets = (count - update.dropped_quantiles) * (len(returned) if actor and update.quantiles else 1)
        self.spare, self.num_weights = num_targets, sum(x.numel() for x in critics.parameters)
        self.columns = features, actions or 1, features, 0, 0, actions or 1, actions or 1
        self.options = np.array([0.0, 0.0, 0.0, update.quantiles, num_targets])
        self.further = self.options.ctypes.data, self.numbers.ctypes.data


def view_samples(samples: Any, columns: Sequence[int], wanted: dict[str, bool]) -> tuple[np.ndarray, ...]:
    """Samples as arrays, if their shapes are those that are expected; of what is not wanted, arrays of nothing.

    Columns are how many numbers a sample has of each: 0 stands for one, without a dimension of its own.
    """
    arrays, count = [], len(samples[0])
    for name, x, number in zip(samples._fields, samples, columns, strict=True):
        shape, array = (count, number) if number else (count,), x
        if not wanted.get(name, True):
            array = np.empty((0, 0)[: len(shape)], np.float32)
        elif x is None:
            raise ValueError(f"{name}: got None, expected a tensor with these networks and options")
        elif x.shape != shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {shape}")
        elif isinstance(x, Tensor):
            if x.requires_grad or not x.is_cpu:
                raise ValueError(f"{name}: got {x.device} and requires_grad={x.requires_grad}, expected cpu and False")
            array = x.numpy()
        arrays.append(np.ascontiguousarray(array, bool if name == "action_masks" else np.float32))
    return tuple(arrays)
