"""PyTorch's optimizers as tables of settings and addresses: their state stays where it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

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
        if refused or any(isinstance(x, Tensor) for x in (group["lr"], *group.get("betas", ()))):
            raise Unsupported(f"{name} with {refused or 'settings that are tensors'} is not compiled")
    if any(x.requires_grad and id(x) not in known for x in parameters):
        raise Unsupported(f"{name} does not have all parameters")
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


def prepare_state(optimizer: Optimizer, rule: int, parameter: Tensor, group: dict[str, Any]) -> list[int]:
    """Addresses of the step count and the states of a parameter; the optimizer gets them if it has none yet."""
    if not list_states(rule, group):
        return [0, 0, 0, 0]
    state = optimizer.state[parameter]
    if not state and rule != serial.SGD:
        state["step"] = 0 if rule == serial.RMSPROP_TF else torch.tensor(0.0, dtype=torch.float32)
    counts = [state["step"]] if isinstance(state.get("step"), Tensor) else []
    is_new, names = len(state) < 2, list_states(rule, group)
    for name, number in names.items():
        if (is_new and name not in state) or state[name] is None:
            state[name] = torch.full_like(parameter, number, requires_grad=False)
    tensors = [*counts, *(state[name] for name in names)]
    if not all(map(is_plain_tensor, tensors)):
        raise Unsupported(f"the state of {type(optimizer).__name__} is not float32, contiguous and on the CPU")
    addresses = [counts[0].data_ptr() if counts else 0, 0, 0, 0]
    for name in names:
        addresses[PLACES[name]] = state[name].data_ptr()
    return addresses


def describe_group(rule: int, group: dict[str, Any]) -> list[float]:
    """The settings of a group, in the order of their columns."""
    beta, second = group.get("betas") or (group.get("alpha", 0.0), 0.0)
    decay, is_decoupled = group["weight_decay"], group.get("decoupled_weight_decay", False)
    decays = (0.0, 1.0 - group["lr"] * decay) if is_decoupled else (decay, 1.0)
    others = group.get("eps", 0.0), group.get("momentum", 0.0), group.get("nesterov", False), rule
    return [group["lr"], *decays, beta, second, *others]


def make_parameter_tables(
    optimizer: Optimizer, parameters: list[Tensor], groups: list[dict[str, Any]]
) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """The tables of parameters and of settings, and memory: gradients, and those of the last step."""
    rule = find_rule(optimizer)
    table = np.zeros((len(parameters), serial.COLUMNS), np.int64)
    settings = np.zeros((len(parameters), serial.SETTINGS))
    memory = torch.empty(2, sum(x.numel() for x in parameters))
    address, distance = memory.data_ptr(), 4 * memory.shape[1]
    for k, (x, group) in enumerate(zip(parameters, groups, strict=True)):
        table[k, : serial.SIZE + 1] = x.data_ptr(), 0, x.numel()
        if group:
            table[k, serial.STEP : serial.THIRD_STATE + 1] = prepare_state(optimizer, rule, x, group)
            table[k, [serial.GRADIENT, serial.LAST_GRADIENT]] = address, address + distance
            settings[k] = describe_group(rule, group)
        address += 4 * x.numel()
    return table, settings, memory


def leave_gradients(optimizer: Optimizer, parameters: list[Tensor], last: Tensor) -> None:
    """Leave the gradients of the last step where `backward` would, and none where a parameter was not updated."""
    for x in (x for group in optimizer.param_groups for x in group["params"]):
        x.grad = None
    for x, gradient in zip(parameters, torch.split(last, [x.numel() for x in parameters]), strict=True):
        if x.requires_grad:
            x.grad = gradient.view(x.shape)


def count_steps(optimizer: Optimizer, parameters: list[Tensor], count: int) -> None:
    """Add to the counts of steps that are Python's numbers."""
    for x in parameters:
        state = optimizer.state.get(x, {})
        if x.requires_grad and isinstance(state.get("step"), int):
            state["step"] += count
