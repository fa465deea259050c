"""Training steps that are captured once in a CUDA graph and replayed.

A minibatch step of a small network is hundreds of kernels, which Python launches one by one; a graph launches them at
once. `CapturedStep` runs a step eagerly wherever it cannot be captured, says why in one warning, and computes the same.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules import module as module_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from rl_triton_core._internal.arguments.validation import is_number
from rl_triton_core._internal.capture.graphs import CudaGraphs, Graphs, use_stream
from rl_triton_core._internal.capture.optimizers import (
    PreparedOptimizer,
    describe_settings,
    keep_state_on_error,
    list_step_hooks,
    name_unsupported,
)

__all__ = ["CapturedStep", "hold_captures", "is_input", "use_capture_stream"]

WARM_UPS = 3
"""Eager steps before a capture: libraries choose their algorithms and allocate their workspaces."""
WARM_UPS_OF_RANKS = 11
"""Where gradients are averaged over processes: `DistributedDataParallel` times its first ten steps by events."""
UNUSED_CALLS = 256
"""After so many calls without it, a graph makes room for another."""
GLOBAL_HOOKS = (
    module_hooks._global_forward_pre_hooks,
    module_hooks._global_forward_hooks,
    module_hooks._global_backward_pre_hooks,
    module_hooks._global_backward_hooks,
)
"""Hooks of all modules."""
CAPTURING = threading.RLock()
"""Held while a step is made that can be captured: streams, random numbers, the check for waiting are the process's."""


class CapturedStep:
    """A training step: captured at its first call for given shapes, replayed at every further one.

        step = CapturedStep(function, modules=[policy], optimizers=[optimizer])
        losses = step(observations, actions, advantages, clip_range)

    The function does all that a step does: `zero_grad`, forward pass, loss, `backward`, clipping of gradients,
    `optimizer.step()`. It must not read from the device (no ``.item()``, no boolean indexing). What it is given is
    copied into tensors of the graph; what it closes over (a rollout on the device, say) must stay where it is.
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
        self.function, self.enabled, self.max_graphs = function, enabled, max_graphs
        self.modules, self.generators, self.extra = list(modules), list(generators), list(state)
        self.optimizers = list(optimizers)
        self.reason = self.find_obstacle()
        self.stop = torch.zeros((), device=self.device)
        self.graphs: Graphs = CudaGraphs(self.device)
        self.prepared: list[PreparedOptimizer] = []
        self.captured: dict[Hashable, Captured] = {}
        self.calls = 0
        self.pointers: tuple[int, ...] = ()
        self.is_stale = self.may_stop = False
        self.warned: set[str] = set()
        if self.reason and self.device.type != "cpu" and is_wanted(enabled):
            self.warn_once(self.reason, stacklevel=3)

    def find_obstacle(self) -> str:
        """Why nothing can be captured; empty if it can, as far as can be told before trying."""
        return find_obstacle(self.optimizers, self.tensors(), self.enabled, find_averaged(self.modules))

    @property
    def device(self) -> torch.device:
        """Where the first of the tensors lies that the step changes."""
        of_modules = (list_own() for x in self.modules for list_own in (x.parameters, x.buffers))
        of_optimizers = (group["params"] for x in self.optimizers for group in x.param_groups)
        tensors = chain.from_iterable(chain(of_modules, of_optimizers, [self.extra]))
        return next((x.device for x in tensors), torch.device("cpu"))

    def tensors(self, parts: Iterable[nn.Module] | None = None) -> list[Tensor]:
        """Parameters and buffers of the modules' parts, parameters of the optimizers, and the further state."""
        found = {}
        for part in list_parts(self.modules) if parts is None else parts:
            for own in (part._parameters, part._buffers):
                for x in own.values() if own else ():
                    found[id(x)] = x
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for x in group["params"]:
                    found[id(x)] = x  # most are those of the modules
        return [x for x in (*found.values(), *self.extra) if x is not None]

    def __call__(self, *inputs: Any) -> Any:
        """Make the step."""
        leaves, structure = pytree.tree_flatten(inputs)
        check_inputs(leaves)
        is_plain = bool(self.reason) and self.stop.device == self.device
        with nullcontext() if is_plain else CAPTURING:
            if self.reason and not is_plain:  # what was moved may be captured where it is now
                self.reset()
            if self.reason:
                return self.run_eagerly(leaves, structure)
            try:
                graph = self.find_graph(leaves, structure)
            except CaptureFailed as failure:
                return self.fall_back(str(failure), leaves, structure)
            return self.run_eagerly(leaves, structure, copy=True) if graph is None else graph.replay(leaves)

    def find_graph(self, leaves: list[Any], structure: Any) -> Captured | None:
        """The graph of a step with these inputs, captured if it is new; None if the step has to run eagerly."""
        context = name_context()
        if context:
            self.warn_once(context)
            return None
        parts = list_parts(self.modules)
        tensors = self.tensors(parts)
        lost = self.is_stale or any(x.is_outdated() for x in self.prepared)
        if lost or self.pointers != find_pointers(tensors, self.optimizers):
            self.reset()
        for optimizer in self.prepared:  # before a capture too, which would keep a rate that is a number
            optimizer.update_learning_rates()
        key = (structure, tuple(map(describe_leaf, leaves)), describe_mode(parts, self.optimizers, tensors))
        self.calls += 1
        if key not in self.captured:
            if not self.make_room():
                self.warn_once(f"more than {self.max_graphs} combinations of shapes and settings")
                return None
            if self.reason or self.find_obstacle():
                self.reset()
                self.warn_once(self.reason)
                return None
            self.captured[key] = self.capture_or_fail(leaves, structure)
        graph = self.captured[key]
        graph.last_call = self.calls
        return graph

    def make_room(self) -> bool:
        """Whether there is room for a graph; the one that was used longest ago makes some, unless that is not long."""
        if len(self.captured) < self.max_graphs:
            return True
        key, oldest = min(self.captured.items(), key=lambda item: item[1].last_call)
        if self.calls - oldest.last_call <= UNUSED_CALLS:
            return False
        del self.captured[key]
        if not self.captured:
            self.graphs.release()
        return True

    def forget_graphs(self) -> None:
        """Drop all graphs; each is captured anew when it is needed."""
        self.captured.clear()
        self.graphs.release()

    def run_eagerly(self, leaves: list[Any], structure: Any, copy: bool = False) -> Any:
        """The step as it is, perhaps with copies of its inputs; what is stopped changes nothing here either."""
        device = self.device
        arguments = [as_tensor(x, device, copy) for x in leaves]
        with self.stopping(), self.keep_buffers(), self.installed():
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

    @contextmanager
    def keep_buffers(self) -> Iterator[None]:
        """A step that begins while `stop` is 1 changes no buffers, such as statistics of a normalisation."""
        parts = list_parts(self.modules) if self.may_stop else ()
        kept = [(x, x.clone()) for part in parts for x in part._buffers.values() if x is not None]
        is_stopped = self.stop.bool() if kept else self.stop
        yield
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(torch.where(is_stopped, before, buffer))

    def capture_or_fail(self, leaves: list[Any], structure: Any) -> Captured:
        """Capture; whatever stands against it, no memory or something that no graph can hold, is a CaptureFailed."""
        try:
            return self.capture(leaves, structure)
        except Exception as error:
            message = str(error).splitlines()
            reason = f"{type(error).__name__}: {message[0] if message else ''}"
        except BaseException:
            self.reset()
            raise
        self.reset()
        raise CaptureFailed(reason)  # without the error, which would keep the memory of the capture

    def capture(self, leaves: list[Any], structure: Any) -> Captured:
        """Warm up, put everything back, and capture."""
        static = [as_tensor(x, self.device, copy=True) for x in leaves]
        arguments = pytree.tree_unflatten(static, structure)

        def call() -> Any:
            torch.clear_autocast_cache()  # a graph has to cast parameters itself
            with self.installed(), ExitStack() as stack:
                for optimizer in self.prepared:
                    stack.enter_context(optimizer.stopping())
                stack.enter_context(self.keep_buffers())
                return self.function(*arguments)

        warm_ups = WARM_UPS_OF_RANKS if find_averaged(self.modules) else WARM_UPS
        with keep_state_on_error(self.optimizers):
            for optimizer in self.optimizers[len(self.prepared) :]:
                self.prepared.append(PreparedOptimizer(optimizer, self.stop, self.mark_stale))
            with self.unchanged(), keep_gradients(self.tensors()) as list_carried:
                self.graphs.warm_up(call, warm_ups)
                with refuse_accumulation(list_carried()):
                    self.graphs.warm_up(call, 1)
            with self.unchanged(), keep_gradients(self.tensors()) as list_carried:
                results, replay = self.graphs.capture(call, self.generators)
                gradients = [(x, x.grad) for x in list_carried()]
        torch.clear_autocast_cache()
        self.pointers = find_pointers(self.tensors(), self.optimizers)
        return Captured(static, results, replay, gradients)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """What happens inside leaves no trace: tensors, optimizers and random states are put back."""
        rates = chain.from_iterable(optimizer.rates for optimizer in self.prepared)
        changed = (*self.tensors(), self.stop, *rates)
        tensors = list({(x.data_ptr(), x.shape, x.stride()): x for x in changed}.values())
        copies = [x.detach().clone() for x in tensors]
        saved = [optimizer.save_state() for optimizer in self.prepared]
        random = self.graphs.save_random_state(self.generators)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)
            for optimizer, state in zip(self.prepared, saved, strict=True):
                optimizer.restore_state(state)
            self.graphs.restore_random_state(random)

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
        """Capture anew at the next call: an optimizer's state has been replaced."""
        self.is_stale = True

    def reset(self) -> None:
        """Forget the graphs and the optimizers' preparation; the next call captures anew."""
        self.forget_graphs()
        for optimizer in self.prepared:
            optimizer.release()
        self.prepared, self.is_stale = [], False
        if self.stop.device != self.device:
            self.stop, self.reason = self.stop.to(self.device), ""
            self.graphs = CudaGraphs(self.device)
        self.reason = self.reason or self.find_obstacle()
        self.pointers = find_pointers(self.tensors(), self.optimizers)

    def fall_back(self, reason: str, leaves: list[Any], structure: Any) -> Any:
        """Run eagerly from here on, and say so, unless the step itself is wrong: it raises the same error eagerly."""
        if find_averaged(self.modules):
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
            warnings.warn(f"CapturedStep runs eagerly: {reason}", RuntimeWarning, stacklevel=stacklevel)

    def __getstate__(self) -> dict[str, Any]:
        """Without graphs, which belong to this object."""
        own = ("graphs", "captured", "prepared", "pointers")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As after construction."""
        self.__dict__.update(state)
        self.graphs, self.captured, self.prepared, self.pointers = CudaGraphs(self.device), {}, [], ()


class CaptureFailed(Exception):
    """Why a step could not be captured."""


@dataclass
class Captured:
    """A graph with its inputs and results."""

    inputs: list[Any]
    results: Any
    run: Callable[[], None]
    gradients: list[tuple[Tensor, Tensor | None]]
    """Parameters, and where the graph leaves their gradients, if it leaves any."""
    last_call: int = field(init=False, default=0)
    """The number of the call that used it last."""
    tensors: list[int] = field(init=False)
    structure: Any = field(init=False)
    """Of the results: every call gets containers of its own."""

    def __post_init__(self) -> None:
        """Remember which inputs are tensors, and take the results apart."""
        self.tensors = [i for i, x in enumerate(self.inputs) if isinstance(x, Tensor)]
        self.results, self.structure = pytree.tree_flatten(self.results)

    def replay(self, leaves: list[Any]) -> Any:
        """Copy the inputs that are not there already, and launch."""
        copies: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}  # one kernel copies all of a dtype
        for i in self.tensors:
            static, given = self.inputs[i], leaves[i]
            if not isinstance(given, Tensor):
                static.fill_(given)
            elif given.data_ptr() != static.data_ptr():
                targets, sources = copies.setdefault((given.dtype, given.device), ([], []))
                targets.append(static)
                sources.append(given)
        for targets, sources in copies.values():
            torch._foreach_copy_(targets, sources)
        self.run()
        for parameter, gradient in self.gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        return pytree.tree_unflatten(self.results, self.structure)


def is_input(x: Any) -> bool:
    """Whether a captured step can be given a leaf of its inputs: a tensor, number, bool, string or None."""
    return x is None or isinstance(x, (Tensor, bool, str)) or is_number(x)


def check_inputs(leaves: Iterable[Any]) -> None:
    """Refuse what a graph cannot take: gradients would end at its copy, and other arrays are no tensors."""
    for x in leaves:
        if isinstance(x, Tensor):
            if x.requires_grad and torch.is_grad_enabled():
                expected = "expected one that needs none: detach it, or compute it inside the step"
                raise ValueError(f"inputs: got a tensor of shape {tuple(x.shape)} that requires grad, {expected}")
        elif not is_input(x):
            raise TypeError(f"inputs: got {type(x).__name__}, expected tensors, numbers, bools, strings or None")


def as_tensor(x: Any, device: torch.device, copy: bool = False) -> Any:
    """Numbers as tensors without dimensions, tensors on the device, perhaps copied, anything else as it is."""
    if isinstance(x, Tensor):
        return x.detach().to(device, copy=True) if copy else x.to(device)
    if not is_number(x):
        return x
    return torch.tensor(x, dtype=torch.int64 if isinstance(x, Integral) else torch.float32, device=device)


def describe_leaf(x: Any) -> Hashable:
    """What of an input a graph depends on: not on the device, since tensors are copied to the graph's."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    if is_number(x):
        return Integral if isinstance(x, Integral) else Real
    known: Hashable = x
    return known


def describe_mode(parts: Iterable[nn.Module], optimizers: Iterable[Optimizer], tensors: Iterable[Tensor]) -> Hashable:
    """What else a graph depends on: modules with their modes and hooks, frozen parameters, settings, precision."""
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    state = tuple([(x, x.training, x.__dict__.get("forward")) for x in parts])
    frozen = tuple([not x.requires_grad for x in tensors])
    settings = tuple([describe_settings(x) for x in optimizers])
    hooks = tuple(list_hooks(parts, optimizers, tensors))
    return state, hooks, frozen, settings, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def list_hooks(parts: Iterable[nn.Module], optimizers: Iterable[Optimizer], tensors: Iterable[Tensor]) -> Iterator[int]:
    """The hooks that a step runs, by PyTorch's numbers: no two in a process have the same."""
    kinds: list[dict[int, Any] | None] = [*GLOBAL_HOOKS]
    for part in parts:
        kinds += part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks
    for x in tensors:
        kinds += x._backward_hooks, x._post_accumulate_grad_hooks
    for optimizer in optimizers:
        kinds += list_step_hooks(optimizer)
    return chain.from_iterable(filter(None, kinds))


def name_context() -> str:
    """What is active around a step and calls Python at every operation, as no graph does; empty if nothing is."""
    if torch.is_anomaly_enabled():
        return "anomaly detection is on"
    saved_tensor_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if saved_tensor_hooks:
        return "hooks of saved tensors are active"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is active"
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(not isinstance(mode, DeviceContext) for mode in modes):  # which a default device is
        return "a TorchFunctionMode is active"
    return ""


@contextmanager
def keep_gradients(tensors: Iterable[Tensor]) -> Iterator[Callable[[], list[Tensor]]]:
    """Put gradients back; yield a function that lists the tensors which had one, or have one when it is called."""
    leaves = [x for x in tensors if x.is_leaf and x.requires_grad]
    kept = [(x, x.grad, None if x.grad is None else x.grad.clone()) for x in leaves]
    try:
        yield lambda: [x for x, before, _ in kept if before is not None or x.grad is not None]
    finally:
        with torch.no_grad():
            for x, gradient, value in kept:
                x.grad = gradient if gradient is None or value is None else gradient.copy_(value)


@contextmanager
def refuse_accumulation(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Raise if the step inside adds to gradients of these tensors that are there before it: NaN stays NaN then."""
    marks = []
    for x in filter(Tensor.numel, tensors):
        x.grad = torch.full_like(x, torch.nan)
        marks.append((x.grad, x.grad._version))
    yield
    if any(mark._version != version and mark.isnan().all().item() for mark, version in marks):
        raise RuntimeError("the step adds to gradients of the step before: let it call zero_grad for all modules first")


def list_parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules and all modules in them, each once: `nn.Module.modules` takes longer, since it makes names."""
    found: dict[nn.Module, None] = {}
    waiting = [*modules]
    for module in waiting:
        if module not in found:
            found[module] = None
            if module._modules:
                waiting += [x for x in module._modules.values() if x is not None]
    return [*found]


def find_pointers(tensors: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> tuple[int, ...]:
    """Where the tensors lie that a graph knows by their addresses, those of the optimizers' states among them."""
    states = chain.from_iterable(getattr(optimizer, "state", {}).values() for optimizer in optimizers)
    kept = [x for x in chain.from_iterable(map(dict.values, states)) if isinstance(x, Tensor)]
    return (*[x.data_ptr() for x in tensors], *[x.data_ptr() for x in kept])


def is_wanted(enabled: bool | None) -> bool:
    """Whether steps are to be captured where that is possible."""
    return enabled is not False and (enabled is True or os.environ.get("RL_TRITON_CAPTURE") != "0")


def find_averaged(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """The modules and those in them whose gradients are averaged over processes."""
    return [part for part in list_parts(modules) if isinstance(part, DistributedDataParallel)]


@contextmanager
def hold_captures() -> Iterator[None]:
    """Read or set a model's state inside, in another thread than the one that trains it: no captured step is made.

    A capture makes steps and takes them back. What is read within one may be of such a step, and what is set is lost.
    Random numbers that another thread draws on the device meanwhile are an error of PyTorch's; inside, they are none.
    """
    with CAPTURING:
        yield


@contextmanager
def use_capture_stream(device: torch.device | str) -> Iterator[None]:
    """Make a `DistributedDataParallel` inside, so that its gradients can be averaged in a graph.

    Gradients are added up on the stream on which it is made. A graph cannot wait for the default one; this is the
    stream of captures. Nothing happens on a CPU.

    Args:
        device: Of the module.
    """
    device = torch.empty(0, device=device).device  # with its index
    with CAPTURING, use_stream(device, "capture") if device.type == "cuda" else nullcontext():
        yield


def find_obstacle(
    optimizers: Iterable[Optimizer],
    tensors: Iterable[Tensor],
    enabled: bool | None,
    averaged: Iterable[DistributedDataParallel] = (),
) -> str:
    """Why nothing can be captured; empty if it can, as far as can be told before trying."""
    if not is_wanted(enabled):
        return "switched off"
    devices = {x.device for x in tensors}
    if not devices or any(device.type != "cuda" for device in devices):
        return f"graphs need tensors on a GPU, got {', '.join(sorted(map(str, devices))) or 'none'}"
    if len(devices) > 1:
        return f"graphs need tensors on one device, got {', '.join(sorted(map(str, devices)))}"
    for module in averaged:
        known = distributed.get_backend_config(module.process_group)
        if "cuda:nccl" not in known.split(","):
            return f"gradients are averaged over {known}, expected NCCL, whose operations a graph can hold"
    return next(filter(None, map(name_unsupported, optimizers)), "")
