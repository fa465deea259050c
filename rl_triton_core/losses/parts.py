"""Parts of a loss alone: of a value function, and KL divergences (Schulman, http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.loss.arguments import ESTIMATOR_NAMES, CheckedPolicy, Number, build_problem, elements_of
from rl_triton_core._internal.loss.solve import solve_loss, take_loss
from rl_triton_core.losses.policies import LogProbs


def value_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    *,
    old_values: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    value_clip: Number | None = None,
    value_clip_mode: str = "sb3",
    huber_delta: Number | None = None,
    value_factor: Number = 1.0,
    backend: str | None = None,
) -> torch.Tensor:
    r"""Mean error of value estimates, in the forms in which PPO's implementations clip it.

        e(v) = (v − R)²
        e(v) = (v − R)²/2 where |v − R| ≤ δ, else δ·(|v − R| − δ/2)    with `huber_delta`

        value_clip_mode    error of an element
        "sb3"              e(V_old + clip(V − V_old, −c, c))
        "cleanrl"          max(e(V), e(V_old + clip(V − V_old, −c, c)))
        "rllib"            min(e(V), c)

    Args:
        values: V, of any shape; float32, bfloat16, float16, or float64 (not on the triton backend).
        returns: R, the value targets, shaped like `values`.
        old_values: V_old, the values when the rollout was made, shaped like `values`; for "sb3" and "cleanrl" only.
        mask: Which elements count, shaped like `values`: nonzero if bool or integer; a weight if floating point. What
            stands in an element of weight 0 is not read.
        value_clip: c, >= 0; None does not clip.
        value_clip_mode: ``"sb3"``, ``"cleanrl"`` or ``"rllib"``, see above.
        huber_delta: δ of Huber's loss, >= 0; None takes the squared error.
        value_factor: Multiplies the loss: 0.5 is the factor of CleanRL.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        The weighted mean error, without dimensions; 0 if there is no element that counts. float32, or float64 if
        another argument than the mask is; differentiable by `values`, once.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device, mode or number is not.
        BackendUnavailableError: The backend asked for cannot run here.

    Example:
        >>> value_loss(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
        tensor(2.5000)
    """
    problem = build_problem(
        CheckedPolicy(elements_of("values", values), "none", (), ()),
        values=values,
        returns=returns,
        old_values=old_values,
        mask=mask,
        value_coef=1.0,
        value_clip=value_clip,
        value_clip_mode=value_clip_mode,
        huber_delta=huber_delta,
        value_factor=value_factor,
    )
    return solve_loss(problem, (values,), backend, take_loss)


def kl_divergence(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    estimator: str = "k1",
    mask: torch.Tensor | None = None,
    *,
    log_ratio_clamp: Number | None = None,
    kl_clip: Number | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    r"""Mean KL(policy ‖ reference) over actions that the policy drew.

        x = ref_log_probs − log_probs

        estimator    value of an element    derivative by its log-probability
        "k1"         −x                     1
        "k2"         x²/2                   −x
        "k3"         exp(x) − 1 − x         1 − exp(x)
        "k1+"        −x                     −x
        "k3+"        exp(x) − 1 − x         −x

    The last two are the straight-through forms of verl: the value of one estimator with the derivative of "k2", whose
    expectation is the derivative of the divergence. "k2+" is "k2".

    Args:
        log_probs: Log-probabilities of actions under the policy, of any shape; float32, bfloat16, float16, or float64
            (not on the triton backend).
        ref_log_probs: Those under the reference policy, shaped like `log_probs`.
        estimator: See above.
        mask: Which elements count, shaped like `log_probs`: nonzero if bool or integer; a weight if floating point.
            What stands in an element of weight 0 is not read.
        log_ratio_clamp: The largest |x| of "k3", beyond which its derivative is 0; None does not clamp.
        kl_clip: The largest value of an element, beyond which its derivative is 0, but for "k1+" and "k3+"; None does
            not clip.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        The weighted mean, without dimensions; 0 if there is no element that counts. float32, or float64 if
        another argument than the mask is; differentiable by `log_probs`, once.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device, name or bound is not.
        BackendUnavailableError: The backend asked for cannot run here.

    Example:
        >>> kl_divergence(torch.tensor([-1.0]), torch.tensor([-2.0]), "k2")
        tensor(0.5000)
    """
    policy = LogProbs(log_probs).check()
    check.check_tensor("ref_log_probs", ref_log_probs, check.REAL_DTYPES)
    problem = build_problem(
        policy,
        ref_log_probs=ref_log_probs,
        mask=mask,
        kl_coef=1.0,
        kl_estimator=check.check_choice("estimator", estimator, ESTIMATOR_NAMES),
        log_ratio_clamp=log_ratio_clamp,
        kl_clip=kl_clip,
    )
    return solve_loss(problem, (log_probs,), backend, take_loss)
