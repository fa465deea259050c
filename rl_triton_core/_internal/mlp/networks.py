"""Two MLPs as a table of layers, and why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rl_triton_core._internal.mlp import serial

MAX_WEIGHTS = 400 * 320
"""Of a layer: with more, loops take longer than PyTorch (`python -m benchmarks FOLDER perceptrons`)."""


class Unsupported(Exception):
    """Why an update cannot run in compiled code."""


class Layer(NamedTuple):
    """A linear layer and the activation behind it."""

    linear: nn.Linear
    activation: int
    slope: float
    """Of the activation below 0, where it has one."""
    source: int
    """The number of the layer before it, -1 if there is none."""


ACTIVATIONS: dict[Any, int] = {nn.Tanh: serial.TANH, nn.ReLU: serial.RELU, nn.SiLU: serial.SILU}
ACTIVATIONS |= {nn.GELU: serial.GELU, nn.LeakyReLU: serial.RELU, nn.ELU: serial.ELU}
SLOPES: dict[Any, str] = {nn.LeakyReLU: "negative_slope", nn.ELU: "alpha"}  # below 0


def describe_activation(module: Any) -> tuple[int, float]:
    """The number of an activation, and its slope below 0, if it has one."""
    kind = type(module)
    if kind not in ACTIVATIONS:
        names = ", ".join(x.__name__ for x in (nn.Linear, *ACTIVATIONS))
        raise Unsupported(f"{kind.__name__} is none of the modules that are compiled: {names}")
    if getattr(module, "approximate", "none") != "none":
        raise Unsupported(f"GELU(approximate={module.approximate!r}) is not compiled")
    return ACTIVATIONS[kind], float(getattr(module, SLOPES.get(kind, ""), 0.0))


def flatten_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of nested `nn.Sequential`s in the order in which they are called."""
    if "forward" in vars(module):
        raise Unsupported(f"this {type(module).__name__} has its own forward")
    if type(module) is nn.Sequential:
        for part in module:
            yield from flatten_modules(part)
    elif type(module) is not nn.Identity:
        yield module


def list_layers(*networks: nn.Module) -> tuple[list[Layer], list[int]]:
    """The layers of some networks, those that they share once, and the numbers of their last ones."""
    layers: list[Layer] = []
    ends = []
    for network in networks:
        modules, source = [*flatten_modules(network)], -1
        while modules:
            linear = modules.pop(0)
            if type(linear) is not nn.Linear:
                raise Unsupported(f"{type(linear).__name__} is not behind a Linear, or not compiled")
            is_plain = not modules or type(modules[0]) is nn.Linear
            kind, slope = (serial.IDENTITY, 0.0) if is_plain else describe_activation(modules.pop(0))
            layer = Layer(linear, kind, slope, source)
            if layer not in layers:
                layers.append(layer)
            source = layers.index(layer)
        if source < 0:
            raise Unsupported("a network has no Linear")
        ends.append(source)
    return layers, ends


def check_parameters(layers: list[Layer], parameters: list[Any]) -> None:
    """Raise `Unsupported` unless all are plain, and weights, whose sizes count, fit what is beside them."""
    for x in parameters:
        if type(x) not in (nn.Parameter, torch.Tensor) or not x.is_leaf or not is_plain_tensor(x):
            raise Unsupported(f"a parameter is {x.dtype} on {x.device}, or not contiguous")
        if x.numel() > MAX_WEIGHTS:
            raise Unsupported(f"a layer has {x.numel()} weights; with more than {MAX_WEIGHTS}, PyTorch is faster")
    if len({x.data_ptr() for x in parameters}) < len(parameters):
        raise Unsupported("a parameter is used twice")
    for linear, *_, source in layers:
        shape, bias = getattr(linear.weight, "shape", ()), linear.bias
        before = shape[1:] if source < 0 else layers[source].linear.weight.shape[:1]
        if len(shape) != 2 or shape[1:] != before or (bias is not None and bias.shape != shape[:1]):
            raise Unsupported(f"a weight of shape {tuple(shape)} does not fit its bias or the layer before")


def is_plain_tensor(x: torch.Tensor) -> bool:
    """Whether compiled code can read and write a tensor in place."""
    return x.dtype is torch.float32 and x.is_cpu and x.is_contiguous()


def make_layer_table(
    layers: list[Layer], parameters: list[torch.Tensor], start: int, first: int, by_features: int
) -> tuple[np.ndarray, np.ndarray]:
    """The table of layers, and their slopes.

    Features are in rows of scratch memory from this address on, the first row behind them is that of units. Derivatives
    by features are wanted at another address, or, if it is 0, not at all.
    """
    rows: dict[int, int] = {id(x): row for row, x in enumerate(parameters)}
    table: list[list[int]] = []
    own = serial.VALUES, serial.SLOPES
    for layer in layers:
        linear, (outputs, inputs) = layer.linear, layer.linear.weight.shape
        sums, slopes, values = (start + serial.ROW * (first + i * outputs) for i in range(3))
        values = sums if layer.activation == serial.IDENTITY else values
        before = [start, by_features] if layer.source < 0 else [table[layer.source][i] for i in own]
        places = rows[id(linear.weight)], rows.get(id(linear.bias), -1), before[0], sums, values, slopes, before[1]
        table.append([inputs, outputs, layer.activation, *places])
        first += 3 * outputs
    return np.array(table), np.array([layer.slope for layer in layers], np.float32)
