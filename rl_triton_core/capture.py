"""Training steps that are captured once in a CUDA graph and replayed.

A minibatch step of a small network is hundreds of kernels, which Python launches one by one; a graph launches them at
once. `CapturedStep` runs a step eagerly wherever it cannot be captured, says why in one warning, and computes the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from rl_triton_core._internal.arguments.side_effects import warn
from rl_triton_core._internal.arguments.validation import check_count
from rl_triton_core._internal.capture import step as steps
from rl_triton_core._internal.capture.graphs import CudaGraphs, use_stream
from rl_triton_core._internal.capture.host import HostState
from rl_triton_core._internal.capture.key import Contents, describe_context, describe_leaf, find_pointers, name_context
from rl_triton_core._internal.capture.optimizers import OPTIMIZERS, PreparedOptimizer, name_repeated
from rl_triton_core._internal.capture.snapshot import Snapshot
from rl_triton_core._internal.capture.step import Captured, find_group_obstacle, find_obstacle, is_input, keep_buffers

__all__ = [
    "OPTIMIZERS",
    "CapturedStep",
    "Snapshot",
    "find_group_obstacle",
    "hold_captures",
    "is_input",
    "keep_buffers",
    "name_repeated",
    "use_capture_stream",
]

WARM_UPS = 3
"""Eager steps before the first capture: libraries choose their algorithms and allocate their workspaces."""
WARM_UPS_OF_RANKS = 11
"""Where gradients are averaged over processes: `DistributedDataParallel` times its first ten steps by events."""
UNUSED_CALLS = 256
"""After so many calls without it, a graph makes room for another."""
CAPTURING = threading.RLock()
"""Held while a step is made that can be captured: streams and random numbers are the process's."""


class CapturedStep:
    """A training step: captured at its first call for given shapes, replayed at every further one.

        step = CapturedStep(function, modules=[policy], optimizers=[optimizer])
        losses = step(observations, actions, advantages, clip_range)

    The function does all that a step does: `zero_grad`, forward pass, loss, `backward`, clipping of gradients,
    `optimizer.step()`. It must not read from the device (no ``.item()``, no boolean indexing). What it is given is
    copied into tensors of the graph; what it closes over (such as a rollout on the device) must stay where it is.
    Gradients may be accumulated within a step; one that adds to those of the step before runs eagerly.

    Args:
        function: The step: tensors and numbers in, tensors out, nested in tuples, lists and dicts as you like. Tensors
            must not require grad, or a call raises a ValueError: no gradient flows through a graph's inputs. Numbers
            arrive as tensors without dimensions, float32 for floats, so that a schedule (clip range, entropy
            coefficient) does not ask for another graph. Bools, strings and None arrive as they are; another value is
            another graph.
        modules: Whose parameters and buffers the step changes. Parameters may be frozen and released between steps.
            One in `DistributedDataParallel`, over NCCL, is made inside `use_capture_stream`.
        optimizers: That the step calls. Adam, AdamW, SGD (without dampening) and RMSprop can be captured. Their
            learning rates, numbers or float32 tensors on the device, may change between steps, as schedulers and
            frameworks do it; another value of any other setting is another graph. The function may step them through a
            `torch.amp.GradScaler`.
        state: Further tensors that the step changes in place, such as running sums of statistics.
        generators: Of random numbers that the step draws, besides the device's default one.
        enabled: False runs every step eagerly. None captures where possible, unless RL_TRITON_CAPTURE is 0 in the
            environment.
        max_graphs: How many combinations of shapes and settings have a graph. A graph that was not used in the last 256
            calls makes room for another; where there is none, the step runs eagerly.

    Attributes:
        stop: float32 tensor without dimensions, 0 or 1. While it is 1, steps change neither parameters nor buffers: a
            device flag for early stopping. Set it inside the function (`stop_if`), and to 0 before the next epoch
            (`resume`).
        reason: Why steps run eagerly; empty while they are replayed.

    Results lie in the graph's memory, and the next call overwrites them: clone what is to stay.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        modules: Iterable[nn.Module] = (),
        optimizers: Iterable[Optimizer] = (),
        state: Iterable[Tensor] = (),
        generators: Iterable[torch.Generator] = (),
        enabled: bool | None = None,
        max_graphs: int = 4,
    ) -> None:
        """Nothing is captured until the first call."""
        if enabled is not None and not isinstance(enabled, bool):
            raise TypeError(f"enabled: got {type(enabled).__name__}, expected a bool or None")
        if not callable(function):
            raise TypeError(f"function: got {type(function).__name__}, expected a function")
        for name, x, kind in (("modules", modules, nn.Module), ("optimizers", optimizers, Optimizer)):
            if isinstance(x, kind):
                raise TypeError(f"{name}: got a {type(x).__name__}, expected several, such as [x]")
        self.function, self.enabled, self.max_graphs = function, enabled, check_count("max_graphs", max_graphs)
        self.modules, self.generators, self.extra = list(modules), list(generators), list(state)
        self.optimizers = list(optimizers)
        self.stop = torch.zeros((), dtype=torch.float32, device=self.device)
        self.contents = Contents()
        self.reason = self.find_obstacle()
        self.graphs = CudaGraphs(self.device)
        self.prepared: list[PreparedOptimizer] = []
        self.captured: dict[Hashable, Captured] = {}
        self.calls = self.blocks = 0
        self.held_graphs: dict[Hashable, Captured] = {}
        self.pointers: tuple[int, ...] = ()
        self.is_stale = self.may_stop = False
        self.warned: set[str] = set()
        if self.reason and self.device.type != "cpu" and steps.is_wanted(enabled):
            self.warn_once(self.reason, stacklevel=3)

    def find_obstacle(self) -> str:
        """Why nothing can be captured; empty if it can, as far as can be told before trying."""
        return find_obstacle(self.optimizers, self.tensors(), self.enabled, steps.find_averaged(self.modules))

    @property
    def device(self) -> torch.device:
        """Where the first of the tensors lies that the step changes."""
        of_modules = (list_own() for x in self.modules for list_own in (x.parameters, x.buffers))
        of_optimizers = (group["params"] for x in self.optimizers for group in x.param_groups)
        tensors = chain.from_iterable(chain(of_modules, of_optimizers, [self.extra]))
        return next((x.device for x in tensors), torch.device("cpu"))

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers of the modules, parameters of the optimizers, and the further state."""
        return self.contents.find(self.modules, self.optimizers, self.extra, self.stop.device)

    def __call__(self, *inputs: Any) -> Any:
        """Make the step."""
        leaves, structure = pytree.tree_flatten(inputs)
        steps.check_inputs(leaves)
        form = structure, tuple(map(describe_leaf, leaves))
        is_plain = bool(self.reason) and self.stop.device == self.device
        with nullcontext() if is_plain else CAPTURING:
            if self.reason and not is_plain:  # what was moved may be captured where it is now
                self.reset()
            if self.reason:
                return self.run_eagerly(leaves, structure)
            try:
                graph = self.find_held_graph(form) or self.find_graph(leaves, form)
            except steps.CaptureFailed as failure:
                return self.fall_back(str(failure), leaves, structure)
            return self.run_eagerly(leaves, structure, copy=True) if graph is None else graph.replay(leaves)

    def find_held_graph(self, form: Hashable) -> Captured | None:
        """Inside `held`, the graph of a step with inputs of this form, if there has been one."""
        graph = self.held_graphs.get(form)
        if graph is not None:
            for optimizer in self.prepared:
                optimizer.update_learning_rates()
            self.calls += 1
            graph.last_call = self.calls
        return graph

    def find_graph(self, leaves: list[Any], form: tuple[Any, Hashable]) -> Captured | None:
        """The graph of a step with these inputs, captured if it is new; None if the step has to run eagerly."""
        context = name_context()
        if context:
            self.warn_once(context)
            return None
        lost = self.is_stale or any(x.is_outdated() for x in self.prepared)
        if lost or not self.contents.holds():
            if lost or self.pointers != find_pointers(self.tensors(), self.optimizers):
                self.reset()
            self.contents.describe(self.modules, self.optimizers, self.extra)
        for optimizer in self.prepared:  # before a capture too, which would keep a rate that is a number
            optimizer.update_learning_rates()
        key = (*form, *self.contents.key, describe_context())
        self.calls += 1
        graph = self.captured.get(key)
        if graph is None:
            if not self.evict_idle_graph():
                self.warn_once(f"more than {self.max_graphs} combinations of shapes and settings{self.name_change()}")
                return None
            if self.reason or self.find_obstacle():
                self.reset()
                self.warn_once(self.reason)
                return None
            graph = self.captured[key] = self.capture_or_fail(leaves, form[0])
        if self.blocks and not graph.effects:
            self.held_graphs[form] = graph
        graph.last_call = self.calls
        return graph

    def name_change(self) -> str:
        """What has changed last of what modules keep on the host, if graphs are of several states of it."""
        keys: Any = self.captured
        return f": {self.contents.changed} has changed" if len({state for _, _, state, *_ in keys}) > 1 else ""

    def evict_idle_graph(self) -> bool:
        """Whether there is room for a graph; the one unused for longest is evicted, if it is idle for long enough."""
        if len(self.captured) < self.max_graphs:
            return True
        key, oldest = min(self.captured.items(), key=lambda item: item[1].last_call)
        if self.calls - oldest.last_call <= UNUSED_CALLS:
            return False
        del self.captured[key]
        self.held_graphs.clear()
        if not self.captured:
            self.graphs.release()
        return True

    def forget_graphs(self) -> None:
        """Drop all graphs; each is captured again when it is needed."""
        self.captured.clear()
        self.held_graphs.clear()
        self.graphs.release()

    def run_eagerly(self, leaves: list[Any], structure: Any, copy: bool = False) -> Any:
        """The step as it is, perhaps with copies of its inputs; what is stopped changes nothing here either."""
        device = self.device
        arguments = [steps.as_tensor(x, device, copy) for x in leaves]
        with self.stopping(), self.kept_buffers(), self.installed():
            return self.function(*pytree.tree_unflatten(arguments, structure))

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Eager steps of the optimizers change nothing while `stop` is 1, which is read from the device."""

        def drop_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self.may_stop and self.stop.item():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None

        handles = [optimizer.register_step_pre_hook(drop_gradients) for optimizer in self.optimizers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, optimizers that are prepared step as a graph can."""
        with ExitStack() as stack:
            for optimizer in self.prepared:
                stack.enter_context(optimizer.installed())
            yield

    def kept_buffers(self) -> AbstractContextManager[None]:
        """Buffers that a step inside replaces stay where they lie; one that begins while `stop` is 1 changes none."""
        stop = self.stop if self.may_stop else None
        modules = self.modules if self.reason else self.contents.host.parts
        return nullcontext() if self.reason and stop is None else keep_buffers(modules, stop)

    def unchanged(self, host: HostState, generators: list[torch.Generator]) -> AbstractContextManager[None]:
        """What happens inside leaves no trace."""
        return steps.put_back(host, (*self.tensors(), self.stop), self.prepared, self.graphs, generators)

    def capture_or_fail(self, leaves: list[Any], structure: Any) -> Captured:
        """Capture. Whatever prevents it, no memory or something that no graph can hold, is a CaptureFailed."""
        try:
            return self.capture(leaves, structure)
        except Exception as error:
            reason = steps.describe_failure(error)
        except BaseException:
            self.reset()
            raise
        self.reset()
        raise steps.CaptureFailed(reason)  # without the error, which would keep the memory of the capture

    def capture(self, leaves: list[Any], structure: Any) -> Captured:
        """Warm up, put everything back, and capture."""
        static = [steps.as_tensor(x, self.device, copy=True) for x in leaves]

        def call() -> Any:
            torch.clear_autocast_cache()  # a graph has to cast parameters itself
            with self.installed(), ExitStack() as stack:
                for optimizer in self.prepared:
                    stack.enter_context(optimizer.stopping())
                stack.enter_context(self.kept_buffers())
                return self.function(*pytree.tree_unflatten(static, structure))  # in new lists, which it may change

        host = self.contents.host
        generators = [*{*self.generators, *host.generators}]
        warm_ups = 1 if self.captured else WARM_UPS_OF_RANKS if steps.find_averaged(self.modules) else WARM_UPS
        with steps.keep_state_on_error(self.optimizers):
            for optimizer in self.optimizers[len(self.prepared) :]:
                self.prepared.append(PreparedOptimizer(optimizer, self.stop, self.mark_stale))
            with self.unchanged(host, generators), steps.keep_gradients(self.tensors()) as list_carried:
                self.graphs.warm_up(call, warm_ups)
                with steps.refuse_accumulation(list_carried()):
                    _, changes = host.watch(lambda: self.graphs.warm_up(call, 1))
                if changes:
                    raise RuntimeError(f"the step changes {changes[0]} on the host in every call")
            with self.unchanged(host, generators), steps.keep_gradients(self.tensors()) as list_carried:
                (results, replay), changes = host.watch(lambda: self.graphs.capture(call, generators), can_repeat=False)
                gradients = [(x, x.grad) for x in list_carried()]
        torch.clear_autocast_cache()
        self.pointers = find_pointers(self.tensors(), self.optimizers)
        return Captured(static, results, replay, gradients, changes)

    def stop_if(self, condition: Tensor) -> None:
        """Inside the function: from here on the optimizers change nothing if the condition holds."""
        if not self.may_stop:
            self.may_stop = True
            self.forget_graphs()  # those that change buffers, stopped or not
        self.stop.copy_(torch.maximum(self.stop, condition.to(self.stop.dtype)))

    def resume(self) -> None:
        """Let the optimizers step again."""
        self.stop.zero_()

    def mark_stale(self) -> None:
        """Capture again at the next call: an optimizer's state has been replaced."""
        self.is_stale = True
        self.held_graphs.clear()

    def reset(self) -> None:
        """Forget the graphs and the optimizers' preparation; the next call captures again."""
        self.forget_graphs()
        for optimizer in self.prepared:
            optimizer.release()
        self.prepared, self.is_stale = [], False
        if self.stop.device != self.device:
            self.stop, self.reason = self.stop.to(self.device), ""
            self.graphs, self.contents = CudaGraphs(self.device), Contents()
        self.reason = self.reason or self.find_obstacle()
        self.pointers = find_pointers(self.tensors(), self.optimizers)

    def recapture(self) -> None:
        """Forget the graphs, and why a capture has failed: the next call tries it.

        Call it after a change of what no graph can see, such as a setting of the process.
        """
        self.reset()
        self.reason = self.find_obstacle()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Ask once, and not before each replay, whether a graph still holds.

            with step.held():
                for minibatch in minibatches:
                    step(minibatch)

        The first call inside with inputs of a form (shapes, dtypes, values that are no numbers) looks at modules,
        optimizers, hooks and contexts as always, and captures what has no graph. Further calls of that form replay the
        same graph. So nothing else may change there: inputs and learning rates may. Blocks may be nested: the outermost
        one counts.
        """
        self.blocks += 1
        try:
            yield
        finally:
            self.blocks -= 1
            if not self.blocks:
                self.held_graphs.clear()

    def fall_back(self, reason: str, leaves: list[Any], structure: Any) -> Any:
        """Run eagerly from here on, and say so, unless the step itself is wrong: it raises the same error eagerly."""
        if steps.find_averaged(self.modules):
            reason += " (DistributedDataParallel has to be made inside use_capture_stream)"
        self.reason = reason
        try:
            results = self.run_eagerly(leaves, structure, copy=True)
        except BaseException:
            self.reason = ""
            raise
        self.warn_once(reason)
        return results

    def warn_once(self, reason: str, stacklevel: int = 4) -> None:
        """Say why steps run eagerly."""
        if reason not in self.warned:
            self.warned.add(reason)
            warn(f"CapturedStep runs eagerly: {reason}", RuntimeWarning, stacklevel=stacklevel)

    def __getstate__(self) -> dict[str, Any]:
        """Without graphs, which belong to this object."""
        own = ("graphs", "captured", "held_graphs", "blocks", "prepared", "pointers", "contents")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As after construction."""
        self.__dict__.update(state)
        self.graphs, self.captured, self.prepared, self.pointers = CudaGraphs(self.device), {}, [], ()
        self.contents, self.held_graphs, self.blocks = Contents(), {}, 0


@contextmanager
def hold_captures() -> Iterator[None]:
    """Read or set a model's state inside, in another thread than the one that trains it: no captured step is made.

    A capture makes steps and takes them back. What is read within one may be of such a step, and what is set is lost.
    Random numbers that another thread draws on the device meanwhile are an error of PyTorch's, but not inside.
    """
    with CAPTURING:
        yield


@contextmanager
def use_capture_stream(device: torch.device | str) -> Iterator[None]:
    """Make a `DistributedDataParallel` on a device inside, so that its gradients can be averaged in a graph.

    Gradients are added up on the stream on which it is made. A graph cannot wait for the default one; this is the
    stream of captures. Nothing happens on a CPU.
    """
    device = torch.empty(0, device=device).device  # with its index
    with CAPTURING, use_stream(device, "capture") if device.type == "cuda" else nullcontext():
        yield
