"""Optimizers of a framework's learners: few operations for all parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer


def fuse_optimizer(optimizer: Optimizer) -> None:
    """Let Adam, AdamW or SGD step all parameters in one kernel, unless it was told how. Checkpoints do not show it."""
    groups = optimizer.param_groups
    chosen = any(group.get(name) for group in groups for name in ("foreach", "fused", "capturable", "differentiable"))
    parameters = [x for group in groups for x in group["params"]]
    if type(optimizer) not in (Adam, AdamW, SGD) or chosen or not all(x.is_floating_point() for x in parameters):
        return

    def set_fused(*_: Any) -> None:
        for group in optimizer.param_groups:
            group["fused"] = True
        for parameter, state in optimizer.state.items():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(parameter.device)

    def hide_fused(_: Optimizer, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            group["fused"] = None

    set_fused()
    optimizer.register_load_state_dict_post_hook(set_fused)
    optimizer.register_state_dict_post_hook(hide_fused)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> None:
    """Scale the gradients so that their norm is at most this: `torch.nn.utils.clip_grad_norm_` with fewer operations.

    Args:
        parameters: Whose gradients these are; all on one device.
        max_norm: The largest norm.
    """
    gradients = [x.grad for x in parameters if x.grad is not None]
    if gradients:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
