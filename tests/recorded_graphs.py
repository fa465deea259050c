"""CUDA graphs for tests without a GPU: operations are recorded with their tensors, and replayed in the same memory.

A replay calls no Python of the step. As on a GPU, a graph reads what it read when it was captured: one that has gone
stale gives wrong results here too. Streams are noted: a test fails if work of two, of which none waits for the other,
uses one memory, and one of them writes.
"""

import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch import distributed
from torch.optim import rmsprop
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rl_triton_core import capture, normalization
from rl_triton_core._internal.arguments import validation
from rl_triton_core._internal.backend import choose_backend
from rl_triton_core._internal.capture.optimizers import name_unsupported
from rl_triton_core._internal.launch import launcher
from rl_triton_core._internal.loss import solve as losses
from rl_triton_core._internal.scan import problem as scans


def allow_captures(monkeypatch, device="cpu"):
    """Let steps be captured without a GPU, in recorded graphs, unless they are switched off."""
    if device == "cpu":
        monkeypatch.setattr(capture, "find_obstacle", find_obstacle)
        monkeypatch.setattr(capture, "CudaGraphs", RecordedGraphs)


def find_obstacle(optimizers, tensors, enabled, averaged):
    """What stands against a capture, besides the device."""
    if enabled is False:
        return "switched off"
    return next(filter(None, map(name_unsupported, optimizers)), "")


class Race(BaseException):
    """Not an error that a step could have."""


class Stream:
    """A stream of a graph: it knows of each stream, itself too, how much of its work is done before what comes next."""

    device = torch.device("cpu")

    def __init__(self, device=None):
        self.done = Counter()

    def record_event(self):
        return Counter(self.done)

    def wait_event(self, event):
        self.done |= event  # the greater of each

    def wait_stream(self, stream):
        self.wait_event(stream.done)


class Streams:
    """The streams of a graph, and who has used which memory last: backward passes belong to who calls them."""

    def __init__(self):
        self.current, self.writers, self.readers = Stream(), {}, {}

    @contextmanager
    def use(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def installed(self):
        """Inside, they are those of the device; branches of adapters, if these are there, see that it captures."""
        functions = {"current_stream": lambda *_: self.current, "stream": self.use, "Stream": Stream}
        branches = sys.modules.get("rl_triton_adapters.common.branches", SimpleNamespace(is_capturing=None))
        is_capturing = mock.patch.object(branches, "is_capturing", lambda: True)
        record_stream = mock.patch.object(torch.Tensor, "record_stream", lambda *_: None)
        with mock.patch.multiple(torch.cuda, **functions), is_capturing, record_stream:
            yield

    def note(self, function, given, changed, results):
        """Raise if another stream's work, which this one does not wait for, is in the way."""
        own, read, made = self.current, find_places(given), find_places(changed)
        own.done[own] += 1
        for place in read | made | find_places(results):
            writers, readers = self.writers.setdefault(place, {}), self.readers.setdefault(place, {})
            is_write = place in made or place not in read
            others = [*writers.items(), *(readers.items() if is_write else ())]
            if any(own.done[stream] < count for stream, count in others):
                raise Race(f"two branches of a graph use one memory in {function}")
            (writers if is_write else readers)[own] = own.done[own]


STATISTICS = {torch.ops.aten.native_batch_norm.default: slice(3, 5)}
"""Arguments that an operation writes, and does not say so."""


def list_tensors(tree):
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def find_places(tree):
    return {x.untyped_storage().data_ptr() for x in list_tensors(tree)} - {0}


class Recording(TorchDispatchMode):
    """Operations in their order: functions, arguments, results. Views are none, since replays keep all memory."""

    def __init__(self):
        super().__init__()
        self.operations, self.is_paused, self.streams = [], False, Streams()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default and not self.is_paused:
            raise RuntimeError("operation not permitted when stream is capturing")
        results = function(*args, **(kwargs or {}))
        if not function.is_view and not self.is_paused:
            self.operations.append((function, args, kwargs or {}, results))
            named = {**dict(zip([x.name for x in function._schema.arguments], args, strict=False)), **(kwargs or {})}
            writes = {x.name for x in function._schema.arguments if x.alias_info is not None and x.alias_info.is_write}
            changed = [named.get(x) for x in writes], args[STATISTICS.get(function, slice(0))]
            self.streams.note(function, named, changed, results)
        return results

    def as_operation(self, function):
        """Let a function be recorded as a whole: it reads or writes memory by other means than PyTorch's operations."""

        def call(*args, **kwargs):
            tensors = list_tensors((args, kwargs))
            versions = [x._version for x in tensors]
            self.is_paused = True
            try:
                results = function(*args, **kwargs)
            finally:
                self.is_paused = False
            changed = [x for x, version in zip(tensors, versions, strict=True) if x._version != version]
            self.streams.note(function, tensors, changed, results)
            self.operations.append((function, args, kwargs, results))
            return results

        return call

    def choose_backend(self, name, device):
        """A backend whose kernels, those of Numba too, are recorded."""
        backend = choose_backend(name, device)
        names = {"scan": ["run"], "moments": ["run"], "loss": ["compute_loss", "scale_gradients"]}
        own = {topic: vars(getattr(backend, topic)) for topic in names}
        recorded = {topic: {name: self.as_operation(own[topic][name]) for name in names[topic]} for topic in names}
        return backend._replace(**{topic: SimpleNamespace(**own[topic] | recorded[topic]) for topic in names})

    @contextmanager
    def recording(self):
        step = rmsprop._multi_tensor_rmsprop  # on a CPU, it reads the learning rate
        with ExitStack() as stack:
            for module in (scans, losses, normalization):
                stack.enter_context(mock.patch.object(module, "choose_backend", self.choose_backend))
            stack.enter_context(mock.patch.object(rmsprop, step.__name__, self.as_operation(step)))
            for name in ("all_reduce", "broadcast"):
                stack.enter_context(mock.patch.object(distributed, name, self.as_operation(getattr(distributed, name))))
            # As on a GPU, where values are looked at before a capture.
            stack.enter_context(mock.patch.object(validation, "can_read_values", lambda *_: False))
            # As inside a call that is being recorded: none takes the fast path.
            stack.enter_context(mock.patch.multiple(launcher.RECORDER, launches=[], outcome=None, is_busy=True))
            stack.enter_context(self.streams.installed())
            stack.enter_context(self)
            yield

    @torch.no_grad()
    def replay(self):
        """Do it all again. Random numbers are other ones."""
        for function, args, kwargs, results in self.operations:
            again = function(*args, **kwargs)
            for x, new in zip(pytree.tree_leaves(results), pytree.tree_leaves(again), strict=True):
                if isinstance(x, torch.Tensor) and x is not new:
                    x.data.copy_(new)  # as on a GPU, autograd does not see it


class RecordedGraphs:
    """In the place of `CudaGraphs`, with the same interface."""

    def __init__(self, device=None):
        self.captures, self.replays, self.pool = 0, 0, None

    def warm_up(self, call, times):
        for _ in range(times):
            call()

    def capture(self, call, generators):
        self.captures += 1
        self.pool = self.pool or object()
        recording = Recording()
        with recording.recording():
            results = call()

        def replay():
            self.replays += 1
            recording.replay()

        return results, replay

    def save_random_state(self, generators):
        return [(generator, generator.get_state()) for generator in (torch.default_generator, *generators)]

    def restore_random_state(self, saved):
        for generator, state in saved:
            generator.set_state(state)

    def release(self):
        self.pool = None
