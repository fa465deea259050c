"""The fast path: a call like an earlier one repeats its launches, without validating and building them again.

The second call with certain shapes and options is recorded: which launches a backend makes, and with which arguments.
From that a `Plan` is made, which makes the same launches with other tensors, numbers and new outputs. Numbers such as γ
that were not met before are checked by the call itself, which ends where it has checked them.

A call that is traced, one with arguments of other types, and one whose outputs may overlap its inputs takes the normal
path. So does one that is differentiated, unless it says how its results get their graph (`Outcome`). A call inside a
recorded one is recorded as a part of that.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from operator import is_
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.arguments.side_effects import warn
from rl_triton_core._internal.arguments.validation import TRACED, computes_itself, is_number, is_transformed
from rl_triton_core._internal.launch import launcher, plan
from rl_triton_core._internal.launch.launcher import RECORDER, NoPlanError, collect_numbers, record_launches
from rl_triton_core._internal.launch.plan import NORMAL_PATH, NOT_ALIKE, TENSORS, Plan, Runner, make_picker

P = ParamSpec("P")
R = TypeVar("R")

MAX_FORMS_PER_FUNCTION = 64
MAX_SHAPES_PER_FORM = 256
MAX_CALLS_PER_SHAPE = 8
MAX_KNOWN_NUMBERS = 64
MAX_SEEN_SIGNATURES = 1024
Sequences = tuple[tuple[tuple[int, Any, int], ...], ...]
"""Places, types and lengths of tuples and lists; then of those in them, and so on."""
SEQUENCES: set[type] = {tuple, list}
"""Types of arguments that may hold several tensors; named tuples are added where they are defined."""
CONSTANT_TYPES = (type(None), bool, int, float, str)
DEVICES = {"cpu", "cuda"}
"""Types of devices that have a backend which records its launches."""


# -- the switch -------------------------------------------------------------------------------------------------------


class Switch:
    """Whether there is a fast path, and why not."""

    enabled: bool | None = None
    """None until it is set or read from the environment."""
    reason = ""


def is_switched_on() -> bool:
    """Whether there is a fast path."""
    if Switch.enabled is None:
        Switch.enabled = check.read_switch("RL_TRITON_FAST_PATH")
        Switch.reason = "" if Switch.enabled else "RL_TRITON_FAST_PATH is 0 in the environment"
    return Switch.enabled


class FastPathStatus(NamedTuple):
    """What `fast_path_status` tells."""

    enabled: bool
    reason: str
    """Why calls take the normal path although they need not; empty if none does."""
    shapes: dict[str, int]
    """For each function, the number of shapes whose calls take the fast path."""


def set_fast_path(enabled: bool) -> AbstractContextManager[Any]:
    """Switch the fast path for repeated calls on or off, in this process.

    It is on by default, unless RL_TRITON_FAST_PATH is 0 in the environment.

    Args:
        enabled: Whether calls that are like earlier ones repeat their launches without validating them again.

    Returns:
        A context manager: in a ``with`` statement, the setting lasts for the block.

    Example:
        >>> with set_fast_path(False):
        ...     fast_path_status().enabled
        False
    """
    setting = ExitStack()
    setting.callback(switch_fast_path, Switch.enabled, Switch.reason)
    switch_fast_path(check.check_bool("enabled", enabled), "" if enabled else "set_fast_path(False) was called")
    return setting


def switch_fast_path(enabled: bool | None, reason: str) -> None:
    """Set the switch, and let no call before count."""
    Switch.enabled, Switch.reason = enabled, reason
    forget_plans()


def fast_path_status() -> FastPathStatus:
    """Tell whether repeated calls take the fast path, and for which functions they do.

    Returns:
        FastPathStatus(enabled, reason, shapes): whether it is switched on; why calls that could take it do not, if
        that is so; the number of shapes of each function whose calls take it.
    """
    with LOCK:
        shapes = {x.name: sum(len(form.calls) for forms in x.forms.values() for form in forms) for x in MEMORIES}
    try:
        enabled = is_switched_on()
    except ValueError as error:  # which every call raises
        return FastPathStatus(False, str(error), {})
    return FastPathStatus(enabled, Switch.reason, {name: number for name, number in shapes.items() if number})


# -- memory -----------------------------------------------------------------------------------------------------------


class PlannedCall:
    """Calls whose other arguments are certain constants, and what they do."""

    def __init__(self, values: Sequence[Any], numbers: Sequence[int], run: Runner) -> None:
        """Calls like one with these arguments, for any numbers in some places, are made by `run`."""
        self.match_tensors = make_matcher(values, numbers)
        self.numbers, self.run = Numbers(len(numbers)), run
        self.pick_numbers = make_picker(numbers) if numbers and run is not take_normal_path else None


def make_matcher(
    values: Sequence[Any], numbers: Sequence[int]
) -> Callable[[Sequence[Any]], tuple[torch.Tensor, ...] | None]:
    """A function that returns the tensors of a call, each once, if it is like one with these arguments; else None."""
    places: dict[int, int] = {}
    tensors = [i for i, x in enumerate(values) if type(x) in TENSORS]
    identical = [(first, i) for i in tensors if (first := places.setdefault(id(values[i]), i)) != i]
    pick_tensors = make_picker([*places.values()])
    pick_constants = make_picker([i for i in range(len(values)) if i not in tensors and i not in numbers])
    fits, constants = plan.make_tensor_guard(pick_tensors(values)), pick_constants(values)
    types = tuple(map(type, constants))
    grad_mode = torch.is_grad_enabled() if any(values[i].requires_grad for i in tensors) else None  # where it matters
    get_grad_mode = torch.is_grad_enabled

    def match_tensors(values: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
        found = pick_tensors(values)
        if not fits(*found):
            return None
        others = pick_constants(values)
        are_same = all(map(is_, others, constants))  # which is quicker to find out, and most are
        if not are_same and (tuple(map(type, others)) != types or others != constants):
            return None
        if identical and any(values[i] is not values[j] for i, j in identical):
            return None
        return None if grad_mode is not None and get_grad_mode() is not grad_mode else found

    return match_tensors


class Numbers:
    """The numbers of planned calls, such as γ, as launches take them."""

    def __init__(self, count: int) -> None:
        self.latest: tuple[tuple[Any, ...], tuple[Any, ...]] = ((object(),) * count, ())
        self.known: dict[Hashable, tuple[Any, ...]] = {}

    def find(
        self, given: tuple[Any, ...], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """The numbers of a call, which ends at their check if they are new. None: one is no number."""
        before, numbers = self.latest
        if all(map(is_, given, before)):
            return numbers
        if not all(map(is_number, given)):
            return None
        key = given, tuple(map(type, given))
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= MAX_KNOWN_NUMBERS:
                self.known.clear()
            found = self.known[key] = collect_numbers(function, *args, **kwargs)
        self.latest = given, found
        return found


def take_normal_path(tensors: tuple[torch.Tensor, ...], numbers: tuple[Any, ...]) -> Any:
    """Stand for the launches of calls that cannot be planned."""
    return NORMAL_PATH


class Form:
    """Calls with arguments of certain names, of which certain ones are tuples or lists."""

    def __init__(self, sequences: Sequences, first: int) -> None:
        self.sequences = sequences
        self.first = first
        self.calls: dict[Hashable, tuple[PlannedCall, ...]] = {}
        """By the shape of the first tensor, those of late first."""

    def add(self, values: Sequence[Any], planned: PlannedCall) -> None:
        """Add calls like one with these arguments."""
        shape = getattr(values[self.first], "shape", None)
        while len(self.calls) >= MAX_SHAPES_PER_FORM and shape not in self.calls:
            del self.calls[next(iter(self.calls))]
        self.calls[shape] = (planned, *self.calls.get(shape, ())[: MAX_CALLS_PER_SHAPE - 1])


class Memory:
    """What a public function remembers of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        self.name = function.__name__
        self.parameters = list(parameters)
        self.numbers = {name for name, x in parameters.items() if re.search(r"\b(float|Number)\b", str(x.annotation))}
        """Parameters that may change between calls of one form."""
        self.forms: dict[Hashable, tuple[Form, ...]] = {}
        """By the number of arguments that are given by place, and the names of the others."""
        self.seen: set[int] = set()
        self.fixed: set[int] = set()
        """Signatures of calls whose numbers are constants."""

    def find_numbers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
        """The places of numbers that may change, tuples and lists taken apart."""
        places, at = [], 0
        names = (*self.parameters[: len(args)], *kwargs)
        for name, x in zip(names, (*args, *kwargs.values()), strict=False):
            if name in self.numbers and is_number(x):
                places.append(at)
            at += count_leaves(x)
        return places

    def add(self, key: Hashable, form: Form, values: Sequence[Any], planned: PlannedCall) -> None:
        """Plan calls like one with these arguments."""
        forms = self.forms.get(key, ())
        same = [x for x in forms if x.sequences == form.sequences]
        if not same:
            while len(self.forms) >= MAX_FORMS_PER_FUNCTION and key not in self.forms:
                del self.forms[next(iter(self.forms))]
            self.forms[key] = (form, *forms[: MAX_CALLS_PER_SHAPE - 1])
        (same or [form])[0].add(values, planned)


def remember(known: set[int], signature: int) -> None:
    """Note a signature."""
    if len(known) >= MAX_SEEN_SIGNATURES:
        known.clear()
    known.add(signature)


MEMORIES: list[Memory] = []
LOCK = threading.Lock()


def forget_plans() -> None:
    """Let every call take the normal path, until it is recorded again."""
    with LOCK:
        for known in (x for memory in MEMORIES for x in (memory.forms, memory.seen, memory.fixed)):
            known.clear()


# -- public functions -------------------------------------------------------------------------------------------------


def with_fast_path(function: Callable[P, R]) -> Callable[P, R]:
    """Give a public function a fast path for repeated calls.

    Its arguments whose annotations name float or Number may change between calls of one form, the others may not. Such
    numbers go to the recurrence as they are, or through arithmetic: they must not decide which tensors are used. What
    a call depends on besides its arguments must not change.
    """
    memory = Memory(function)
    MEMORIES.append(memory)
    known_forms, is_compiling = memory.forms, torch.compiler.is_compiling
    count_modes, is_jit_tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling():
            return function(*args, **kwargs)
        if is_transformed() or RECORDER.is_busy or count_modes() or is_jit_tracing():
            if is_jit_tracing():
                raise RuntimeError(
                    f"{memory.name}: got a call within torch.jit.trace, expected torch.compile or export"
                )
            return function(*args, **kwargs)
        given: Sequence[Any] = (*args, *kwargs.values())
        for form in known_forms.get((len(args), *kwargs), ()):
            values = flatten_sequences(given, form.sequences) if form.sequences else given
            if values is None:
                continue
            for planned in form.calls.get(getattr(values[form.first], "shape", None), ()):
                if (tensors := planned.match_tensors(values)) is None:
                    continue
                numbers: tuple[Any, ...] | None = ()
                if planned.pick_numbers is not None:
                    numbers = planned.numbers.find(planned.pick_numbers(values), function, args, kwargs)
                results: Any = NOT_ALIKE if numbers is None else planned.run(tensors, numbers)
                if results is NOT_ALIKE:
                    continue
                return function(*args, **kwargs) if results is NORMAL_PATH else results
        return record_call(function, memory, args, kwargs)

    return call


def record_call(function: Callable[..., R], memory: Memory, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    """Make a call on the normal path. If there was one like it, record its launches and plan further ones."""
    given, key, numbers = (*args, *kwargs.values()), (len(args), *kwargs), memory.find_numbers(args, kwargs)
    sequences = find_sequences(given)
    values = flatten_sequences(given, sequences) or given
    signature = describe_call((key, sequences), values, numbers) if is_switched_on() else None
    if signature is None:  # it is traced if classes of tensors among the values compute
        before, TRACED.is_on = TRACED.is_on, TRACED.is_on or any(map(computes_itself, values))
        try:
            return function(*args, **kwargs)
        finally:
            TRACED.is_on = before
    own = hash((signature, *(values[i] for i in numbers))) if signature in memory.fixed else signature
    if own not in memory.seen:
        results = function(*args, **kwargs)
        remember(memory.seen, own)
        return results
    with record_launches() as launches:
        results = function(*args, **kwargs)
    outcome, RECORDER.outcome = RECORDER.outcome, None
    if not RECORDER.is_postponed:
        tensors = [*{id(x): x for x in values if type(x) in TENSORS}.values()]
        run = plan_launches(tensors, launches, results, outcome, (RECORDER.num_numbers or 0) if numbers else 0)
        if numbers and not RECORDER.num_numbers and run is not take_normal_path:
            remember(memory.fixed, signature)
            numbers = []
        first = next(i for i, x in enumerate(values) if type(x) in TENSORS)
        with LOCK:
            if Switch.enabled:
                memory.seen.discard(own)
                memory.add(key, Form(sequences, first), values, PlannedCall(values, numbers, run))
    return results


def plan_launches(*recorded: Any) -> Runner:
    """A plan of recorded launches, or what stands for it where there is none."""
    try:
        return Plan(*recorded).bind()
    except launcher.UnknownLauncherError as error:
        if Switch.reason != str(error):  # which is said once
            Switch.reason = str(error)
            warn(f"there is no fast path for repeated calls: {error}", stacklevel=2)
    except NoPlanError:
        pass
    return take_normal_path


def find_sequences(given: Sequence[Any]) -> Sequences:
    """The tuples and lists among arguments, and those in them."""
    own = tuple((i, type(x), len(x)) for i, x in enumerate(given) if type(x) in SEQUENCES)
    return (own, *find_sequences(flatten_sequences(given, (own,)) or ())) if own else ()


def flatten_sequences(given: Sequence[Any], sequences: Sequences) -> Sequence[Any] | None:
    """Arguments with the elements of tuples and lists in the places of these; None if they are others."""
    for level in sequences:
        flat: list[Any] = []
        start = 0
        for i, kind, length in level:
            x: Any = given[i]
            if type(x) is not kind or len(x) != length:
                return None
            flat += given[start:i]
            flat += x
            start = i + 1
        flat += given[start:]
        given = flat
    return given


def count_leaves(x: Any) -> int:
    """How many arguments one is, with tuples and lists taken apart."""
    return sum(map(count_leaves, x)) if type(x) in SEQUENCES else 1


def describe_call(key: Hashable, values: Sequence[Any], numbers: Sequence[int]) -> int | None:
    """A number that calls have in common that may share a recording; None where nothing is to be recorded."""
    parts: list[Any] = [key, torch.is_grad_enabled()]
    on_device = False
    for i, x in enumerate(values):
        if i in numbers:
            continue
        if type(x) in TENSORS:
            if not on_device and x.device.type not in DEVICES:
                return None
            if x.ndim == 0 and x.device.type == "cpu":  # a number, which is read in every call
                return None
            on_device = True
            parts += (x.shape, x.dtype, x.requires_grad)
        elif type(x) in CONSTANT_TYPES:
            parts.append(x)
        else:
            return None
    return hash(tuple(parts)) if on_device else None
