"""The device of a launch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch


def device_guard(device: torch.device) -> Any:
    """The context in which a kernel runs on this device."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
