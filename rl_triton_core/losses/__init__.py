"""Losses of policy-gradient methods with their gradients in one pass, and log-probabilities of tokens."""

from rl_triton_core._internal.loss.solve import get_gradients as get_gradients
from rl_triton_core.losses.group import group_normalize as group_normalize
from rl_triton_core.losses.grpo import grpo_loss as grpo_loss
from rl_triton_core.losses.kl import kl_divergence as kl_divergence
from rl_triton_core.losses.policies import Bernoulli as Bernoulli
from rl_triton_core.losses.policies import Categorical as Categorical
from rl_triton_core.losses.policies import Gaussian as Gaussian
from rl_triton_core.losses.policies import LogProbs as LogProbs
from rl_triton_core.losses.policies import MultiCategorical as MultiCategorical
from rl_triton_core.losses.policies import Policy as Policy
from rl_triton_core.losses.ppo import Normalization as Normalization
from rl_triton_core.losses.ppo import PPOLoss as PPOLoss
from rl_triton_core.losses.ppo import ppo_loss as ppo_loss
from rl_triton_core.losses.tokens import TokenLogProbs as TokenLogProbs
from rl_triton_core.losses.tokens import token_log_probs as token_log_probs
from rl_triton_core.losses.value import value_loss as value_loss

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
    "kl_divergence",
    "ppo_loss",
    "token_log_probs",
    "value_loss",
]
