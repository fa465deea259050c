"""What a backend is, and which one runs a call.

Each topic, `scan`, `moments`, `loss` and `tokens`, has a module of each backend's name. They are imported when the
backend is first asked for, so that nothing optional is imported before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib import import_module
from typing import Any, TypeVar

import torch

from rl_triton_core._internal.arguments.side_effects import warn

T = TypeVar("T")


@dataclass(frozen=True)
class Backend:
    """What a backend provides.

    Attributes:
        run: Fill the outputs of a validated problem, which has at least one element.
        unavailable: Say why the backend cannot run on tensors of a device; None where it can.
        normalize: Fill the output of a normalisation.
        loss: Compute a loss and its gradients, of a minibatch that is not empty.
        scale: Multiply gradients by a number, in place.
        evaluate_tokens: Fill the log-probabilities of tokens.
        differentiate_tokens: Fill the gradient by their logits.
        supports_expectation: Whether `run` takes an `Expectation` as next values. Otherwise it is summed before.
    """

    run: Callable[[Any], None]
    unavailable: Callable[[torch.device], str | None]
    normalize: Callable[[Any, Any], Any]
    loss: Callable[[Any], Any]
    scale: Callable[[Any, torch.Tensor], Any]
    evaluate_tokens: Callable[[Any, Any], Any]
    differentiate_tokens: Callable[[Any, Any, Any, torch.Tensor], Any]
    supports_expectation: bool


def assemble_backend(name: str) -> Backend:
    """The functions of a backend from its modules."""
    topics = "scan", "moments", "loss", "tokens"
    scan, moments, loss, tokens = (import_module(f"{__package__}.{topic}.{name}") for topic in topics)
    return Backend(
        run=scan.run,
        unavailable=scan.unavailable,
        normalize=moments.run,
        loss=loss.compute_loss,
        scale=loss.scale_gradients,
        evaluate_tokens=tokens.run,
        differentiate_tokens=tokens.differentiate,
        supports_expectation=scan.SUPPORTS_EXPECTATION,
    )


BACKENDS: dict[str, Callable[[], Backend]] = {
    name: partial(assemble_backend, name) for name in ("triton", "cpu", "reference")
}
"""What makes each backend, by the backend's name."""
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
        return load_backend(name).unavailable(device)
    except ImportError as error:
        return f"its import failed: {error}"


@cache
def load_backend(name: str) -> Backend:
    """Import a backend, when it is first needed."""
    return BACKENDS[name]()


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
