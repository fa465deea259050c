"""How a capture, its warm-ups and a step that is stopped leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rl_triton_core._internal.capture.graphs import CudaGraphs
from rl_triton_core._internal.capture.host import HostState, list_parts
from rl_triton_core._internal.capture.optimizers import PreparedOptimizer


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
