"""CUDA graphs: warming up, capturing, random states. Tests put graphs of their own in the place of `CudaGraphs`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch.autograd import graph as autograd_graph

ERROR_MODE = "thread_local"
"""What a capture forbids, it forbids its own thread alone."""


class CudaGraphs:
    """Graphs of one CUDA device, which share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        """Take no memory yet."""
        self.device = device
        self.pool: Any = None

    def warm_up(self, call: Callable[[], Any], times: int) -> None:
        """Make the call some times, on another stream, as captures are made."""
        with use_stream(self.device, "warm-up"), without_advice():
            for _ in range(times):
                call()

    def capture(self, call: Callable[[], Any], generators: Iterable[torch.Generator]) -> tuple[Any, Callable[[], None]]:
        """The call's results, and a function that makes it again without Python; the call itself has no effect.

        Other threads may use the device meanwhile.
        """
        # Autograd's graphs that only circles keep tie a capture to the stream before. Looking at old ones takes long
        gc.collect(2 if self.pool is None else 1)
        graph = create_graph(generators)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        current, side = torch.cuda.current_stream(self.device), find_stream(self.device, "capture")
        errors: list[BaseException] = []
        try:
            with (
                torch.cuda.device(self.device),
                torch.cuda.graph(graph, pool=self.pool, stream=side, capture_error_mode=ERROR_MODE),
            ):
                try:
                    results = call()
                except BaseException as error:
                    errors.append(error)
                    raise
        except BaseException:
            torch.cuda.set_stream(current)  # a capture that fails at its end leaves its own behind
            self.leave_pool()
            self.leave_generators(generators)
            if errors:
                raise errors.pop() from None  # the call's own, which may have made the capture's end fail
            raise
        return results, graph.replay

    def leave_pool(self) -> None:
        """Let the allocator end a capture that failed at its end, or it would keep memory back for good."""
        with suppress(RuntimeError):  # it has ended it
            torch._C._cuda_endAllocateToPool(self.device.index, self.pool)
            torch._C._cuda_releasePool(self.device.index, self.pool)

    def leave_generators(self, generators: Iterable[torch.Generator]) -> None:
        """Let the generators leave the state of a capture that failed: by one that does not."""
        graph, side = create_graph(generators), find_stream(self.device, "capture")
        with torch.cuda.device(self.device), torch.cuda.graph(graph, stream=side, capture_error_mode=ERROR_MODE):
            torch.empty(1, device=self.device).zero_()

    def save_random_state(self, generators: Iterable[torch.Generator]) -> Any:
        """Of the device and the generators given."""
        own = [(generator, generator.get_state()) for generator in generators]
        return torch.cuda.get_rng_state(self.device), own

    def restore_random_state(self, saved: Any) -> None:
        """Put them back."""
        device, own = saved
        torch.cuda.set_rng_state(device, self.device)
        for generator, state in own:
            generator.set_state(state)

    def release(self) -> None:
        """Begin a pool with the next graph: one without graphs takes none while a tensor, as a gradient, is in it."""
        if self.pool is not None:
            self.pool = None
            torch.cuda.empty_cache()


def create_graph(generators: Iterable[torch.Generator]) -> torch.cuda.CUDAGraph:
    """An empty graph that draws from these generators, besides the default one."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    return graph


@contextmanager
def without_advice() -> Iterator[None]:
    """Inside, PyTorch does not warn of gradients on another stream than that of their parameters: here it is meant.

    That is for the whole process. Warnings have no other switch that leaves Python's filters as they are.
    """
    switch = getattr(autograd_graph, "set_warn_on_accumulate_grad_stream_mismatch", lambda _: None)
    before = getattr(torch._C, "_warn_on_accumulate_grad_stream_mismatch", lambda: True)()
    switch(False)
    try:
        yield
    finally:
        switch(before)


@contextmanager
def use_stream(device: torch.device, purpose: str) -> Iterator[None]:
    """Inside, a device works in its stream for this purpose, after what precedes and before what follows."""
    current, side = torch.cuda.current_stream(device), find_stream(device, purpose)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        current.wait_stream(side)


@cache
def find_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """A device's stream for all warm-ups or captures: cuBLAS keeps a workspace of megabytes for each that it sees.

    Graphs keep the workspace of the stream that captured them, so that no warm-up may have it meanwhile.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
