"""Compilation ahead of training."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_triton_core import estimators
from rl_triton_core._internal.backend import BackendUnavailableError, check_backend
from rl_triton_core.normalization import normalize_advantages

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: x for name in estimators.__all__ if inspect.isroutine(x := getattr(estimators, name))},
    "normalize_advantages": normalize_advantages,
}
USUAL_TENSORS = (
    *("values", "terminated", "dones", "target_log_probs", "behaviour_log_probs"),
    *("expected_next_q", "bootstrap_values"),
)
"""Those of them that a function takes are passed to it, unless the caller says otherwise."""
FLAGS = ("terminated", "truncated", "dones", "mask")
NUM_CALLS = 3
"""The first call compiles, the second one is recorded for the fast path, the third one takes it."""


def warm_up(
    function: str,
    shape: Sequence[int],
    *,
    tensors: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
    flag_dtype: torch.dtype = torch.bool,
    time_dim: int = -1,
    backend: str | None = None,
    device: torch.device | str | None = None,
    **arguments: Any,
) -> float:
    """Compile what calls of a function need, before training begins.

    Makes such a call a few times, on tensors of zeros. What is compiled depends on which arguments are given and on
    their dtypes, on the layout, and on a GPU on the sizes. It is kept on disk for other processes too.

    Args:
        function: Name of the function, such as ``"compute_gae"`` or ``"normalize_advantages"``.
        shape: Shape of its per-step tensors: (num_envs, num_steps), or (num_steps, num_envs) with ``time_dim=0``.
        tensors: Names of the tensors that training will pass beside the required ones, such as ``("terminated",
            "truncated", "bootstrap_values")``. None: the usual ones. `bootstrap_values` is per step if `truncated` is
            among them, else per environment.
        dtype: Of the real-valued tensors.
        flag_dtype: Of terminations, truncations, dones and masks.
        time_dim: The time dimension of the tensors: -1 or 1, 0 or -2.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the device.
        device: Where the tensors are. None: on the GPU for the triton backend if there is one, else on the CPU.
        arguments: Further arguments of the function, such as ``compute_returns=False``, as training will pass them.

    Returns:
        The seconds that it took.

    Raises:
        ValueError: There is no function, argument or device of that name, the shape is none, or the function refuses
            what it was given.
        BackendUnavailableError: The backend asked for cannot run on the device.

    Example:
        >>> seconds = warm_up("compute_gae", (8, 128), tensors=("terminated", "bootstrap_values"))
    """
    if function not in FUNCTIONS:
        raise ValueError(f"function: got {function!r}, expected one of {', '.join(FUNCTIONS)}")
    start = time.perf_counter()
    call = FUNCTIONS[function]
    parameters = inspect.signature(call).parameters
    names = choose_tensors(parameters, tensors)
    if device is None:
        device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    check_device(device, backend)
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"shape: got {tuple(shape)}, expected two sizes of at least 1")
    for name in names:  # zeros, and a mask of ones
        size = shape_of(name, shape, time_dim, per_step="truncated" in names)
        kind = flag_dtype if name in FLAGS else dtype
        try:
            arguments[name] = torch.full(size, float(name == "mask"), dtype=kind, device=device)
        except RuntimeError as error:
            raise ValueError(f"shape: got {tuple(shape)}, expected one that fits into memory: {error}") from None
    if "time_dim" in parameters:
        arguments["time_dim"] = time_dim
    for _ in range(NUM_CALLS):
        call(**arguments, backend=backend)
    return time.perf_counter() - start


def check_device(device: torch.device | str, backend: str | None) -> None:
    """Raise an error unless there is such a device, the backend runs on it, and tensors on it have data."""
    try:
        check_backend(backend, device)
        torch.zeros((), device=device).item()
    except BackendUnavailableError:
        raise
    except (AssertionError, RuntimeError) as error:  # the first from a PyTorch that was built without CUDA
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device: got {str(device)!r}, expected one that there is here: {reason}") from None


def list_required_options(function: Callable[..., Any]) -> list[str]:
    """The names of a function's options that have no default."""
    parameters = inspect.signature(function).parameters
    return [name for name, x in parameters.items() if x.default is x.empty and x.kind is x.KEYWORD_ONLY]


def choose_tensors(parameters: Any, tensors: Sequence[str] | None) -> list[str]:
    """The names of the tensors to pass: those required, and those asked for or usual."""
    required = [name for name, x in parameters.items() if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    unknown = [name for name in tensors or () if name not in parameters]
    if unknown:
        raise ValueError(f"tensors: got {unknown[0]!r}, expected names of arguments: {', '.join(parameters)}")
    others = [name for name in USUAL_TENSORS if name in parameters] if tensors is None else tensors
    return [*required, *(name for name in others if name not in required)]


def shape_of(name: str, shape: Sequence[int], time_dim: int, per_step: bool) -> tuple[int, ...]:
    """The shape of an argument, where others are per step or per environment."""
    if name == "initial" or (name == "bootstrap_values" and not per_step):
        return (shape[1 - time_dim % 2],)
    return tuple(shape)
