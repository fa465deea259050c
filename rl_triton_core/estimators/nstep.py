"""n-step returns (Sutton & Barto 2018, chapter 7)."""

from __future__ import annotations

from typing import Any

import torch

from rl_triton_core.extending import (
    FinalValues,
    Recurrence,
    Step,
    check_count,
    check_layout,
    read_state,
    select,
    solve_windows,
)


def coefficients(step: Step) -> tuple[Any, Any]:
    """α = r,  β = γ while the trajectory continues; α = r + γ·NV,  β = 0 at its end."""
    _, reward = step.inputs
    last = reward + step.gamma * step.next_value
    return select(step.continues, reward, last), select(step.continues, step.gamma, 0)


NSTEP_RETURNS = Recurrence(
    name="nstep_returns",
    inputs=("values", "rewards"),
    num_lookahead=1,
    outputs=("returns",),
    coefficients=coefficients,
    readout=read_state,
)


def compute_nstep_returns(
    rewards: torch.Tensor,
    values: torch.Tensor | None = None,
    terminated: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    *,
    n: int,
    gamma: float | torch.Tensor = 0.99,
    bootstrap_values: float | torch.Tensor | FinalValues | None = None,
    next_values: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    mask_mode: str = "skip",
    cu_seqlens: torch.Tensor | None = None,
    time_dim: int = -1,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    r"""Compute n-step returns: n rewards and the value of the state after them.

        G[t] = r[t] + γ·r[t+1] + ... + γⁿ⁻¹·r[t+n-1] + γⁿ·V[t+n]      inside
        G[t] = r[t] + ... + γᵏ·r[t+k] + γᵏ⁺¹·NV[t+k]                  where step t+k, k < n, terminated (NV = 0), was
                                                                      truncated, or the rollout ends

    n = 1 is the one-step target; with n >= num_steps G is the discounted return. It is computed by PyTorch's operations
    on every backend, in about 2·log2(n) passes; there is no kernel of its own.

    Args:
        rewards: Reward r of the transition t → t+1, [num_envs, num_steps], or [num_steps, num_envs] with
            ``time_dim=0``; float32, bfloat16, float16, or float64 (not on the triton backend). Any strides.
        values: Value estimates V(s_t), shaped like `rewards`, floating point. Not together with `next_values`.
        terminated: Nonzero where the transition ended in a terminal state, shaped like `rewards`; bool, integer, or
            floating point 0 and 1. None: nowhere. Where both flags are set, termination wins.
        truncated: Nonzero where the episode was cut although its state has a future (a time limit), shaped like
            `rewards`; bool, integer, or floating point 0 and 1. None: nowhere.
        n: Number of rewards before the value, an int >= 1. It has no default.
        gamma: Discount γ: a finite number >= 0, or one per step, shaped like `rewards`, where 0 ends the trajectory.
        bootstrap_values: With `values`: V(s_{t+1}), before any reset, at truncated steps and at the rollout's end: one
            number, [num_envs] for the rollout's end alone (without `truncated`), shaped like `rewards` (read there
            only), or sparse `FinalValues`. It has no default: pass 0.0 to mean zero.
        next_values: V(s_{t+1}) of every step, before any reset, shaped like `rewards`; replaces `values` and
            `bootstrap_values`.
        mask: Nonzero where a step belongs to the trajectory, shaped like `rewards`; bool, integer, or floating point 0
            and 1. Masked cells are never read and yield 0. None: everywhere.
        mask_mode: ``"skip"``: as if the masked steps were deleted. ``"reset"``: a masked step ends the trajectory
            before it as a terminal state would.
        cu_seqlens: For packed rows, sequences of any lengths end to end: where each starts, and where the last ends,
            [num_sequences + 1], int32 or int64, rising from 0 to num_steps. Per-step tensors are then [num_steps], and
            [num_envs] is [num_sequences]. Each sequence is a rollout of its own. Bootstrap values per sequence may be
            [num_sequences, 1], those per step [1, num_steps], and have to be where the two numbers are equal.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.
        out: Preallocated result, shaped like `rewards`, floating point, any strides, apart from every input.
        backend: ``"triton"``, ``"cpu"`` or ``"reference"``; None chooses by the tensors' device.

    Returns:
        G, shaped like `rewards` and in their unit, float32 (float64 if an input is). If an input requires grad, so does
        G (and `out`, which a second call then refuses): differentiable with respect to every real-valued tensor.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape, device or value is wrong, both or neither of `values` and `next_values` were given, or
            no bootstrap values were given with `values`.
        BackendUnavailableError: The backend asked for cannot run here.

    Source:
        Sutton & Barto 2018, section 7.1, http://incompleteideas.net/book/the-book-2nd.html

    Example:
        >>> rewards, values = torch.ones(1, 4), torch.tensor([[10.0, 20.0, 30.0, 40.0]])
        >>> compute_nstep_returns(rewards, values, n=2, gamma=1.0, bootstrap_values=50.0)
        tensor([[32., 42., 52., 51.]])
    """
    if (values is None) == (next_values is None):
        given = "None" if values is None else "both it and next_values"
        raise ValueError(f"values: got {given}, expected either values (with bootstrap_values) or next_values")
    return solve_windows(
        NSTEP_RETURNS,
        {"rewards": rewards} | ({} if values is None else {"values": values}),
        check_layout("rewards", rewards, time_dim, cu_seqlens=cu_seqlens),
        check_count("n", n),
        terminated=terminated,
        truncated=truncated,
        gamma=gamma,
        bootstrap_values=bootstrap_values,
        next_values=next_values,
        mask=mask,
        mask_mode=mask_mode,
        out=out,
        backend=backend,
    )
