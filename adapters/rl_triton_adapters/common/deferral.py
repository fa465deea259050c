"""Metrics that a framework reads one by one, and for each of which the host would wait for the device."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Deferral(TorchFunctionMode):
    """A context in which `item` returns a tensor, and `torch.tensor` copies no number to the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.item:
            return args[0].detach()
        if function is torch.tensor and isinstance(args[0], float):
            return torch.full((), *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def read_numbers(values: list[Any]) -> list[Any]:
    """The values with tensors of one element as numbers; the host waits once."""
    waiting = [x for x in values if isinstance(x, Tensor)]
    numbers = iter(torch.stack([x.float() for x in waiting]).tolist() if waiting else ())
    return [next(numbers) if isinstance(x, Tensor) else x for x in values]
