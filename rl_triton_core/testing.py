"""Random rollouts, and a comparison that NaN cannot pass: for tests, adapters' tests and benchmarks."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Rollout", "assert_close", "random_rollout", "relative_error"]

ArrayLike: TypeAlias = Tensor | npt.NDArray[Any]

_RTOL = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Rollout(NamedTuple):
    """One rollout of random experience; every field has the layout asked for.

    Attributes:
        rewards: Standard normal rewards.
        values: Standard normal estimates V(s_t).
        terminated: Done flags, bool: the transition t -> t+1 ended the episode.
        truncated: Done flags, bool: the transition t -> t+1 was cut short. Both flags may be set at once.
        bootstrap_values: V(s_{t+1}) before any reset, at every step; estimators read it where bootstrapped only.
    """

    rewards: Tensor
    values: Tensor
    terminated: Tensor
    truncated: Tensor
    bootstrap_values: Tensor


def random_rollout(
    num_envs: int,
    num_steps: int,
    *,
    seed: int = 0,
    terminated_prob: float = 0.02,
    truncated_prob: float = 0.01,
    dtype: torch.dtype = torch.float32,
    time_dim: int = -1,
    device: torch.device | str = "cpu",
) -> Rollout:
    """Draw a rollout, the same one for a seed whatever the layout, dtype (but for rounding) and device.

    Args:
        num_envs: Number of environments, N.
        num_steps: Number of steps, T.
        seed: Seed of the generator; the global generators are left alone.
        terminated_prob: Probability that a step terminates its episode.
        truncated_prob: Probability that a step truncates its episode.
        dtype: Type of rewards, values and bootstrap values.
        time_dim: -1 or 1 for contiguous `[N, T]` tensors, 0 or -2 for contiguous `[T, N]` ones.
        device: Where the tensors live.

    Returns:
        The rollout. `compute_gae(**rollout._asdict())` accepts it as it is.

    Raises:
        ValueError: If `time_dim` is none of -2, -1, 0, 1.
    """
    if time_dim not in (-2, -1, 0, 1):
        raise ValueError(f"time_dim: got {time_dim}, expected one of -2, -1, 0, 1")
    generator = torch.Generator().manual_seed(seed)
    shape = (num_envs, num_steps)

    def place_tensor(x: Tensor) -> Tensor:
        x = x.t() if time_dim in (-2, 0) else x
        return x.contiguous().to(device=device, dtype=x.dtype if x.dtype == torch.bool else dtype)

    reals = (torch.randn(shape, generator=generator, device="cpu") for _ in range(3))
    rewards, values, bootstrap_values = map(place_tensor, reals)
    chances = terminated_prob, truncated_prob
    flags = (torch.rand(shape, generator=generator, device="cpu") < prob for prob in chances)
    terminated, truncated = map(place_tensor, flags)
    return Rollout(rewards, values, terminated, truncated, bootstrap_values)


def relative_error(actual: ArrayLike, expected: ArrayLike) -> float:
    """Return ‖actual − expected‖ / ‖expected‖ in float64, of two of the same shape.

    Returns:
        The relative error in the Euclidean norm; 0 if both are all zero or empty, infinity if only `expected` is all
        zero, and NaN if either holds a NaN or an infinity.

    Raises:
        ValueError: If the shapes differ: a broadcast would compare the wrong cells.
    """
    a = torch.as_tensor(actual).detach()
    e = torch.as_tensor(expected).detach().to(device=a.device, dtype=torch.float64)
    if a.shape != e.shape:
        raise ValueError(f"actual: got shape {tuple(a.shape)}, expected {tuple(e.shape)}")
    difference = float(torch.linalg.vector_norm(a.to(torch.float64) - e))
    norm = float(torch.linalg.vector_norm(e))
    if norm == 0.0:
        return 0.0 if difference == 0.0 else difference * np.inf
    return difference / norm


def assert_close(actual: ArrayLike, expected: ArrayLike, *, rtol: float | None = None, name: str = "result") -> None:
    """Raise unless `actual` is `expected` up to a relative error in the norm; NaN and infinity never pass.

    Args:
        actual: What was computed.
        expected: What it should be; same shape.
        rtol: Largest ‖actual − expected‖ / ‖expected‖ allowed. Defaults by the dtype of `actual`: 1e-12 for float64,
            1e-6 for float32, 1e-3 for float16, 8e-3 for bfloat16, and 0 for any other.
        name: What to call `actual` in the message.

    Raises:
        AssertionError: If the error is larger, or is NaN, or the shapes differ.
    """
    a = torch.as_tensor(actual).detach()
    e = torch.as_tensor(expected).detach().to(a.device)
    if a.shape != e.shape:
        raise AssertionError(f"{name}: got shape {tuple(a.shape)}, expected {tuple(e.shape)}")
    limit = _RTOL.get(a.dtype, 0.0) if rtol is None else rtol
    error = relative_error(a, e)
    if error <= limit:
        return
    difference = (a.to(torch.float64) - e.to(torch.float64)).abs().nan_to_num(nan=np.inf)
    worst = tuple(int(i) for i in np.unravel_index(int(difference.argmax()), a.shape))
    raise AssertionError(
        f"{name}: relative error {error:.3e}, expected at most {limit:.3e}; worst cell {worst}: "
        f"got {float(a[worst])!r}, expected {float(e[worst])!r}; "
        f"cells not finite: {int((~a.isfinite()).sum())} in actual, {int((~e.isfinite()).sum())} in expected"
    )
