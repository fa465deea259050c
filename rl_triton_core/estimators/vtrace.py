"""V-Trace (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core.extending import FinalValues, Recurrence, Step, exp, minimum, select, solve, with_fast_path


class VTraceOutput(NamedTuple):
    """Results of `compute_vtrace`, each shaped like `rewards`."""

    targets: torch.Tensor
    """Value targets vs[t] = V[t] + D[t]."""
    advantages: torch.Tensor
    """Policy-gradient advantages; None if ``compute_advantages=False``."""


def coefficients(step: Step) -> tuple[Any, Any]:
    """α = ρ·(r + γ·NV − V),  β = γ·c while the trajectory continues, with c = λ·min(c̄, ratio)."""
    value, reward, target, behaviour = step.inputs
    lambda_, rho_bar, c_bar, _ = step.params
    ratio = exp(target - behaviour)
    trace = lambda_ * minimum(ratio, c_bar)
    delta = reward + step.gamma * step.next_value - value
    return minimum(ratio, rho_bar) * delta, select(step.continues, step.gamma * trace, 0)


def readout(step: Step, difference: Any, after: Any) -> tuple[Any, ...]:
    """Targets vs = V + D and advantages ρ_pg·(r + γ·(NV + D_after) − V)."""
    value, reward, target, behaviour = step.inputs
    _, _, _, rho_bar_pg = step.params
    ahead = reward + step.gamma * (step.next_value + after) - value
    return value + difference, minimum(exp(target - behaviour), rho_bar_pg) * ahead


VTRACE = Recurrence(
    name="vtrace",
    inputs=("values", "rewards", "target_log_probs", "behaviour_log_probs"),
    num_lookahead=1,
    outputs=("targets", "advantages"),
    coefficients=coefficients,
    readout=readout,
    params=("lambda_", "rho_bar", "c_bar", "rho_bar_pg"),
)


@with_fast_path
def compute_vtrace(
    rewards: torch.Tensor,
    values: torch.Tensor,
    terminated: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    *,
    log_ratios: torch.Tensor | None = None,
    target_log_probs: torch.Tensor | None = None,
    behaviour_log_probs: torch.Tensor | None = None,
    gamma: float | torch.Tensor = 0.99,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    rho_bar_pg: float | None = None,
    bootstrap_values: float | torch.Tensor | FinalValues | None = None,
    next_values: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    mask_mode: str = "skip",
    cu_seqlens: torch.Tensor | None = None,
    time_dim: int = -1,
    compute_advantages: bool = True,
    out: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    backend: str | None = None,
) -> VTraceOutput:
    r"""Compute off-policy value targets and policy-gradient advantages.

        ratio = exp(log π(a_t|s_t) − log μ(a_t|s_t)),  ρ = min(ρ̄, ratio),  c = λ·min(c̄, ratio)
        D[t] = ρ[t]·(r[t] + γ·NV[t] − V[t]) + γ·c[t]·D[t+1]      where the trajectory continues, else the first term
        targets[t] = V[t] + D[t]
        advantages[t] = min(ρ̄_pg, ratio)·(r[t] + γ·NVS[t] − V[t])

    NV[t] is 0 where step t terminated, the bootstrap value where it was truncated or the rollout ends, V[t+1]
    elsewhere. NVS[t] is the same with targets[t+1] in the place of V[t+1]. With ratio = ρ̄ = c̄ = 1 the targets minus V
    are the GAE advantages of the same λ.

    Args:
        rewards: Reward r of the transition t → t+1, as of `compute_gae`.
        values: Value estimates V(s_t), shaped like `rewards`, floating point.
        terminated: Flags of steps that ended in a terminal state, as of `compute_gae`.
        truncated: Flags of steps whose episode was cut, as of `compute_gae`.
        log_ratios: log π(a_t|s_t) − log μ(a_t|s_t), the learned policy's log-probability minus the behaviour policy's,
            shaped like `rewards`, floating point; −∞ for an action that π never takes.
        target_log_probs: log π(a_t|s_t), shaped like `rewards`; with `behaviour_log_probs` it replaces `log_ratios`.
        behaviour_log_probs: log μ(a_t|s_t) of the policy that acted, shaped like `rewards`; with `target_log_probs`.
        gamma: Discount γ: a finite number >= 0, or one per step, shaped like `rewards`, where 0 ends the trajectory.
            IMPALA's `discounts` go here, without flags.
        lambda_: λ, a number in [0, 1].
        rho_bar: ρ̄ >= 0, the clip of the temporal difference's weight; infinity for none.
        c_bar: c̄ >= 0, the clip of the trace; infinity for none.
        rho_bar_pg: ρ̄_pg >= 0, the clip of the advantage's weight; infinity for none. None takes `rho_bar`.
        bootstrap_values: V(s_{t+1}) at truncated steps and at the rollout's end, as of `compute_gae`.
        next_values: V(s_{t+1}) of every step, before any reset, shaped like `rewards`; replaces `bootstrap_values`.
            Inside an episode NVS[t] is then next_values[t] + D[t+1].
        mask: Flags of the steps that count, as of `compute_gae`.
        mask_mode: ``"skip"`` or ``"reset"``, as of `compute_gae`.
        cu_seqlens: For packed rows: where sequences start and end, as of `compute_gae`.
        time_dim: The time dimension of per-step tensors: -1 or 1, 0 or -2.
        compute_advantages: Whether to compute `advantages` as well.
        out: Preallocated (targets, advantages), as of `compute_gae`.
        backend: ``"triton"``, ``"cpu"`` or ``"reference"``; None chooses by the tensors' device.

    Returns:
        VTraceOutput(targets, advantages), otherwise as of `compute_gae`. The gradient is 0 where a clip holds a ratio.

    Raises:
        ValueError: The ratios are not given in one of the two ways; other errors are those of `compute_gae`.

    Source:
        Espeholt et al. 2018, section 4, https://arxiv.org/abs/1802.01561

    Example:
        >>> rewards, values = torch.ones(1, 2), torch.zeros(1, 2)
        >>> log_ratios = torch.tensor([[0.0, -torch.inf]])  # the second action is one the policy would not take
        >>> compute_vtrace(rewards, values, gamma=1.0, log_ratios=log_ratios, bootstrap_values=0.0).targets
        tensor([[1., 0.]])
    """
    layout = check.check_layout("rewards", rewards, time_dim, cu_seqlens=cu_seqlens)
    rho_bar = check.check_clip("rho_bar", rho_bar)
    ratios = check.check_log_ratios(log_ratios, target_log_probs, behaviour_log_probs, layout)
    results = solve(
        VTRACE,
        {"rewards": rewards, "values": values, **ratios},
        layout,
        terminated=terminated,
        truncated=truncated,
        gamma=gamma,
        params=(
            check.check_number("lambda_", lambda_, 0.0, 1.0),
            rho_bar,
            check.check_clip("c_bar", c_bar),
            rho_bar if rho_bar_pg is None else check.check_clip("rho_bar_pg", rho_bar_pg),
        ),
        bootstrap_values=bootstrap_values,
        next_values=next_values,
        mask=mask,
        mask_mode=mask_mode,
        wanted=(True, check.check_bool("compute_advantages", compute_advantages)),
        out=out,
        backend=backend,
    )
    return VTraceOutput(*results)
