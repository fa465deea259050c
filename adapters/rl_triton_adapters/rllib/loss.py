"""Losses of PPO and APPO with the numbers of RLlib's: value and gradient in one pass over the minibatch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from ray.rllib.algorithms.appo import appo
from ray.rllib.algorithms.impala.torch.vtrace_torch_v2 import make_time_major
from ray.rllib.algorithms.ppo import ppo
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchMultiCategorical,
)
from ray.rllib.core.learner.learner import ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY
from ray.rllib.core.rl_module.apis import TARGET_NETWORK_ACTION_DIST_INPUTS
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.torch_utils import explained_variance
from torch import Tensor

from rl_triton_adapters.rllib.metrics import LateMetrics
from rl_triton_core.losses import Gaussian, MultiCategorical, Policy, PPOLoss, ppo_loss

MAX_IMPORTANCE = 2.0  # where RLlib's loss of APPO clips μ/π_target
DISTRIBUTIONS = TorchDiagGaussian, TorchCategorical, TorchMultiCategorical
"""Of actions, whose loss is computed in one pass."""
LOG_IMPORTANCE = "log_importance"  # the column log min(μ/π_target, 2) of APPO's loss, beside those of PPO


class Head(NamedTuple):
    """A distribution of actions whose loss is computed in one pass."""

    nvec: tuple[int, ...] = ()
    """Numbers of actions of each categorical distribution; none for a Gaussian."""

    def describe_policy(self, inputs: Tensor, old_inputs: Tensor | None) -> Policy:
        """What the distribution is to the loss, from its inputs, and perhaps from those of the old policy."""
        if self.nvec:
            return MultiCategorical(inputs, self.nvec, old_inputs)
        return Gaussian(*inputs.chunk(2, dim=-1), *(() if old_inputs is None else old_inputs.chunk(2, dim=-1)))


class LossParts(NamedTuple):
    """What the metrics of a loss are computed from, without a graph."""

    build: Callable[..., dict[str, Any]]
    loss: PPOLoss
    values: Tensor | None
    columns: Any

    def build_metrics(self) -> dict[str, Any]:
        """What RLlib's loss logs of a module."""
        return self.build(*self[1:])


class FusedLoss:
    """The loss of a PPO learner's modules, in one pass over the minibatch.

    Modules whose distribution of actions is none of `DISTRIBUTIONS` have RLlib's loss.
    """

    def __init__(self, learner: Any, backend: str | None) -> None:
        self.learner, self.backend = learner, backend
        self.heads: dict[Any, Head | None] = {}  # those found in an update, since they may change between two
        self.obstacle = ""  # why there is none

    def find_head(self, module_id: str) -> Head | None:
        """The head of a module, if its loss is computed in one pass."""
        module = self.learner.module[module_id].unwrapped()
        if module not in self.heads:
            self.heads[module] = None if self.obstacle else describe_head(module)
        return self.heads[module]

    def compute(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Tensor:
        """The loss of one module, whose metrics are logged, with the arguments of RLlib's `compute_loss_for_module`."""
        head, values, metrics = self.find_head(module_id), None, self.learner.metrics
        assert head is not None
        if self.uses_critic(config):
            module = self.learner.module[module_id].unwrapped()
            values = module.compute_values(batch, embeddings=fwd_out.get(Columns.EMBEDDINGS))
        columns = self.build_columns(module_id, config, batch, values)
        loss = self.compute_fused(module_id, config, head, fwd_out[Columns.ACTION_DIST_INPUTS], values, columns)
        values = None if values is None else values.detach()
        parts = LossParts(self.build_metrics, loss._replace(loss=loss.loss.detach()), values, dict(columns))
        if isinstance(metrics, LateMetrics):
            metrics.keep(module_id, parts)
        else:
            metrics.log_dict(parts.build_metrics(), key=module_id, window=1)
        return loss.loss

    def uses_critic(self, config: Any) -> bool:
        """Whether the loss has a term for the values."""
        return bool(config.use_critic)

    def choose_options(self, config: Any) -> dict[str, Any]:
        """How the loss clips."""
        return {"clip": config.clip_param, "value_clip": config.vf_clip_param, "value_clip_mode": "rllib"}

    def build_columns(self, module_id: str, config: Any, batch: Any, values: Any) -> Any:
        """The columns that the loss is computed from: those of the batch."""
        return batch

    @staticmethod
    def build_metrics(loss: PPOLoss, values: Tensor | None, columns: Any) -> dict[str, Any]:
        """What RLlib's loss logs of a module."""
        targets, mask = columns[Postprocessing.VALUE_TARGETS], columns.get(Columns.LOSS_MASK)
        one = 1.0 if mask is None else mask.sum() / mask.sum()  # RLlib's means over no slot at all are NaN
        unclipped = zero = targets.new_zeros(())
        if values is not None:
            unclipped = compute_masked_mean(torch.square(values - targets), mask)
        return {
            POLICY_LOSS_KEY: loss.policy_loss * one,
            VF_LOSS_KEY: loss.value_loss if values is None else loss.value_loss * one,
            ppo.LEARNER_RESULTS_VF_LOSS_UNCLIPPED_KEY: unclipped,
            ppo.LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY: explained_variance(targets, zero if values is None else values),
            ENTROPY_KEY: loss.entropy * one,
            ppo.LEARNER_RESULTS_KL_KEY: loss.kl * one,
        }

    def compute_fused(
        self, module_id: str, config: Any, head: Head, inputs: Tensor, values: Tensor | None, columns: Any
    ) -> PPOLoss:
        """Compute the loss of a module from columns."""
        entropy_coef = self.learner.entropy_coeff_schedulers_per_module[module_id].get_current_value()
        kl_coef = self.learner.curr_kl_coeffs_per_module[module_id] if config.use_kl_loss else 0.0
        old_inputs = columns[Columns.ACTION_DIST_INPUTS] if config.use_kl_loss else None
        actions = columns[Columns.ACTIONS]
        actions = actions.long() if head.nvec else actions if actions.is_floating_point() else actions.to(inputs.dtype)
        return ppo_loss(
            head.describe_policy(inputs, old_inputs),
            actions,
            columns[Columns.ACTION_LOGP],
            columns[Postprocessing.ADVANTAGES],
            values=values,
            returns=None if values is None else columns[Postprocessing.VALUE_TARGETS],
            mask=columns.get(Columns.LOSS_MASK),
            value_coef=config.vf_loss_coeff,
            entropy_coef=as_coefficient(entropy_coef),
            kl_coef=as_coefficient(kl_coef),
            backend=self.backend,
            **self.choose_options(config),
        )


class FusedAPPOLoss(FusedLoss):
    """The loss of an APPO learner's modules, in one pass over the minibatch.

        ratio = min(μ/π_target, 2)·π/μ = π/π_old          log π_old = max(log π_target, log μ − log 2)

    Which modules have it is as in `FusedLoss`.
    """

    def uses_critic(self, config: Any) -> bool:
        """Whether the loss has a term for the values."""
        return True

    def choose_options(self, config: Any) -> dict[str, Any]:
        """How the loss clips, and what the value loss is multiplied by."""
        return {"clip": config.clip_param, "value_factor": 0.5}

    @torch.no_grad()
    def build_columns(self, module_id: str, config: Any, batch: Any, values: Tensor) -> dict[str, Any]:
        """The columns that the loss is computed from, by the names of PPO's, laid out like the batch."""
        module, behaviour = self.learner.module[module_id].unwrapped(), batch[Columns.ACTION_LOGP]
        inputs = module.forward_target(batch)[TARGET_NETWORK_ACTION_DIST_INPUTS]
        log_probs = module.get_train_action_dist_cls().from_logits(inputs).logp(batch[Columns.ACTIONS])
        old_log_probs = torch.maximum(log_probs, behaviour - math.log(MAX_IMPORTANCE))
        targets, advantages = self.estimate_advantages(config, batch, log_probs, values)
        return {
            Columns.ACTIONS: batch[Columns.ACTIONS],
            Columns.ACTION_DIST_INPUTS: inputs,
            Columns.ACTION_LOGP: old_log_probs,
            Columns.LOSS_MASK: batch[Columns.LOSS_MASK],
            Postprocessing.VALUE_TARGETS: targets,
            Postprocessing.ADVANTAGES: advantages,
            LOG_IMPORTANCE: behaviour - old_log_probs,
            appo.LEARNER_RESULTS_CURR_KL_COEFF_KEY: self.learner.curr_kl_coeffs_per_module[module_id],
        }

    def estimate_advantages(self, config: Any, batch: Any, log_probs: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Value targets and advantages, laid out like the values, by V-Trace as RLlib's loss computes it."""
        columns = {
            "target_action_log_probs": log_probs,
            "behaviour_action_log_probs": batch[Columns.ACTION_LOGP],
            "discounts": (1.0 - batch[Columns.TERMINATEDS].float()) * config.gamma * batch[Columns.LOSS_MASK].float(),
            "rewards": batch[Columns.REWARDS],
            "values": values,
        }
        length, seq_lens = config.get_rollout_fragment_length(), batch.get(Columns.SEQ_LENS)
        time_major = {
            name: make_time_major(column, trajectory_len=length, recurrent_seq_len=seq_lens)
            for name, column in columns.items()
        }
        first_values = time_major["values"][0]
        found = self.learner.compute_vtrace(
            **time_major,
            bootstrap_values=torch.cat([first_values[1:], first_values[:1]]),  # of the next row; none behind the last
            clip_rho_threshold=config.vtrace_clip_rho_threshold,
            clip_pg_rho_threshold=config.vtrace_clip_pg_rho_threshold,
        )
        targets, advantages = (restore_layout(x, values.shape) for x in found)
        return targets, advantages

    @staticmethod
    def build_metrics(loss: PPOLoss, values: Tensor | None, columns: Any) -> dict[str, Any]:
        """What RLlib's loss logs of a module."""
        importance, mask = torch.exp(columns[LOG_IMPORTANCE]), columns[Columns.LOSS_MASK]
        mean, kl_coef_key = compute_masked_mean(importance, mask), appo.LEARNER_RESULTS_CURR_KL_COEFF_KEY
        return {
            POLICY_LOSS_KEY: loss.policy_loss,
            VF_LOSS_KEY: loss.value_loss,
            ENTROPY_KEY: loss.entropy,
            appo.LEARNER_RESULTS_KL_KEY: loss.kl,
            kl_coef_key: columns[kl_coef_key],
            appo.LEARNER_RESULTS_MEAN_IS_KEY: mean,
            appo.LEARNER_RESULTS_VAR_IS_KEY: compute_masked_mean(torch.square(importance - mean), mask),
        }


def as_coefficient(x: Any) -> Any:
    """A number as it is, a tensor of one in floating point: losses take no integers there."""
    return x.float() if isinstance(x, Tensor) else x


def describe_head(module: Any) -> Head | None:
    """The head of a module whose distributions of actions, in training and while acting, are one of those known."""
    space, kinds = module.action_space, set(find_distributions(module))
    if isinstance(space, Box) and len(space.shape) == 1 and kinds == {TorchDiagGaussian}:
        return Head()
    if isinstance(space, Discrete) and kinds == {TorchCategorical}:
        return Head((int(space.n),))
    if isinstance(space, MultiDiscrete) and space.nvec.ndim == 1 and kinds:
        sizes = tuple(space.nvec.tolist())
        return Head(sizes) if all(is_multi_categorical(kind, sizes) for kind in kinds) else None
    return None


def find_distributions(module: Any) -> tuple[type, ...]:
    """A module's distributions of actions in training and while acting; empty if it has none."""
    try:
        return module.get_train_action_dist_cls(), module.get_exploration_action_dist_cls()
    except Exception:  # modules raise it that have none: those of users raise any, and RLlib may call one of the two
        return ()


def name_distribution(kind: Any) -> str:
    """Its name; where arguments were filled in, which makes a class of its own, that of the class behind it."""
    name: str = (kind.__bases__[0] if "_merge_kwargs" in vars(kind) else kind).__name__
    return name


def is_multi_categorical(kind: Any, sizes: tuple[int, ...]) -> bool:
    """Whether a class is RLlib's: with these sizes filled in, which makes a class of its own, and with nothing else."""
    is_partial = kind.__bases__ == (TorchMultiCategorical,) and kind.__module__ == Distribution.__module__
    return is_partial and tuple(kind._merge_kwargs().get("input_lens", ())) == sizes


def compute_masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the slots that count, whatever stands in the others; over all without a mask."""
    return x.mean() if mask is None else torch.where(mask, x, 0.0).sum() / mask.sum()


def restore_layout(x: Tensor, shape: torch.Size) -> Tensor:
    """Undo `make_time_major`: from [T, B] to [slots] without the padding, or to [B, T]."""
    return x.transpose(0, 1).flatten()[: shape.numel()].view(shape)
