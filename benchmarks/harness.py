"""How calls are timed: arms take turns, and every time is a median with its quartiles. Microseconds.

*Full*: one call between two CUDA events, the GPU synchronised before the first and after the second; on a CPU by the
host's clock. Arms take turns, a burst of up to 50 calls after as many warm-ups each. *Device*: the time of a call
within a CUDA graph of many (`triton.testing.do_bench_cudagraph`).
"""

import gc
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from functools import cache
from typing import Any

import torch

from benchmarks.results import Row, make_row
from benchmarks.settings import Setting
from rl_triton_core import set_num_threads
from rl_triton_core.testing import assert_close, relative_error

__all__ = ["Options", "Rows", "Setting", "Times", "make_row"]  # what benchmarks are made of

Call = Callable[[], Any]
Options, Rows = Namespace, Iterator[Row]
Times = dict[str, list[list[float]]]  # of every call, by arm and turn
FLOORS = ("null", "torch_add")  # arms that compute something less, with which nothing is compared
TURNS, BURST = 5, 50
SECONDS = 1.0  # about how long an arm is timed: slow calls come in shorter bursts
PROCESSES = min(14, os.cpu_count() or 1)  # that compile: each takes some memory of the GPU
TOLERANCE = 1e-5  # the largest error of an arm that counts; float32 loops stay well below


def measure_arms(
    arms: dict[str, Call],
    device: str,
    seconds: float | None = None,
    reference: str = "ours",
    host_only: Collection[str] = (),
    moved: int = 0,
    peaks: bool = False,
    **setting: Any,
) -> Rows:
    """The lines of all arms: full calls, and on a GPU the device's own time.

    There also that in which a copy moves so many bytes, if any, and on demand the peaks of memory.
    """
    yield from list_times(time_in_turns(arms, device, seconds), reference, **setting)
    if device != "cuda":
        return
    yield from (measure_device(name, call, **setting) for name, call in arms.items() if name not in host_only)
    if moved:
        yield make_row("copy", "device", "µs", moved / measure_bandwidth(), **setting)
    for name, call in arms.items() if peaks else ():
        yield make_row(name, "peak", "MiB", measure_memory(call), **setting)


def list_times(times: Times, reference: str = "ours", metric: str = "full", unit: str = "µs", **setting: Any) -> Rows:
    """The lines of all arms' times, and of how many times as long as the reference they take, turn by turn."""
    for name, bursts in times.items():
        scale = {"µs": 1.0, "ms": 1e-3}[unit]
        yield make_row(name, metric, unit, [scale * x for x in itertools.chain(*bursts)], **setting)
    for name in times if reference in times else ():
        if name not in (reference, *FLOORS):
            pairs = zip(times[name], times[reference], strict=True)
            ratios = [statistics.median(x) / statistics.median(y) for x, y in pairs]
            yield make_row(name, f"over {reference}", "×", ratios, **setting)


def time_in_turns(
    arms: dict[str, Call],
    device: str,
    seconds: float | None = None,
    turns: int = TURNS,
    burst: int | None = None,
) -> Times:
    """The times of every call, by arm and turn.

    A burst of a given length has no warm-ups, others as many as calls: its first call finds the caches as another arm
    left them.
    """
    times: Times = {name: [] for name in arms}
    calls: dict[str, int] = {}
    for _, name in itertools.product(range(turns), arms):
        if name not in calls:
            calls[name] = burst or choose_burst(arms[name], device, (seconds or SECONDS) / (2 * turns))
        for _ in range(0 if burst else calls[name]):
            arms[name]()
        times[name].append([time_call(arms[name], device) for _ in range(calls[name])])
    return times


def take_turns(arms: Iterable[str], seconds: float, least: int, most: int = 1 << 20) -> Iterator[str]:
    """The arms in the order of each round, until the time is over, but at least and at most in so many rounds.

    It is rotated, and every second time backwards, so that each arm takes every place equally often.
    """
    names, ends = list(arms), time.perf_counter() + seconds
    for round_ in range(most if names else 0):
        if round_ >= least and time.perf_counter() > ends:
            return
        first = round_ // 2 % len(names)
        order = [*names[first:], *names[:first]]
        yield from order[::-1] if round_ % 2 else order


def time_rounds(calls: dict[str, Call], options: Options) -> dict[str, list[float]]:
    """The times of every arm, of one call in each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in take_turns(calls, options.seconds, options.rounds):
        times[name].append(time_call(calls[name], options.device))
    return times


def make_ratio(arm: str, metric: str, times: dict[str, list[float]], note: str = "") -> Row:
    """How many times as long stock takes, paired by rounds."""
    return make_row(arm, metric, "×", [a / b for a, b in zip(times["stock"], times[arm], strict=True)], note)


def run_pass(function: Callable[..., Any], leaves: Sequence[torch.Tensor], *given: Any) -> None:
    """Forward, and with the gradients of all that is found by some tensors, if any."""
    with torch.set_grad_enabled(bool(leaves)):
        found = function(*given)
    if leaves:
        results = found if isinstance(found, tuple) else (found,)
        torch.autograd.grad([x.sum() if x.ndim else x for x in results], leaves, allow_unused=True)


def compare_parameters(name: str, got: torch.nn.Module, want: torch.nn.Module, rtol: float = 1e-3) -> None:
    for x, y in zip(got.parameters(), want.parameters(), strict=True):
        assert_close(x, y, rtol=rtol, name=name)


def choose_burst(call: Call, device: str, seconds: float) -> int:
    """So many calls take so long, if they are no more than `BURST`."""
    first = min(time_call(call, device) for _ in range(2))
    return max(1, min(BURST, int(seconds * 1e6 / max(first, 1e-3))))


def time_call(call: Call, device: str) -> float:
    if not device.startswith("cuda"):
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def measure_device(name: str, call: Call, **setting: Any) -> Row:
    """The line of an arm's time on the device; without a number where it cannot be captured."""
    from triton.testing import do_bench_cudagraph

    try:
        times = do_bench_cudagraph(call, return_mode="all")
    except RuntimeError as error:
        torch.cuda.synchronize()
        return make_row(name, "device", "µs", [], f"not captured: {str(error).splitlines()[0]}", **setting)
    return make_row(name, "device", "µs", [1e3 * x for x in times], **setting)


def measure_memory(call: Call, kind: str = "allocated") -> float:
    """The peak of a call on a GPU, beyond what is left of others; in MiB."""
    from gpu_checks import measure_peak

    gc.collect()
    torch.cuda.empty_cache()
    return measure_peak(call, kind) / 2**20


def find_error(found: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor]) -> float:
    """The largest ‖x − exact‖ / ‖exact‖; no number if one is none."""
    return float(torch.tensor([relative_error(x, y) for x, y in zip(found, wanted, strict=True)]).max())


def describe_error(error: float) -> str:
    """Why an arm does not count; empty if it does."""
    return "" if error <= TOLERANCE else f"wrong: its relative error is {error:.3g}"


@cache
def measure_bandwidth() -> float:
    """Bytes per microsecond, read and written, of a large elementwise copy on the GPU; measured once per process."""
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)
    row = measure_device("copy", lambda: torch.mul(source, 1.0, out=target))
    return 2 * source.nbytes / (row.median or float("nan"))


def set_threads(count: int) -> None:
    torch.set_num_threads(count)
    set_num_threads(count)


def compile_ahead(function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]], options: Options) -> None:
    """On a GPU, call a function in parallel processes, which fill the compilers' caches on disk.

    What takes more than half of the time is compiled, and what fails fails again, where it is timed.
    """
    if options.device != "cuda":
        return
    seconds = min(86_400.0, (options.ends - time.perf_counter()) / 2)
    context = multiprocessing.get_context("spawn")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in these processes, which are many
    with ProcessPoolExecutor(PROCESSES, context) as pool:
        futures = [pool.submit(function, *job) for job in jobs]
        unfinished = wait(futures, timeout=seconds).not_done
        pool.shutdown(wait=not unfinished, cancel_futures=True)
        for process in context.active_children() if unfinished else ():
            process.terminate()


def run_in_group(function: Callable[..., Any], processes: int, device: str, *args: Any) -> Any:
    """What the first of some processes returns, which average their gradients: a GPU each over NCCL, or over gloo."""
    from processes import run_ranks

    kind = "gloo" if device == "cpu" else "nccl"
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(run_share, folder, function, device, *args, ranks=processes, kind=kind)[0]


def run_share(rank: int, function: Callable[..., Any], device: str, *args: Any) -> Any:
    return function(device if device == "cpu" else f"cuda:{rank}", *args)
