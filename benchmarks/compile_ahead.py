"""Compile what a run will time, in parallel processes that fill the compilers' caches on disk."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as TookTooLong

import torch

from benchmarks.providers import REGISTRY
from benchmarks.workloads import Workload, draw_inputs

Job = tuple[str, Workload]
Compiled = dict[tuple[str, Workload | None], str]
"""Why an arm must not be called, by `key_of` its job: nothing where its compilation ended well."""

LARGEST = 1 << 27
"""Larger windows are compiled when they are timed: many processes share the memory."""
PROCESSES = 14


def compile_ahead(jobs: Iterable[Job], seconds: float, device: str) -> Compiled:
    """Make every arm's first call somewhere; those that take too long are not to be made again."""
    wanted = list(select_jobs(jobs))
    if not wanted:
        return {}
    workers = max(1, min(PROCESSES, len(wanted), (os.cpu_count() or 2) - 1))
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=limit_threads)
    futures: dict[Future[None], Job] = {pool.submit(compile_job, *job, device): job for job in wanted}
    trouble: Compiled = dict.fromkeys(map(key_of, wanted), "not compiled in time")
    try:
        for future in as_completed(futures, timeout=seconds):
            trouble[key_of(futures[future])] = describe_outcome(future)
        pool.shutdown()
    except TookTooLong:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
    bad = [f"{name} {workload}: {why}" for (name, workload), why in trouble.items() if why]
    print(
        f"compiled {len(wanted) - len(bad)} arms in {time.perf_counter() - started:.0f} s", *bad, sep="\n", flush=True
    )
    return trouble


def key_of(job: Job) -> tuple[str, Workload | None]:
    """What is compiled: an arm for a workload, or for all."""
    name, workload = job
    return name, workload if REGISTRY[name].compiles == "each" else None


def describe_outcome(future: Future[None]) -> str:
    """Why a compilation failed; nothing if it did not, or if its process died and so may have others."""
    failure = future.exception()
    if failure is None or isinstance(failure, BrokenExecutor):
        return ""
    return f"failed: {type(failure).__name__}: {str(failure)[:200]}"


def select_jobs(jobs: Iterable[Job]) -> Iterable[Job]:
    """The jobs that compile something, those that compile once for all workloads first and once."""
    small = [job for job in dict.fromkeys(jobs) if job[1].cells <= LARGEST]
    once = {name: (name, workload) for name, workload in reversed(small) if REGISTRY[name].compiles == "once"}
    slowest_first = ("compiled_scan", "flat_triton")
    each = [job for job in small if REGISTRY[job[0]].compiles == "each"]
    each.sort(key=lambda job: (job[0] not in slowest_first, -job[1].num_steps))
    return [*once.values(), *each]


def limit_threads() -> None:
    """One compiling thread per process."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def compile_job(name: str, workload: Workload, device: str) -> None:
    """Compile by calling."""
    provider = REGISTRY[name]
    if provider.unavailable(device):
        return
    call = provider.make_call(workload, draw_inputs(workload, device))
    if call is not None:
        call()
    if device == "cuda":
        torch.cuda.synchronize()
