"""The loss of proximal policy optimisation (Schulman et al. 2017, https://arxiv.org/abs/1707.06347)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.launch.fast_path import with_fast_path
from rl_triton_core._internal.loss.arguments import (
    Elements,
    Number,
    build_problem,
    check_normalization,
    drop_graph,
    elements_of,
    gather_policy,
)
from rl_triton_core._internal.loss.solve import solve_loss


class PPOLoss(NamedTuple):
    """A loss, its parts and what is logged beside it: tensors without dimensions, of which `loss` has a graph.

    loss = policy_loss + value_coef·value_loss − entropy_coef·entropy + kl_coef·kl, each a weighted mean.
    """

    loss: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    """0 without values."""
    entropy: torch.Tensor
    kl: torch.Tensor
    """0 without a policy to compare with."""
    approx_kl: torch.Tensor
    """KL from the old policy, estimated as the mean of r − 1 − log r."""
    approx_kl_k1: torch.Tensor
    """The same, estimated as the mean of −log r."""
    clip_fraction: torch.Tensor
    """How often the ratio was outside of the clip."""
    ratio_mean: torch.Tensor
    explained_variance: torch.Tensor
    """1 − Var(R − V)/Var(R); NaN without values, and where returns do not vary."""
    ratio_min: torch.Tensor
    ratio_max: torch.Tensor


def arrange_parts(loss: torch.Tensor, statistics: torch.Tensor) -> PPOLoss:
    """A loss with its statistics, each by its name."""
    return PPOLoss(loss, *statistics.unbind())


@with_fast_path
def ppo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    values: torch.Tensor | None = None,
    returns: torch.Tensor | None = None,
    old_values: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    clip: Number | None = 0.2,
    clip_high: Number | None = None,
    dual_clip: Number | None = None,
    value_coef: Number = 0.5,
    value_clip: Number | None = None,
    value_clip_mode: str = "sb3",
    value_loss: str = "mse",
    huber_delta: Number = 1.0,
    value_factor: Number = 1.0,
    entropy_coef: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k1",
    log_ratio_clamp: Number | None = None,
    kl_clip: Number | None = None,
    normalize_advantages: bool = False,
    correction: float = 1,
    epsilon: float = 1e-8,
    epsilon_mode: str = "add",
    group: distributed.ProcessGroup | str | None = None,
    backend: str | None = None,
) -> PPOLoss:
    r"""The clipped surrogate loss of PPO, with value loss, entropy and KL divergence, from log-probabilities.

        r = exp(log_probs − old_log_probs)
        policy_loss = mean(−min(r·A, clip(r, 1 − clip, 1 + clip_high)·A))
        loss = policy_loss + value_coef·value_loss − entropy_coef·entropy + kl_coef·kl

    Values and gradients are computed in one pass, the gradients by formulas written by hand. The gradient is 0 where a
    clip holds, also where the ratio overflows. It flows to `log_probs`, `values` and `entropy`, once: a second
    derivative is refused.

    Args:
        log_probs: Log-probabilities of the actions under the policy, of any shape; float32, bfloat16, float16, or
            float64 (not on the triton backend). Like all tensors copied if they are not contiguous.
        old_log_probs: Log-probabilities of the actions under the policy that drew them, shaped like `log_probs`.
        advantages: A, shaped like `log_probs`.
        values: V, the value estimates, shaped like `log_probs`; None leaves out the value loss.
        returns: R, the value targets, shaped like `log_probs`.
        old_values: V_old, the values when the rollout was made, shaped like `log_probs`; read only to clip by them.
        entropy: Of the policy at each element, shaped like `log_probs`; None estimates it by −log_probs.
        ref_log_probs: Log-probabilities of the actions under a reference policy, shaped like `log_probs`.
        mask: Which elements count, shaped like `log_probs`: nonzero if bool or integer; a weight if floating
            point. What stands in an element of weight 0 is not read.
        clip: How far the ratio may fall below 1, and, without `clip_high`, rise above it; None does not clip.
        clip_high: How far the ratio may rise above 1.
        dual_clip: Where A < 0, the loss is at most −dual_clip·A (Ye et al. 2020); >= 1, or None.
        value_coef: Coefficient of the value loss.
        value_clip: c, by which values are clipped; None does not clip.
        value_clip_mode: How: ``"sb3"``, the error of the value after it moved at most c away from V_old;
            ``"cleanrl"``, the larger of that and of the value's own error; ``"rllib"``, the value's own error, at most
            c.
        value_loss: The error of a value: ``"mse"``, squared, or ``"huber"``, Huber's loss.
        huber_delta: Where Huber's loss becomes linear.
        value_factor: Multiplies the value loss: 0.5 is the factor of CleanRL.
        entropy_coef: Coefficient of the entropy, which is maximised.
        kl_coef: Coefficient of the KL divergence.
        kl_estimator: How the divergence from `ref_log_probs` is estimated: ``"k1"``, ``"k2"``, ``"k3"``, ``"k1+"`` or
            ``"k3+"``, see `kl_divergence`.
        log_ratio_clamp: The largest |log r|, and |x| of "k3", beyond which the derivative is 0; None does not clamp.
        kl_clip: The largest divergence of an element, beyond which its derivative is 0, but for "k1+" and
            "k3+"; None does not clip.
        normalize_advantages: Whether to subtract the mean from the advantages and divide by the standard deviation, as
            the function of that name does: over the elements that count, by their weights.
        correction: What the variance's divisor is less than the sum of the weights.
        epsilon: ε of the normalisation.
        epsilon_mode: Where ε goes: ``"add"``, ``"floor"`` or ``"variance"``.
        group: Normalise over all ranks of this process group, ``"world"`` for the default one. Every rank must call.
            Not under torch.compile.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        The loss, its parts and statistics, each a tensor without dimensions; float32, or float64 if an
            argument is (not the mask, old outputs of the network or coefficients).

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, or a tensor is missing that another argument asks for.
        BackendUnavailableError: The backend asked for cannot run here.

    Example:
        >>> log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
        >>> result = ppo_loss(log_probs, torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 1.0]))
        >>> result.loss
        tensor(-1.1000, grad_fn=<LossFunctionBackward>)
        >>> result.loss.backward()
        >>> log_probs.grad
        tensor([-0.5000,  0.0000])
    """
    elements = elements_of("log_probs", log_probs)
    return solve_ppo(
        elements,
        *gather_policy(elements, log_probs, entropy),
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
        value_loss=value_loss,
        huber_delta=huber_delta,
        value_factor=value_factor,
        entropy_coef=entropy_coef,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        log_ratio_clamp=log_ratio_clamp,
        kl_clip=kl_clip,
        normalize_advantages=normalize_advantages,
        correction=correction,
        epsilon=epsilon,
        epsilon_mode=epsilon_mode,
        group=group,
        backend=backend,
    )


def solve_ppo(
    elements: Elements,
    head: str,
    network: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    normalize_advantages: Any,
    correction: Any,
    epsilon: Any,
    epsilon_mode: Any,
    group: Any,
    backend: str | None,
    old_log_probs: Any,
    advantages: Any,
    values: Any,
    **options: Any,
) -> PPOLoss:
    """Compute a loss from what a network gave: as it was given, and as checked matrices without a graph."""
    streams = {"old_log_probs": old_log_probs, "advantages": advantages}
    for name, x in streams.items():
        check.check_tensor(name, x, check.REAL_DTYPES)
    rule, exchange = check_normalization(normalize_advantages, correction, epsilon, epsilon_mode, group)
    problem = build_problem(elements, head, inputs, values=values, rule=rule, exchange=exchange, **streams, **options)
    return solve_loss(problem, network if values is None else (*network, values), backend, arrange_parts)


def check_actions(elements: Elements, actions: Any, num_heads: int, single: bool) -> torch.Tensor:
    """Indices of actions as [num_elements, num_heads]."""
    check.check_tensor("actions", actions, check.INTEGER_DTYPES)
    if single and actions.shape == elements.shape:
        actions = actions.unsqueeze(-1)
    return elements.check_matrix("actions", actions, num_heads, check.INTEGER_DTYPES)


@with_fast_path
def categorical_ppo_loss(
    logits: torch.Tensor | Sequence[torch.Tensor],
    actions: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    nvec: Sequence[int] | None = None,
    values: torch.Tensor | None = None,
    returns: torch.Tensor | None = None,
    old_values: torch.Tensor | None = None,
    old_logits: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ref_log_probs: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    clip: Number | None = 0.2,
    clip_high: Number | None = None,
    dual_clip: Number | None = None,
    value_coef: Number = 0.5,
    value_clip: Number | None = None,
    value_clip_mode: str = "sb3",
    value_loss: str = "mse",
    huber_delta: Number = 1.0,
    value_factor: Number = 1.0,
    entropy_coef: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k1",
    log_ratio_clamp: Number | None = None,
    kl_clip: Number | None = None,
    normalize_advantages: bool = False,
    correction: float = 1,
    epsilon: float = 1e-8,
    epsilon_mode: str = "add",
    group: distributed.ProcessGroup | str | None = None,
    backend: str | None = None,
) -> PPOLoss:
    r"""`ppo_loss` of a categorical distribution, or of several side by side, from logits in one pass.

        log π(a) = x[a] − log Σ exp x          H = −Σ p·log p          summed over the distributions
        KL(π_old ‖ π) = Σ p_old·(log p_old − log p)                    with `old_logits`

    A logit of −∞ is an action that is not allowed: of probability 0, with a gradient of 0. Beyond the gradient, nothing
    of the size of the logits is kept.

    Args:
        logits: x, [..., num_actions]; a sequence of such tensors for several distributions side by side. float32,
            bfloat16, float16, or float64 (not on the triton backend).
        actions: Indices of the actions, [...], or [..., number of distributions]; integers. One that there is not makes
            the loss NaN.
        nvec: Numbers of actions of several distributions whose logits lie side by side in the last dimension.
        old_log_probs: Log-probabilities of the actions under the policy that drew them, [...].
        advantages: A, [...].
        values: V, the value estimates, [...]; None leaves out the value loss.
        returns: R, the value targets, [...].
        old_values: V_old, the values when the rollout was made, [...]; read only to clip by them.
        old_logits: Logits of the policy that drew the actions, like `logits`: `kl` is then KL(π_old ‖ π), exact.
        ref_log_probs: Log-probabilities of the actions under a reference policy, [...].
        mask: Which elements count, [...]: nonzero if bool or integer; a weight if floating
            point. What stands in an element of weight 0 is not read.
        clip: How far the ratio may fall below 1, and, without `clip_high`, rise above it; None does not clip.
        clip_high: How far the ratio may rise above 1.
        dual_clip: Where A < 0, the loss is at most −dual_clip·A (Ye et al. 2020); >= 1, or None.
        value_coef: Coefficient of the value loss.
        value_clip: c, by which values are clipped; None does not clip.
        value_clip_mode: How: ``"sb3"``, the error of the value after it moved at most c away from V_old;
            ``"cleanrl"``, the larger of that and of the value's own error; ``"rllib"``, the value's own error, at most
            c.
        value_loss: The error of a value: ``"mse"``, squared, or ``"huber"``, Huber's loss.
        huber_delta: Where Huber's loss becomes linear.
        value_factor: Multiplies the value loss: 0.5 is the factor of CleanRL.
        entropy_coef: Coefficient of the entropy, which is maximised.
        kl_coef: Coefficient of the KL divergence.
        kl_estimator: How the divergence from `ref_log_probs` is estimated: ``"k1"``, ``"k2"``, ``"k3"``, ``"k1+"`` or
            ``"k3+"``, see `kl_divergence`.
        log_ratio_clamp: The largest |log r|, and |x| of "k3", beyond which the derivative is 0; None does not clamp.
        kl_clip: The largest divergence of an element, beyond which its derivative is 0, but for "k1+" and
            "k3+"; None does not clip.
        normalize_advantages: Whether to subtract the mean from the advantages and divide by the standard deviation, as
            the function of that name does: over the elements that count, by their weights.
        correction: What the variance's divisor is less than the sum of the weights.
        epsilon: ε of the normalisation.
        epsilon_mode: Where ε goes: ``"add"``, ``"floor"`` or ``"variance"``.
        group: Normalise over all ranks of this process group, ``"world"`` for the default one. Every rank must call.
            Not under torch.compile.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        The loss, its parts and statistics, each a tensor without dimensions; float32, or float64 if an
            argument is (not the mask, old outputs of the network or coefficients).

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, or a tensor is missing that another argument asks for.
        BackendUnavailableError: The backend asked for cannot run here.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0]], requires_grad=True)
        >>> result = categorical_ppo_loss(
        ...     logits, torch.tensor([0]), torch.tensor([0.5]).log(), torch.tensor([1.0]), entropy_coef=0.01
        ... )
        >>> result.entropy
        tensor(0.6931)
        >>> result.loss.backward()
        >>> logits.grad
        tensor([[-0.5000,  0.5000]])
    """
    elements, network, inputs, sizes = check_logits("logits", logits, nvec)
    old_inputs = () if old_logits is None else check_old_logits(old_logits, nvec, inputs, sizes)
    return solve_ppo(
        elements,
        "categorical",
        network,
        inputs,
        actions=check_actions(elements, actions, len(sizes), single=len(network) == len(sizes) == 1),
        old_inputs=old_inputs,
        sizes=sizes,
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
        value_loss=value_loss,
        huber_delta=huber_delta,
        value_factor=value_factor,
        entropy_coef=entropy_coef,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        log_ratio_clamp=log_ratio_clamp,
        kl_clip=kl_clip,
        normalize_advantages=normalize_advantages,
        correction=correction,
        epsilon=epsilon,
        epsilon_mode=epsilon_mode,
        group=group,
        backend=backend,
    )


def check_logits(
    name: str, logits: Any, nvec: Sequence[int] | None
) -> tuple[Elements, Sequence[torch.Tensor], list[torch.Tensor], tuple[int, ...]]:
    """The elements, the logits as given and as matrices, and how many each distribution has."""
    network = (logits,) if isinstance(logits, torch.Tensor) else tuple(logits)
    if not network:
        raise ValueError(f"{name}: got no tensor, expected one for each distribution")
    elements = elements_of(name, network[0], trailing=1)
    inputs = [elements.check_matrix(name, x) for x in network]
    sizes = tuple(x.shape[1] for x in inputs)
    if nvec is not None:
        if len(network) > 1:
            raise ValueError(
                f"nvec: got {tuple(nvec)} together with {len(network)} tensors of {name}, expected one of them"
            )
        if sum(nvec) != sizes[0] or min(nvec) < 1:
            raise ValueError(f"nvec: got {tuple(nvec)}, expected sizes of 1 or more that add up to {sizes[0]}")
        sizes = tuple(int(n) for n in nvec)
    return elements, network, inputs, sizes


def check_old_logits(
    logits: Any, nvec: Sequence[int] | None, inputs: Sequence[torch.Tensor], sizes: tuple[int, ...]
) -> Sequence[torch.Tensor]:
    """Logits of the old network, of the shapes of those of the new one, as matrices."""
    _, network, old_inputs, old_sizes = check_logits("old_logits", logits, nvec)
    rows, old_rows = inputs[0].shape[0], old_inputs[0].shape[0]
    if old_sizes != sizes or old_inputs[0].shape != inputs[0].shape:
        raise ValueError(
            f"old_logits: got {old_rows} elements of sizes {old_sizes}, expected {rows} of {sizes}, as logits have"
        )
    for x in network:
        check.check_detached("old_logits", x)
    return old_inputs


@with_fast_path
def gaussian_ppo_loss(
    mean: torch.Tensor,
    log_std: torch.Tensor,
    actions: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    values: torch.Tensor | None = None,
    returns: torch.Tensor | None = None,
    old_values: torch.Tensor | None = None,
    old_mean: torch.Tensor | None = None,
    old_log_std: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    clip: Number | None = 0.2,
    clip_high: Number | None = None,
    dual_clip: Number | None = None,
    value_coef: Number = 0.5,
    value_clip: Number | None = None,
    value_clip_mode: str = "sb3",
    value_loss: str = "mse",
    huber_delta: Number = 1.0,
    value_factor: Number = 1.0,
    entropy_coef: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k1",
    log_ratio_clamp: Number | None = None,
    kl_clip: Number | None = None,
    normalize_advantages: bool = False,
    correction: float = 1,
    epsilon: float = 1e-8,
    epsilon_mode: str = "add",
    group: distributed.ProcessGroup | str | None = None,
    backend: str | None = None,
) -> PPOLoss:
    r"""`ppo_loss` of independent normal distributions, one per dimension of the action, in one pass.

        log π(a) = Σ −(a − μ)²/(2σ²) − log σ − log √(2π)          H = Σ log σ + log √(2π) + 1/2
        KL(π_old ‖ π) = Σ log σ − log σ_old + (σ_old² + (μ_old − μ)²)/(2σ²) − 1/2     with `old_mean` and `old_log_std`

    Args:
        mean: μ, [..., num_dimensions]; float32, bfloat16, float16, or float64 (not on the triton backend).
        log_std: log σ, [num_dimensions] where it does not depend on the state, or like `mean`.
        actions: a, like `mean`, as they were drawn: neither clipped nor squashed.
        old_log_probs: Log-probabilities of the actions under the policy that drew them, [...].
        advantages: A, [...].
        values: V, the value estimates, [...]; None leaves out the value loss.
        returns: R, the value targets, [...].
        old_values: V_old, the values when the rollout was made, [...]; read only to clip by them.
        old_mean: μ_old, like `mean`: `kl` is then KL(π_old ‖ π), exact.
        old_log_std: log σ_old, [num_dimensions] or like `mean`.
        ref_log_probs: Log-probabilities of the actions under a reference policy, [...].
        mask: Which elements count, [...]: nonzero if bool or integer; a weight if floating
            point. What stands in an element of weight 0 is not read.
        clip: How far the ratio may fall below 1, and, without `clip_high`, rise above it; None does not clip.
        clip_high: How far the ratio may rise above 1.
        dual_clip: Where A < 0, the loss is at most −dual_clip·A (Ye et al. 2020); >= 1, or None.
        value_coef: Coefficient of the value loss.
        value_clip: c, by which values are clipped; None does not clip.
        value_clip_mode: How: ``"sb3"``, the error of the value after it moved at most c away from V_old;
            ``"cleanrl"``, the larger of that and of the value's own error; ``"rllib"``, the value's own error, at most
            c.
        value_loss: The error of a value: ``"mse"``, squared, or ``"huber"``, Huber's loss.
        huber_delta: Where Huber's loss becomes linear.
        value_factor: Multiplies the value loss: 0.5 is the factor of CleanRL.
        entropy_coef: Coefficient of the entropy, which is maximised.
        kl_coef: Coefficient of the KL divergence.
        kl_estimator: How the divergence from `ref_log_probs` is estimated: ``"k1"``, ``"k2"``, ``"k3"``, ``"k1+"`` or
            ``"k3+"``, see `kl_divergence`.
        log_ratio_clamp: The largest |log r|, and |x| of "k3", beyond which the derivative is 0; None does not clamp.
        kl_clip: The largest divergence of an element, beyond which its derivative is 0, but for "k1+" and
            "k3+"; None does not clip.
        normalize_advantages: Whether to subtract the mean from the advantages and divide by the standard deviation, as
            the function of that name does: over the elements that count, by their weights.
        correction: What the variance's divisor is less than the sum of the weights.
        epsilon: ε of the normalisation.
        epsilon_mode: Where ε goes: ``"add"``, ``"floor"`` or ``"variance"``.
        group: Normalise over all ranks of this process group, ``"world"`` for the default one. Every rank must call.
            Not under torch.compile.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        The loss, its parts and statistics, each a tensor without dimensions; float32, or float64 if an
            argument is (not the mask, actions, old outputs of the network or coefficients).

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, or a tensor is missing that another argument asks for.
        BackendUnavailableError: The backend asked for cannot run here.

    Example:
        >>> mean, log_std = torch.zeros(1, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
        >>> old_log_probs = torch.tensor([-2.462877])
        >>> actions = torch.tensor([[1.0, 0.5]])
        >>> gaussian_ppo_loss(mean, log_std, actions, old_log_probs, torch.tensor([1.0])).loss.backward()
        >>> mean.grad
        tensor([[-1.0000, -0.5000]])
    """
    elements = elements_of("mean", mean, trailing=1)
    inputs = [elements.check_matrix("mean", mean), check_log_std(elements, "log_std", log_std, mean)]
    return solve_ppo(
        elements,
        "gaussian",
        (mean, log_std),
        inputs,
        actions=check_constant_matrix(elements, "actions", actions, mean.shape[-1]),
        old_inputs=check_old_gaussian(elements, old_mean, old_log_std, mean),
        sizes=(mean.shape[-1],),
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
        value_loss=value_loss,
        huber_delta=huber_delta,
        value_factor=value_factor,
        entropy_coef=entropy_coef,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        log_ratio_clamp=log_ratio_clamp,
        kl_clip=kl_clip,
        normalize_advantages=normalize_advantages,
        correction=correction,
        epsilon=epsilon,
        epsilon_mode=epsilon_mode,
        group=group,
        backend=backend,
    )


def check_old_gaussian(
    elements: Elements, old_mean: torch.Tensor | None, old_log_std: torch.Tensor | None, mean: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Means and log σ of the old policy, without a graph; none, if neither is given."""
    if old_mean is None and old_log_std is None:
        return ()
    if old_mean is None or old_log_std is None:
        raise ValueError("old_log_std: got one of old_mean and old_log_std, expected both or neither")
    old_inputs = (
        elements.check_matrix("old_mean", old_mean, mean.shape[-1]),
        check_log_std(elements, "old_log_std", old_log_std, mean),
    )
    check.check_detached("old_mean", old_mean)
    check.check_detached("old_log_std", old_log_std)
    return old_inputs


def check_log_std(elements: Elements, name: str, log_std: Any, mean: torch.Tensor) -> torch.Tensor:
    """Logarithms of standard deviations as [num_dimensions] or [num_elements, num_dimensions]."""
    size = mean.shape[-1]
    check.check_tensor(name, log_std, check.REAL_DTYPES)
    if log_std.shape != mean.shape and log_std.numel() == size == log_std.shape[-1]:
        check.check_device(name, log_std, elements.device)
        return drop_graph(log_std).reshape(size).contiguous()
    return elements.check_matrix(name, log_std, size)


@with_fast_path
def bernoulli_ppo_loss(
    logits: torch.Tensor,
    actions: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    values: torch.Tensor | None = None,
    returns: torch.Tensor | None = None,
    old_values: torch.Tensor | None = None,
    old_logits: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    clip: Number | None = 0.2,
    clip_high: Number | None = None,
    dual_clip: Number | None = None,
    value_coef: Number = 0.5,
    value_clip: Number | None = None,
    value_clip_mode: str = "sb3",
    value_loss: str = "mse",
    huber_delta: Number = 1.0,
    value_factor: Number = 1.0,
    entropy_coef: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k1",
    log_ratio_clamp: Number | None = None,
    kl_clip: Number | None = None,
    normalize_advantages: bool = False,
    correction: float = 1,
    epsilon: float = 1e-8,
    epsilon_mode: str = "add",
    group: distributed.ProcessGroup | str | None = None,
    backend: str | None = None,
) -> PPOLoss:
    r"""`ppo_loss` of independent binary actions (MultiBinary), each 1 with probability sigmoid(logit), in one pass.

        log π(a) = Σ log sigmoid(±x)          H = −Σ p·log p + (1 − p)·log(1 − p)          p = sigmoid(x)

    Args:
        logits: x, [..., num_actions]; float32, bfloat16, float16, or float64 (not on the triton backend).
        actions: Like `logits`: nonzero where the action is 1.
        old_log_probs: Log-probabilities of the actions under the policy that drew them, [...].
        advantages: A, [...].
        values: V, the value estimates, [...]; None leaves out the value loss.
        returns: R, the value targets, [...].
        old_values: V_old, the values when the rollout was made, [...]; read only to clip by them.
        old_logits: Logits of the policy that drew the actions, like `logits`: `kl` is then KL(π_old ‖ π), exact.
        ref_log_probs: Log-probabilities of the actions under a reference policy, [...].
        mask: Which elements count, [...]: nonzero if bool or integer; a weight if floating
            point. What stands in an element of weight 0 is not read.
        clip: How far the ratio may fall below 1, and, without `clip_high`, rise above it; None does not clip.
        clip_high: How far the ratio may rise above 1.
        dual_clip: Where A < 0, the loss is at most −dual_clip·A (Ye et al. 2020); >= 1, or None.
        value_coef: Coefficient of the value loss.
        value_clip: c, by which values are clipped; None does not clip.
        value_clip_mode: How: ``"sb3"``, the error of the value after it moved at most c away from V_old;
            ``"cleanrl"``, the larger of that and of the value's own error; ``"rllib"``, the value's own error, at most
            c.
        value_loss: The error of a value: ``"mse"``, squared, or ``"huber"``, Huber's loss.
        huber_delta: Where Huber's loss becomes linear.
        value_factor: Multiplies the value loss: 0.5 is the factor of CleanRL.
        entropy_coef: Coefficient of the entropy, which is maximised.
        kl_coef: Coefficient of the KL divergence.
        kl_estimator: How the divergence from `ref_log_probs` is estimated: ``"k1"``, ``"k2"``, ``"k3"``, ``"k1+"`` or
            ``"k3+"``, see `kl_divergence`.
        log_ratio_clamp: The largest |log r|, and |x| of "k3", beyond which the derivative is 0; None does not clamp.
        kl_clip: The largest divergence of an element, beyond which its derivative is 0, but for "k1+" and
            "k3+"; None does not clip.
        normalize_advantages: Whether to subtract the mean from the advantages and divide by the standard deviation, as
            the function of that name does: over the elements that count, by their weights.
        correction: What the variance's divisor is less than the sum of the weights.
        epsilon: ε of the normalisation.
        epsilon_mode: Where ε goes: ``"add"``, ``"floor"`` or ``"variance"``.
        group: Normalise over all ranks of this process group, ``"world"`` for the default one. Every rank must call.
            Not under torch.compile.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        The loss, its parts and statistics, each a tensor without dimensions; float32, or float64 if an
            argument is (not the mask, actions, old outputs of the network or coefficients).

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, or a tensor is missing that another argument asks for.
        BackendUnavailableError: The backend asked for cannot run here.

    Example:
        >>> logits = torch.zeros(1, 2, requires_grad=True)
        >>> actions = torch.tensor([[1, 0]])
        >>> bernoulli_ppo_loss(logits, actions, torch.tensor([0.25]).log(), torch.tensor([1.0])).loss.backward()
        >>> logits.grad
        tensor([[-0.5000,  0.5000]])
    """
    elements = elements_of("logits", logits, trailing=1)
    size = logits.shape[-1]
    old_inputs: Sequence[torch.Tensor] = ()
    if old_logits is not None:
        old_inputs = (check_constant_matrix(elements, "old_logits", old_logits, size),)
    return solve_ppo(
        elements,
        "bernoulli",
        (logits,),
        [elements.check_matrix("logits", logits)],
        actions=check_constant_matrix(elements, "actions", actions, size, (*check.FLAG_DTYPES, *check.INTEGER_DTYPES)),
        old_inputs=old_inputs,
        sizes=(size,),
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
        value_loss=value_loss,
        huber_delta=huber_delta,
        value_factor=value_factor,
        entropy_coef=entropy_coef,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        log_ratio_clamp=log_ratio_clamp,
        kl_clip=kl_clip,
        normalize_advantages=normalize_advantages,
        correction=correction,
        epsilon=epsilon,
        epsilon_mode=epsilon_mode,
        group=group,
        backend=backend,
    )


def check_constant_matrix(
    elements: Elements, name: str, x: Any, size: int, dtypes: Any = check.REAL_DTYPES
) -> torch.Tensor:
    """Several numbers per element, through which no gradient flows."""
    matrix = elements.check_matrix(name, x, size, dtypes)
    check.check_detached(name, x)
    return matrix
