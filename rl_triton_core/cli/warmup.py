"""`rl-triton warmup`: compile what calls need, before training begins."""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_triton_core import estimators
from rl_triton_core._internal.arguments.validation import check_choice
from rl_triton_core._internal.backend import BackendUnavailableError, check_backend
from rl_triton_core.cli.output import Report, Table, track_progress
from rl_triton_core.normalization import normalize_advantages

HELP = "Compile what calls need, before training begins."
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: x for name in estimators.__all__ if inspect.isroutine(x := getattr(estimators, name))},
    "normalize_advantages": normalize_advantages,
}
ESTIMATORS = [name.removeprefix("compute_") for name in FUNCTIONS if name != "linear_recurrence"]
"""Names on the command line; a recurrence has a direction that only training code knows."""
USUAL_TENSORS = (
    *("values", "terminated", "dones", "target_log_probs", "behaviour_log_probs"),
    *("expected_next_q", "bootstrap_values"),
)
"""Those of them that a function takes are passed to it."""
FLAGS = ("terminated", "truncated", "dones", "mask")
NUM_CALLS = 3
"""The first call compiles, the second one is recorded for the fast path, the third one takes it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what describes the calls."""
    add, dtypes = parser.add_argument, ("float32", "bfloat16", "float16", "float64")
    add("--estimator", nargs="+", choices=ESTIMATORS, default=ESTIMATORS, help="The functions to compile, or all.")
    add("--updates", nargs="+", default=(), help="Compile whole updates on the CPU for these distributions of actions.")
    add("--shape", nargs=2, type=int, default=(64, 128), help="The sizes of rewards (default: 64 128).")
    add("--time-dim", type=int, choices=(-2, -1, 0, 1), default=-1, help="The dimension that is time (default: -1).")
    add("--dtype", choices=dtypes, default="float32", help="The dtype of rewards (default: float32).")
    add("--backend", choices=("triton", "cpu", "reference"), help="The backend to compile (default: by device).")
    add("--device", help="The device of tensors, such as cuda (default: that of the backend).")


def run(options: argparse.Namespace) -> Report:
    """Compile what is asked for, and tell how long each took."""
    if options.updates:
        from rl_triton_core import compiled  # needs Numba, which not every installation has

        for head in options.updates:
            check_choice("--updates", head, compiled.HEADS)
    device = options.device or ("cuda" if options.backend == "triton" and torch.cuda.is_available() else "cpu")
    check_device(device, options.backend)
    if min(options.shape) < 1:
        raise ValueError(f"shape: got {tuple(options.shape)}, expected two sizes of at least 1")
    names = track_progress(options.estimator, "compiling", len(options.estimator))
    seconds = {name: warm_up(name, options, device) for name in names}
    seconds |= {f"update, {head}": compiled.compile_update(head) for head in options.updates}
    rows = [(name, f"{x:.1f} s") for name, x in seconds.items()]
    return Report({name: round(x, 3) for name, x in seconds.items()}, [Table("", (), rows)])


def check_device(device: str, backend: str | None) -> None:
    """Raise an error unless there is such a device, the backend runs on it, and tensors on it have data."""
    try:
        check_backend(backend, device)
        torch.zeros((), device=device).item()
    except BackendUnavailableError:
        raise
    except (AssertionError, RuntimeError) as error:  # the first from a PyTorch that was built without CUDA
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device: got {device!r}, expected one that there is here: {reason}") from None


def warm_up(name: str, options: argparse.Namespace, device: str) -> float:
    """The seconds of a few calls on zeros."""
    function, start, given = FUNCTIONS.get(name) or FUNCTIONS[f"compute_{name}"], time.perf_counter(), {}
    parameters = inspect.signature(function).parameters
    for tensor in choose_tensors(parameters):
        size = shape_of(tensor, options.shape, options.time_dim, per_step=False)
        dtype = torch.bool if tensor in FLAGS else getattr(torch, options.dtype)
        try:
            given[tensor] = torch.zeros(size, dtype=dtype, device=device)
        except RuntimeError as error:
            got = tuple(options.shape)
            raise ValueError(f"shape: got {got}, expected one that fits into memory: {error}") from None
    given |= {"time_dim": options.time_dim} if "time_dim" in parameters else {}
    for _ in range(NUM_CALLS):
        function(**given, backend=options.backend)
    return time.perf_counter() - start


def choose_tensors(parameters: Any) -> list[str]:
    """The names of the tensors to pass: those required, and the usual ones."""
    required = [name for name, x in parameters.items() if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    return [*required, *(name for name in USUAL_TENSORS if name in parameters and name not in required)]


def shape_of(name: str, shape: Sequence[int], time_dim: int, per_step: bool) -> tuple[int, ...]:
    """The shape of an argument, where bootstrap values are per step or per environment."""
    if name == "initial" or (name == "bootstrap_values" and not per_step):
        return (shape[1 - time_dim % 2],)
    return tuple(shape)
