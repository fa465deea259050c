"""The fast path: a call like an earlier one repeats its launches, without validating and building them anew.

The second call with certain shapes is recorded: which launches a backend makes, and with which arguments. From that a
`Plan` is written, a Python function that makes the same launches with the addresses of other tensors and with new
outputs. A plan is for one form of call: which arguments are tensors, numbers or constants, and how they go into the
launches. What the sizes decide (a kernel, a grid, strides) is kept beside it for each shape, as `Sizes`; numbers such
as γ are checked and passed on anew in every call.

A call that is traced, one with arguments of other types, and one whose outputs may overlap its inputs takes the normal
path. So does one that is differentiated, unless it says how its results get their graph (`Outcome`). A call inside a
recorded one is recorded as a part of that.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import math
import os
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from rl_triton_core._internal.arguments.traced_numbers import Trace, TracedNumber
from rl_triton_core._internal.arguments.validation import is_number, is_transformed

P = ParamSpec("P")
R = TypeVar("R")
Stream = torch.Tensor | None

MAX_PLANS_PER_FUNCTION = 32
MAX_SHAPES_PER_PLAN = 256
MAX_SEEN_SIGNATURES = 1024
TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors, of which none has operations of its own."""
SEQUENCES = (tuple, list)
"""Types of arguments that may hold several tensors."""
DEVICES = {"cpu", "cuda"}
"""Types of devices that have a backend which records its launches."""
CONSTANT_TYPES = (type(None), bool, int, float, str)
SLOW_PATH = object()
"""In the place of results: the call has this form, but has to take the normal path."""
STREAM = object()
"""Stands for the current stream among a launch's arguments."""

FRONT = """
def call{header}:
    if is_compiling() or is_transformed() or RECORDER.launches is not None:
        return function({keywords})
    for plan in memory.plans:
        results = plan({names})
        if results is SLOW_PATH:
            return function({keywords})
        if results is not None:
            return results
    return call_and_record({names})
"""
"""A public function as written out: with the same parameters, so that Python binds them, which is the quickest."""


class UnknownLauncherError(Exception):
    """A backend cannot tell what its launches call in the end; the message says what to do."""


class ResolvedLaunch(NamedTuple):
    """What a launch calls in the end."""

    function: Callable[..., Any]
    arguments: Sequence[Any]
    """Tensors stand for their addresses, STREAM for the current stream. They may lie in tuples. See `Whole` too."""
    get_stream: Callable[[], Any] | None = None
    """Return the current stream, or None where the launch may not be repeated just now."""


class Whole(NamedTuple):
    """Stands for a tensor itself among a launch's arguments, where a bare one stands for its address."""

    tensor: torch.Tensor


class RecordedLaunch(NamedTuple):
    """A launch that a backend made."""

    resolve: Callable[[], ResolvedLaunch]
    """Raises `UnknownLauncherError` where that cannot be told."""
    scratch: torch.Tensor | None = None
    """Memory that the launch takes beside the call's arguments and results."""


class Outcome(NamedTuple):
    """The results of a call that are made from what its launches write, such as a loss with its graph."""

    results: Any
    written: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]
    """Arguments of the call."""
    finish: Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], Any]
    """Make the results from what was written and the inputs. It serves for other tensors of the same sizes."""


class Recorder(threading.local):
    """The launches of the call that this thread records, None while it records nothing."""

    launches: list[RecordedLaunch] | None = None
    outcome: Outcome | None = None
    is_postponed = False


RECORDER = Recorder()


def record_launch(launch: RecordedLaunch) -> None:
    """Add a launch to the recording of this thread, if there is one."""
    if RECORDER.launches is not None:
        RECORDER.launches.append(launch)


def record_outcome(outcome: Outcome) -> None:
    """Note how results are made. It counts if the recorded call returns these."""
    if RECORDER.launches is not None:
        RECORDER.outcome = outcome


def forbid_plan() -> None:
    """Let calls like the recorded one take the normal path: it does more than launches."""
    record_launch(RecordedLaunch(refuse_launch))


def refuse_launch() -> ResolvedLaunch:
    """Stand for what cannot be repeated."""
    raise NoPlanError


def is_recording() -> bool:
    """Whether this thread records a call, whose numbers are traced."""
    return RECORDER.launches is not None


def postpone_recording() -> None:
    """Let a later call be recorded instead of this one: its launches are not final."""
    RECORDER.is_postponed = True


@contextmanager
def record_launches() -> Iterator[list[RecordedLaunch]]:
    """Collect the launches of this thread."""
    RECORDER.launches, RECORDER.outcome, RECORDER.is_postponed = [], None, False
    try:
        yield RECORDER.launches
    finally:
        RECORDER.launches = None


# -- memory -----------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """What the sizes of a call's tensors decide."""

    fits: Callable[..., bool]
    """Whether other tensors have these sizes, strides, dtypes and this device."""
    values: tuple[Any, ...]
    """Kernels, grids and strides: what a plan puts into its launches."""


class Plan(NamedTuple):
    """The launches of a form of call."""

    run: Callable[..., Any]
    """Of the call's arguments: None if they have another form or unknown sizes, else results, or SLOW_PATH."""
    sizes: dict[torch.Size, tuple[Sizes, ...]]
    """By the shape of the first tensor."""


class Memory:
    """What a public function remembers of its calls."""

    def __init__(self, name: str) -> None:
        """Remember nothing of the function of this name."""
        self.name = name
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.plans: tuple[Callable[..., Any], ...] = ()
        self.by_source: dict[str, Plan] = {}
        self.seen: set[int] = set()
        self.fixed: dict[int, tuple[int, ...]] = {}
        """By the signature of recorded calls: positions of numbers that a plan of theirs takes for constants."""

    def fix_numbers(self, signature: int, positions: set[int]) -> None:
        """Note that calls are to be recorded only where these numbers, which a plan takes for constants, come again."""
        if len(self.fixed) >= MAX_SEEN_SIGNATURES:
            self.fixed.clear()
        if positions:
            self.fixed[signature] = tuple(positions)

    def add(self, source: str, names: dict[str, Any], shape: torch.Size, sizes: Sizes) -> None:
        """Add sizes to the plan that has a source, which is compiled if it is new."""
        plan = self.by_source.get(source)
        if plan is None:
            plan = Plan(compile_function(source, self.name, names), names["sizes_of"])
            while len(self.by_source) >= MAX_PLANS_PER_FUNCTION:
                del self.by_source[next(iter(self.by_source))]
            self.by_source[source] = plan
            self.plans = tuple(plan.run for plan in reversed(self.by_source.values()))
        while len(plan.sizes) >= MAX_SHAPES_PER_PLAN and shape not in plan.sizes:
            del plan.sizes[next(iter(plan.sizes))]
        plan.sizes[shape] = (sizes, *plan.sizes.get(shape, ())[:3])


MEMORIES: list[Memory] = []
LOCK = threading.Lock()


def forget_plans() -> None:
    """Let every call take the normal path again, until it is recorded anew."""
    with LOCK:
        for memory in MEMORIES:
            memory.clear()


def remember_signature(seen: set[int], signature: int) -> None:
    """Note that there was a call with a signature."""
    if len(seen) >= MAX_SEEN_SIGNATURES:
        seen.clear()
    seen.add(signature)


# -- the switch -------------------------------------------------------------------------------------------------------


class Switch:
    """Whether there is a fast path, and why not."""

    enabled = os.environ.get("RL_TRITON_FAST_PATH", "1") != "0"
    reason = "" if enabled else "RL_TRITON_FAST_PATH is 0 in the environment"


class FastPathStatus(NamedTuple):
    """What `fast_path_status` tells."""

    enabled: bool
    reason: str
    """Why calls take the normal path although they need not; empty if none does."""
    shapes: dict[str, int]
    """For each function, the number of shapes whose calls take the fast path."""


class FastPathSetting:
    """What `set_fast_path` returns: a context manager that restores the setting before."""

    def __init__(self, before: tuple[bool, str]) -> None:
        """Restore this at the end of a with block."""
        self.before = before

    def __enter__(self) -> None:
        """Keep the new setting for the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the setting before."""
        Switch.enabled, Switch.reason = self.before
        forget_plans()


def set_fast_path(enabled: bool) -> FastPathSetting:
    """Switch the fast path for repeated calls on or off, in this process.

    It is on by default, unless RL_TRITON_FAST_PATH is 0 in the environment.

    Args:
        enabled: Whether calls that are like earlier ones repeat their launches without validating them anew.

    Returns:
        A context manager: in a ``with`` statement, the setting lasts for the block.

    Example:
        >>> with set_fast_path(False):
        ...     fast_path_status().enabled
        False
    """
    setting = FastPathSetting((Switch.enabled, Switch.reason))
    Switch.enabled, Switch.reason = bool(enabled), "" if enabled else "set_fast_path(False) was called"
    forget_plans()
    return setting


def fast_path_status() -> FastPathStatus:
    """Tell whether repeated calls take the fast path, and for which functions they do.

    Returns:
        FastPathStatus(enabled, reason, shapes): whether it is switched on; why calls that could take it do not, if
        that is so; the number of shapes of each function whose calls take it.
    """
    with LOCK:
        shapes = {memory.name: sum(len(plan.sizes) for plan in memory.by_source.values()) for memory in MEMORIES}
    return FastPathStatus(Switch.enabled, Switch.reason, {name: number for name, number in shapes.items() if number})


def warn_of_unknown_launcher(error: UnknownLauncherError) -> None:
    """Say once that calls take the normal path, and why."""
    if Switch.reason != str(error):
        Switch.reason = str(error)
        warnings.warn(f"there is no fast path for repeated calls: {error}", stacklevel=2)


# -- public functions -------------------------------------------------------------------------------------------------


def with_fast_path(function: Callable[P, R]) -> Callable[P, R]:
    """Give a public function a fast path for repeated calls.

    Its arguments whose annotations name float or Number may change between calls of one form, the others may not.
    """
    memory = Memory(function.__name__)
    MEMORIES.append(memory)
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    of_numbers = [i for i, x in enumerate(parameters.values()) if re.search(r"\b(float|Number)\b", str(x.annotation))]
    normal_path: Callable[..., R] = function

    def call_and_record(*arguments: Any) -> R:
        numbers = {i for i in of_numbers if is_number(arguments[i])}
        form = signature_of(arguments, numbers) if Switch.enabled else None
        if form is None:
            return normal_path(**dict(zip(names, arguments, strict=True)))
        signature = hash((form, *(arguments[i] for i in memory.fixed.get(form, ()))))
        if signature not in memory.seen:
            results = normal_path(**dict(zip(names, arguments, strict=True)))
            remember_signature(memory.seen, signature)
            return results
        trace = Trace(numbers)
        traced = [TracedNumber(x, (i,), trace) if i in numbers else x for i, x in enumerate(arguments)]
        with record_launches() as launches:
            results = normal_path(**dict(zip(names, traced, strict=True)))
        outcome, RECORDER.outcome = RECORDER.outcome, None
        with LOCK:
            if Switch.enabled and not RECORDER.is_postponed:
                memory.seen.discard(signature)
                memory.fix_numbers(form, trace.escaped)
                add_plan(memory, arguments, trace, launches, results, outcome)
        return results

    bare = [x.replace(default=x.empty, annotation=x.empty) for x in parameters.values()]
    header, keywords = inspect.Signature(bare), ", ".join(f"{name}={name}" for name in names)
    namespace = {
        "function": function,
        "memory": memory,
        "call_and_record": call_and_record,
        "is_compiling": torch.compiler.is_compiling,
        "is_transformed": is_transformed,
        "RECORDER": RECORDER,
        "SLOW_PATH": SLOW_PATH,
    }
    source = FRONT.format(header=header, names=", ".join(names), keywords=keywords)
    front: Any = compile_function(source, function.__name__, namespace)
    front.__defaults__, front.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    call: Callable[P, R] = wraps(function)(front)
    return call


COUNTER = itertools.count()


def compile_function(source: str, name: str, namespace: dict[str, Any]) -> Any:
    """Compile the one function of a source, whose lines show in tracebacks."""
    file = f"<fast path of {name}, {next(COUNTER)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    before = set(namespace)
    exec(compile(source, file, "exec"), namespace)
    (function,) = (x for key, x in namespace.items() if key not in before and inspect.isfunction(x))
    weakref.finalize(function, linecache.cache.pop, file, None)
    return function


def signature_of(arguments: Iterable[Any], numbers: set[int]) -> int | None:
    """A number that calls have in common that may share a recording; None where nothing is to be recorded."""
    parts: list[Any] = [torch.is_grad_enabled()]
    on_device = False
    for i, argument in enumerate(arguments):
        if i in numbers:
            parts.append(float)
            continue
        for x in argument if type(argument) in SEQUENCES else (argument,):
            if type(x) in TENSORS:
                if not on_device and x.device.type not in DEVICES:
                    return None
                on_device = True
                parts += (x.shape, x.dtype, x.requires_grad)
            elif type(x) in CONSTANT_TYPES:
                parts.append(x)
            else:
                return None
    return hash(tuple(parts)) if on_device else None


# -- plans ------------------------------------------------------------------------------------------------------------

PLAN = """
def plan({parameters}):
    if not ({conditions}):
        return None
    for fits, values in sizes_of.get({first}.shape, ()):
        if fits({tensors}):
            break
    else:
        return None
    {addresses}
    if {misplaced}:
        return None
    {numbers}
    {values} = values
    {launches}
"""
"""Arguments are named a0, a1, ..., the addresses of tensors among them p0, p1, ..., constants c0, c1, ..., numbers of
the launches n0, n1, ..., values that the sizes decide v0, v1, ..., and results r0, r1, ...."""

NUMBERS = """
    before, numbers = latest[0]
    if not ({unchanged}):
        numbers = update({given})
        if numbers is None:
            return None
    {names} = numbers
"""


class NoPlanError(Exception):
    """Calls like the recorded one always take the normal path."""


def add_plan(
    memory: Memory,
    arguments: Sequence[Any],
    trace: Trace,
    launches: Sequence[RecordedLaunch],
    results: Any,
    outcome: Outcome | None = None,
) -> None:
    """Plan calls like a recorded one, with the sizes that it has."""
    writer = PlanWriter(arguments, trace)
    try:
        lines = writer.launch_lines(launches, results, outcome)
        varying = {position for factors in writer.factors for position in factors} - trace.escaped
    except (NoPlanError, UnknownLauncherError) as error:
        lines, varying = ["return SLOW_PATH"], set(trace.positions)
        writer.values, writer.factors = [], []
        if isinstance(error, UnknownLauncherError):
            warn_of_unknown_launcher(error)
    if all(type(arguments[i]) in CONSTANT_TYPES for i in set(trace.positions) - varying):
        tensors = list(writer.tensors.values())
        sizes = Sizes(tensor_guard(tensors), tuple(writer.values))
        memory.add(writer.plan_source(lines, varying), writer.make_namespace(), tensors[0].shape, sizes)


class PlanWriter:
    """Writes the source of a plan, and collects the values that it takes for the sizes at hand."""

    def __init__(self, arguments: Sequence[Any], trace: Trace) -> None:
        """Plan calls with arguments like these."""
        self.arguments, self.trace = arguments, trace
        self.tensors = find_tensors(arguments)
        self.places = {x.data_ptr(): f"p{i}" for i, x in enumerate(self.tensors.values())}
        """Expressions for addresses."""
        self.allocated: dict[str, torch.Tensor] = {}
        """What a plan allocates, by name."""
        self.values: list[Any] = []
        self.factors: list[tuple[int, ...]] = []
        """For each number of the launches, the arguments whose product it is."""

    def launch_lines(
        self, launches: Sequence[RecordedLaunch], results: Any, outcome: Outcome | None = None
    ) -> list[str]:
        """Write lines that allocate what launches write, make the launches and return the results."""
        if outcome is not None and outcome.results is not results:
            outcome = None
        every = self.find_written(results) if outcome is None else outcome.written
        if not launches:
            raise NoPlanError
        resolved = [launch.resolve() for launch in launches]
        lines = self.stream_lines(resolved[0])
        returned = [self.result_source(f"r{i}", x, lines) for i, x in enumerate(every)]
        scratch = {id(x.scratch): x.scratch for x in launches if x.scratch is not None}
        for i, tensor in enumerate(scratch.values()):
            lines.append(self.allocation_line(f"s{i}", tensor))
        written: set[int] = set()
        for function, arguments, _ in resolved:
            written |= {x.data_ptr() for x in flatten_tuples(arguments) if isinstance(x, torch.Tensor)}
            lines.append(f"{self.bind_constant(function)}({', '.join(map(self.argument_source, arguments))})")
        if any(x is not None and x.data_ptr() not in written for x in every):
            raise NoPlanError
        return [*lines, f"return {self.returned_source(results, returned, outcome)}"]

    def find_written(self, results: Any) -> tuple[Stream, ...]:
        """The results, if launches write them and nothing is made from them."""
        every = results if isinstance(results, tuple) else (results,)
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors.values())
        if differentiated or not all(x is None or type(x) is torch.Tensor for x in every):
            raise NoPlanError
        return every

    def returned_source(self, results: Any, written: Sequence[str], outcome: Outcome | None) -> str:
        """Return an expression for what a call returns, from those for what its launches write."""
        if outcome is not None:
            names = {id(x): name for name, x in self.tensors.items()}
            if any(id(x) not in names for x in outcome.inputs):
                raise NoPlanError
            inputs = "".join(f"{names[id(x)]}, " for x in outcome.inputs)
            return f"{self.bind_constant(outcome.finish)}(({', '.join(written)},), ({inputs}))"
        if isinstance(results, tuple):
            return f"new({self.bind_constant(type(results))}, ({', '.join(written)},))"
        return written[0]

    def stream_lines(self, launch: ResolvedLaunch) -> list[str]:
        """Write lines that find the current stream, if launches need it."""
        if launch.get_stream is None:
            return []
        return [f"stream = {self.bind_constant(launch.get_stream)}()", "if stream is None: return SLOW_PATH"]

    def result_source(self, name: str, result: torch.Tensor | None, lines: list[str]) -> str:
        """Return an expression for a result, and add lines: its allocation, or guards if it is an argument."""
        if result is None:
            return "None"
        for argument, x in self.tensors.items():
            if x.data_ptr() == result.data_ptr():
                lines += self.overlap_guard(result)
                return argument
        lines.append(self.allocation_line(name, result))
        return name

    def overlap_guard(self, out: torch.Tensor) -> Iterator[str]:
        """Write lines that see to it that a tensor to be written to shares no memory with the other arguments."""
        at, end = self.places[out.data_ptr()], self.bind_constant(byte_span(out))
        for x in self.tensors.values():
            other, other_end = self.places[x.data_ptr()], self.bind_constant(byte_span(x))
            if other != at:
                yield f"if {at} < {other} + {other_end} and {other} < {at} + {end}: return SLOW_PATH"

    def allocation_line(self, name: str, x: torch.Tensor) -> str:
        """Write a line that allocates a tensor like this one. The quickest copies the form of an argument."""
        self.places[x.data_ptr()] = f"{name}.data_ptr()"
        self.allocated[name] = x
        for argument, like in self.tensors.items():
            alike = like.dtype == x.dtype and like.shape == x.shape
            if alike and torch.empty_like(like, device="meta").stride() == x.stride():
                return f"{name} = empty_like({argument})"
        empty = partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return f"{name} = {self.bind_constant(empty)}()"

    def argument_source(self, x: Any) -> str:
        """Return an expression for an argument of a launch, in which addresses stand for tensors."""
        if isinstance(x, torch.Tensor):
            return self.address_source(x)
        if type(x) is Whole:
            return self.tensor_source(x.tensor)
        if x is STREAM:
            return "stream"
        if type(x) is TracedNumber:
            self.factors.append(x.factors)
            return f"n{len(self.factors) - 1}"
        if isinstance(x, tuple):
            elements = f"({''.join(f'{self.argument_source(y)},' for y in x)})"
            return elements if type(x) is tuple else f"new({self.bind_constant(type(x))}, {elements})"
        return "None" if x is None else self.bind_constant(x)

    def address_source(self, x: torch.Tensor) -> str:
        """Return an expression for the address of a tensor, or of a view inside of one."""
        at = x.data_ptr()
        if at in self.places:
            if any(y.data_ptr() == at and byte_span(x) > byte_span(y) for y in self.allocated.values()):
                raise NoPlanError
            return self.places[x.data_ptr()]
        others = [y for y in self.known_tensors().values() if contains(y, x)]
        if len(others) != 1:
            raise NoPlanError
        return f"{self.places[others[0].data_ptr()]} + {self.bind_constant(at - others[0].data_ptr())}"

    def tensor_source(self, x: torch.Tensor) -> str:
        """Return an expression for the tensor of which this one is a view from the first element."""
        for name, y in self.known_tensors().items():
            if (y.data_ptr(), y.dtype) == (x.data_ptr(), x.dtype) and contains(y, x):
                return name
        raise NoPlanError

    def known_tensors(self) -> dict[str, torch.Tensor]:
        """The arguments, and what a plan allocates, by expressions for them."""
        return self.tensors | self.allocated

    def bind_constant(self, x: Any) -> str:
        """Return a name for a value that calls with these sizes have in common."""
        self.values.append(x)
        return f"v{len(self.values) - 1}"

    def plan_source(self, launches: Sequence[str], varying: set[int]) -> str:
        """Write the plan around the lines that make its launches, for any numbers in some positions."""
        constants, conditions = argument_guards(self.arguments, varying)
        tensors, given = list(self.tensors), ", ".join(f"a{i}" for i in sorted(self.trace.checks))
        if any(x.requires_grad for x in self.tensors.values()):
            conditions.append(f"is_grad_enabled() is {torch.is_grad_enabled()}")
        numbers = NUMBERS.format(
            unchanged=" and ".join(f"a{i} is before[{k}]" for k, i in enumerate(sorted(self.trace.checks))),
            given=given,
            names="".join(f"n{i}, " for i in range(len(self.factors))),
        )
        plan = PLAN.format(
            parameters=", ".join(f"a{i}" for i in range(len(self.arguments))),
            conditions=" and ".join([*conditions, f"type({tensors[0]}) in TENSORS"]),
            first=tensors[0],
            tensors=", ".join(tensors),
            addresses="; ".join(f"p{i} = {name}.data_ptr()" for i, name in enumerate(tensors)),
            misplaced=" or ".join(alignment_guards(self.tensors.values())),
            numbers=numbers.strip() if self.factors else "",
            values="".join(f"v{i}, " for i in range(len(self.values))) or "()",
            launches="\n    ".join(launches),
        )
        return "".join(f"c{i} = {x!r}\n" for i, x in enumerate(constants)) + plan

    def make_namespace(self) -> dict[str, Any]:
        """Return the names that a plan uses, apart from its own."""
        positions, factors, trace = sorted(self.trace.checks), tuple(self.factors), self.trace
        latest: list[tuple[Any, Any]] = [((object(),) * len(positions), ())]

        def update(*given: Any) -> tuple[float, ...] | None:
            """Check numbers and compute from them what the launches take; None if a tensor or so took their place."""
            if not all(map(is_number, given)):
                return None
            numbers = trace.compute(factors, dict(zip(positions, given, strict=True)))
            latest[0] = given, numbers
            return numbers

        names: dict[str, Any] = {"SLOW_PATH": SLOW_PATH, "TENSORS": TENSORS, "inf": math.inf, "nan": math.nan}
        names |= {"is_grad_enabled": torch.is_grad_enabled, "empty_like": torch.empty_like, "new": tuple.__new__}
        return {**names, "latest": latest, "update": update, "sizes_of": {}}


def find_tensors(arguments: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The tensors among arguments, each once, by an expression for it."""
    tensors: dict[str, torch.Tensor] = {}
    for name, x in named_arguments(arguments):
        if type(x) in TENSORS and not any(x is other for other in tensors.values()):
            tensors[name] = x
    return tensors


def named_arguments(arguments: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Arguments and expressions for them, those in tuples one by one."""
    for i, x in enumerate(arguments):
        if type(x) in SEQUENCES:
            yield from ((f"a{i}[{j}]", y) for j, y in enumerate(x))
        else:
            yield f"a{i}", x


def argument_guards(arguments: Sequence[Any], varying: set[int]) -> tuple[list[Any], list[str]]:
    """Constants, and conditions that a call has the form of another: what is constant, and what is one tensor."""
    constants: list[Any] = []
    conditions = [
        f"type(a{i}) is {type(x).__name__} and len(a{i}) == {len(x)}"
        for i, x in enumerate(arguments)
        if type(x) in SEQUENCES
    ]
    tensors: dict[int, str] = {}
    for name, x in named_arguments(arguments):
        if type(x) in TENSORS:
            if tensors.setdefault(id(x), name) != name:
                conditions.append(f"{name} is {tensors[id(x)]}")
        elif x is None or type(x) is bool:
            conditions.append(f"{name} is {x}")
        elif name not in {f"a{i}" for i in varying}:
            constant = f"c{len(constants)}"
            conditions.append(f"({name} is {constant} or type({name}) is {type(x).__name__} and {name} == {constant})")
            constants.append(x)
    return constants, conditions


def alignment_guards(tensors: Iterable[torch.Tensor]) -> Iterator[str]:
    """Conditions that other tensors are not aligned like these, or lie at two addresses instead of one."""
    aligned = []
    first: dict[int, int] = {}
    for i, x in enumerate(tensors):
        remainder = x.data_ptr() & 15
        if remainder:
            yield f"p{i} & 15 != {remainder}"
        else:
            aligned.append(f"p{i}")
        if first.setdefault(x.data_ptr(), i) != i:
            yield f"p{i} != p{first[x.data_ptr()]}"
    if aligned:
        yield f"({' | '.join(aligned)}) & 15"


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
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


def flatten_tuples(x: Any) -> Iterator[Any]:
    """What is in tuples, and tuples in them, one by one."""
    if isinstance(x, tuple | list):
        for y in x:
            yield from flatten_tuples(y)
    else:
        yield x


def contains(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor reaches over all of another's memory."""
    start = other.data_ptr() - tensor.data_ptr()
    return start >= 0 and start + byte_span(other) <= byte_span(tensor)


def byte_span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
