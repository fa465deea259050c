"""The plain first-order linear recurrence, for everything that has no function of its own."""

from __future__ import annotations

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.scan.recurrence import LINEAR_BACKWARD, LINEAR_FORWARD
from rl_triton_core.extending import solve_features, with_fast_path


@with_fast_path
def linear_recurrence(
    alpha: torch.Tensor,
    beta: torch.Tensor,
    initial: torch.Tensor | None = None,
    *,
    reverse: bool,
    time_dim: int = -1,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    r"""Compute the scan itself.

        A[t] = α[t] + β[t]·A[t-1],  A[-1] = initial      (reverse=False)
        A[t] = α[t] + β[t]·A[t+1],  A[T] = initial       (reverse=True)

    A β of exactly 0 lets nothing through, NaN included.

    Args:
        alpha: α, [num_envs, num_steps, *features], or [num_steps, num_envs, *features] with ``time_dim=0``; float32,
            bfloat16, float16, or float64 (not on the triton backend). Any strides.
        beta: β, shaped like `alpha`, floating point.
        initial: The state that enters the scan, [num_envs, *features], floating point. None: 0.
        reverse: Whether the recurrence runs backward in time. It has no default.
        time_dim: Which of the two leading dimensions is time: -1 or 1, 0 or -2.
        out: Preallocated result, shaped like `alpha`, floating point, any strides, apart from every input.
        backend: ``"triton"``, ``"cpu"`` or ``"reference"``; None chooses by the tensors' device.

    Returns:
        A, shaped like `alpha` and in its unit, float32 (float64 if an input is). Differentiable with respect to
        `alpha`, `beta` and `initial`.

    Raises:
        ValueError: A shape, device or value is wrong; other errors are those of `compute_gae`.

    Source:
        Blelloch 1990, section 1.4, https://www.cs.cmu.edu/~guyb/papers/Ble93.pdf

    Example:
        >>> linear_recurrence(torch.ones(1, 3), torch.full((1, 3), 0.5), reverse=False)
        tensor([[1.0000, 1.5000, 1.7500]])
    """
    layout = check.check_layout("alpha", alpha, time_dim, features=True)
    check.check_tensor("beta", beta)
    check.check_shape("beta", beta, alpha.shape, "that of alpha", alpha.device)
    if initial is not None:
        check.check_tensor("initial", initial)
        shape = (layout.num_envs, *alpha.shape[2:])
        check.check_shape("initial", initial, shape, "[num_envs, *features]", alpha.device)
    recurrence = LINEAR_BACKWARD if check.check_bool("reverse", reverse) else LINEAR_FORWARD
    return solve_features(recurrence, (alpha, beta), layout, initial=initial, out=out, backend=backend)
