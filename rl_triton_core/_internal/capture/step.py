"""What can be captured, a captured step with its inputs and results, and how no other leaves a trace."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from rl_triton_core._internal.arguments.validation import is_number, read_switch
from rl_triton_core._internal.capture.graphs import CudaGraphs
from rl_triton_core._internal.capture.host import Change, HostState, list_parts
from rl_triton_core._internal.capture.optimizers import PreparedOptimizer, name_unsupported

WAITS = "operation not permitted when stream is capturing"
"""What CUDA answers to a wait within a capture."""


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
    reasons = (*(find_group_obstacle(x.process_group) for x in averaged), *map(name_unsupported, optimizers))
    return next(filter(None, reasons), "")


def find_group_obstacle(group: Any = None) -> str:
    """Why no graph can hold a group's averaging of gradients, or the default group's; empty if one can."""
    known = distributed.get_backend_config(group)
    if "cuda:nccl" in known.split(","):
        return ""
    return f"gradients are averaged over {known}, expected NCCL, whose operations a graph can hold"


def is_wanted(enabled: bool | None) -> bool:
    """Whether steps are to be captured where that is possible."""
    return enabled is not False and (enabled is True or read_switch("RL_TRITON_CAPTURE"))


def find_averaged(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """The modules and those in them whose gradients are averaged over processes."""
    return [part for part in list_parts(modules) if isinstance(part, DistributedDataParallel)]


class CaptureFailed(Exception):
    """Why a step could not be captured."""


def describe_failure(error: Exception) -> str:
    """Why a capture failed: by the error, or by the line that waits for the device, which no graph can."""
    if WAITS in str(error):
        place = [x for x in traceback.extract_tb(error.__traceback__) if x.name != "__torch_function__"][-1]
        return f"the step waits for the device in {place.filename}, line {place.lineno}"
    message = str(error).splitlines()
    return f"{type(error).__name__}: {message[0] if message else ''}"


@dataclass
class Captured:
    """A graph with its inputs and results."""

    inputs: list[Any]
    results: Any
    run: Callable[[], None]
    gradients: list[tuple[Tensor, Tensor | None]]
    """Parameters, and where the graph leaves their gradients, if it leaves any."""
    effects: list[Change]
    """What the step leaves on the host that is another than before it."""
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
        for x in self.effects:
            x.holder.put(x.key, x.now)
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


# -- captures, their warm-ups and steps that are stopped leave no trace -----------------------------------------------


@contextmanager
def put_back(
    host: HostState,
    tensors: Iterable[Tensor],
    optimizers: Sequence[PreparedOptimizer],
    graphs: CudaGraphs,
    generators: Iterable[torch.Generator],
) -> Iterator[None]:
    """After what happens inside, all that a step changes is as before, on the device and on the host."""
    places = list_buffers(host.parts)
    rates = [rate for optimizer in optimizers for rate in optimizer.rates]
    changed = list({(x.data_ptr(), x.shape, x.stride()): x for x in (*tensors, *rates)}.values())
    copies = [x.detach().clone() for x in changed]
    saved = [optimizer.save_state() for optimizer in optimizers]
    random = graphs.save_random_state(generators)
    try:
        with host.put_back():
            yield
    finally:
        replaced = [(buffers, name, x) for buffers, name, x in places if buffers[name] is not x]
        for buffers, name, x in replaced:
            buffers[name] = x
        with torch.no_grad():
            for tensor, copy in zip(changed, copies, strict=True):
                tensor.copy_(copy)
        for optimizer, state in zip(optimizers, saved, strict=True):
            optimizer.restore_state(state)
        graphs.restore_random_state(random)
    if replaced:
        raise RuntimeError(f"the step replaces a buffer by one of another shape or dtype: {replaced[0][1]}")


def list_buffers(modules: Iterable[nn.Module]) -> list[tuple[Any, str, Tensor]]:
    """Where the buffers are that there are, their names, and they themselves."""
    of_parts: list[Any] = [part._buffers for part in list_parts(modules)]
    return [(buffers, name, x) for buffers in of_parts for name, x in buffers.items() if x is not None]


@contextmanager
def keep_buffers(modules: Iterable[nn.Module], stop: Tensor | None = None) -> Iterator[None]:
    """Buffers that are replaced inside stay where they lie, since graphs know them by their addresses.

    Those of another shape or dtype stay replaced. A step that begins while `stop` is 1 changes none.
    """
    places = list_buffers(modules)
    is_stopped = stop.bool() if places and stop is not None else None
    copies = [x if is_stopped is None else x.clone() for *_, x in places]
    yield
    with torch.no_grad():
        for (buffers, name, buffer), before in zip(places, copies, strict=True):
            found = buffers[name]
            if found is not buffer and found is not None and (found.shape, found.dtype) == (buffer.shape, buffer.dtype):
                buffers[name] = buffer.copy_(found)
            if is_stopped is not None:
                buffer.copy_(torch.where(is_stopped, before, buffer))


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


@contextmanager
def keep_state_on_error(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """If something inside fails, the optimizers' states are those of before; tensors that were there keep values."""
    kept = [(x.state, {parameter: dict(state) for parameter, state in x.state.items()}) for x in optimizers]
    try:
        yield
    except BaseException:
        for states, before in kept:
            states.clear()
            states.update(before)
        raise
