"""V-Trace with the arguments of RLlib's, and its place in the losses of IMPALA and APPO."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import ray
import torch
from ray.rllib.algorithms.impala.torch.vtrace_torch_v2 import vtrace_torch
from torch import Tensor

from rl_triton_adapters.common.switch import with_switch
from rl_triton_core import compute_vtrace
from rl_triton_core.reach import copy_function


@with_switch(vtrace_torch)
@torch.no_grad()
def vtrace(
    *,
    target_action_log_probs: Tensor,
    behaviour_action_log_probs: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_values: Tensor,
    clip_rho_threshold: float | Tensor | None = 1.0,
    clip_pg_rho_threshold: float | Tensor | None = 1.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """V-Trace, with the arguments and results of RLlib's `vtrace_torch`, by `rl_triton_core.compute_vtrace`.

    Tensors are [T, B], of any strides, and `bootstrap_values` [B]; discounts are 0 where an episode ends. Thresholds
    are ρ̄ of the value targets and of the advantages, None for no clip. Returns vs and pg_advantages, [T, B], without a
    graph. `backend` names one of `rl_triton_core`; None chooses by the tensors' device.

    Raises:
        ValueError: A tensor is not shaped like `rewards`, as values [T, B, 1] are not.
    """
    per_step = {"discounts": discounts, "values": values, "target_action_log_probs": target_action_log_probs}
    for name, x in {**per_step, "behaviour_action_log_probs": behaviour_action_log_probs}.items():
        if x.shape != rewards.shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {tuple(rewards.shape)}, that of rewards")
    bars = [math.inf if x is None else float(x) for x in (clip_rho_threshold, clip_pg_rho_threshold)]
    return compute_vtrace(
        rewards,
        values,
        target_log_probs=target_action_log_probs,
        behaviour_log_probs=behaviour_action_log_probs,
        gamma=discounts,
        rho_bar=bars[0],
        rho_bar_pg=bars[1],
        bootstrap_values=bootstrap_values,
        time_dim=0,
        backend=backend,
    )


def replace_vtrace(method: Any, replacement: Callable[..., Any]) -> MethodType:
    """Copy a method so that it calls the replacement where it called RLlib's `vtrace_torch`; an error if it did not."""
    function, name = method.__func__, "vtrace_torch"
    if name not in function.__code__.co_names:
        raise RuntimeError(f"{function.__qualname__}: got none in Ray {ray.__version__}, expected a call of {name}")
    return MethodType(copy_function(function, {name: replacement}), method.__self__)
