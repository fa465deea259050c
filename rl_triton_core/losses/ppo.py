"""The loss of proximal policy optimisation (Schulman et al. 2017, https://arxiv.org/abs/1707.06347)."""

from __future__ import annotations

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.launch.fast_path import SEQUENCES, with_fast_path
from rl_triton_core._internal.loss.arguments import Normalization, Number, build_problem, check_normalization
from rl_triton_core._internal.loss.problem import PPOLoss
from rl_triton_core._internal.loss.solve import solve_loss
from rl_triton_core.losses.policies import Policy, check_policy

SEQUENCES.add(Normalization)


@with_fast_path
def ppo_loss(
    policy: Policy,
    actions: torch.Tensor | None,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    values: torch.Tensor | None = None,
    returns: torch.Tensor | None = None,
    old_values: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    clip: Number | None = 0.2,
    clip_high: Number | None = None,
    dual_clip: Number | None = None,
    value_coef: Number = 0.5,
    value_clip: Number | None = None,
    value_clip_mode: str = "sb3",
    huber_delta: Number | None = None,
    value_factor: Number = 1.0,
    entropy_coef: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k1",
    log_ratio_clamp: Number | None = None,
    kl_clip: Number | None = None,
    normalize_advantages: bool | Normalization = False,
    backend: str | None = None,
) -> PPOLoss:
    r"""The clipped surrogate loss of PPO, with value loss, entropy and KL divergence.

        r = exp(log_probs − old_log_probs)
        policy_loss = mean(−min(r·A, clip(r, 1 − clip, 1 + clip_high)·A))
        loss = policy_loss + value_coef·value_loss − entropy_coef·entropy + kl_coef·kl

    Values and gradients are computed in one pass, the gradients by formulas written by hand. The gradient is 0 where a
    clip holds, also where the ratio overflows. It flows to what the network gave for the policy and to `values`, once:
    a second derivative is refused. Tensors are copied if they are not contiguous.

    Args:
        policy: What the network gave: `LogProbs`, `Categorical`, `MultiCategorical`, `Gaussian` or `Bernoulli`.
        actions: As the policy describes them; None with `LogProbs`.
        old_log_probs: Log-probabilities of the actions under the policy that drew them, [...]: one number per element
            of the minibatch, as in all tensors below.
        advantages: A, [...].
        values: V, the value estimates, [...]; None leaves out the value loss.
        returns: R, the value targets, [...].
        old_values: V_old, the values when the rollout was made, [...]; read only to clip by them.
        ref_log_probs: Log-probabilities of the actions under a reference policy, [...].
        mask: Which elements count, [...]: nonzero if bool or integer; a weight if floating point. What stands in an
            element of weight 0 is not read.
        clip: How far the ratio may fall below 1, and, without `clip_high`, rise above it; None does not clip.
        clip_high: How far the ratio may rise above 1.
        dual_clip: Where A < 0, the loss is at most −dual_clip·A (Ye et al. 2020); >= 1, or None.
        value_coef: Coefficient of the value loss.
        value_clip: c, by which values are clipped; None does not clip.
        value_clip_mode: How: ``"sb3"``, the error of the value after it moved at most c away from V_old;
            ``"cleanrl"``, the larger of that and of the value's own error; ``"rllib"``, the value's own error, at most
            c.
        huber_delta: Where Huber's loss of a value becomes linear; None takes the squared error.
        value_factor: Multiplies the value loss: 0.5 is the factor of CleanRL.
        entropy_coef: Coefficient of the entropy, which is maximised.
        kl_coef: Coefficient of the KL divergence: from the old policy, where `policy` has outputs of its network, or
            from a reference policy.
        kl_estimator: How the divergence from `ref_log_probs` is estimated: ``"k1"``, ``"k2"``, ``"k3"``, ``"k1+"`` or
            ``"k3+"``, see `grpo_loss`.
        log_ratio_clamp: The largest |log r|, and |x| of "k3", beyond which the derivative is 0; None does not clamp.
        kl_clip: The largest divergence of an element, beyond which its derivative is 0, but for "k1+" and "k3+"; None
            does not clip.
        normalize_advantages: Whether to subtract the mean from the advantages and divide by the standard deviation, as
            the function of that name does: over the elements that count, by their weights. A `Normalization` says how.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        The loss, its parts and statistics, each a tensor without dimensions; float32, or float64 if an
            argument is (not the mask, actions, old outputs of the network or coefficients).

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, or a tensor is missing that another argument asks for.
        BackendUnavailableError: The backend asked for cannot run here.

    Example:
        >>> from rl_triton_core.losses import Categorical
        >>> logits = torch.tensor([[0.0, 0.0]], requires_grad=True)
        >>> old_log_probs, advantages = torch.tensor([0.5]).log(), torch.tensor([1.0])
        >>> result = ppo_loss(Categorical(logits), torch.tensor([0]), old_log_probs, advantages, entropy_coef=0.01)
        >>> result.entropy
        tensor(0.6931)
        >>> result.loss.backward()
        >>> logits.grad
        tensor([[-0.5000,  0.5000]])
    """
    checked = check_policy(policy, actions)
    check.check_tensor("old_log_probs", old_log_probs, check.REAL_DTYPES)
    check.check_tensor("advantages", advantages, check.REAL_DTYPES)
    rule, exchange = check_normalization(normalize_advantages)
    problem = build_problem(
        checked,
        old_log_probs=old_log_probs,
        advantages=advantages,
        values=values,
        returns=returns,
        old_values=old_values,
        ref_log_probs=ref_log_probs,
        mask=mask,
        clip=clip,
        clip_high=clip_high,
        dual_clip=dual_clip,
        value_coef=value_coef,
        value_clip=value_clip,
        value_clip_mode=value_clip_mode,
        huber_delta=huber_delta,
        value_factor=value_factor,
        entropy_coef=entropy_coef,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        log_ratio_clamp=log_ratio_clamp,
        kl_clip=kl_clip,
        rule=rule,
        exchange=exchange,
    )
    inputs = checked.network if values is None else (*checked.network, values)
    return solve_loss(problem, inputs, backend)
