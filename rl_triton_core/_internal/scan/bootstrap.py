"""Bootstrap values in all their forms, checked and turned into a number or one value per step."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.scan.recurrence import Expectation
from rl_triton_core.boundaries import FinalValues


def check_continuation(
    bootstrap: Any,
    next_values: Any,
    truncated: Any,
    mask: torch.Tensor | None,
    layout: check.RolloutLayout,
    precision: torch.dtype,
) -> float | torch.Tensor:
    """Check bootstrap values or `next_values`, and return the former as a number or a tensor of one per step.

    `mask` is that of the steps to skip, if any, and `precision` that of the arithmetic so far.
    """
    if next_values is not None:
        if bootstrap is not None:
            raise ValueError("bootstrap_values: got both it and next_values, expected one of the two")
        if not isinstance(next_values, Expectation):
            check.check_per_step("next_values", next_values, layout)
        return 0.0
    if bootstrap is None:
        raise ValueError(
            "bootstrap_values: got None, expected the values V(s_{t+1}) at truncations and at the rollout's end, "
            "or 0.0 if every row ends in a terminal state or a finite horizon is meant"
        )
    if isinstance(bootstrap, FinalValues):
        if layout.cu_seqlens is not None:
            raise ValueError("bootstrap_values: got FinalValues together with cu_seqlens, expected a float or a tensor")
        return scatter_final_values(bootstrap, mask, layout, precision)
    if isinstance(bootstrap, torch.Tensor):
        return check_bootstrap_tensor(bootstrap, truncated, layout)
    if isinstance(bootstrap, bool) or not isinstance(bootstrap, Real):
        raise TypeError(
            f"bootstrap_values: got {type(bootstrap).__name__}, expected a float, a torch.Tensor or FinalValues"
        )
    return float(bootstrap)


def check_bootstrap_tensor(bootstrap: torch.Tensor, truncated: Any, layout: check.RolloutLayout) -> torch.Tensor:
    """Check a tensor of one number, one per environment or sequence, or one per step; return one per step."""
    check.check_tensor("bootstrap_values", bootstrap)
    if bootstrap.ndim == 0:
        return bootstrap.expand(layout.shape)
    if layout.cu_seqlens is None:
        per_step = bootstrap.ndim == 2
    else:
        bootstrap, per_step = check_packed_bootstrap(bootstrap, truncated, layout)
    if not per_step and bootstrap.ndim == 1 and truncated is not None:
        raise ValueError(
            f"bootstrap_values: got shape {tuple(bootstrap.shape)} together with truncated, expected a value for every "
            f"truncated step: shape {tuple(layout.shape)}, FinalValues, or a float"
        )
    shape = layout.shape if per_step else (layout.num_envs,)
    check.check_shape(
        "bootstrap_values", bootstrap, shape, f"{layout.per_env}, or that of {layout.name}", layout.device
    )
    return bootstrap if per_step else layout.expand_over_time(bootstrap)


def check_packed_bootstrap(
    bootstrap: torch.Tensor, truncated: Any, layout: check.RolloutLayout
) -> tuple[torch.Tensor, bool]:
    """Bootstrap values of a packed row as one dimension, and whether they are per step."""
    sequences, steps = layout.num_envs, layout.num_steps
    if bootstrap.shape == (1, steps):
        return bootstrap[0], True
    if bootstrap.shape == (sequences, 1):
        return bootstrap[:, 0], False
    if bootstrap.shape == (steps,) and sequences == steps > 1 and truncated is None:
        raise ValueError(
            f"bootstrap_values: got shape ({steps},), of as many sequences as steps, expected ({sequences}, 1) for one "
            f"per sequence or (1, {steps}) for one per step"
        )
    return bootstrap, bootstrap.shape == (steps,)


def scatter_final_values(
    final: FinalValues, mask: torch.Tensor | None, layout: check.RolloutLayout, precision: torch.dtype
) -> torch.Tensor:
    """Write sparse bootstrap values into a dense tensor: the last value at the last step not skipped, NaN elsewhere."""
    has_dtype = isinstance(final.value, (torch.Tensor, np.ndarray))
    value = convert_to_tensor("bootstrap_values.value", final.value, None if has_dtype else torch.float64)
    check.check_tensor("bootstrap_values.value", value)
    precision = torch.promote_types(precision, check.find_precision((final.last_value, value if has_dtype else None)))
    value = value.to(precision).to(layout.device)
    env = check_index("bootstrap_values.env", final.env, layout.num_envs, value, layout)
    time = check_index("bootstrap_values.time", final.time, layout.num_steps, value, layout)
    dense = torch.full(layout.shape, math.nan, dtype=value.dtype, device=layout.device)
    if final.last_value is not None and dense.numel():
        last_value = check_last_value(final.last_value, value, layout).unsqueeze(layout.time_dim)
        dense = dense.scatter(layout.time_dim, find_last_step(mask, layout), last_value)
    cells = (env, time) if layout.time_dim == 1 else (time, env)
    dense = dense.index_put(cells, value)
    if not check.is_transformed():
        written, value = dense[cells].detach(), value.detach()
        differs = (written != value) & ~(written.isnan() & value.isnan())
        text = "bootstrap_values: got FinalValues with two values for the same step, expected one for each"
        check.refuse(differs, text)
    return dense


def find_last_step(mask: torch.Tensor | None, layout: check.RolloutLayout) -> torch.Tensor:
    """Index of each environment's last step that is not skipped, with a time dimension of size 1."""
    if mask is None:
        size = (layout.num_envs, 1) if layout.time_dim == 1 else (1, layout.num_envs)
        return torch.full(size, layout.num_steps - 1, device=layout.device)
    return layout.num_steps - 1 - (mask != 0).flip(layout.time_dim).byte().argmax(layout.time_dim, keepdim=True)


def check_last_value(last_value: Any, value: torch.Tensor, layout: check.RolloutLayout) -> torch.Tensor:
    """Check the values at the rollout's end, and return them as [num_envs]."""
    name = "bootstrap_values.last_value"
    if not isinstance(last_value, torch.Tensor):
        number = check.check_number(name, last_value, -math.inf, math.inf)
        return torch.full((layout.num_envs,), number, dtype=value.dtype, device=layout.device)
    check.check_tensor(name, last_value)
    check.check_shape(name, last_value, (layout.num_envs,), "[num_envs]", layout.device)
    return last_value.to(value.dtype)


def convert_to_tensor(name: str, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert a sequence or an array of numbers to a tensor."""
    if isinstance(values, (list, tuple)) and values and all(isinstance(x, torch.Tensor) for x in values):
        values = torch.stack([*values])  # whose gradients `as_tensor` would drop
    device = values.device if isinstance(values, torch.Tensor) else torch.device("cpu")
    try:
        return torch.as_tensor(values, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name}: got {check.describe_type(values)}, expected a torch.Tensor or a sequence of numbers"
        ) from error


def check_index(name: str, indices: Any, size: int, value: torch.Tensor, layout: check.RolloutLayout) -> torch.Tensor:
    """Check integer indices in [0, size), as many as values. Those on a GPU are asserted there, without waiting."""
    index = convert_to_tensor(name, indices)
    if index.numel() and (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool):
        raise TypeError(f"{name}: got dtype {index.dtype}, expected integers")
    index = index.to(torch.int64)
    if index.ndim != 1 or index.shape != value.shape:
        raise ValueError(f"{name}: got shape {tuple(index.shape)}, expected [num_values], {tuple(value.shape)}")
    outside = (index < 0) | (index >= size)
    if index.device.type in check.UNREAD or check.is_traced():
        torch._assert_async(~outside.any(), f"{name}: an index is out of range, negative or too large")
    elif outside.any():
        raise ValueError(f"{name}: got index {index[outside][0].item()}, expected indices in [0, {size})")
    return index.to(layout.device)
