"""PyTorch's optimizers as tables of settings and addresses: their state stays where it is."""

from __future__ import annotations

from typing import Any

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
    find_rule(optimizer)
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
    return [rate, *decays, beta, second, *others]


class ParameterTables:
    """Parameters, their states and settings as tables; raises `Unsupported` if compiled code cannot update a state."""

    def __init__(self, optimizer: Optimizer, parameters: list[Tensor], groups: list[dict[str, Any]]) -> None:
        self.optimizer, self.parameters, self.groups = optimizer, parameters, groups
        self.rule = find_rule(optimizer)
        states = [optimizer.state.get(x, {}) for x in parameters]
        if not all(is_plain_tensor(x) for state in states for x in state.values() if isinstance(x, Tensor)):
            raise Unsupported(f"the state of {type(optimizer).__name__} is not float32, contiguous and on the CPU")
        if self.rule == serial.ADAM and not all(isinstance(x["step"], Tensor) for x in states if x):
            raise Unsupported(f"{type(optimizer).__name__} counts steps in numbers of Python")

    def make_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """The tables of parameters and of settings; the optimizer gets the states that it has not yet."""
        if any(x.requires_grad != bool(group) for x, group in zip(self.parameters, self.groups, strict=True)):
            raise RuntimeError("a parameter was frozen, or is no longer, since `CompiledUpdate.prepare`")
        self.memory = self.parameters[0].new_empty(sum(x.numel() for x in self.parameters))  # of gradients
        self.gradients = [torch.empty_like(x.detach()) if x.requires_grad else None for x in self.parameters]
        described = {id(x): (list_states(self.rule, x), describe_group(self.rule, x)) for x in self.groups if x}
        address, table, settings = self.memory.data_ptr(), [], []
        for x, group, gradient in zip(self.parameters, self.groups, self.gradients, strict=True):
            row, size = [0] * serial.COLUMNS, x.numel()
            row[serial.ADDRESS], row[serial.SIZE] = x.data_ptr(), size
            names, numbers = described.get(id(group), ({}, [0.0] * serial.SETTINGS))
            if gradient is not None:
                row[serial.GRADIENT], row[serial.LAST_GRADIENT] = address, gradient.data_ptr()
            if names:
                row[serial.STEP : serial.THIRD_STATE + 1] = self.prepare_state(x, names)
            table.append(row)
            settings.append(numbers)
            address += 4 * size
        return np.array(table), np.array(settings)

    def prepare_state(self, parameter: Tensor, names: dict[str, float]) -> list[int]:
        """Addresses of the step count and the states of a parameter."""
        state = self.optimizer.state[parameter]
        if not state and self.rule != serial.SGD:
            state["step"] = 0 if self.rule == serial.RMSPROP_TF else torch.zeros((), dtype=torch.float32, device="cpu")
        count, is_new = state.get("step"), len(state) < 2
        addresses = [count.data_ptr() if isinstance(count, Tensor) else 0, 0, 0, 0]
        for name, number in names.items():
            if (is_new and name not in state) or state[name] is None:
                state[name] = torch.full_like(parameter, number, requires_grad=False)
            addresses[PLACES[name]] = state[name].data_ptr()
        return addresses

    def leave_gradients(self) -> None:
        """Leave the gradients of the last step where `backward` would, and none where a parameter was not updated."""
        for x in (x for group in self.optimizer.param_groups for x in group["params"]):
            x.grad = None
        for x, gradient in zip(self.parameters, self.gradients, strict=True):
            x.grad = gradient

    def count_steps(self, count: int) -> None:
        """Add to the counts of steps that are Python's numbers."""
        for x in self.parameters:
            state = self.optimizer.state.get(x, {})
            if x.requires_grad and isinstance(state.get("step"), int):
                state["step"] += count
