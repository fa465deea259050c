"""Optimizers of a framework's learners: few operations for all parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer, RMSprop

from rl_triton_core.capture import OPTIMIZERS, name_repeated
from rl_triton_core.extending import warn

WARNED: WeakSet[Optimizer] = WeakSet()  # optimizers with a parameter twice of which that was said


def fuse_optimizer(optimizer: Optimizer) -> None:
    """Let Adam, AdamW or SGD step all parameters in one kernel, RMSprop in a few, unless the optimizer was told how.

    The setting is there during steps only: checkpoints and copies are those of a plain optimizer. One that has a
    parameter twice steps one by one, with a warning.
    """
    groups = optimizer.param_groups
    chosen = any(group.get(name) is not None for group in groups for name in ("foreach", "fused"))
    chosen = chosen or any(group.get(name) for group in groups for name in ("capturable", "differentiable"))
    parameters = [x for group in groups for x in group["params"]]
    known = type(optimizer) in OPTIMIZERS and all(x.is_floating_point() for x in parameters)
    if not known or chosen or is_fused(optimizer):
        return
    optimizer.register_step_pre_hook(set_fused)
    handle: Any = optimizer.register_step_post_hook(unset_fused)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


def release_optimizer(optimizer: Optimizer) -> None:
    """Let it step as before `fuse_optimizer`, also where a step was interrupted."""
    if not is_fused(optimizer):
        return
    unset_fused(optimizer)
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for key in [key for key, x in hooks.items() if x in (set_fused, unset_fused)]:
            del hooks[key]
    move_step_counts(optimizer, torch.device("cpu"))


@contextmanager
def fused(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Inside, optimizers step as `fuse_optimizer` says; after it as before, whatever comes out."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.callback(release_optimizer, optimizer)
            fuse_optimizer(optimizer)
        yield


def is_fused(optimizer: Optimizer) -> bool:
    """Whether `fuse_optimizer` has changed how this optimizer steps."""
    return set_fused in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()


def choose_setting(optimizer: Optimizer) -> dict[str, bool]:
    """What lets an optimizer step many parameters at once: one kernel, which reads no strides, or else a few.

    Nothing where neither is possible, since several kernels of Adam take no learning rate that is a tensor, and where
    the optimizer has been told, as a captured step does it.
    """
    groups = optimizer.param_groups
    if any(group.get("fused") or group.get("foreach") for group in groups):
        return {}
    tensors = [x for group in groups for x in group["params"]]
    tensors += [x.grad for x in tensors if x.grad is not None]  # a hook may have given it other strides
    if any(x.is_sparse for x in tensors):
        return {}
    if repeated := name_repeated(optimizer):
        if optimizer not in WARNED:
            WARNED.add(optimizer)
            warn(f"{repeated}: each is stepped alone", RuntimeWarning, stacklevel=2)
        return {"foreach": False}
    if isinstance(optimizer, RMSprop) or any(group.get("momentum") for group in groups):
        return {"foreach": True}  # a fused SGD takes no parameter whose momentum begins later than that of others
    tensors += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    if all(map(Tensor.is_contiguous, tensors)):
        return {"fused": True}
    return {} if any(isinstance(group["lr"], Tensor) for group in groups) else {"foreach": True}


def set_fused(optimizer: Optimizer, *_: Any) -> None:
    """Before a step: all parameters at once, and steps counted where the parameters are."""
    optimizer._rl_triton_setting = choose_setting(optimizer)  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group.update(optimizer._rl_triton_setting)  # type: ignore[attr-defined]
    if "fused" in optimizer._rl_triton_setting:  # type: ignore[attr-defined]
        move_step_counts(optimizer)


def move_step_counts(optimizer: Optimizer, device: torch.device | None = None) -> None:
    """Count steps on a device, or where the parameters are: all in one place, and if the first is there, so are all."""
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, Tensor):
            if step.device == (device or parameter.device):
                return
            state["step"] = step.to(device or parameter.device)


def unset_fused(optimizer: Optimizer, *_: Any) -> None:
    """After it: as if nothing had been set."""
    setting = vars(optimizer).pop("_rl_triton_setting", {})
    for group in optimizer.param_groups:
        group.update(dict.fromkeys(setting))


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> None:
    """What `torch.nn.utils.clip_grad_norm_` does, in fewer operations; all parameters are on one device."""
    gradients = [x.grad for x in parameters if x.grad is not None]
    if gradients:
        clip_by_norm(gradients, max_norm)


def clip_by_norm(gradients: list[Tensor], max_norm: float, adapt: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Scale gradients, of which there are some, by their norm as it is after `adapt`, which is returned."""
    norm = adapt(torch.linalg.vector_norm(adapt(torch.stack(torch._foreach_norm(gradients)))))
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
