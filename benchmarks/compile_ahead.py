"""Compile what a run will time, in parallel processes that fill the compilers' caches on disk."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, wait

import torch

from benchmarks.providers import REGISTRY
from benchmarks.workloads import Workload, draw_inputs

Job = tuple[str, Workload]
Compiled = dict[tuple[str, Workload | None], str]
"""Why an arm must not be called, by `key_of` its job: nothing where its compilation ended well."""

LARGEST = 1 << 27
"""Larger rollouts are compiled when they are timed: many processes share the memory."""
PROCESSES = 14


def compile_ahead(jobs: Iterable[Job], seconds: float, device: str) -> Compiled:
    """Make every arm's first call somewhere; those that take too long are not to be made again."""
    started, wanted = time.perf_counter(), select_jobs(jobs)
    workers = max(1, min(PROCESSES, len(wanted), (os.cpu_count() or 2) - 1))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=limit_threads)
    futures = [pool.submit(compile_job, *job, device) for job in wanted]
    unfinished = wait(futures, timeout=seconds).not_done
    outcomes = {key_of(job): describe_outcome(future) for job, future in zip(wanted, futures, strict=True)}
    pool.shutdown(wait=not unfinished, cancel_futures=True)
    for process in multiprocessing.active_children() if unfinished else ():
        process.terminate()
    bad = [f"{name} {workload}: {why}" for (name, workload), why in outcomes.items() if why]
    seconds = time.perf_counter() - started
    print(f"compiled {len(wanted) - len(bad)} arms in {seconds:.0f} s", *bad, sep="\n", flush=True)
    return outcomes


def key_of(job: Job) -> tuple[str, Workload | None]:
    """What is compiled: an arm for a workload, or for all."""
    name, workload = job
    return name, workload if REGISTRY[name].compiles == "each" else None


def describe_outcome(future: Future[None]) -> str:
    """Why there is nothing to call; nothing if there is, or if its process died and so may have others."""
    if not future.done():
        return "not compiled in time"
    failure = future.exception()
    if failure is None or isinstance(failure, BrokenExecutor):
        return ""
    return f"failed: {type(failure).__name__}: {str(failure)[:200]}"


def select_jobs(jobs: Iterable[Job]) -> list[Job]:
    """The jobs that compile something, those that compile once for all workloads first and once."""
    small = [job for job in dict.fromkeys(jobs) if job[1].cells <= LARGEST]
    once = {name: (name, workload) for name, workload in reversed(small) if REGISTRY[name].compiles == "once"}
    slowest_first = ("compiled_scan", "flat_triton")
    each = [job for job in small if REGISTRY[job[0]].compiles == "each"]
    return [*once.values(), *sorted(each, key=lambda job: (job[0] not in slowest_first, -job[1].num_steps))]


def limit_threads() -> None:
    """One compiling thread per process."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def compile_job(name: str, workload: Workload, device: str) -> None:
    """Compile by calling."""
    provider = REGISTRY[name]
    call = None if provider.unavailable(device) else provider.make_call(workload, draw_inputs(workload, device))
    if call is not None:
        call()
    if device == "cuda":
        torch.cuda.synchronize()
