"""RLlib: parts of a learner's update that take less time than RLlib's. `rllib.enable_triton` turns them on.

Each has a flag. Minibatches and their order, metrics and checkpoints are RLlib's; weights and losses are RLlib's up to
rounding. What a part does not cover is left to RLlib's own code.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import tree
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner
from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.algorithms.ppo.ppo import (
    LEARNER_RESULTS_KL_KEY,
    LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY,
    LEARNER_RESULTS_VF_LOSS_UNCLIPPED_KEY,
)
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchMultiCategorical,
)
from ray.rllib.core.learner.learner import ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY
from ray.rllib.core.rl_module.apis import SelfSupervisedLossAPI
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.minibatch_utils import MiniBatchCyclicIterator
from ray.rllib.utils.torch_utils import clip_gradients, explained_variance
from torch import Tensor
from torch.optim import Optimizer

from rl_triton_adapters._optimizers import fuse_optimizer
from rl_triton_core.losses import PPOLoss, categorical_ppo_loss, gaussian_ppo_loss

__all__ = ["FusedLossMixin", "FusedUpdateMixin", "SlicedMinibatches"]


# -- the loss ---------------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """A distribution of actions whose loss is computed in one pass."""

    name: str
    nvec: tuple[int, ...] = ()
    """Numbers of actions of each of several categorical distributions."""

    @property
    def num_inputs(self) -> int:
        """How many numbers of the network one of the smallest such distributions has."""
        return sum(self.nvec) or 2


class LossParts(NamedTuple):
    """What the metrics of a loss are computed from."""

    loss: PPOLoss
    values: Tensor | None
    columns: Any


class FusedLossMixin:
    """Compute PPO's loss and its gradient in one pass over the minibatch.

    Put it in front of `PPOTorchLearner`. Modules whose distribution of actions is not `TorchDiagGaussian`,
    `TorchCategorical` or `TorchMultiCategorical` have RLlib's loss.
    """

    _flags: Any
    _device: Any
    config: Any
    metrics: Any
    module: Any
    entropy_coeff_schedulers_per_module: Any
    curr_kl_coeffs_per_module: Any

    def __init__(self, **kwargs: Any) -> None:
        """Create the learner, which is not built yet.

        Args:
            **kwargs: Passed on to RLlib.
        """
        super().__init__(**kwargs)
        self._heads: dict[str, tuple[Any, Head | None]] = {}
        self._last_losses: dict[str, LossParts] = {}

    def build(self) -> None:
        """Build the learner, and compile its losses."""
        super().build()  # type: ignore[misc]
        for module_id in self.module.keys():  # noqa: SIM118 (a MultiRLModule is no dict)
            head = self.find_head(module_id)
            if head is not None:
                self._warm_up_loss(module_id, head)

    def find_head(self, module_id: str) -> Head | None:
        """The head of a module, if its loss is computed in one pass."""
        module = self.module[module_id].unwrapped()
        known, head = self._heads.get(module_id, (None, None))
        if known is not module:
            wanted = self._flags.enabled and self._flags.fused_loss
            behind = find_own_method(type(self), ("compute_loss_for_module",), behind=FusedLossMixin)
            head = describe_head(module) if wanted and behind is None else None
            self._heads[module_id] = (module, head)
        return head

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Tensor:
        """The loss of one module, with the numbers of RLlib's.

        Args:
            module_id: Name of the module.
            config: Config of the module.
            batch: Minibatch of the module.
            fwd_out: What its `forward_train` returned.

        Returns:
            The loss, a tensor without dimensions.
        """
        head = self.find_head(module_id)
        if head is None:
            stock: Any = super()
            own: Tensor = stock.compute_loss_for_module(
                module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
            )
            return own
        values = None
        if self.uses_critic(config):
            module = self.module[module_id].unwrapped()
            values = module.compute_values(batch, embeddings=fwd_out.get(Columns.EMBEDDINGS))
        inputs = fwd_out[Columns.ACTION_DIST_INPUTS]
        columns = self.build_loss_columns(module_id, config, batch, values)
        loss = self._compute_fused_loss(module_id, config, head, inputs, values, columns)
        self._last_losses[module_id] = LossParts(
            loss._replace(loss=loss.loss.detach()), None if values is None else values.detach(), columns
        )
        if not self._flags.deferred_metrics or self._reads_metrics():
            self._log_losses()
        return loss.loss

    def _reads_metrics(self) -> bool:
        """Whether a method is the learner's own that may read metrics of a loss, or log others by their names."""
        names = ("compute_loss_for_module", "compute_losses", "after_gradient_based_update")
        return find_own_method(type(self), names) is not None

    def build_loss_columns(self, module_id: str, config: Any, batch: Any, values: Any) -> Any:
        """The columns that the loss is computed from: those of the batch."""
        return batch

    def uses_critic(self, config: Any) -> bool:
        """Whether the loss has a term for the values."""
        return bool(config.use_critic)

    def choose_loss_options(self, config: Any) -> dict[str, Any]:
        """How the loss clips."""
        return {"clip": config.clip_param, "value_clip": config.vf_clip_param, "value_clip_mode": "rllib"}

    def _compute_fused_loss(
        self, module_id: str, config: Any, head: Head, inputs: Tensor, values: Tensor | None, columns: Any
    ) -> PPOLoss:
        entropy_coef, kl_coef = self._find_coefficients(module_id)
        old_inputs = columns[Columns.ACTION_DIST_INPUTS] if config.use_kl_loss else None
        compute: Callable[..., PPOLoss]
        if head.name == "gaussian":
            old_mean, old_log_std = (None, None) if old_inputs is None else old_inputs.chunk(2, dim=-1)
            compute = partial(gaussian_ppo_loss, *inputs.chunk(2, dim=-1), old_mean=old_mean, old_log_std=old_log_std)
        else:
            compute = partial(categorical_ppo_loss, inputs, nvec=head.nvec or None, old_logits=old_inputs)
        return compute(
            columns[Columns.ACTIONS],
            columns[Columns.ACTION_LOGP],
            columns[Postprocessing.ADVANTAGES],
            values=values,
            returns=None if values is None else columns[Postprocessing.VALUE_TARGETS],
            mask=columns.get(Columns.LOSS_MASK),
            value_coef=config.vf_loss_coeff,
            entropy_coef=entropy_coef,
            kl_coef=kl_coef if config.use_kl_loss else 0.0,
            backend=self._flags.backend,
            **self.choose_loss_options(config),
        )

    def _find_coefficients(self, module_id: str) -> tuple[Any, Any]:
        """Those of entropy and KL divergence, as they are now: numbers or tensors, of integers too."""
        entropy_coef = self.entropy_coeff_schedulers_per_module[module_id].get_current_value()
        kl_coef = self.curr_kl_coeffs_per_module[module_id]
        return as_coefficient(entropy_coef), as_coefficient(kl_coef)

    def _warm_up_loss(self, module_id: str, head: Head) -> None:
        """Compute the loss of two steps, so that no minibatch compiles anything. Slices of one are contiguous."""
        config = self.config.get_config_for_module(module_id)
        zeros = torch.zeros(2, device=self._device)
        inputs = zeros.new_zeros(2, head.num_inputs)
        num_actions = len(head.nvec) or 1
        indices = torch.zeros(2, num_actions, dtype=torch.int64, device=self._device)
        columns = {
            Columns.ACTION_DIST_INPUTS: inputs,
            Columns.ACTIONS: inputs[:, :1] if head.name == "gaussian" else indices if head.nvec else indices[:, 0],
            Columns.ACTION_LOGP: zeros,
            Postprocessing.ADVANTAGES: zeros,
            Postprocessing.VALUE_TARGETS: zeros,
            Columns.LOSS_MASK: torch.ones(2, dtype=torch.bool, device=self._device),
        }
        values = zeros.clone().requires_grad_() if self.uses_critic(config) else None
        with torch.enable_grad():
            inputs = inputs.clone().requires_grad_()
            loss = self._compute_fused_loss(module_id, config, head, inputs, values, columns).loss
            torch.autograd.grad(loss, inputs)

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Log the metrics of the last losses, and do what RLlib does after an update.

        Args:
            timesteps: Steps that were sampled and trained on.
        """
        self._log_losses()
        super().after_gradient_based_update(timesteps=timesteps)  # type: ignore[misc]

    def _log_losses(self) -> None:
        """Log the metrics of each module's last loss, which are all that RLlib's window keeps."""
        while self._last_losses:
            module_id, parts = self._last_losses.popitem()
            self.metrics.log_dict(self.build_loss_metrics(module_id, parts), key=module_id, window=1)

    def build_loss_metrics(self, module_id: str, parts: LossParts) -> dict[str, Any]:
        """What RLlib's loss logs of a module."""
        loss, values, columns = parts
        targets, mask = columns[Postprocessing.VALUE_TARGETS], columns.get(Columns.LOSS_MASK)
        one = 1.0 if mask is None else mask.sum() / mask.sum()  # RLlib's means over no slot at all are NaN
        return {
            POLICY_LOSS_KEY: loss.policy_loss * one,
            VF_LOSS_KEY: loss.value_loss if values is None else loss.value_loss * one,
            LEARNER_RESULTS_VF_LOSS_UNCLIPPED_KEY: compute_unclipped_value_loss(values, targets, mask),
            LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY: explained_variance(
                targets, targets.new_zeros(()) if values is None else values
            ),
            ENTROPY_KEY: loss.entropy * one,
            LEARNER_RESULTS_KL_KEY: loss.kl * one,
        }


STOCK_LEARNERS = (APPOTorchLearner, IMPALATorchLearner, PPOTorchLearner)


def as_coefficient(x: Any) -> Any:
    """A number as it is, a tensor of one in floating point: losses take no integers there."""
    return x.float() if isinstance(x, Tensor) else x


class OwnMethod(NamedTuple):
    """A method of a learner that is not the one we know."""

    name: str
    owner: type


def find_own_method(learner_class: type, names: Iterable[str], behind: type | None = None) -> OwnMethod | None:
    """Find a method of these names that is the user's: of a class that is neither of this package nor RLlib's learner.

    Args:
        learner_class: Class of the learner.
        names: Names of methods of RLlib's learner.
        behind: Look at classes behind this one alone, whose methods it goes around.
    """
    mro = learner_class.__mro__
    stock = next(base for base in mro if base in STOCK_LEARNERS).__mro__
    known = [base for base in mro if base in stock or base.__module__.partition(".")[0] == __package__]
    looked_at = mro if behind is None else mro[mro.index(behind) :]
    for name in names:
        methods = [vars(base)[name] for base in known if name in vars(base)]
        for base in looked_at:
            if base not in known and inspect.unwrap(vars(base).get(name, methods[0])) not in methods:
                return OwnMethod(name, base)  # Ray wraps those of remote learners
    return None


def describe_head(module: Any) -> Head | None:
    """The head of a module whose distributions of actions, in training and while acting, are one of those known."""
    space, kinds = module.action_space, find_distributions(module)
    if not kinds:
        return None
    if isinstance(space, Box) and len(space.shape) == 1 and all(kind is TorchDiagGaussian for kind in kinds):
        return Head("gaussian")
    if isinstance(space, Discrete) and all(kind is TorchCategorical for kind in kinds):
        return Head("categorical")
    if isinstance(space, MultiDiscrete) and space.nvec.ndim == 1:
        sizes = tuple(space.nvec.tolist())
        return Head("categorical", sizes) if all(is_multi_categorical(kind, sizes) for kind in kinds) else None
    return None


def find_distributions(module: Any) -> tuple[type, ...]:
    """A module's distributions of actions in training and while acting; empty if it has none."""
    try:
        return module.get_train_action_dist_cls(), module.get_exploration_action_dist_cls()
    except (NotImplementedError, ValueError):  # what RLlib's modules raise that have none
        return ()


def is_multi_categorical(kind: Any, sizes: tuple[int, ...]) -> bool:
    """Whether a class is RLlib's: with these sizes filled in, which makes a class of its own, and with nothing else."""
    is_partial = kind.__bases__ == (TorchMultiCategorical,) and kind.__module__ == Distribution.__module__
    return is_partial and tuple(kind._merge_kwargs().get("input_lens", ())) == sizes


def compute_unclipped_value_loss(values: Tensor | None, targets: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of (V − R)² over the steps that count; 0 without values."""
    if values is None:
        return targets.new_zeros(())
    return compute_masked_mean(torch.square(values - targets), mask)


def compute_masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the slots that count, whatever stands in the others; over all without a mask."""
    return x.mean() if mask is None else torch.where(mask, x, 0.0).sum() / mask.sum()


# -- minibatches ------------------------------------------------------------------------------------------------------


class SlicedMinibatches:
    """The minibatches of RLlib's `MiniBatchCyclicIterator`, draw by draw, as plain slices of the columns.

    RLlib builds three `SampleBatch` objects for each, and maps over the columns' names each time.
    """

    def __init__(self, iterator: Any, may_share: Callable[[], bool] = lambda: False) -> None:
        """Take over what an iterator, which has not begun, would do.

        Args:
            iterator: A `MiniBatchCyclicIterator` for which `can_slice_minibatches` holds.
            may_share: Whether the next minibatch may be views of the batch: what it is for changes it nowhere.
        """
        self.iterator, self.may_share = iterator, may_share
        self.cycles = {
            name: BatchCycle(batch, iterator._minibatch_size, iterator._shuffle_batch_per_epoch)
            for name, batch in iterator._batch.policy_batches.items()
        }

    def __iter__(self) -> Iterator[MultiAgentBatch]:
        """Yield minibatches until every module's batch was covered in all epochs, or as many as were asked for."""
        num_minibatches, count = self.iterator._num_total_minibatches, 0
        env_steps = len(self.iterator._batch)
        while count < num_minibatches or (not num_minibatches and self.count_epochs() < self.iterator._num_epochs):
            share = self.may_share()
            yield MultiAgentBatch({name: cycle.draw_minibatch(share) for name, cycle in self.cycles.items()}, env_steps)
            count += 1

    def count_epochs(self) -> int:
        """How often the batches of all modules were covered."""
        return min(cycle.num_epochs for cycle in self.cycles.values())


class BatchCycle:
    """The rows of one module's batch, over and over."""

    def __init__(self, batch: SampleBatch, minibatch_size: int, shuffle: bool) -> None:
        """Begin with the rows in their order."""
        self.columns, self.count = dict(batch), len(batch)
        self.minibatch_size, self.shuffle = minibatch_size, shuffle
        self.start = self.num_epochs = 0

    def draw_minibatch(self, share: bool) -> SampleBatch:
        """The next rows, copied unless they may be shared; where the batch ends, it is shuffled and begins again."""
        parts, missing = [], self.minibatch_size
        while self.start + missing >= self.count:
            parts.append(self.slice_columns(self.start, self.count))
            missing -= self.count - self.start
            self.start = 0
            self.num_epochs += 1
            if self.shuffle:
                self.shuffle_columns()
        if missing:
            parts.append(self.slice_columns(self.start, self.start + missing))
            self.start += missing
        if len(parts) > 1:
            return SampleBatch(tree.map_structure(lambda *rows: torch.cat(rows), *parts))
        return SampleBatch(parts[0] if share else map_columns(torch.clone, parts[0]))

    def slice_columns(self, first: int, last: int) -> dict[str, Any]:
        """These rows of all columns."""
        return map_columns(lambda column: column[first:last], self.columns)

    def shuffle_columns(self) -> None:
        """Draw a permutation as RLlib does, and put the rows in its order."""
        permutation = torch.from_numpy(np.random.permutation(self.count))  # noqa: NPY002
        device = tree.flatten(self.columns)[0].device
        rows = permutation.to(device)
        self.columns = map_columns(lambda column: column.index_select(0, rows), self.columns)


def map_columns(function: Callable[[Tensor], Tensor], columns: dict[str, Any]) -> dict[str, Any]:
    """Apply a function to every tensor of possibly nested columns."""
    return {
        name: function(column) if isinstance(column, Tensor) else tree.map_structure(function, column)
        for name, column in columns.items()
    }


def can_slice_minibatches(iterator: Any) -> bool:
    """Whether minibatches are rows of tensors, of modules without a state."""
    return type(iterator) is MiniBatchCyclicIterator and all(
        len(batch) > 0
        and SampleBatch.SEQ_LENS not in batch
        and all(isinstance(x, Tensor) and x.shape[:1] == (len(batch),) for x in tree.flatten(dict(batch)))
        for batch in iterator._batch.policy_batches.values()
    )


# -- metrics ----------------------------------------------------------------------------------------------------------


class RecordingLogger:
    """A `MetricsLogger` that remembers what was logged through it."""

    def __init__(self, metrics: Any) -> None:
        """Log through these metrics."""
        self.metrics = metrics
        self.calls: list[tuple[Any, Any, dict[str, Any]]] = []

    def log_value(self, key: Any, value: Any, **options: Any) -> None:
        """Log a value, and remember it."""
        self.calls.append((key, value, options))
        self.metrics.log_value(key, value, **options)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the logger's."""
        return getattr(self.metrics, name)


@dataclass
class LoggedSteps:
    """What was logged of a minibatch, and how many of the same sizes came after it."""

    sizes: Any
    calls: list[tuple[Any, Any, dict[str, Any]]]
    num_repeats: int = 0


class DeferredMetricsMixin:
    """Log once per update what RLlib logs for every minibatch, with the same results.

    These are metrics of which RLlib keeps the last minibatch's value alone, and sums over minibatches of one size.
    """

    _flags: Any
    metrics: Any

    def __init__(self, **kwargs: Any) -> None:
        """Create the learner, which is not built yet.

        Args:
            **kwargs: Passed on to RLlib.
        """
        super().__init__(**kwargs)
        self._last_batch: dict[str, Any] = {}
        self._logged_steps: list[LoggedSteps] = []

    def _compute_off_policyness(self, batch: dict[str, Any]) -> None:
        if self._flags.enabled and self._flags.deferred_metrics:
            self._last_batch.update(batch)
        else:
            super()._compute_off_policyness(batch)  # type: ignore[misc]

    def _log_steps_trained_metrics(self, batch: MultiAgentBatch) -> None:
        sizes = (batch.env_steps(), {name: len(x) for name, x in batch.policy_batches.items()})
        if self._logged_steps and self._logged_steps[-1].sizes == sizes:
            self._logged_steps[-1].num_repeats += 1
            return
        recorder = RecordingLogger(self.metrics)
        self.metrics = recorder
        try:
            super()._log_steps_trained_metrics(batch)  # type: ignore[misc]
        finally:
            self.metrics = recorder.metrics
        if self._flags.enabled and self._flags.deferred_metrics:
            self._logged_steps.append(LoggedSteps(sizes, recorder.calls))

    def _log_repeated_steps(self) -> None:
        """Log the minibatches that were of the size of the one before: sums grow, and so do means of several sizes."""
        has_several_sizes = len(self._logged_steps) > 1
        for logged in self._logged_steps:
            for key, value, options in logged.calls if logged.num_repeats else ():
                if options.get("reduce") in ("sum", "lifetime_sum"):
                    self.metrics.log_value(key, value * logged.num_repeats, **options)
                elif options.get("reduce") == "mean" and has_several_sizes:
                    for _ in range(logged.num_repeats):
                        self.metrics.log_value(key, value, **options)
        self._logged_steps = []

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Log what is left of the update's metrics, and do what RLlib does after it.

        Args:
            timesteps: Steps that were sampled and trained on.
        """
        self._log_repeated_steps()
        stock: Any = super()
        if self._last_batch:
            stock._compute_off_policyness(self._last_batch)
            self._last_batch = {}
        stock.after_gradient_based_update(timesteps=timesteps)


# -- optimizers -------------------------------------------------------------------------------------------------------


class FusedUpdateMixin(DeferredMetricsMixin):
    """Slice minibatches, check all gradients at once, and step all parameters at once.

    Put it in front of a `TorchLearner`.
    """

    _flags: Any
    _grad_scalers: Any
    _lr_scheduler_classes: Any
    _module_optimizers: Any
    _params: Any
    config: Any
    module: Any

    def find_head(self, module_id: str) -> Head | None:
        """The head of a module, if its loss is computed in one pass."""
        return None

    def describe_losses(self) -> str:
        """What computes the losses of all modules, in words."""
        own = find_own_method(type(self), ("compute_losses", "compute_loss_for_module"))
        if own is not None:
            return f"the loss of {own.owner.__name__}, which may call the fused one"
        phrases = []
        for module_id, module in self.module.items():
            kinds = find_distributions(module.unwrapped())
            if is_self_supervised(module):
                phrases.append(f"the loss of the module {module_id} ({type(module.unwrapped()).__name__})")
            elif self.find_head(module_id) is not None:
                phrases.append(f"the fused loss of {module_id}")
            elif kinds:
                phrases.append(f"RLlib's loss of {module_id} ({kinds[0].__name__})")
        return ", ".join(phrases)

    def list_trainable_modules(self) -> list[str]:
        """Names of modules with a distribution of actions. Others, such as one that acts at random, have no loss."""
        return [name for name, module in self.module.items() if find_distributions(module.unwrapped())]

    def register_optimizer(self, *, optimizer: Optimizer, **kwargs: Any) -> None:
        """Register an optimizer, and let it step all of its parameters at once.

        Args:
            optimizer: The optimizer.
            **kwargs: Passed on to RLlib.
        """
        super().register_optimizer(optimizer=optimizer, **kwargs)  # type: ignore[misc]
        if self._flags.enabled and self._flags.fused_optimizer:
            fuse_optimizer(optimizer)

    def apply_gradients(self, gradients_dict: dict[Any, Tensor]) -> None:
        """Step the optimizers, if all gradients are finite; otherwise RLlib decides.

        Args:
            gradients_dict: Gradients by parameters.
        """
        behind = find_own_method(type(self), ("apply_gradients",), behind=FusedUpdateMixin)
        plain = self._grad_scalers is None and self._lr_scheduler_classes is None and behind is None
        wanted = self._flags.enabled and self._flags.fused_optimizer and plain
        if not wanted or not (self.config.torch_skip_nan_gradients or are_finite([*gradients_dict.values()])):
            super().apply_gradients(gradients_dict)  # type: ignore[misc]
            return
        self._step_optimizers(gradients_dict)

    def _step_optimizers(self, gradients_dict: dict[Any, Tensor]) -> None:
        for reference, gradient in gradients_dict.items():
            self._params[reference].grad = gradient
        stock: Any = self
        for module_id, names in self._module_optimizers.items():
            for name in names:
                stock.get_optimizer(module_id, name).step()

    def _get_clip_function(self) -> Callable[..., Tensor | None]:
        stock: Any = super()
        clip: Callable[..., Tensor | None] = stock._get_clip_function()
        wanted = self._flags.enabled and self._flags.fused_optimizer and clip is clip_gradients
        return clip_gradients_at_once if wanted else clip

    def _create_iterator_if_necessary(self, **kwargs: Any) -> Any:
        stock: Any = super()
        iterator = stock._create_iterator_if_necessary(**kwargs)
        if self._flags.enabled and self._flags.sliced_minibatches and can_slice_minibatches(iterator):
            return SlicedMinibatches(iterator, self._copies_minibatches)
        return iterator

    def _copies_minibatches(self) -> bool:
        """Whether a step works on a copy of its minibatch."""
        return False


def is_self_supervised(module: Any) -> bool:
    """Whether a module computes its loss."""
    return isinstance(module.unwrapped(), SelfSupervisedLossAPI)


def are_finite(gradients: list[Tensor]) -> Tensor:
    """Whether all gradients are finite, on their device; False too if their norm overflows."""
    if not gradients:
        return torch.tensor(True)
    return torch.isfinite(torch.stack(torch._foreach_norm(gradients)).sum())


def clip_gradients_at_once(
    gradients_dict: dict[Any, Tensor | None], *, grad_clip: float | None = None, grad_clip_by: str = "value"
) -> Tensor | None:
    """Clip gradients in place as RLlib's `clip_gradients` does; by norms, in few operations and without a read.

    Args:
        gradients_dict: Gradients by parameters, None where there is none.
        grad_clip: What to clip at; None does not clip.
        grad_clip_by: ``"value"``, ``"norm"`` or ``"global_norm"``.

    Returns:
        The global norm, if gradients were clipped by it.
    """
    gradients = [gradient.detach() for gradient in gradients_dict.values() if gradient is not None]
    if grad_clip is None or grad_clip_by not in ("norm", "global_norm") or not gradients:
        norm: Tensor | None = clip_gradients(gradients_dict, grad_clip=grad_clip, grad_clip_by=grad_clip_by)
        return norm
    limits = {"neginf": -10e8, "posinf": 10e8}  # RLlib's
    norms = torch.stack(torch._foreach_norm(gradients)).nan_to_num(**limits)
    if grad_clip_by == "norm":
        torch._foreach_mul_(gradients, list(torch.where(norms > grad_clip, grad_clip / norms, 1.0)))
        return None
    norm = torch.linalg.vector_norm(norms).nan_to_num(**limits)
    torch._foreach_mul_(gradients, (grad_clip / (norm + 1e-6)).clamp(max=1.0))
    return norm
