"""Plans: the launches of a recorded call, with other tensors of the same sizes in the place of the recorded ones.

A plan builds one list, the pool: addresses of the call's tensors and of what it allocates, the stream, constants,
numbers, addresses of views into tensors, and tuples of these. Each launch picks its arguments from the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import accumulate
from operator import itemgetter, or_
from typing import Any

import torch

from rl_triton_core._internal.arguments.outputs import byte_span
from rl_triton_core._internal.launch import launcher
from rl_triton_core._internal.launch.launcher import CURRENT_STREAM, LaunchNumber, NoPlanError, Outcome

TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors, of which none has operations of its own."""
ALIGNMENT = 15
"""The bits of an address that Triton compiles a kernel for."""
NORMAL_PATH = object()
"""In the place of results: the call has to take the normal path."""
NOT_ALIKE = object()
"""In the place of results: the call needs another plan."""
Runner = Callable[[tuple[torch.Tensor, ...], tuple[Any, ...]], Any]
"""Makes a call with other tensors and numbers, or returns NORMAL_PATH or NOT_ALIKE."""
Picker = Callable[[Sequence[Any]], tuple[Any, ...]]
Reference = tuple[str, int]
"""A part of the pool, and the place within that."""


class Plan:
    """The launches of calls whose tensors have certain sizes and whose other arguments are certain constants."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        launches: Sequence[launcher.RecordedLaunch],
        results: Any,
        outcome: Outcome | None = None,
        num_numbers: int = 0,
    ) -> None:
        """Plan calls like a recorded one, with its tensors, each once, and how its results are made of what is written.

        All or none of its marked numbers may change from call to call. Raises `NoPlanError` where calls do more.
        """
        if not launches:
            raise NoPlanError
        builder = PoolBuilder(tensors, num_numbers)
        self.allocations = builder.allocations
        self.overlaps: list[tuple[int, int, int, int]] = []
        """A tensor to be written to, one that must not share memory with it, and the bytes of both."""
        if outcome is not None and outcome.results is not results:
            outcome = None
        written = find_written(results, tensors) if outcome is None else outcome.written
        resolved = [launch.resolve() for launch in launches]
        self.get_stream = resolved[0].get_stream
        places = [None if x is None else self.place_result(x, tensors, builder) for x in written]
        for scratch in {id(x.scratch): x.scratch for x in launches if x.scratch is not None}.values():
            builder.allocate(scratch)
        for launch in resolved:
            builder.launches.append((launch.function, [builder.refer_to(x) for x in launch.arguments]))
        arguments = flatten_tuples([launch.arguments for launch in resolved])
        passed = {x.data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
        if any(x is not None and x.data_ptr() not in passed for x in written):  # it would be as it was allocated
            raise NoPlanError
        self.groups, self.launches = builder.make_pickers(self.get_stream is not None)
        self.views, self.constants = builder.views, builder.constants
        self.arrange = arrange_results(results, places, outcome, tensors)
        addresses = [x.data_ptr() for x in tensors]
        self.remainders = [x & ALIGNMENT for x in addresses]
        self.shared = [(i, addresses.index(x)) for i, x in enumerate(addresses) if addresses.index(x) < i]
        self.is_guarded = any(self.remainders) or bool(self.shared) or bool(self.overlaps)

    def place_result(self, x: torch.Tensor, tensors: Sequence[torch.Tensor], builder: PoolBuilder) -> int:
        """Where among tensors and allocations a result is; one that is an argument must not overlap the others."""
        addresses = [other.data_ptr() for other in tensors]
        if x.data_ptr() not in addresses:
            return builder.allocate(x)
        own = addresses.index(x.data_ptr())
        apart = [i for i, address in enumerate(addresses) if address != addresses[own]]
        self.overlaps += [(own, i, byte_span(x), byte_span(tensors[i])) for i in apart]
        return own

    def bind(self) -> Runner:
        """A function of tensors and numbers that makes the launches and returns the results, or why not."""
        is_guarded, find_obstacle, get_stream = self.is_guarded, self.find_obstacle, self.get_stream
        allocations, constants, views, groups = self.allocations, self.constants, self.views, self.groups
        launches, arrange, make = self.launches, self.arrange, tuple.__new__

        def run(tensors: tuple[torch.Tensor, ...], numbers: tuple[Any, ...]) -> Any:
            pool: list[Any] = [x.data_ptr() for x in tensors]
            if reduce(or_, pool) & ALIGNMENT or is_guarded:
                obstacle = find_obstacle(pool)
                if obstacle is not None:
                    return obstacle
            objects = tensors
            for allocate, like in allocations:
                x = allocate(tensors[like])
                objects += (x,)
                pool.append(x.data_ptr())
            if get_stream is not None:
                stream = get_stream()
                if stream is None:
                    return NORMAL_PATH
                pool.append(stream)
            pool += constants
            pool += numbers
            if views:
                pool += [pool[i] + offset for i, offset in views]
            for kind, pick in groups:
                pool.append(pick(pool) if kind is tuple else make(kind, pick(pool)))
            for function, pick in launches:
                function(*pick(pool))
            return arrange(objects)

        return run

    def find_obstacle(self, addresses: Sequence[int]) -> Any:
        """NOT_ALIKE where tensors are not aligned as the recorded ones, NORMAL_PATH where one to write to overlaps."""
        if [x & ALIGNMENT for x in addresses] != self.remainders:
            return NOT_ALIKE
        if any(addresses[i] != addresses[j] for i, j in self.shared):
            return NOT_ALIKE
        overlaps = any(
            addresses[i] < addresses[j] + other_bytes and addresses[j] < addresses[i] + out_bytes
            for i, j, out_bytes, other_bytes in self.overlaps
        )
        return NORMAL_PATH if overlaps else None


def find_written(results: Any, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """The results, if launches write them and nothing is made from them."""
    every = results if isinstance(results, tuple) else (results,)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if differentiated or not all(x is None or type(x) is torch.Tensor for x in every):
        raise NoPlanError
    return every


def arrange_results(
    results: Any, places: Sequence[int | None], outcome: Outcome | None, tensors: Sequence[torch.Tensor]
) -> Callable[[tuple[Any, ...]], Any]:
    """A function of tensors and allocations that returns what the call returns."""
    if outcome is not None:
        positions = {id(x): i for i, x in enumerate(tensors)}
        if any(id(x) not in positions for x in outcome.inputs):
            raise NoPlanError
        finish, pick_inputs = outcome.finish, make_picker([positions[id(x)] for x in outcome.inputs])
        pick_written = make_picker([i for i in places if i is not None])
        return lambda objects: finish(pick_written(objects), pick_inputs(objects))
    if not isinstance(results, tuple):
        return itemgetter(places[0])
    kind = type(results)
    if None in places:
        return lambda objects: tuple.__new__(kind, [None if i is None else objects[i] for i in places])
    pick = make_picker(places)  # type: ignore[arg-type]
    return lambda objects: tuple.__new__(kind, pick(objects))


class PoolBuilder:
    """Decides what is in a plan's pool, and where."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_numbers: int) -> None:
        self.objects = list(tensors)
        """The tensors, and what a plan allocates."""
        self.num_given = len(tensors)
        self.allocations: list[tuple[Callable[[torch.Tensor], torch.Tensor], int]] = []
        """What allocates, and the tensor whose form it may copy."""
        self.views: list[tuple[int, int]] = []
        """Of addresses inside objects: the object and the offset in bytes."""
        self.constants: list[Any] = []
        self.num_numbers = num_numbers
        self.groups: list[tuple[type, list[Reference]]] = []
        """Tuples of what precedes them in the pool."""
        self.launches: list[tuple[Callable[..., Any], list[Reference]]] = []

    def allocate(self, x: torch.Tensor) -> int:
        """Let a plan allocate a tensor like this one. The quickest way copies the form of an object."""
        empty = partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
        allocation: tuple[Callable[[torch.Tensor], torch.Tensor], int] = (lambda _: empty(), 0)
        for i, like in enumerate(self.objects[: self.num_given]):
            alike = like.dtype == x.dtype and like.shape == x.shape
            if alike and torch.empty_like(like, device="meta").stride() == x.stride():
                allocation = torch.empty_like, i
                break
        self.allocations.append(allocation)
        self.objects.append(x)
        return len(self.objects) - 1

    def refer_to(self, x: Any) -> Reference:
        """Where in the pool an argument of a launch is."""
        if isinstance(x, torch.Tensor):
            return self.refer_to_address(x)
        if x is CURRENT_STREAM:
            return "stream", 0
        if type(x) is LaunchNumber:
            if x.index < self.num_numbers:
                return "number", x.index
            x = float(x)
        if isinstance(x, tuple) and any(isinstance(y, torch.Tensor | LaunchNumber) for y in flatten_tuples(x)):
            elements = [self.refer_to(y) for y in x]
            self.groups.append((type(x), elements))
            return "group", len(self.groups) - 1
        self.constants.append(x)
        return "constant", len(self.constants) - 1

    def refer_to_address(self, x: torch.Tensor) -> Reference:
        """The address of an object, or of a view inside of one."""
        at = x.data_ptr()
        for i, y in enumerate(self.objects):
            if y.data_ptr() == at:
                if i >= self.num_given and byte_span(x) > byte_span(y):
                    raise NoPlanError
                return "address", i
        offsets = {i: at - y.data_ptr() for i, y in enumerate(self.objects)}
        others = [i for i, y in enumerate(self.objects) if 0 <= offsets[i] <= byte_span(y) - byte_span(x)]
        if len(others) != 1:
            raise NoPlanError
        self.views.append((others[0], offsets[others[0]]))
        return "view", len(self.views) - 1

    def make_pickers(
        self, has_stream: bool
    ) -> tuple[list[tuple[type, Picker]], list[tuple[Callable[..., Any], Picker]]]:
        """What picks the elements of each group and the arguments of each launch from the pool."""
        sizes = {"address": len(self.objects), "stream": int(has_stream), "constant": len(self.constants)}
        sizes |= {"number": self.num_numbers, "view": len(self.views), "group": len(self.groups)}
        starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))

        def make(references: Sequence[Reference]) -> Picker:
            return make_picker([starts[part] + place for part, place in references])

        groups = [(kind, make(elements)) for kind, elements in self.groups]
        return groups, [(function, make(arguments)) for function, arguments in self.launches]


def make_picker(places: Sequence[int]) -> Picker:
    """A function that returns the elements at these places as a tuple."""
    if len(places) > 1:
        pick: Picker = itemgetter(*places)
        return pick
    return lambda pool: tuple([pool[i] for i in places])


def flatten_tuples(x: Any) -> Iterator[Any]:
    """What is in tuples and lists, and in those in them, one by one."""
    if isinstance(x, tuple | list):
        for y in x:
            yield from flatten_tuples(y)
    else:
        yield x


def make_tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that tells whether tensors are like these, by PyTorch's own check where there is that."""
    sizes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    with suppress(Exception):
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    want = [describe_tensor(x) for x in tensors]
    return lambda *others: all(type(x) in TENSORS for x in others) and [describe_tensor(x) for x in others] == want


def describe_tensor(x: torch.Tensor) -> Any:
    """What a tensor has to have in common with another to take its place."""
    return type(x), x.shape, x.stride(), x.dtype, x.device, torch.is_grad_enabled() and x.requires_grad
