"""Stable-Baselines3: actions and loss of a policy, computed without distribution objects where its parts are known."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import log, pi, sqrt
from typing import Any

import torch
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    DiagGaussianDistribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor
from torch.distributions import Distribution

from rl_triton_core.losses import PPOLoss, categorical_ppo_loss, gaussian_ppo_loss, ppo_loss

FUSED_HEADS = (CategoricalDistribution, MultiCategoricalDistribution, DiagGaussianDistribution)
"""Distributions whose loss is computed from the networks' outputs."""
METHODS = ("forward", "evaluate_actions", "_get_action_dist_from_latent")
"""What a policy must not override for its distribution to be known by its class."""


def find_head(policy: Any) -> type | None:
    """Find the class of a policy's distribution of actions; None if the policy has methods of its own."""
    kind = type(policy)
    is_plain = all(getattr(kind, name, None) is getattr(ActorCriticPolicy, name) for name in METHODS)
    is_patched = not vars(policy).keys().isdisjoint(METHODS[1:])
    return type(policy.action_dist) if is_plain and not is_patched else None


def apply_networks(policy: Any, observations: Any) -> tuple[Tensor, Tensor]:
    """Compute the inputs of the distribution, logits or means, and the values, as a plain `ActorCriticPolicy` does."""
    features = policy.extract_features(observations)
    if policy.share_features_extractor:
        latent_pi, latent_vf = policy.mlp_extractor(features)
    else:
        latent_pi = policy.mlp_extractor.forward_actor(features[0])
        latent_vf = policy.mlp_extractor.forward_critic(features[1])
    return policy.action_net(latent_pi), policy.value_net(latent_vf)


# -- acting ------------------------------------------------------------------------------------------------------------


def apply_policy(policy: Any, observations: Any, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return actions, values and log-probabilities: those of the policy's `forward`, bit for bit.

    Args:
        policy: The policy.
        observations: Tensor of observations, or a dictionary of them.
        deterministic: Whether to return the likeliest actions instead of drawing them.
    """
    head = find_head(policy)
    if deterministic or head not in (CategoricalDistribution, DiagGaussianDistribution):
        with skip_validation():
            result: tuple[Tensor, Tensor, Tensor] = type(policy).forward(policy, observations, deterministic)
            return result
    inputs, values = apply_networks(policy, observations)
    if head is CategoricalDistribution:
        actions, log_probs = draw_categorical(inputs)
    else:
        actions, log_probs = draw_gaussian(inputs, policy.log_std)
    return actions.reshape((-1, *policy.action_space.shape)), values, log_probs


def draw_categorical(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Draw actions as `torch.distributions.Categorical` does, and return their log-probabilities too."""
    log_probs = logits - logits.logsumexp(dim=-1, keepdim=True)
    actions = torch.multinomial(torch.softmax(log_probs, dim=-1), 1, replacement=True)
    return actions.squeeze(-1), log_probs.gather(-1, actions).squeeze(-1)


def draw_gaussian(mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """Draw actions as `torch.distributions.Normal` does, and return their log-probabilities too, summed."""
    std = torch.ones_like(mean) * log_std.exp()
    actions = mean + torch.empty_like(mean).normal_() * std
    log_probs = -((actions - mean) ** 2) / (2 * std**2) - std.log() - log(sqrt(2 * pi))
    return actions, log_probs.sum(dim=1)


@contextmanager
def skip_validation() -> Iterator[None]:
    """Let distributions not check their arguments, for which they would wait for the device."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


# -- the loss ----------------------------------------------------------------------------------------------------------


def compute_loss(policy: Any, observations: Any, actions: Tensor, **arguments: Any) -> PPOLoss:
    """Compute PPO's loss and its gradient in one pass, from the networks' outputs where the distribution is known.

    Args:
        policy: The policy.
        observations: Tensor of observations, or a dictionary of them.
        actions: What the policy's `evaluate_actions` takes.
        arguments: Passed on to `ppo_loss`, `categorical_ppo_loss` or `gaussian_ppo_loss`.
    """
    if find_head(policy) not in FUSED_HEADS:
        with skip_validation():
            values, log_probs, entropy = policy.evaluate_actions(observations, actions)
        return ppo_loss(log_probs, entropy=entropy, values=values.flatten(), **arguments)
    inputs, values = apply_networks(policy, observations)
    return compute_head_loss(policy, inputs, actions, values=values.flatten(), **arguments)


def compute_head_loss(policy: Any, inputs: Tensor, actions: Tensor, **arguments: Any) -> PPOLoss:
    """Compute the loss of a policy whose distribution is one of `FUSED_HEADS`, from the distribution's inputs."""
    distribution = policy.action_dist
    if type(distribution) is DiagGaussianDistribution:
        return gaussian_ppo_loss(inputs, policy.log_std, actions, **arguments)
    nvec = distribution.action_dims if type(distribution) is MultiCategoricalDistribution else None
    return categorical_ppo_loss(inputs, actions.long(), nvec=nvec, **arguments)


def compile_loss(policy: Any, **arguments: Any) -> None:
    """Compute the loss of two steps, so that no later one compiles anything.

    Of a single one, slices would be contiguous, for which Numba compiles other code.

    Args:
        policy: The policy.
        arguments: Numbers and switches that `compute_loss` is going to be given.
    """
    values, constant = torch.zeros(2, requires_grad=True), torch.zeros(2)
    arguments |= dict.fromkeys(("old_log_probs", "advantages", "returns", "old_values"), constant)
    if find_head(policy) not in FUSED_HEADS:
        torch.autograd.grad(ppo_loss(values, entropy=values, values=values, **arguments).loss, values)
        return
    distribution = policy.action_dist
    sizes = getattr(distribution, "action_dims", None) or [distribution.action_dim]
    is_gaussian = type(distribution) is DiagGaussianDistribution
    actions = torch.zeros(2, sum(sizes) if is_gaussian else len(sizes))
    inputs = torch.zeros(2, sum(sizes), requires_grad=True)
    torch.autograd.grad(compute_head_loss(policy, inputs, actions, values=values, **arguments).loss, inputs)
