"""Threads that share the work of a large call on the CPU.

A call keeps to the thread that makes it, unless more are asked for: beside environments in processes of their own, a
thread that waits for a processor makes all the others wait.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import TypeVar

from rl_triton_core._internal.arguments.validation import check_count
from rl_triton_core._internal.launch.fast_path import forget_plans

T = TypeVar("T")


def read_num_threads() -> int:
    """Return the number of threads that the environment asks for."""
    text = os.environ.get("RL_TRITON_NUM_THREADS") or "1"
    return check_count("RL_TRITON_NUM_THREADS", int(text) if text.isdecimal() else text)


class Setting:
    """How many threads a call may use; None until it is set or read from the environment."""

    num_threads: int | None = None


def get_num_threads() -> int:
    """Tell how many threads a call on the CPU may use: 1 unless `set_num_threads` or RL_TRITON_NUM_THREADS said more.

    Returns:
        The number of threads, the one that makes the call included.
    """
    if Setting.num_threads is None:
        Setting.num_threads = read_num_threads()
    return Setting.num_threads


def set_num_threads(num_threads: int) -> None:
    """Let large calls on the CPU use several threads, in this process.

    More than one pay where processors are idle and a rollout has some hundred thousand steps. Results do not depend on
    the number of threads.

    Args:
        num_threads: The number of threads of a call, at least 1, the one that makes the call included.

    Raises:
        TypeError: `num_threads` is no int.
        ValueError: `num_threads` is less than 1.
    """
    Setting.num_threads = check_count("num_threads", num_threads)
    forget_plans()


def run_chunks(work: Callable[[T], object], chunks: Iterable[T], num_threads: int | None = None) -> None:
    """Do the work on every chunk, with so many threads or as many as a call may use.

    Each takes the next chunk when it is done with one, so that none waits for a thread that gets no processor.
    """
    remaining = deque(chunks)
    if len(remaining) == 1:
        work(remaining.pop())
        return

    def take_chunks() -> None:
        while remaining:
            try:
                chunk = remaining.popleft()
            except IndexError:  # another thread was faster
                return
            work(chunk)

    number = num_threads or get_num_threads()
    jobs: list[Future[None]] = []
    with suppress(RuntimeError):  # the process ends, or has as many threads as it may
        jobs.extend(start_threads(number).submit(take_chunks) for _ in range(min(number, len(remaining)) - 1))
    try:
        take_chunks()
    finally:  # an interrupt, too, waits for what writes to memory
        for job in jobs:
            if not job.cancel():
                job.result()


@cache
def start_threads(number: int) -> ThreadPoolExecutor:
    """Start threads, when a call is first large enough."""
    return ThreadPoolExecutor(number, thread_name_prefix="rl_triton_core")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=start_threads.cache_clear)  # a fork has none of its parent's threads
