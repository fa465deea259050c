"""Losses of policy-gradient methods with their gradients in one pass, and log-probabilities of tokens."""

from rl_triton_core._internal.loss.arguments import Normalization
from rl_triton_core._internal.loss.problem import PPOLoss
from rl_triton_core._internal.loss.solve import get_gradients
from rl_triton_core._internal.tokens.problem import TokenLogProbs
from rl_triton_core.losses.group import group_normalize
from rl_triton_core.losses.grpo import grpo_loss
from rl_triton_core.losses.linear import linear_grpo_loss, linear_token_log_probs
from rl_triton_core.losses.policies import Bernoulli, Categorical, Gaussian, LogProbs, MultiCategorical, Policy
from rl_triton_core.losses.ppo import ppo_loss
from rl_triton_core.losses.tokens import token_log_probs

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "LogProbs",
    "MultiCategorical",
    "Normalization",
    "PPOLoss",
    "Policy",
    "TokenLogProbs",
    "get_gradients",
    "group_normalize",
    "grpo_loss",
    "linear_grpo_loss",
    "linear_token_log_probs",
    "ppo_loss",
    "token_log_probs",
]
