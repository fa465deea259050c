"""RLlib: APPO's loss as that of PPO, of columns that V-Trace and the target network give."""

# mypy: allow-subclassing-any

from __future__ import annotations

import math
from typing import Any

import torch
from ray.rllib.algorithms.appo.appo import (
    LEARNER_RESULTS_CURR_KL_COEFF_KEY,
    LEARNER_RESULTS_KL_KEY,
    LEARNER_RESULTS_MEAN_IS_KEY,
    LEARNER_RESULTS_VAR_IS_KEY,
)
from ray.rllib.algorithms.impala.torch.vtrace_torch_v2 import make_time_major
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.learner import ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY
from ray.rllib.core.rl_module.apis import TARGET_NETWORK_ACTION_DIST_INPUTS
from ray.rllib.evaluation.postprocessing import Postprocessing
from torch import Tensor

from rl_triton_adapters._rllib_updates import FusedLossMixin, LossParts, compute_masked_mean

__all__ = ["FusedAPPOLossMixin"]

MAX_IMPORTANCE = 2.0
"""Where RLlib's loss clips μ/π_target."""
BEHAVIOUR_LOG_PROBS = "behaviour_log_probs"
"""The column log μ(a|s) of the loss, beside those of PPO."""


class FusedAPPOLossMixin(FusedLossMixin):
    """Compute APPO's loss and its gradient in one pass over the minibatch.

        ratio = min(μ/π_target, 2)·π/μ = π/π_old          log π_old = max(log π_target, log μ − log 2)

    Put it in front of a learner that has `compute_vtrace`, and of `APPOTorchLearner`. Which modules have it is as in
    `FusedLossMixin`.
    """

    compute_vtrace: Any

    @torch.no_grad()
    def build_loss_columns(self, module_id: str, config: Any, batch: Any, values: Tensor) -> dict[str, Tensor]:
        """The columns that the loss is computed from, by the names of PPO's.

        Args:
            module_id: Name of the module.
            config: Config of the module.
            batch: Minibatch of the module, [slots], or [rows, max_seq_len] if the module has a state.
            values: Value estimates of each slot.

        Returns:
            Columns laid out like the batch.
        """
        module = self.module[module_id].unwrapped()
        inputs = module.forward_target(batch)[TARGET_NETWORK_ACTION_DIST_INPUTS]
        log_probs = module.get_train_action_dist_cls().from_logits(inputs).logp(batch[Columns.ACTIONS])
        behaviour_log_probs = batch[Columns.ACTION_LOGP]
        targets, advantages = self._estimate_advantages(config, batch, log_probs, values)
        return {
            Columns.ACTIONS: batch[Columns.ACTIONS],
            Columns.ACTION_DIST_INPUTS: inputs,
            Columns.ACTION_LOGP: torch.maximum(log_probs, behaviour_log_probs - math.log(MAX_IMPORTANCE)),
            Columns.LOSS_MASK: batch[Columns.LOSS_MASK],
            BEHAVIOUR_LOG_PROBS: behaviour_log_probs,
            Postprocessing.VALUE_TARGETS: targets,
            Postprocessing.ADVANTAGES: advantages,
        }

    def _estimate_advantages(self, config: Any, batch: Any, log_probs: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Value targets and advantages, laid out like the values, by V-Trace as RLlib's loss computes it."""
        columns = {
            "target_action_log_probs": log_probs,
            "behaviour_action_log_probs": batch[Columns.ACTION_LOGP],
            "discounts": (1.0 - batch[Columns.TERMINATEDS].float()) * config.gamma * batch[Columns.LOSS_MASK].float(),
            "rewards": batch[Columns.REWARDS],
            "values": values,
        }
        lengths = {
            "trajectory_len": config.get_rollout_fragment_length(),
            "recurrent_seq_len": batch.get(Columns.SEQ_LENS),
        }
        time_major = {name: make_time_major(column, **lengths) for name, column in columns.items()}
        first_values = time_major["values"][0]
        targets, advantages = self.compute_vtrace(
            **time_major,
            bootstrap_values=torch.cat([first_values[1:], first_values[:1]]),  # of the next row; none behind the last
            clip_rho_threshold=config.vtrace_clip_rho_threshold,
            clip_pg_rho_threshold=config.vtrace_clip_pg_rho_threshold,
        )
        return restore_layout(targets, values.shape), restore_layout(advantages, values.shape)

    def uses_critic(self, config: Any) -> bool:
        """Whether the loss has a term for the values."""
        return True

    def choose_loss_options(self, config: Any) -> dict[str, Any]:
        """How the loss clips, and what the value loss is multiplied by."""
        return {"clip": config.clip_param, "value_factor": 0.5}

    def build_loss_metrics(self, module_id: str, parts: LossParts) -> dict[str, Any]:
        """What RLlib's loss logs of a module."""
        loss, _, columns = parts
        importance = torch.exp(columns[BEHAVIOUR_LOG_PROBS] - columns[Columns.ACTION_LOGP])
        mask = columns[Columns.LOSS_MASK]
        mean = compute_masked_mean(importance, mask)
        return {
            POLICY_LOSS_KEY: loss.policy_loss,
            VF_LOSS_KEY: loss.value_loss,
            ENTROPY_KEY: loss.entropy,
            LEARNER_RESULTS_KL_KEY: loss.kl,
            LEARNER_RESULTS_CURR_KL_COEFF_KEY: self.curr_kl_coeffs_per_module[module_id],
            LEARNER_RESULTS_MEAN_IS_KEY: mean,
            LEARNER_RESULTS_VAR_IS_KEY: compute_masked_mean(torch.square(importance - mean), mask),
        }


def restore_layout(x: Tensor, shape: torch.Size) -> Tensor:
    """Undo `make_time_major`: from [T, B] to [slots] without the padding, or to [B, T]."""
    return x.transpose(0, 1).flatten()[: shape.numel()].view(shape)
