"""Stable-Baselines3: actions and loss of a policy, computed without distribution objects where its parts are known."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import log, nan, pi, sqrt
from types import SimpleNamespace
from typing import Any

import torch
from stable_baselines3.common.distributions import Distribution
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rl_triton_adapters.common.overrides import find_own, list_stock
from rl_triton_adapters.common.update import DeferredChecks, replace_nan
from rl_triton_adapters.sb3.base import PACKAGES
from rl_triton_core.losses import Bernoulli, Gaussian, LogProbs, MultiCategorical, Policy, PPOLoss, ppo_loss

DISTRIBUTIONS = (Distribution, torch.distributions.Distribution)
HEADS = {
    "stable_baselines3.common.distributions.CategoricalDistribution": "categorical",
    "stable_baselines3.common.distributions.MultiCategoricalDistribution": "multicategorical",
    "stable_baselines3.common.distributions.DiagGaussianDistribution": "gaussian",
    "stable_baselines3.common.distributions.BernoulliDistribution": "bernoulli",
    "sb3_contrib.common.maskable.distributions.MaskableCategoricalDistribution": "categorical",
    "sb3_contrib.common.maskable.distributions.MaskableMultiCategoricalDistribution": "multicategorical",
    "sb3_contrib.common.maskable.distributions.MaskableBernoulliDistribution": "multicategorical",
}  # distributions of actions whose equations are known, by the names of their classes
MASKED_LOGIT = -1e8  # logit of an action that is masked out, as in sb3-contrib


def find_head(policy: Any) -> str | None:
    """Find the kind of a policy's distribution of actions; None if not in `HEADS` or methods were overridden."""
    kind = type(getattr(policy, "action_dist", None))
    head = HEADS.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if head is None or find_own_methods(policy) else head


def explain_head(policy: Any) -> str:
    """Why there is no kind of it; empty if there is one."""
    unknown = f"{type(policy).__name__} has a distribution of its own"
    return "" if find_head(policy) is not None else find_own_methods(policy) or unknown


def find_own_methods(policy: Any) -> str:
    """Which method of a policy or its distribution is a user's, of those that `apply_networks` and others go around."""
    stock = [x for name in ("forward", "evaluate_actions") for x in list_stock(type(policy), name, PACKAGES)]
    return find_own([policy, getattr(policy, "action_dist", None)], stock, PACKAGES, apply_networks)


def list_sizes(distribution: Any) -> list[int]:
    """List the numbers of a distribution's inputs, one for each of its parts."""
    sizes = getattr(distribution, "action_dims", None) or distribution.action_dim
    return [sizes] if isinstance(sizes, int) else list(sizes)


def apply_networks(policy: Any, observations: Any) -> tuple[Tensor, Tensor]:
    """Compute the inputs of the distribution, logits or means, and the values, as a plain `ActorCriticPolicy` does."""
    features, networks = policy.extract_features(observations), policy.mlp_extractor
    if policy.share_features_extractor:
        latent_pi, latent_vf = networks(features)
    else:
        latent_pi, latent_vf = networks.forward_actor(features[0]), networks.forward_critic(features[1])
    return policy.action_net(latent_pi), policy.value_net(latent_vf)


# -- acting ------------------------------------------------------------------------------------------------------------


def draw_actions(policy: Any, obs: Any, action_masks: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return actions, values and log-probabilities: those of the policy's `forward`, bit for bit.

    Where that raises an error, since its distribution refuses what the networks return, log-probabilities are NaN.
    There are masks if its distribution, which is one of `HEADS`, takes any.
    """
    head = find_head(policy)
    inputs, values = apply_networks(policy, obs)
    allowed = None
    if action_masks is not None:
        allowed = torch.as_tensor(action_masks, device=inputs.device).bool().view(inputs.shape)
    if head == "gaussian":  # as torch.distributions.Normal
        std = torch.ones_like(inputs) * policy.log_std.exp()
        actions = inputs + torch.empty_like(inputs).normal_() * std
        densities = -((actions - inputs) ** 2) / (2 * std**2) - std.log() - log(sqrt(2 * pi))
        log_probs = densities.sum(dim=1)
    elif head == "bernoulli":
        actions = torch.bernoulli(replace_nan(torch.sigmoid(inputs)))
        log_probs = -binary_cross_entropy_with_logits(inputs, actions, reduction="none").sum(dim=1)
    else:
        sizes = list_sizes(policy.action_dist)
        masks = [None] * len(sizes) if allowed is None else torch.split(allowed, sizes, dim=-1)
        parts = [draw_categorical(*pair) for pair in zip(torch.split(inputs, sizes, dim=-1), masks, strict=True)]
        actions, each = (torch.stack(x, dim=-1) for x in zip(*parts, strict=True))
        log_probs = each.sum(dim=-1)
    return actions.reshape((-1, *policy.action_space.shape)), values, log_probs


def draw_categorical(logits: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw actions as `torch.distributions.Categorical` does, and return their log-probabilities too.

    Logits are [num_environments, num_actions], as are the actions that are allowed, masked as sb3-contrib does it.
    """
    log_probs = logits - logits.logsumexp(dim=-1, keepdim=True)
    if allowed is not None:
        log_probs = log_probs.where(allowed | log_probs.isnan(), MASKED_LOGIT)
        log_probs = log_probs - log_probs.logsumexp(dim=-1, keepdim=True)
    actions = torch.multinomial(replace_nan(torch.softmax(log_probs, dim=-1)), 1, replacement=True)
    return actions.squeeze(-1), log_probs.gather(-1, actions).squeeze(-1)


def detach_distribution(owner: Any) -> None:
    """Drop the graphs that a policy's or actor's last distribution has: no copy or capture could have them."""
    waiting = [getattr(owner, "action_dist", SimpleNamespace())]
    for distribution in waiting:
        own = vars(distribution)
        for name, x in own.items():
            if isinstance(x, Tensor) and x.grad_fn is not None:
                own[name] = x.detach()
            parts = x if isinstance(x, list) else [x]
            waiting += [y for y in parts if isinstance(y, DISTRIBUTIONS) and y not in waiting]


@contextmanager
def kept_distribution(owner: Any) -> Iterator[None]:
    """After a graph's step, an actor or a policy has its distribution of before: copies have nothing of a graph's."""
    distribution = getattr(owner, "action_dist", SimpleNamespace())
    before = {**vars(distribution)}
    try:
        yield
    finally:
        vars(distribution).clear()
        vars(distribution).update(before)


# -- losses ------------------------------------------------------------------------------------------------------------


def evaluate_actions(
    policy: Any, observations: Any, actions: Tensor, *masks: Tensor, defers_checks: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what the policy's own method does: values, log-probabilities and entropies of actions.

    With `defers_checks` the device is not waited for. Where the method raises an error, since its distribution refuses
    something, log-probabilities are NaN then.
    """
    if not defers_checks:
        return policy.evaluate_actions(observations, actions, *masks)  # type: ignore[no-any-return]
    with kept_distribution(policy), DeferredChecks() as checks:
        values, log_probs, entropy = policy.evaluate_actions(observations, actions, *masks)
    return values, checks.mark_refused(log_probs), entropy


def compute_loss(
    policy: Any, observations: Any, actions: Tensor, masks: Tensor | None = None, *, defers_checks: bool, **rest: Any
) -> PPOLoss:
    """Compute PPO's loss and its gradient in one pass, from the networks' outputs where the distribution is known.

    `approx_kl` is not finite where the policy's method raises an error, unless this does. Arguments are those of
    `evaluate_actions`, with masks [..., num_actions], and of `ppo_loss`.
    """
    head = find_head(policy)
    if head is None:
        given = (policy, observations, actions, *(() if masks is None else (masks,)))
        values, log_probs, entropy = evaluate_actions(*given, defers_checks=defers_checks)
        if entropy is not None and entropy.shape != log_probs.shape:
            entropy = entropy.mean().expand_as(log_probs)  # which is all that PPO reads of it
        return ppo_loss(LogProbs(log_probs, entropy), None, values=values.flatten(), **rest)
    inputs, values = apply_networks(policy, observations)
    if masks is not None:
        inputs = inputs + torch.where(masks, 0.0, MASKED_LOGIT)  # NaN stays
    if head == "gaussian":
        is_plain = policy.log_std.shape == inputs.shape[1:]
        log_std = policy.log_std if is_plain else policy.log_std.expand(1, inputs.shape[1])[0]
        known: Policy = Gaussian(inputs, log_std)
    elif head == "bernoulli":  # NaN where an action is neither 0 nor 1
        known = Bernoulli(inputs.where((actions == 0) | (actions == 1), nan))
    else:
        known, actions = MultiCategorical(inputs, list_sizes(policy.action_dist)), actions.long()
    return ppo_loss(known, actions, values=values.flatten(), **rest)
