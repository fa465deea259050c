"""PyTorch's optimizers as tables of settings and addresses: their state stays where it is."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import proxy

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from rl_triton_core._internal.capture.optimizers import name_repeated
from rl_triton_core._internal.mlp import serial
from rl_triton_core._internal.mlp.networks import Unsupported, is_plain_tensor

TF_LIKE = "stable_baselines3.common.sb2_compat.rmsprop_tf_like.RMSpropTFLike"
RULES = {Adam: serial.ADAM, AdamW: serial.ADAM, RMSprop: serial.RMSPROP, SGD: serial.SGD}
REFUSED = ("amsgrad", "maximize", "dampening", "differentiable", "capturable")
"""Settings with which an optimizer is not compiled."""
PLACES = {"exp_avg": 1, "square_avg": 1, "exp_avg_sq": 2, "momentum_buffer": 2, "grad_avg": 3}
"""Where the addresses of states are, behind that of the count of steps."""


def find_rule(optimizer: Optimizer) -> int:
    """The number of an optimizer's rule."""
    kind = type(optimizer)
    if f"{kind.__module__}.{kind.__qualname__}" == TF_LIKE:
        return serial.RMSPROP_TF
    if kind not in RULES:
        names = ", ".join(x.__name__ for x in RULES)
        raise Unsupported(f"{kind.__name__} is none of the optimizers that are compiled: {names}, RMSpropTFLike")
    return RULES[kind]


def find_groups(optimizer: Optimizer, parameters: list[Tensor]) -> list[dict[str, Any]]:
    """The group of each parameter that is to be updated; an empty one for those that are frozen."""
    known = {id(x): group for group in optimizer.param_groups for x in group["params"]}
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        refused = next((key for key in REFUSED if group.get(key)), "")
        if refused or any(isinstance(x, Tensor) for x in group.get("betas", ())):
            raise Unsupported(f"{name} with {refused or 'settings that are tensors'} is not compiled")
    if any(x.requires_grad and id(x) not in known for x in parameters):
        raise Unsupported(f"{name} does not have all parameters")
    repeated = name_repeated(optimizer)
    if repeated:
        raise Unsupported(repeated)
    if not any(x.requires_grad for x in parameters):
        raise Unsupported("all parameters are frozen")
    own = {name for name in ("step", "zero_grad") if name in vars(optimizer)}
    if own:
        raise Unsupported(f"this {name} has its own {own.pop()}")
    return [known[id(x)] if x.requires_grad else {} for x in parameters]


class Learning(NamedTuple):
    """What an optimizer does with a parameter."""

    states: dict[str, float]
    """The tensors that it keeps, in their columns' order, and their first values."""
    group: dict[str, Any]
    """What has its settings; empty if the parameter is frozen."""


FROZEN = Learning({}, {})


def describe_learning(optimizer: Optimizer, parameters: list[Tensor]) -> list[Learning]:
    """What an optimizer does with each of these parameters."""
    rule, groups = find_rule(optimizer), find_groups(optimizer, parameters)
    known = {id(x): Learning(list_states(rule, x), x) for x in groups if x}
    return [known.get(id(x), FROZEN) for x in groups]


def list_states(rule: int, group: dict[str, Any]) -> dict[str, float]:
    """The tensors that an optimizer keeps of a parameter, in their columns' order, and their first values."""
    momentum = {"momentum_buffer": 0.0} if group.get("momentum") else {}
    if rule == serial.ADAM:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    if rule == serial.SGD:
        return momentum
    squares = {"square_avg": 1.0 if rule == serial.RMSPROP_TF else 0.0}
    return squares | momentum | ({"grad_avg": 0.0} if group["centered"] else {})


def describe_group(rule: int, group: dict[str, Any]) -> list[float]:
    """The settings of a group, in the order of their columns."""
    beta, second = group.get("betas") or (group.get("alpha", 0.0), 0.0)
    rate, decay, is_decoupled = float(group["lr"]), group["weight_decay"], group.get("decoupled_weight_decay", False)
    decays = (0.0, 1.0 - rate * decay) if is_decoupled else (decay, 1.0)
    others = group.get("eps", 0.0), group.get("momentum", 0.0), group.get("nesterov", False), rule
    return [*map(float, (rate, *decays, beta, second, *others))]


def list_kept(optimizer: Optimizer, parameters: list[Tensor], learning: list[Learning]) -> list[list[Any]]:
    """Of each parameter the count of steps and the states that an optimizer has; None where it has none yet."""
    pairs = zip(parameters, learning, strict=True)
    own = [(optimizer.state.get(x) or {}, ("step", *y.states) if y.states else ()) for x, y in pairs]
    return [[state.get(name) for name in names] for state, names in own]


class ParameterTables:
    """Parameters, their states and settings as tables; raises `Unsupported` if compiled code cannot update a state."""

    def __init__(
        self, optimizer: Optimizer | None, parameters: list[Tensor], learning: list[Learning], kept: list[list[Any]]
    ) -> None:
        self.parameters, self.learning, self.kept = parameters, learning, kept
        if optimizer is not None:
            self.optimizer: Any = proxy(optimizer)  # with which tables are kept as long as it is there
            self.rule, self.name = find_rule(optimizer), type(optimizer).__name__
            learned, known = [x for group in optimizer.param_groups for x in group["params"]], {*map(id, parameters)}
            self.others = [x for x in learned if id(x) not in known]
        self.has_new_states = False
        self.memory: list[Any] = []
        """What has the addresses in the tables, whatever becomes of the tensors."""
        for x, own in zip(parameters, kept, strict=True):
            if any(y is not None for y in own):
                self.check_states(x.shape, *own)

    def check_states(self, shape: torch.Size, count: Any, *states: Any) -> None:
        """Raise `Unsupported` unless there is all of a state, where its addresses are to be."""
        name, tensors = self.name, [x for x in states if x is not None]
        if self.rule == serial.ADAM and not isinstance(count, Tensor):
            raise Unsupported(f"{name} counts steps in numbers of Python")
        if self.rule != serial.SGD and (count is None or len(tensors) < len(states)):
            raise Unsupported(f"the state of {name} is not complete")
        fits = all(type(x) is Tensor and x.shape == shape and is_plain_tensor(x) for x in tensors)
        if not fits or (isinstance(count, Tensor) and (count.ndim or not is_plain_tensor(count))):
            raise Unsupported(
                f"the state of {name} is not float32, contiguous, on the CPU and of its parameter's shape"
            )

    def make_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """The tables of parameters and of settings; the optimizer gets the states that it has not yet."""
        gradients = self.parameters[0].new_empty(sum(x.numel() for x in self.parameters))
        address, rows = self.locate(gradients), []
        self.first_gradient = address
        for x, learning, kept in zip(self.parameters, self.learning, self.kept, strict=True):
            row, size = [0] * serial.COLUMNS, x.numel()
            row[serial.ADDRESS], row[serial.SIZE] = self.locate(x), size
            row[serial.GRADIENT] = address if learning.group else 0
            if kept:
                row[serial.STEP : serial.THIRD_STATE + 1] = self.place_states(x, learning, *kept)
            rows.append(row)
            address += 4 * size
        self.table, self.settings = np.array(rows), np.zeros((len(rows), serial.SETTINGS))
        owners = np.array([id(x.group) for x in self.learning])
        groups = {id(x.group): x.group for x in self.learning if x.group}
        self.rows = [(group, np.flatnonzero(owners == key)) for key, group in groups.items()]
        return self.table, self.settings

    def copy_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """The same tables with other memory for gradients."""
        table, size = self.table.copy(), int(self.table[:, serial.SIZE].sum())
        moved = self.locate(self.parameters[0].new_empty(size)) - self.first_gradient
        table[:, serial.GRADIENT] += moved * (table[:, serial.GRADIENT] != 0)
        return table, self.settings

    def place_states(self, parameter: Tensor, learning: Learning, count: Any, *states: Tensor | None) -> list[int]:
        """Addresses of the step count and the states of a parameter."""
        state = self.optimizer.state.setdefault(parameter, {})
        if count is None and self.rule != serial.SGD:
            state["step"] = 0 if self.rule == serial.RMSPROP_TF else torch.zeros((), dtype=torch.float32, device="cpu")
        count = state.get("step")
        addresses = [self.locate(count) if isinstance(count, Tensor) else 0, 0, 0, 0]
        for (name, number), x in zip(learning.states.items(), states, strict=True):
            if x is None:
                state[name] = torch.full_like(parameter, number, requires_grad=False)
                self.has_new_states = True
            addresses[PLACES[name]] = self.locate(state[name] if x is None else x)
        return addresses

    def locate(self, x: Tensor) -> int:
        """The address of a tensor, whose memory is kept."""
        memory = x.untyped_storage()
        if memory.nbytes() < 4 * (x.storage_offset() + x.numel()):
            raise Unsupported("a parameter or a state has lost its memory")
        self.memory.append(memory)
        return x.data_ptr()

    def renew(self) -> None:
        """Read the settings, and make room for the gradients of the last step, which are left to others."""
        for group, rows in self.rows:
            self.settings[rows] = describe_group(self.rule, group)
        pairs = zip(self.parameters, self.learning, strict=True)
        self.gradients = [torch.empty_like(x) if learning.group else None for x, learning in pairs]
        self.table[:, serial.LAST_GRADIENT] = [0 if x is None else x.data_ptr() for x in self.gradients]

    def leave_steps(self, count: int) -> None:
        """Leave what PyTorch would after so many steps: counts in Python's numbers, and the gradients of the last."""
        if count == 0:
            return
        for x, kept in zip(self.parameters, self.kept if self.rule != serial.ADAM else (), strict=False):
            state = self.optimizer.state.get(x, {}) if kept else {}
            if isinstance(state.get("step"), int):
                state["step"] += count
        for x in self.others:
            x.grad = None
        for x, gradient in zip(self.parameters, self.gradients, strict=True):
            x.grad = gradient
