"""Optimizers of a framework's learners: one kernel for all parameters."""

from __future__ import annotations

from typing import Any

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
