"""One door to the backends. Each is a module with ``unavailable(device) -> str | None`` and ``run(problem)``."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

PREFERENCE = {"cuda": ("triton", "reference"), "cpu": ("cpu", "reference")}
NAMES = ("triton", "cpu", "reference")


class BackendUnavailableError(RuntimeError):
    """The backend asked for by name cannot run here; the message says why."""


def available_backends(device: torch.device | str = "cpu") -> tuple[str, ...]:
    """Names of the backends that can run on tensors of this device."""
    device = torch.device(device)
    return tuple(name for name in NAMES if why_unavailable(name, device) is None)


def choose(name: str | None, device: torch.device) -> ModuleType:
    """The backend of that name, or the best one for the device."""
    if name is None:
        return automatic(device.type)
    check_available(name, device)
    return load(name)


def check_available(name: str | None, device: torch.device) -> None:
    """Raise BackendUnavailableError unless the backend of that name can run on the device, or it is None."""
    check_name(name)
    reason = None if name is None else why_unavailable(name, device)
    if reason is not None:
        raise BackendUnavailableError(f"backend: got {name!r}, which is not available: {reason}")


def check_name(name: str | None) -> None:
    """Raise ValueError unless there is a backend of that name, or None."""
    if name is not None and name not in NAMES:
        raise ValueError(f"backend: got {name!r}, expected one of {', '.join(NAMES)}, or None to choose by device")


@cache
def automatic(device_type: str) -> ModuleType:
    """The first backend of the device's preference that is available."""
    best, *others = PREFERENCE.get(device_type, ("reference",))
    reason = why_unavailable(best, torch.device(device_type))
    if reason is None:
        return load(best)
    warnings.warn(f"the {best} backend is not available ({reason}); using the slow {others[0]} backend", stacklevel=2)
    return load(others[0])


def why_unavailable(name: str, device: torch.device) -> str | None:
    """Why a backend cannot run on a device, or None if it can."""
    try:
        reason: str | None = load(name).unavailable(device)
    except ImportError as error:
        return f"its import failed: {error}"
    return reason


@cache
def load(name: str) -> ModuleType:
    """Import a backend, when it is first needed."""
    return import_module(f"rl_triton_core._internal.backends.{name}")
