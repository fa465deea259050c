"""The bare first-order linear recurrence, for everything that has no function of its own."""

from __future__ import annotations

import torch

from rl_triton_core._internal import validation as check
from rl_triton_core._internal.fast_path import with_fast_path
from rl_triton_core._internal.linear import LINEAR_BACKWARD, LINEAR_FORWARD
from rl_triton_core._internal.solve import solve_features


@with_fast_path
def linear_recurrence(
    alpha: torch.Tensor,
    beta: torch.Tensor,
    initial: torch.Tensor | None = None,
    *,
    reverse: bool = True,
    time_dim: int = -1,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    r"""The scan itself.

        A[t] = α[t] + β[t]·A[t+1],  A[T] = initial       (reverse)
        A[t] = α[t] + β[t]·A[t-1],  A[-1] = initial      (not reverse)

    A β of exactly 0 lets nothing through, NaN included.

    Args:
        alpha: α, [num_envs, num_steps, *features], or [num_steps, num_envs, *features] with ``time_dim=0``; floating
            point as in `compute_gae`.
        beta: β, shaped like `alpha`.
        initial: The state that enters the scan, [num_envs, *features]; None is 0.
        reverse: Whether the recurrence runs backward in time.
        time_dim: Which of the two leading dimensions is time: -1 or 1, 0 or -2.
        out: Preallocated result, as in `compute_gae`.
        backend: As in `compute_gae`.

    Returns:
        A, shaped like `alpha`. Differentiable with respect to all three.

    Raises:
        TypeError: As in `compute_gae`.
        ValueError: As in `compute_gae`.
        BackendUnavailableError: As in `compute_gae`.

    Example:
        >>> linear_recurrence(torch.ones(1, 3), torch.full((1, 3), 0.5), reverse=False)
        tensor([[1.0000, 1.5000, 1.7500]])
    """
    layout = check.check_layout("alpha", alpha, time_dim, features=True)
    check.check_tensor("beta", beta, check.REAL_DTYPES)
    check.check_same_shape("beta", beta, alpha, "alpha")
    if initial is not None:
        check.check_tensor("initial", initial, check.REAL_DTYPES)
        check.check_shape("initial", initial, (layout.num_envs, *alpha.shape[2:]), "[num_envs, *features]", alpha)
    recurrence = LINEAR_BACKWARD if reverse else LINEAR_FORWARD
    return solve_features(recurrence, (alpha, beta), layout, initial=initial, out=out, backend=backend)
