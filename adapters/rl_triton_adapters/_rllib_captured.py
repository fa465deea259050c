"""RLlib: the minibatch step of PPO's learner captured in a CUDA graph. `rllib.enable_triton` turns it on.

Loss, gradients and optimizers are those of `_rllib_updates`; between minibatches nothing is read from the device.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from ray.rllib.policy.sample_batch import SampleBatch
from torch import Tensor
from torch.utils import _pytree as pytree

from rl_triton_adapters._rllib_updates import LossParts, are_finite, find_own_method
from rl_triton_core.capture import CapturedStep, use_capture_stream

__all__ = ["CapturedUpdateMixin"]

logger = logging.getLogger("ray.rllib.rl_triton")
STEP = (
    "_update",
    "_uncompiled_update",
    "compute_losses",
    "compute_loss_for_module",
    "compute_gradients",
    "postprocess_gradients",
    "postprocess_gradients_for_module",
    "apply_gradients",
)
"""What a step calls. A learner with one of its own may do there what no graph can repeat."""


class StepResults(NamedTuple):
    """What a step returns, in the graph's memory: the next one overwrites it."""

    losses: dict[str, Tensor]
    parts: dict[str, LossParts]
    logged: dict[Any, Tensor]


class StepMetrics:
    """Keeps what a step logs, for the metrics of which the last value is kept."""

    def __init__(self) -> None:
        """Nothing is logged yet."""
        self.values: dict[Any, Tensor] = {}

    def log_value(self, key: Any, value: Any, **options: Any) -> None:
        """Keep a value.

        Raises:
            TypeError: It is not one of which RLlib keeps the last alone.
        """
        if options != {"window": 1} or not isinstance(value, Tensor):
            raise TypeError(f"metric {key!r} of a captured step: got {value!r} with {options}, expected window=1")
        self.values[key] = value


class CapturedUpdateMixin:
    """Capture the step of one minibatch: forward pass, loss, gradients, clipping, optimizers.

    Put it in front of `FusedLossMixin`. What stands against it, see `find_obstacle`, leaves the steps as they were.
    """

    _flags: Any
    _device: Any
    _grad_scalers: Any
    _last_losses: dict[str, LossParts]
    _lr_scheduler_classes: Any
    _named_optimizers: Any
    _torch_compile_complete_update: bool
    _torch_compile_forward_train: bool
    config: Any
    metrics: Any
    module: Any

    def __init__(self, **kwargs: Any) -> None:
        """Create the learner, which is not built yet.

        Args:
            **kwargs: Passed on to RLlib.
        """
        super().__init__(**kwargs)
        self._step: CapturedStep | None = None
        self._coefficients: dict[str, tuple[Any, Any]] = {}
        self._results: StepResults | None = None
        self._num_not_finite = torch.zeros(())

    def find_obstacle(self) -> str:
        """Why steps are not captured, besides what `CapturedStep` says; empty if nothing stands against it."""
        learner: Any = self
        flags, modules = self._flags, learner.list_trainable_modules()
        own = find_own_method(type(self), CapturedUpdateMixin, STEP)
        obstacles = {
            "switched off": not (flags.enabled and flags.captured_update),
            "fused losses, metrics once per update and fused optimizers are part of it": not (
                flags.fused_loss and flags.deferred_metrics and flags.fused_optimizer
            ),
            f"{own.name if own else 'nothing'} is the learner's own": own is not None,
            "modules are compiled": self._torch_compile_complete_update or self._torch_compile_forward_train,
            "gradients are scaled": self._grad_scalers is not None,
            "learning rates have schedulers of PyTorch": self._lr_scheduler_classes is not None,
            "stateful modules have minibatches of several shapes": any(self.module[x].is_stateful() for x in modules),
            "the loss is RLlib's": any(learner.find_head(x) is None for x in modules),
        }
        return next((reason for reason, applies in obstacles.items() if applies), "")

    def _use_capture_stream(self) -> AbstractContextManager[None]:
        """Where the modules of several learners are made, so that their gradients can be averaged in a graph."""
        return use_capture_stream(self._device if self._flags.enabled and self._flags.captured_update else "cpu")

    def _make_modules_ddp_if_necessary(self) -> None:
        with self._use_capture_stream():
            super()._make_modules_ddp_if_necessary()  # type: ignore[misc]

    def add_module(self, **kwargs: Any) -> Any:
        """Add a module, whose gradients can be averaged in a graph.

        Args:
            **kwargs: As of RLlib's learner.
        """
        with self._use_capture_stream():
            return super().add_module(**kwargs)  # type: ignore[misc]

    def find_step(self) -> CapturedStep:
        """The step of the modules and optimizers as they are now; it says why it is not captured."""
        modules = [x for name, x in self.module.items() if isinstance(x, torch.nn.Module)]
        optimizers, known = list(self._named_optimizers.values()), self._step
        if known is None or known.modules != modules or known.optimizers != optimizers:
            if known is not None:
                known.reset()  # the optimizers are prepared once
            obstacle = self.find_obstacle()
            self._num_not_finite = torch.zeros((), device=self._device)
            self._step = known = CapturedStep(
                self._make_step,
                modules=modules,
                optimizers=optimizers,
                state=[self._num_not_finite],
                enabled=False if obstacle else None,
            )
            known.reason = obstacle or known.reason
        return known

    def describe_step(self) -> str:
        """Whether updates are captured, in words."""
        reason = self.find_step().reason
        return f"updates are not captured: {reason}" if reason else "updates are captured"

    def _copies_minibatches(self) -> bool:
        """Whether a step works on a copy of its minibatch, as a graph does."""
        return self._step is not None and not self._step.reason

    def _update(self, batch: dict[str, Any]) -> tuple[Any, Any, Any]:
        step = self.find_step()
        if step.reason:
            stock: Any = super()
            results: tuple[Any, Any, Any] = stock._update(batch)
            return results
        self._compute_off_policyness(batch)  # type: ignore[attr-defined]
        coefficients = {name: super(CapturedUpdateMixin, self)._find_coefficients(name) for name in batch}  # type: ignore[misc]
        self._results = step({name: dict(columns) for name, columns in batch.items()}, coefficients)
        losses = self._results.losses
        if self._reads_metrics():
            self._log_results()
            self._log_losses()  # type: ignore[attr-defined]
        return {}, losses, {}

    def _reads_metrics(self) -> bool:
        reads: bool = super()._reads_metrics()  # type: ignore[misc]
        return reads and not isinstance(self.metrics, StepMetrics)

    def _make_step(self, batch: dict[str, Any], coefficients: dict[str, tuple[Any, Any]]) -> StepResults:
        """Update the modules with one minibatch."""
        learner: Any = self
        metrics, self.metrics, self._coefficients = self.metrics, StepMetrics(), coefficients
        try:
            minibatch = {name: SampleBatch(columns) for name, columns in batch.items()}
            losses = learner.compute_losses(fwd_out=self.module.forward_train(minibatch), batch=minibatch)
            self.apply_gradients(learner.postprocess_gradients(learner.compute_gradients(losses)))
            parts = {name: x._replace(columns=dict(x.columns)) for name, x in self._last_losses.items()}
            self._last_losses = {}
            detached = {name: loss.detach() for name, loss in losses.items()}
            return StepResults(detached, parts, self.metrics.values)
        finally:
            self.metrics, self._coefficients = metrics, {}

    def _find_coefficients(self, module_id: str) -> tuple[Any, Any]:
        """Those of entropy and KL divergence: inputs of the step, since they change between updates."""
        found: tuple[Any, Any] = self._coefficients.get(module_id) or super()._find_coefficients(module_id)  # type: ignore[misc]
        return found

    def apply_gradients(self, gradients_dict: dict[Any, Tensor]) -> None:
        """Step the optimizers; in a captured step, without reading whether gradients are finite.

        Args:
            gradients_dict: Gradients by parameters.
        """
        if not isinstance(self.metrics, StepMetrics):
            super().apply_gradients(gradients_dict)  # type: ignore[misc]
            return
        gradients = [x for x in gradients_dict.values() if x is not None]
        if not self.config.torch_skip_nan_gradients:
            self._num_not_finite += ~are_finite(gradients)
            for gradient in gradients:
                gradient.nan_to_num_()  # what RLlib does with those that are not finite, and no change to others
        self._step_optimizers(gradients_dict)  # type: ignore[attr-defined]

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Log what the last captured step logged, and do what RLlib does after an update.

        Args:
            timesteps: Steps that were sampled and trained on.
        """
        self._log_results()
        if self._num_not_finite.item():
            logger.warning("gradients of %d minibatches were not finite", self._num_not_finite.item())
            self._num_not_finite.zero_()
        super().after_gradient_based_update(timesteps=timesteps)  # type: ignore[misc]

    def _log_results(self) -> None:
        """Log what the last captured step logged, and keep its losses."""
        if self._results is not None:
            results = pytree.tree_map_only(Tensor, torch.clone, self._results)  # replays overwrite the graph's memory
            self._results = None
            self._last_losses.update(results.parts)
            for key, value in results.logged.items():
                self.metrics.log_value(key, value, window=1)
