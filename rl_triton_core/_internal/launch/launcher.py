"""What a call's launches are, as the fast path records them: a backend tells it while it makes them.

Of a launch by Triton, what it calls in the end is called without Triton's own way there. In what order Triton's
launcher wants its arguments is asked of the Triton that is installed: a compiled kernel's own ``kernel[grid]`` is run
with a launcher that only listens, then the launcher with a last function that does.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

CURRENT_STREAM = object()
"""Stands for the current stream among a launch's arguments."""


class UnknownLauncherError(Exception):
    """A backend cannot tell what its launches call in the end; the message says what to do."""


class NoPlanError(Exception):
    """Calls like the recorded one always take the normal path."""


class ResolvedLaunch(NamedTuple):
    """What a launch calls in the end."""

    function: Callable[..., Any]
    arguments: Sequence[Any]
    """Tensors stand for their addresses, CURRENT_STREAM for the current stream. They may lie in tuples."""
    get_stream: Callable[[], Any] | None = None
    """Return the current stream, or None where the launch may not be repeated just now."""


class RecordedLaunch(NamedTuple):
    """A launch that a backend made."""

    resolve: Callable[[], ResolvedLaunch]
    """Raises `UnknownLauncherError` where that cannot be told, `NoPlanError` where it must not be repeated."""
    scratch: torch.Tensor | None = None
    """Memory that the launch takes beside the call's arguments and results."""


class Outcome(NamedTuple):
    """The results of a call that are made from what its launches write, such as a loss with its graph."""

    results: Any
    written: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]
    """Arguments of the call."""
    finish: Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], Any]
    """Make the results from what was written and the inputs. It serves for other tensors of the same sizes."""


class Recorder(threading.local):
    """The launches of the call that this thread records, None while it records nothing."""

    launches: list[RecordedLaunch] | None = None
    outcome: Outcome | None = None
    is_postponed = False
    num_numbers: int | None = None
    """How many numbers were marked; 0 if several calls marked some. None: no call has."""
    collects_numbers = False
    """Whether the call of this thread is to end with `NumbersCollected`."""
    is_busy = False
    """Whether it records, or collects numbers."""


RECORDER = Recorder()


class LaunchNumber(float):
    """A number of a recorded call, such as γ, among a launch's arguments. A plan puts that of its call there."""

    index: int
    """Among the numbers that were marked."""


class NumbersCollected(BaseException):
    """Ends a call that was made to check its numbers; its arguments are these as launches take them."""


def mark_numbers(numbers: Sequence[Any]) -> tuple[Any, ...]:
    """The numbers of a checked call, marked if it is recorded. Launches must take them as they are."""
    if RECORDER.collects_numbers:
        raise NumbersCollected(*numbers)
    if RECORDER.launches is None:
        return tuple(numbers)
    RECORDER.num_numbers = len(numbers) if RECORDER.num_numbers is None else 0
    return tuple(mark_number(x, i) for i, x in enumerate(numbers))


def mark_number(x: Any, index: int) -> Any:
    """A float as a `LaunchNumber`; anything else as it is."""
    if type(x) is not float:
        return x
    marked = LaunchNumber(x)
    marked.index = index
    return marked


def unmark_numbers(x: Any) -> Any:
    """Arguments of a launch with plain floats in the place of marked ones, tuples taken apart."""
    if RECORDER.launches is None:
        return x
    if type(x) is tuple:
        return tuple(map(unmark_numbers, x))
    return float(x) if type(x) is LaunchNumber else x


def collect_numbers(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The numbers of a call as launches take them. The call ends there; errors of its checks are raised."""
    RECORDER.collects_numbers = RECORDER.is_busy = True
    try:
        function(*args, **kwargs)
    except NumbersCollected as collected:
        return collected.args
    finally:
        RECORDER.collects_numbers = RECORDER.is_busy = False
    raise RuntimeError("a planned call marked no numbers")


@contextmanager
def record_launches() -> Iterator[list[RecordedLaunch]]:
    """Collect the launches of this thread."""
    RECORDER.launches, RECORDER.outcome, RECORDER.is_postponed, RECORDER.num_numbers = [], None, False, None
    RECORDER.is_busy = True
    try:
        yield RECORDER.launches
    finally:
        RECORDER.launches, RECORDER.is_busy = None, False


def record_launch(launch: RecordedLaunch) -> None:
    """Add a launch to the recording of this thread, if there is one."""
    if RECORDER.launches is not None:
        RECORDER.launches.append(launch)


def record_outcome(outcome: Outcome) -> None:
    """Note how results are made. It counts if the recorded call returns these."""
    if RECORDER.launches is not None:
        RECORDER.outcome = outcome


def forbid_plan() -> None:
    """Let calls like the recorded one take the normal path: it does more than launches."""
    record_launch(RecordedLaunch(refuse_launch))


def refuse_launch() -> ResolvedLaunch:
    """Stand for what cannot be repeated."""
    raise NoPlanError


def postpone_recording() -> None:
    """Let a later call be recorded instead of this one: its launches are not final."""
    RECORDER.is_postponed = True


# --- launches by Triton -----------------------------------------------------------------------------------------------


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
