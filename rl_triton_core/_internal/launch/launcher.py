"""What a launch by Triton calls in the end, which the fast path calls without Triton's own way there.

In what order Triton's launcher wants its arguments is asked of the Triton that is installed: a compiled kernel's own
``kernel[grid]`` is run with a launcher that only listens, then the launcher with a last function that does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from rl_triton_core._internal.launch.recording import (
    CURRENT_STREAM,
    RECORDER,
    RecordedLaunch,
    ResolvedLaunch,
    UnknownLauncherError,
    record_launch,
)


def record_kernel(kernel: Any, grid: tuple[int, int], arguments: Sequence[Any], scratch: torch.Tensor | None) -> None:
    """Record the launch of a compiled kernel, if this thread records. One that is interpreted is None."""
    if RECORDER.launches is not None and kernel is not None:
        resolve = partial(resolve_launch, kernel, grid, arguments, current_device())
        record_launch(RecordedLaunch(resolve, scratch))


def resolve_launch(kernel: Any, grid: tuple[int, int], arguments: Sequence[Any], device: int) -> ResolvedLaunch:
    """Find out what a launch on a device calls in the end, and with which arguments; without hooks."""
    try:
        launcher, given = kernel.run, capture_launcher_arguments(kernel, grid, arguments)
        if getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 0):
            return ResolvedLaunch(launcher, given, stream_getter(device))
        listening = copy.copy(launcher)
        listening.launch, calls = make_listener()
        listening(*given)
        return ResolvedLaunch(launcher.launch, single_call(calls), stream_getter(device))
    except Exception as error:
        import triton

        raise UnknownLauncherError(
            f"got Triton {triton.__version__}, whose launcher is not known ({type(error).__name__}: {error}), expected "
            "one like those of Triton 3.6 to 3.9; calls take the host several times as long. Install one of those, or "
            "set RL_TRITON_FAST_PATH=0 in the environment to do without the fast path"
        ) from error


def capture_launcher_arguments(kernel: Any, grid: tuple[int, int], arguments: Sequence[Any]) -> Sequence[Any]:
    """With what Triton calls the launcher of a compiled kernel, as its own way to launch one shows; without hooks."""
    run, calls = make_listener()
    listening = SimpleNamespace(
        run=run,
        function=kernel.function,
        packed_metadata=kernel.packed_metadata,
        launch_metadata=lambda *_: None,
        _init_handles=lambda: None,
    )
    type(kernel).__getitem__(listening, (*grid, 1))(*arguments, stream=CURRENT_STREAM)
    return [None if any(x is hook for hook in launch_hooks()) else x for x in single_call(calls)]


def make_listener() -> tuple[Callable[..., None], list[tuple[Any, ...]]]:
    """A function that does nothing, and the arguments of its calls."""
    calls: list[tuple[Any, ...]] = []
    return lambda *given: calls.append(given), calls


def single_call(calls: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The arguments of the only call, among which there is the stream."""
    if len(calls) != 1 or not any(x is CURRENT_STREAM for x in calls[0]):
        raise ValueError("got a launcher that is not known, expected one that makes one call with the stream")
    return calls[0]


def launch_hooks() -> tuple[Any, Any]:
    """What Triton calls before and after every launch, which does nothing where there is no profiler."""
    from triton import knobs

    return knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


def current_device() -> int:
    """The index of the current device."""
    from triton.runtime import driver

    return int(driver.active.get_current_device())


@cache
def stream_getter(index: int) -> Callable[[], Any]:
    """A function that returns a device's current stream; None if another is current, or a profiler wants to know."""
    from triton import knobs
    from triton.runtime import driver

    runtime, stream_of = knobs.runtime, driver.active.get_current_stream
    get_device = getattr(torch._C, "_cuda_getDevice", driver.active.get_current_device)
    chain = runtime.launch_enter_hook
    hooks = getattr(chain, "calls", ())

    def get_stream() -> Any:
        hook = runtime.launch_enter_hook
        if hooks or (hook is not chain and hook) or get_device() != index:
            return None
        return stream_of(index)

    return get_stream
