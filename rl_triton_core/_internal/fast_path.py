"""The fast path for repeated calls on a GPU: their launches alone, without validating and building them anew.

What decides how a call is validated, compiled and launched is every argument that is no tensor, and every tensor's
shape, strides, dtype, device and alignment, and which arguments are one tensor. The first two calls with one signature
take the normal path. The launches of the second are recorded, and a function is written that makes them again: with the
pointers of other tensors, and new outputs. A call with an argument of another type, one that is differentiated, and one
whose outputs may overlap its inputs always takes the normal path, as does every call where Triton's launcher is not one
that is known here.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

MAX_PLANS_PER_FUNCTION = 32
"""Signatures of calls with a plan, for each function."""
MAX_SEEN_SIGNATURES = 1024
"""Signatures seen once that are remembered for each function, a number each."""

FRONT_SOURCE = """
def front(function, call_and_record, plans, is_compiling, SLOW_PATH):
    def call{header}:
        if is_compiling():
            return function({passed})
        for plan in plans:
            results = plan({given})
            if results is SLOW_PATH:
                return function({passed})
            if results is not None:
                return results
        return call_and_record({given})
    return call
"""
"""A public function as written out: with the same arguments, so that Python binds them, which is the quickest."""

CONSTANT_TYPES = (type(None), bool, int, float, str)
SLOW_PATH = object()
"""In the place of results: the call has this signature, but has to take the normal path."""
STREAM = object()
"""Stands for the stream among a launcher's arguments."""
CALL_MEMORIES: list[list[Any] | set[int]] = []
"""What every public function remembers of its calls."""


class RecordedLaunch(NamedTuple):
    """A launch that was made: what Triton compiled, and with what it was called."""

    kernel: Any
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    scratch: torch.Tensor | None


class Recorder(threading.local):
    """The launches since recording began, None while nothing records."""

    launches: list[RecordedLaunch] | None = None


RECORDER = Recorder()


def record_launch(*launched: Any) -> None:
    """Add a launch to the recording of this thread, if there is one."""
    if RECORDER.launches is not None:
        RECORDER.launches.append(RecordedLaunch(*launched))


@contextmanager
def record_launches() -> Iterator[list[RecordedLaunch]]:
    """Collect the launches of this thread."""
    RECORDER.launches = []
    try:
        yield RECORDER.launches
    finally:
        RECORDER.launches = None


def with_fast_path(function: Callable[P, R]) -> Callable[P, R]:
    """Give a public function a fast path for repeated calls on a GPU."""
    plans: list[Callable[..., R | None]] = []
    seen: set[int] = set()
    CALL_MEMORIES.extend((plans, seen))
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    slow_path: Callable[..., R] = function

    def call_and_record(*given: Any) -> R:
        arguments = dict(zip(names, given, strict=True))
        if not is_plannable(given):
            return slow_path(**arguments)
        with record_launches() as launches:
            results = slow_path(**arguments)
        if is_second_call(seen, hash(tuple(signature_of(*flatten_arguments(given))))):
            plans.insert(0, build_plan(given, launches, results))
            del plans[MAX_PLANS_PER_FUNCTION:]
        return results

    bare_parameters = [x.replace(default=x.empty, annotation=x.empty) for x in parameters.values()]
    passed = ", ".join(f"{name}={name}" for name in names)
    made: dict[str, Any] = {}
    exec(FRONT_SOURCE.format(header=inspect.Signature(bare_parameters), given=", ".join(names), passed=passed), made)
    front: Any = made["front"](function, call_and_record, plans, torch.compiler.is_compiling, SLOW_PATH)
    front.__defaults__, front.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    call: Callable[P, R] = wraps(function)(front)
    return call


def forget_plans() -> None:
    """Let every call take the normal path again."""
    for calls in CALL_MEMORIES:
        calls.clear()


def is_plannable(given: Iterable[Any]) -> bool:
    """Whether there are tensors on a GPU, and otherwise types that are known."""
    every = flatten_arguments(given)
    tensors = [x for x in every if type(x) is torch.Tensor]
    return bool(tensors) and tensors[0].is_cuda and all(type(x) in (torch.Tensor, *CONSTANT_TYPES) for x in every)


def flatten_arguments(given: Iterable[Any]) -> list[Any]:
    """Arguments, those in tuples one by one."""
    return [x for argument in given for x in (argument if type(argument) is tuple else (argument,))]


def is_second_call(seen: set[int], signature: int) -> bool:
    """Whether this is the second call with a signature; the first one is remembered."""
    if signature in seen:
        seen.discard(signature)
        return True
    if len(seen) >= MAX_SEEN_SIGNATURES:
        seen.clear()
    seen.add(signature)
    return False


def build_plan(given: Sequence[Any], launches: Sequence[RecordedLaunch], results: R) -> Callable[..., R | None]:
    """A function of the same arguments: None if they are not alike, else results of the same type, or SLOW_PATH."""
    names: dict[str, Any] = {"SLOW_PATH": SLOW_PATH, "new": tuple.__new__}
    tensors, conditions = argument_guards(given, names)
    try:
        lines = launch_source(tensors, launches, results, names)
    except Exception:  # a copy took part, or Triton is not as it is known here
        lines = ["return SLOW_PATH"]
    pointers = [f"p{i} = {name}.data_ptr()" for i, name in enumerate(tensors)]
    body = [f"if not ({' and '.join(conditions)}): return None", *pointers]
    body += [f"if not ({' and '.join(alignment_guards(tensors.values()))}): return None", *lines]
    arguments = ", ".join(f"a{i}" for i in range(len(given)))
    exec(f"def plan({arguments}):\n    " + "\n    ".join(body), names)
    plan: Callable[..., R | None] = names["plan"]
    return plan


def alignment_guards(tensors: Iterable[torch.Tensor]) -> Iterator[str]:
    """Conditions that others lie in memory like these: aligned alike, and one place for those that have one."""
    first: dict[int, int] = {}
    for i, x in enumerate(tensors):
        yield f"p{i} & 15 == {x.data_ptr() & 15}"
        if first.setdefault(x.data_ptr(), i) != i:
            yield f"p{i} == p{first[x.data_ptr()]}"


def argument_guards(given: Sequence[Any], names: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors among arguments, each once under an expression for it, and conditions that others are like these."""
    conditions = []
    every: dict[str, Any] = {}
    for i, x in enumerate(given):
        if type(x) is tuple:
            conditions.append(f"type(a{i}) is tuple and len(a{i}) == {len(x)}")
            every.update({f"a{i}[{j}]": y for j, y in enumerate(x)})
        else:
            every[f"a{i}"] = x
    tensors: dict[str, torch.Tensor] = {}
    for name, x in every.items():
        same = next((other for other, y in tensors.items() if y is x), None)
        if same is not None:
            conditions.append(f"{name} is {same}")
        elif type(x) is torch.Tensor:
            tensors[name] = x
        else:
            constant, kind = bind_constant(x, names), bind_constant(type(x), names)
            conditions.append(f"({name} is {constant} or type({name}) is {kind} and {name} == {constant})")
    if any(x.requires_grad for x in tensors.values()):
        names["graph"] = torch.is_grad_enabled
        conditions.append(f"graph() is {torch.is_grad_enabled()}")
    names["fits"] = tensor_guard(list(tensors.values()))
    return tensors, [*conditions, f"fits({', '.join(tensors)})"]


def bind_constant(x: Any, names: dict[str, Any]) -> str:
    """A name for an object that is not written out."""
    name = f"c{len(names)}"
    names[name] = x
    return name


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that tells whether tensors are like these, by PyTorch's own check where there is that."""
    sizes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    with suppress(Exception):
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    want = signature_of(*tensors)
    return lambda *others: all(type(x) is torch.Tensor for x in others) and signature_of(*others) == want


def signature_of(*every: Any) -> list[Any]:
    """What a tensor has to have in common with another; anything else is itself."""
    grad = torch.is_grad_enabled()
    return [
        (x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad) if type(x) is torch.Tensor else x
        for x in every
    ]


def launch_source(
    tensors: dict[str, torch.Tensor], launches: Sequence[RecordedLaunch], results: Any, names: dict[str, Any]
) -> list[str]:
    """Lines of code that make the launches again, and return results of the same type."""
    several = isinstance(results, tuple)
    every = results if several else (results,)
    places = {x.data_ptr(): f"p{i}" for i, x in enumerate(tensors.values())}
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    known = all(x is None or type(x) is torch.Tensor for x in every)
    if not launches or differentiated or not known:
        return ["return SLOW_PATH"]

    lines = [*device_guards(next(iter(tensors.values())).get_device(), names)]
    returned = []
    by_pointer = {x.data_ptr(): name for name, x in tensors.items()}
    for i, x in enumerate(every):
        if x is None:
            returned.append("None")
        elif x.data_ptr() in by_pointer:
            returned.append(by_pointer[x.data_ptr()])
            lines += overlap_guard(x, places, tensors.values())
        else:
            returned.append(f"r{i}")
            places[x.data_ptr()] = f"r{i}.data_ptr()"
            lines.append(f"r{i} = {allocation_source(x, tensors, names)}")
    scratch = launches[0].scratch
    if scratch is not None:
        places[scratch.data_ptr()] = "scratch.data_ptr()"
        lines.append(f"scratch = {allocation_source(scratch, tensors, names)}")
    for launched in launches:
        launch, arguments = resolve_launcher(launched)
        given = [argument_source(x, places, names) for x in arguments]
        lines.append(f"{bind_constant(launch, names)}({', '.join(given)})")
    made = f"new({bind_constant(type(results), names)}, ({', '.join(returned)},))" if several else returned[0]
    return [*lines, f"return {made}"]


def device_guards(index: int, names: dict[str, Any]) -> Iterator[str]:
    """Lines that see to it that the device is the current one and nothing wants to know of launches; and the stream."""
    from triton import knobs
    from triton.runtime import driver

    chained = hasattr(knobs.runtime.launch_enter_hook, "calls")
    names |= {"knobs": knobs.runtime, "stream_of": driver.active.get_current_stream}
    names["device"] = getattr(torch._C, "_cuda_getDevice", driver.active.get_current_device)
    yield f"if knobs.launch_enter_hook{'.calls' if chained else ''} or device() != {index}: return SLOW_PATH"
    yield f"stream = stream_of({index})"


def overlap_guard(out: torch.Tensor, places: dict[int, str], tensors: Iterable[torch.Tensor]) -> Iterator[str]:
    """Lines that see to it that a tensor to be written to shares no memory with the others."""
    at = places[out.data_ptr()]
    for x in tensors:
        other = places[x.data_ptr()]
        if other != at:
            yield f"if {at} < {other} + {byte_span(x)} and {other} < {at} + {byte_span(out)}: return SLOW_PATH"


def allocation_source(x: torch.Tensor, tensors: dict[str, torch.Tensor], names: dict[str, Any]) -> str:
    """An expression for a new tensor like this one. The quickest copies the form of an argument."""
    for name, like in tensors.items():
        alike = like.dtype == x.dtype and like.shape == x.shape
        if alike and torch.empty_like(like, device="meta").stride() == x.stride():
            names["empty_like"] = torch.empty_like
            return f"empty_like({name})"
    empty = partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return f"{bind_constant(empty, names)}()"


def resolve_launcher(launched: RecordedLaunch) -> tuple[Callable[..., Any], Sequence[Any]]:
    """What Triton's launcher calls in the end, and with which arguments; without hooks."""
    launcher, arguments = launched.kernel.run, capture_launcher_arguments(launched)
    if getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 0):
        return launcher, arguments
    observed = copy.copy(launcher)
    observed.launch, taken = make_listener()
    observed(*arguments)
    return launcher.launch, single_call(taken)


def capture_launcher_arguments(launched: RecordedLaunch) -> Sequence[Any]:
    """With what Triton calls the launcher of a compiled kernel, as its own way to launch one shows; without hooks."""
    kernel = launched.kernel
    run, taken = make_listener()
    observed = SimpleNamespace(
        run=run,
        function=kernel.function,
        packed_metadata=kernel.packed_metadata,
        launch_metadata=lambda *_: None,
        _init_handles=lambda: None,
    )
    type(kernel).__getitem__(observed, (*launched.grid, 1))(*launched.arguments, stream=STREAM)
    return [None if any(x is hook for hook in launch_hooks()) else x for x in single_call(taken)]


def make_listener() -> tuple[Callable[..., None], list[tuple[Any, ...]]]:
    """A function that does nothing, and the arguments of its calls."""
    taken: list[tuple[Any, ...]] = []
    return lambda *given: taken.append(given), taken


def single_call(taken: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The arguments of the only call, among which there is the stream."""
    if len(taken) != 1 or not any(x is STREAM for x in taken[0]):
        raise ValueError("got a launcher that is not known, expected one that makes one call with the stream")
    return taken[0]


def launch_hooks() -> tuple[Any, Any]:
    """What Triton calls before and after every launch, which does nothing where there is no profiler."""
    from triton import knobs

    return knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


def argument_source(x: Any, places: dict[int, str], names: dict[str, Any]) -> str:
    """Code for an argument of a launch, in which pointers stand for tensors."""
    if isinstance(x, torch.Tensor):
        return places[x.data_ptr()]
    if x is STREAM:
        return "stream"
    if type(x) is tuple:
        return f"({''.join(f'{argument_source(y, places, names)},' for y in x)})"
    return repr(x) if type(x) in (type(None), bool, int) else bind_constant(x, names)


def byte_span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
