"""Retrace(λ) (Munos et al. 2016, https://arxiv.org/abs/1606.02647)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core.extending import Expectation, Recurrence, Step, exp, minimum, select, solve, with_fast_path


class RetraceOutput(NamedTuple):
    """Results of `compute_retrace`, each shaped like `rewards`."""

    targets: torch.Tensor
    """Action-value targets Q[t] + D[t]."""
    advantages: torch.Tensor
    """Policy-gradient advantages; None if ``compute_advantages=False``."""


def coefficients(step: Step) -> tuple[Any, Any]:
    """α = r + γ·NQ − Q,  β = γ·c_after while the trajectory continues, with c_after = λ·min(c̄, ratio_after)."""
    q_value, _, _, reward = step.inputs
    _, target_after, behaviour_after = step.next_inputs
    lambda_, c_bar, _ = step.params
    trace = lambda_ * minimum(exp(target_after - behaviour_after), c_bar)
    return reward + step.gamma * step.next_value - q_value, select(step.continues, step.gamma * trace, 0)


def readout(step: Step, difference: Any, after: Any) -> tuple[Any, ...]:
    """Targets Q + D and advantages ρ·(r + γ·NQR − Q)."""
    q_value, target, behaviour, reward = step.inputs
    _, _, rho_bar = step.params
    ahead = select(step.continues, step.next_inputs[0] + after, step.next_value)
    weight = minimum(exp(target - behaviour), rho_bar)
    return q_value + difference, weight * (reward + step.gamma * ahead - q_value)


RETRACE = Recurrence(
    name="retrace",
    inputs=("q_values", "target_log_probs", "behaviour_log_probs", "rewards"),
    num_lookahead=3,
    outputs=("targets", "advantages"),
    coefficients=coefficients,
    readout=readout,
    params=("lambda_", "c_bar", "rho_bar"),
)


@with_fast_path
def compute_retrace(
    rewards: torch.Tensor,
    q_values: torch.Tensor,
    terminated: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    *,
    log_ratios: torch.Tensor | None = None,
    target_log_probs: torch.Tensor | None = None,
    behaviour_log_probs: torch.Tensor | None = None,
    expected_next_q: torch.Tensor | None = None,
    next_action_probs: torch.Tensor | None = None,
    next_q_values: torch.Tensor | None = None,
    gamma: float | torch.Tensor = 0.99,
    lambda_: float = 1.0,
    c_bar: float = 1.0,
    rho_bar: float = 1.0,
    mask: torch.Tensor | None = None,
    mask_mode: str = "skip",
    cu_seqlens: torch.Tensor | None = None,
    time_dim: int = -1,
    compute_advantages: bool = True,
    out: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    backend: str | None = None,
) -> RetraceOutput:
    r"""Compute off-policy action-value targets and advantages.

        ratio = π(a_t|s_t) / μ(a_t|s_t),  c = λ·min(c̄, ratio),  ρ = min(ρ̄, ratio)
        D[t] = r[t] + γ·NQ[t] − Q[t] + γ·c[t+1]·D[t+1]      without the last term where the trajectory ends
        targets[t] = Q[t] + D[t]
        advantages[t] = ρ[t]·(r[t] + γ·NQR[t] − Q[t])

    NQ[t] = Σ_a π(a|s_{t+1})·Q(s_{t+1}, a), with the policy **at s_{t+1}**, 0 where step t terminated. NQR[t] is 0 where
    step t terminated, NQ[t] at a truncation and at the rollout's end, targets[t+1] elsewhere. The trace that enters
    step t is that of the action at t+1: a_t itself is what is being evaluated.

    Args:
        rewards: Reward r of the transition t → t+1, as of `compute_gae`.
        q_values: Action values Q(s_t, a_t), shaped like `rewards`, floating point.
        terminated: Flags of steps that ended in a terminal state, as of `compute_gae`.
        truncated: Flags of steps whose episode was cut, as of `compute_gae`.
        log_ratios: log π(a_t|s_t) − log μ(a_t|s_t), as of `compute_vtrace`; −∞ for an action that π never takes.
        target_log_probs: log π(a_t|s_t), shaped like `rewards`; with `behaviour_log_probs` it replaces `log_ratios`.
        behaviour_log_probs: log μ(a_t|s_t) of the policy that acted, shaped like `rewards`; with `target_log_probs`.
        expected_next_q: NQ of every step, before any reset, shaped like `rewards`, floating point.
        next_action_probs: π(·|s_{t+1}), shaped like `rewards` with a last dimension of actions, floating point; with
            `next_q_values` it replaces `expected_next_q`.
        next_q_values: Q(s_{t+1}, ·), before any reset, shaped like `next_action_probs`, floating point.
        gamma: Discount γ: a finite number >= 0, or one per step, shaped like `rewards`, where 0 ends the trajectory.
        lambda_: λ, a number in [0, 1].
        c_bar: c̄ >= 0, the clip of the trace; infinity for none.
        rho_bar: ρ̄ >= 0, the clip of the advantage's weight; infinity for none.
        mask: Flags of the steps that count, as of `compute_gae`.
        mask_mode: ``"skip"`` or ``"reset"``, as of `compute_gae`.
        cu_seqlens: For packed rows: where sequences start and end, as of `compute_gae`.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2; of the two leading dimensions where there is
            one of actions.
        compute_advantages: Whether to compute `advantages` as well.
        out: Preallocated (targets, advantages), as of `compute_gae`.
        backend: ``"triton"``, ``"cpu"`` or ``"reference"``; None chooses by the tensors' device.

    Returns:
        RetraceOutput(targets, advantages), otherwise as of `compute_gae`. The gradient is 0 where a clip holds a ratio.

    Raises:
        ValueError: Ratios or expectations are not given in one of the two ways; other errors as of `compute_gae`.

    Source:
        Munos et al. 2016, equation 4, https://arxiv.org/abs/1606.02647. The advantages are this library's own.

    Example:
        >>> rewards, q_values = torch.ones(1, 2), torch.zeros(1, 2)
        >>> on_policy, expected = torch.zeros(1, 2), torch.tensor([[0.0, 10.0]])
        >>> compute_retrace(rewards, q_values, gamma=1.0, log_ratios=on_policy, expected_next_q=expected).targets
        tensor([[12., 11.]])
    """
    layout = check.check_layout("rewards", rewards, time_dim, cu_seqlens=cu_seqlens)
    ratios = check.check_log_ratios(log_ratios, target_log_probs, behaviour_log_probs, layout)
    clips = check.check_clip("c_bar", c_bar), check.check_clip("rho_bar", rho_bar)
    results = solve(
        RETRACE,
        {"rewards": rewards, "q_values": q_values, **ratios},
        layout,
        terminated=terminated,
        truncated=truncated,
        gamma=gamma,
        params=(check.check_number("lambda_", lambda_, 0.0, 1.0), *clips),
        next_values=check_expectation(expected_next_q, next_action_probs, next_q_values, layout),
        mask=mask,
        mask_mode=mask_mode,
        wanted=(True, check.check_bool("compute_advantages", compute_advantages)),
        out=out,
        backend=backend,
    )
    return RetraceOutput(*results)


def check_expectation(
    expected: torch.Tensor | None, probs: Any, q_values: Any, layout: check.RolloutLayout
) -> torch.Tensor | Expectation:
    """The expectation NQ in one of two forms: computed, or as π(·|s_{t+1}) and Q(s_{t+1}, ·) of all actions."""
    if expected is not None:
        if probs is not None or q_values is not None:
            raise ValueError("expected_next_q: got it and next_action_probs or next_q_values, expected one form")
        check.check_per_step("expected_next_q", expected, layout)
        return expected
    if probs is None or q_values is None:
        raise ValueError("expected_next_q: got None, expected it, or both next_action_probs and next_q_values")
    for name, tensor in (("next_action_probs", probs), ("next_q_values", q_values)):
        check.check_tensor(name, tensor)
        actions = max(1, tensor.shape[-1]) if tensor.ndim else 1
        check.check_shape(name, tensor, (*layout.shape, actions), "that of rewards, and actions", layout.device)
    check.check_shape("next_q_values", q_values, probs.shape, "that of next_action_probs", layout.device)
    return Expectation(probs, q_values)
