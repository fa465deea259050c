"""What a backend is, and which one runs a call.

Its modules are imported when it is first asked for, so that nothing optional is imported before.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch

from rl_triton_core._internal.arguments.side_effects import warn

T = TypeVar("T")


class Backend(NamedTuple):
    """The modules of a backend, by topic: in each are functions of the same names on every backend."""

    scan: Any
    """`run` fills the outputs of a validated problem, which has at least one element; its next values may be an
    `Expectation` where `SUPPORTS_EXPECTATION`. `unavailable` says why none of the modules can run on a device."""
    moments: Any
    """`run` fills the output of a normalisation."""
    loss: Any
    """`compute_loss` of a minibatch that is not empty, with gradients, which `scale_gradients` multiplies in place."""
    tokens: Any
    """`run` fills the log-probabilities of tokens, `differentiate` the gradient by their logits."""


BACKENDS = ("triton", "cpu", "reference")
PREFERENCE = {"cuda": ("triton", "reference"), "cpu": ("cpu", "reference"), "meta": ("reference",)}
"""By the type of the device: the backend chosen automatically, and the one that stands in where it is not available."""
HOST = torch.device("cpu")


class BackendUnavailableError(RuntimeError):
    """The backend asked for by name cannot run here; the message says why."""


def available_backends(device: torch.device | str = "cpu") -> tuple[str, ...]:
    """Names of the backends that can run on tensors of this device."""
    device = torch.device(device)
    return tuple(name for name in BACKENDS if why_unavailable(name, device) is None)


def choose_backend(name: str | None, device: torch.device) -> Backend:
    """The backend of that name, or the best one for the device, or for copies in host memory if the device has none."""
    if name is None:
        return choose_automatically(device.type)
    check_backend(name, device)
    return load_backend(name)


def check_backend(name: str | None, device: torch.device | str | None = None) -> None:
    """Raise an error unless a backend can be asked for by this name.

    Args:
        name: Name of a backend, or None, which stands for the best one of each device.
        device: Device of the tensors that it has to run on; None checks the name alone.

    Raises:
        ValueError: There is no backend of that name.
        BackendUnavailableError: It cannot run on that device.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}, expected one of {', '.join(BACKENDS)}, or None to choose by device")
    reason = None if name is None or device is None else why_unavailable(name, torch.device(device))
    if reason is not None:
        raise BackendUnavailableError(f"backend: got {name!r}, which is not available: {reason}")


@cache
def choose_automatically(device_type: str) -> Backend:
    """The first backend of the device's preference that is available."""
    if device_type not in PREFERENCE:
        warn(
            f"there is no backend for {device_type} tensors; calls are computed on copies in host memory", stacklevel=2
        )
        return choose_automatically(HOST.type)
    best, *others = PREFERENCE[device_type]
    reason = why_unavailable(best, torch.device(device_type))
    if reason is None:
        return load_backend(best)
    warn(f"the {best} backend is not available ({reason}); using the slow {others[0]} backend", stacklevel=2)
    return load_backend(others[0])


def why_unavailable(name: str, device: torch.device) -> str | None:
    """Why a backend cannot run on a device, or None if it can."""
    try:
        reason: str | None = load_backend(name).scan.unavailable(device)
        return reason
    except ImportError as error:
        return f"its import failed: {error}"


@cache
def load_backend(name: str) -> Backend:
    """Import a backend, when it is first needed."""
    return Backend(*(import_module(f"{__package__}.{topic}.{name}") for topic in Backend._fields))


# -- devices without a backend ----------------------------------------------------------------------------------------


def check_choice(name: str | None, device: torch.device) -> None:
    """Raise an error, or warn, as the choice of a backend does. Under torch.compile its operators choose."""
    if not torch.compiler.is_compiling():
        choose_backend(name, device)


def needs_host(device: torch.device) -> bool:
    """Whether calls on tensors of a device are computed on copies of them in host memory."""
    return device.type not in PREFERENCE


def copy_to_host(x: Any) -> Any:
    """A tensor in host memory, or a tuple with all its tensors there; gradients flow back."""
    if isinstance(x, tuple):
        copies = map(copy_to_host, x)
        return type(x)(*copies) if hasattr(x, "_fields") else tuple(copies)
    return x.to(HOST) if isinstance(x, torch.Tensor) else x


def copy_problem_to_host(problem: T) -> T:
    """A problem, which is a dataclass, with all its tensors in host memory."""
    values: Any = {x.name: copy_to_host(getattr(problem, x.name)) for x in fields(problem) if x.init}  # type: ignore[arg-type]
    return replace(problem, **values)  # type: ignore[type-var]
