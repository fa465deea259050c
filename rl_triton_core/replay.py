"""Calls on a GPU that are like one before: their launches alone, without validating and building them anew.

What decides how a call is validated, compiled and launched is its signature: every argument that is no tensor, and
every tensor's shape, strides, dtype, device and alignment. The first call of a signature goes the whole way, while its
launches are noted. Those that follow get new outputs and the noted launches with their own pointers. A call with an
argument of another type, one that is differentiated, and one whose outputs may overlap its inputs always goes the whole
way, as does every call where Triton's launcher is not the one that is known here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

MOST = 512
"""Signatures remembered per function."""

UNKNOWN = object()
PLAIN = frozenset((type(None), bool, int, float, str))


class Launched(NamedTuple):
    """A launch that was made: what Triton compiled, and with what it was called."""

    kernel: Any
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    scratch: torch.Tensor | None


class Noted(threading.local):
    """The launches since recording began, None while nothing records."""

    launches: list[Launched] | None = None


NOTED = Noted()


def note(*launched: Any) -> None:
    """Tell of a launch."""
    if NOTED.launches is not None:
        NOTED.launches.append(Launched(*launched))


@contextmanager
def recording() -> Iterator[list[Launched]]:
    """Collect the launches of this thread."""
    NOTED.launches = []
    try:
        yield NOTED.launches
    finally:
        NOTED.launches = None


def replayed(function: Callable[P, R]) -> Callable[P, R]:
    """A public function whose calls on a GPU are replayed."""
    known: dict[Any, Any] = {}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        signed = None if torch.compiler.is_compiling() else signature(args, kwargs)
        if signed is None:
            return function(*args, **kwargs)
        key, tensors, pointers = signed
        replay = known.get(key, UNKNOWN)
        if replay is not UNKNOWN:
            results = None if replay is None else replay(tensors, pointers)
            return function(*args, **kwargs) if results is None else results
        with recording() as launches:
            results = function(*args, **kwargs)
        if len(known) >= MOST:
            known.clear()
        known[key] = prepared(launches, tensors, results)
        return results

    return call


def signature(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor], list[int]] | None:
    """What decides how a call is made, its tensors, and where they are; None if it can not be replayed."""
    grad = torch.is_grad_enabled()
    key: list[Any] = [grad, *kwargs]
    tensors: list[torch.Tensor] = []
    pointers: list[int] = []
    for argument in (*args, *kwargs.values()):
        several = type(argument) is tuple
        if several:
            key.append(len(argument))
        for x in argument if several else (argument,):
            kind = type(x)
            if kind is torch.Tensor:
                device, pointer = x.get_device(), x.data_ptr()
                if device < 0 or (grad and x.requires_grad):
                    return None
                tensors.append(x)
                pointers.append(pointer)
                key += (x.shape, x.stride(), x.dtype, device, pointer % 16)
            elif kind in PLAIN:
                key += (kind, x)
            else:
                return None
    return tuple(key), tensors, pointers


class Replay:
    """The launches of a call, with places for its tensors' pointers and new outputs."""

    def __init__(self, launches: Sequence[Launched], tensors: Sequence[torch.Tensor], results: Sequence[Any]) -> None:
        slots = {x.data_ptr(): i for i, x in enumerate(tensors)}
        from triton import knobs
        from triton.runtime import driver

        self.driver, self.knobs, self.device = driver.active, knobs.runtime, tensors[0].get_device()
        self.new: list[tuple[Any, ...]] = []
        given = []
        for x in results:
            if x is not None and x.data_ptr() in slots:
                given.append(slots[x.data_ptr()])
            elif x is not None:
                slots[x.data_ptr()] = len(tensors) + len(self.new)
                self.new.append((x.shape, x.stride(), x.dtype, x.device))
        self.apart = [(out, i, span(tensors[out]), span(x)) for out in given for i, x in enumerate(tensors) if i != out]
        self.results = [None if x is None else slots[x.data_ptr()] for x in results]
        self.scratch = None
        scratch = launches[0].scratch
        if scratch is not None:
            self.scratch = scratch.shape, scratch.dtype, scratch.device
            slots[scratch.data_ptr()] = len(tensors) + len(self.new)
        self.calls = [
            (x.kernel.run, (*x.grid, 1), x.kernel.function, x.kernel.packed_metadata, template(x.arguments, slots))
            for x in launches
        ]

    def __call__(self, tensors: Sequence[torch.Tensor], pointers: list[int]) -> list[Any] | None:
        """The results, or None if the call has to go the whole way."""
        if self.knobs.launch_enter_hook is not None or self.driver.get_current_device() != self.device:
            return None
        for out, other, size, other_size in self.apart:
            if pointers[out] < pointers[other] + other_size and pointers[other] < pointers[out] + size:
                return None
        new = [
            torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype, device in self.new
        ]
        pointers += [x.data_ptr() for x in new]
        if self.scratch is not None:
            shape, dtype, device = self.scratch
            scratch = torch.empty(shape, dtype=dtype, device=device)
            pointers.append(scratch.data_ptr())
        stream = self.driver.get_current_stream(self.device)
        for run, grid, function, metadata, arguments in self.calls:
            run(*grid, stream, function, metadata, None, None, None, *arguments(pointers))
        everything = [*tensors, *new]
        return [None if slot is None else everything[slot] for slot in self.results]


def prepared(launches: list[Launched], tensors: list[torch.Tensor], results: Any) -> Any:
    """A `Replay` that gives results of the same type, or None where there can not be one."""
    several = isinstance(results, tuple)
    flat = results if several else (results,)
    pointers = {x.data_ptr() for x in tensors}
    if not launches or len(pointers) < len(tensors) or not all(x is None or type(x) is torch.Tensor for x in flat):
        return None
    try:
        replay = Replay(launches, tensors, flat)
    except (KeyError, AttributeError, ImportError):  # a copy took part, or Triton is not as it is known here
        return None
    make = type(results)._make if several else next_of

    def call(tensors: list[torch.Tensor], pointers: list[int]) -> Any:
        outputs = replay(tensors, pointers)
        return None if outputs is None else make(outputs)

    return call


def next_of(outputs: list[Any]) -> Any:
    """The one result."""
    return outputs[0]


def template(arguments: tuple[Any, ...], slots: dict[int, int]) -> Callable[[list[int]], tuple[Any, ...]]:
    """A function from pointers to the arguments of a launch, in which they stand for the tensors."""
    constants: list[Any] = []

    def expression(x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return f"p[{slots[x.data_ptr()]}]"
        if type(x) is tuple:
            return f"({''.join(f'{expression(y)},' for y in x)})"
        constants.append(x)
        return f"c[{len(constants) - 1}]"

    made: Callable[[list[int]], tuple[Any, ...]] = eval(f"lambda p, c=c: {expression(arguments)}", {"c": constants})
    return made


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
