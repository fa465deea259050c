"""Parts of a captured step that do not depend on each other: each has a branch of the graph, so that they overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn


@cache
def find_stream(device: torch.device, name: str) -> torch.cuda.Stream:
    """The stream of a branch."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def is_capturing() -> bool:
    """Whether a graph is captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


class Fork:
    """A place from which branches of a graph go out. Where no graph is captured, they are parts of the program.

    SAC's step, `EntropyMixin._learn`, has some. Backward passes follow the branches of what they differentiate.
    """

    def __init__(self, is_serial: bool = False) -> None:
        """Branches begin after all work so far; there are none if it is serial."""
        self.stream = torch.cuda.current_stream() if is_capturing() and not is_serial else None
        self.start = None if self.stream is None else self.stream.record_event()
        self.branches: list[torch.cuda.Stream] = []

    @contextmanager
    def branch(self, name: str, *inputs: Tensor) -> Iterator[None]:
        """Inside, work belongs to the branch of this name, in the order of all branches of that name; it uses these."""
        if self.stream is None or self.start is None:
            yield
            return
        stream = find_stream(self.stream.device, name)
        stream.wait_event(self.start)
        self.branches.append(stream)
        for x in inputs:
            x.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def join(self, *results: Tensor) -> None:
        """Wait for the branches; these results of theirs are used from here on."""
        if self.stream is None:
            return
        for stream in self.branches:
            self.stream.wait_stream(stream)
        for x in results:
            x.record_stream(self.stream)


class Writes:
    """Whether a step writes buffers of its modules, as it has been seen while none was captured.

    Two branches may write the same one, as two calls of an actor with batch normalisation do.
    """

    def __init__(self) -> None:
        self.are_there = False

    @contextmanager
    def watch(self, modules: list[nn.Module]) -> Iterator[None]:
        """Look what the step inside does, unless it is captured."""
        if is_capturing():
            yield
            return
        before = [(x, x._version, x.clone()) for module in modules for x in module.buffers()]
        yield
        pairs = zip((x for module in modules for x in module.buffers()), before, strict=True)
        self.are_there = any(x is not y or x._version != seen or not x.equal(copy) for x, (y, seen, copy) in pairs)


class Siblings:
    """Functions that are called with the same input, one after the other: in a graph, each in a branch of its own."""

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.fork = Fork()

    def call(self, name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Call one, in the branch of this name. The first call with an input is where branches begin."""
        if x is not self.input:
            self.input, self.fork = x, Fork()
        with self.fork.branch(name, x):
            result = function(x)
        self.fork.join(result)
        return result


@contextmanager
def branch_networks(model: Any, *names: str) -> Iterator[None]:
    """Inside, networks of Stable-Baselines3's critics have branches of their own: `q_networks` of these attributes."""
    critics: list[Any] = [getattr(model, x, None) for x in names if is_capturing() and not model._writes.are_there]
    before = [(x, x.q_networks) for x in critics if hasattr(x, "q_networks")]
    try:
        for index, (critic, networks) in enumerate(before):
            call = Siblings().call
            critic.q_networks = [partial(call, f"critic {index} {i}", x) for i, x in enumerate(networks)]
        yield
    finally:
        for critic, networks in before:
            critic.q_networks = networks
