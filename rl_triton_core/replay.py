"""Calls on a GPU that are like one before: their launches alone, without validating and building them anew.

What decides how a call is validated, compiled and launched is every argument that is no tensor, and every tensor's
shape, strides, dtype, device and alignment. The first call of its kind goes the whole way, while its launches are
noted. Those that follow get new outputs and the noted launches with their own pointers. A call with an argument of
another type, one that is differentiated, and one whose outputs may overlap its inputs always goes the whole way, as
does every call where Triton's launcher is not the one that is known here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

MOST = 512
"""Combinations of arguments that are no tensors, remembered per function."""
MOST_ALIKE = 32
"""Kinds of tensors remembered for each of them."""

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


class Known(NamedTuple):
    """A kind of call."""

    fits: Callable[..., bool]
    """Whether tensors are like those of the call that was recorded."""
    alignment: list[int]
    replay: Callable[..., Any] | None
    """None where such a call has to go the whole way."""


def replayed(function: Callable[P, R]) -> Callable[P, R]:
    """A public function whose calls on a GPU are replayed."""
    known: dict[Any, list[Known]] = {}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        key, tensors = (None, []) if torch.compiler.is_compiling() else sorted_out(args, kwargs)
        if key is None or not tensors or not tensors[0].is_cuda:
            return function(*args, **kwargs)
        pointers = [x.data_ptr() for x in tensors]
        alignment = [pointer & 15 for pointer in pointers]
        for fits, aligned, replay in known.get(key, ()):
            if aligned == alignment and fits(*tensors):
                results = None if replay is None else replay(tensors, pointers)
                return function(*args, **kwargs) if results is None else results
        with recording() as launches:
            results = function(*args, **kwargs)
        if len(known) >= MOST:
            known.clear()
        alike = known.setdefault(key, [])
        alike.insert(0, Known(guard(tensors), alignment, prepared(launches, tensors, results)))
        del alike[MOST_ALIKE:]
        return results

    return call


def sorted_out(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """All that is no tensor, to be looked up, and the tensors; nothing to look up if there are other types."""
    key: list[Any] = [*kwargs]
    tensors: list[torch.Tensor] = []
    for argument in (*args, *kwargs.values()):
        several = type(argument) is tuple
        if several:
            key.append(len(argument))
        for x in argument if several else (argument,):
            kind = type(x)
            key.append(kind)
            if kind is torch.Tensor:
                tensors.append(x)
            elif kind in PLAIN:
                key.append(x)
            else:
                return None, tensors
    return tuple(key), tensors


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that tells whether tensors are like these, by PyTorch's own check where there is that."""
    sizes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    with suppress(ImportError, TypeError):
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    want = likeness(*tensors)
    return lambda *others: likeness(*others) == want


def likeness(*tensors: torch.Tensor) -> list[Any]:
    """What a tensor has to have in common with another."""
    grad = torch.is_grad_enabled()
    return [(x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad) for x in tensors]


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
        hook = self.knobs.launch_enter_hook  # None, or a chain of calls
        if getattr(hook, "calls", hook) or self.driver.get_current_device() != self.device:
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
    distinct = len({x.data_ptr() for x in tensors}) == len(tensors)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if not launches or not distinct or differentiated or not all(x is None or type(x) is torch.Tensor for x in flat):
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
