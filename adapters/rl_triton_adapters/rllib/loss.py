"""PPO's loss with the numbers of RLlib's: value and gradient in one pass over the minibatch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from ray.rllib.algorithms.ppo import ppo
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchMultiCategorical,
)
from ray.rllib.core.learner.learner import ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.torch_utils import explained_variance
from torch import Tensor

from rl_triton_adapters.rllib.metrics import LateMetrics
from rl_triton_core.losses import Gaussian, MultiCategorical, Policy, PPOLoss, ppo_loss

DISTRIBUTIONS = TorchDiagGaussian, TorchCategorical, TorchMultiCategorical
"""Of actions, whose loss is computed in one pass."""
Head = tuple[int, ...]
"""Numbers of actions of each categorical distribution whose loss is computed in one pass; none for a Gaussian."""


class LossParts(NamedTuple):
    """What the metrics of a loss are computed from, without a graph."""

    loss: PPOLoss
    values: Tensor | None
    columns: Any

    def build_metrics(self) -> dict[str, Any]:
        """What RLlib's loss logs of a module."""
        loss, values, columns = self
        targets, mask = columns[Postprocessing.VALUE_TARGETS], columns.get(Columns.LOSS_MASK)
        one = 1.0 if mask is None else mask.sum() / mask.sum()  # RLlib's means over no slot at all are NaN
        unclipped = zero = targets.new_zeros(())
        if values is not None:
            errors = torch.square(values - targets)  # whatever stands in the slots that do not count
            unclipped = errors.mean() if mask is None else torch.where(mask, errors, 0.0).sum() / mask.sum()
        return {
            POLICY_LOSS_KEY: loss.policy_loss * one,
            VF_LOSS_KEY: loss.value_loss if values is None else loss.value_loss * one,
            ppo.LEARNER_RESULTS_VF_LOSS_UNCLIPPED_KEY: unclipped,
            ppo.LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY: explained_variance(targets, zero if values is None else values),
            ENTROPY_KEY: loss.entropy * one,
            ppo.LEARNER_RESULTS_KL_KEY: loss.kl * one,
        }


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
        head, metrics, inputs = self.find_head(module_id), self.learner.metrics, fwd_out[Columns.ACTION_DIST_INPUTS]
        assert head is not None
        values, old_inputs, kl_coef = None, None, 0.0
        if config.use_critic:
            module = self.learner.module[module_id].unwrapped()
            values = module.compute_values(batch, embeddings=fwd_out.get(Columns.EMBEDDINGS))
        if config.use_kl_loss:
            old_inputs, kl_coef = batch[Columns.ACTION_DIST_INPUTS], self.learner.curr_kl_coeffs_per_module[module_id]
        entropy_coef = self.learner.entropy_coeff_schedulers_per_module[module_id].get_current_value()
        actions = batch[Columns.ACTIONS]
        if head:
            policy: Policy = MultiCategorical(inputs, head, old_inputs)
            actions = actions.long()
        else:
            policy = Gaussian(*inputs.chunk(2, dim=-1), *(() if old_inputs is None else old_inputs.chunk(2, dim=-1)))
            actions = actions if actions.is_floating_point() else actions.to(inputs.dtype)
        # losses take no integers
        coefficients: list[Any] = [x.float() if isinstance(x, Tensor) else x for x in (entropy_coef, kl_coef)]
        loss = ppo_loss(
            policy,
            actions,
            batch[Columns.ACTION_LOGP],
            batch[Postprocessing.ADVANTAGES],
            values=values,
            returns=None if values is None else batch[Postprocessing.VALUE_TARGETS],
            mask=batch.get(Columns.LOSS_MASK),
            clip=config.clip_param,
            value_coef=config.vf_loss_coeff,
            value_clip=config.vf_clip_param,
            value_clip_mode="rllib",
            entropy_coef=coefficients[0],
            kl_coef=coefficients[1],
            backend=self.backend,
        )
        values = None if values is None else values.detach()
        parts = LossParts(loss._replace(loss=loss.loss.detach()), values, dict(batch))
        if isinstance(metrics, LateMetrics):
            metrics.keep(module_id, parts)
        else:
            metrics.log_dict(parts.build_metrics(), key=module_id, window=1)
        return loss.loss


def describe_head(module: Any) -> Head | None:
    """The head of a module whose distributions of actions, in training and while acting, are one of those known."""
    space, kinds = module.action_space, set[Any](find_distributions(module))
    if isinstance(space, Box) and len(space.shape) == 1 and kinds == {TorchDiagGaussian}:
        return ()
    if isinstance(space, Discrete) and kinds == {TorchCategorical}:
        return (int(space.n),)
    if isinstance(space, MultiDiscrete) and space.nvec.ndim == 1 and kinds:
        sizes = tuple(space.nvec.tolist())
        home = Distribution.__module__  # of classes with sizes filled in, and nothing else
        made = [x for x in kinds if x.__bases__ == (TorchMultiCategorical,) and x.__module__ == home]
        found = {tuple(x._merge_kwargs().get("input_lens", ())) for x in made}
        return sizes if len(made) == len(kinds) and found == {sizes} else None
    return None


def find_distributions(module: Any) -> tuple[type, ...]:
    """A module's distributions of actions in training and while acting; empty if it has none."""
    try:
        return module.get_train_action_dist_cls(), module.get_exploration_action_dist_cls()
    except Exception:  # modules raise it that have none: those of users raise any, and RLlib may call one of the two
        return ()


def name_distribution(kind: Any) -> str:
    """Its name; where arguments were filled in, which makes a class of its own, that of the class behind it."""
    return (kind.__bases__[0] if "_merge_kwargs" in vars(kind) else kind).__name__  # type: ignore[no-any-return]
