"""RLlib: the step of a learner for one minibatch captured in a CUDA graph. `rllib.enable_triton` turns it on.

Loss, gradients and optimizers are those of `_rllib_updates`; between minibatches nothing is read from the device.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, ClassVar, NamedTuple

import torch
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.policy.sample_batch import SampleBatch
from torch import Tensor
from torch.utils import _pytree as pytree

from rl_triton_adapters._rllib_updates import (
    FusedLossMixin,
    LossParts,
    are_finite,
    find_own_method,
    is_self_supervised,
)
from rl_triton_core.capture import CapturedStep, hold_captures, is_input, use_capture_stream

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
ENTROPY, KL = "entropy_coeff_schedulers_per_module", "curr_kl_coeffs_per_module"
"""Where learners keep the coefficients of entropy and, if they have one, KL divergence."""


class StepResults(NamedTuple):
    """What a step returns, in the graph's memory: the next one overwrites it."""

    losses: dict[str, Tensor]
    parts: dict[str, LossParts]
    logged: dict[Any, Tensor]


class StepMetrics:
    """Keeps what a step logs, for the metrics of which the last value is kept. Other threads log as before."""

    def __init__(self, metrics: Any) -> None:
        """Nothing is logged yet.

        Args:
            metrics: The learner's.
        """
        self.metrics, self.thread = metrics, threading.get_ident()
        self.values: dict[Any, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        """All else that the learner's metrics do."""
        return getattr(self.metrics, name)

    def log_value(self, key: Any, value: Any, **options: Any) -> None:
        """Keep a value.

        Raises:
            TypeError: It is not one of which RLlib keeps the last alone.
        """
        if threading.get_ident() != self.thread:
            self.metrics.log_value(key, value, **options)
            return
        if options != {"window": 1} or not isinstance(value, Tensor):
            raise TypeError(f"metric {key!r} of a captured step: got {value!r} with {options}, expected window=1")
        self.values[key] = value

    def log_dict(self, values: dict[Any, Any], *, key: Any = None, **options: Any) -> None:
        """Keep the values of a module."""
        if threading.get_ident() != self.thread:
            self.metrics.log_dict(values, key=key, **options)
            return
        for name, value in values.items():
            self.log_value((key, name), value, **options)


class GivenCoefficient(NamedTuple):
    """In the place of a coefficient's scheduler while a step runs."""

    value: Any

    def get_current_value(self) -> Any:
        """The value that the step was given."""
        return self.value


def hold_captures_in(name: str) -> Callable[..., Any]:
    """A method of `CapturedUpdateMixin` that is that of the learner behind it, while no step is captured.

    A capture makes steps and takes them back, and other threads than the learner's read and set its state.
    """

    @wraps(getattr(TorchLearner, name))
    def call_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with hold_captures():
            return getattr(super(CapturedUpdateMixin, self), name)(*args, **kwargs)

    return call_method


class CapturedUpdateMixin:
    """Capture the step of one minibatch: forward pass, loss, gradients, clipping, optimizers.

    Put it in front of `FusedLossMixin`, or of the learner whose loss it is. What stands against it, see
    `find_obstacle`, leaves the steps as they were.
    """

    has_varying_batches: ClassVar[bool] = False
    """Whether batches have as many slots as their episodes make them, so that each learner has shapes of its own."""
    max_graphs: ClassVar[int] = 32
    """How many shapes of batches have a graph."""

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
        self._results: StepResults | None = None
        self._num_not_finite = torch.zeros(())

    def wants_capture(self) -> bool:
        """Whether the flags ask for it."""
        return bool(self._flags.enabled and self._flags.captured_update)

    def find_obstacle(self) -> str:
        """Why steps are not captured, besides what `CapturedStep` says; empty if nothing stands against it."""
        flags, fused = self._flags, self if isinstance(self, FusedLossMixin) else None
        learner: Any = self
        modules = [*self.module.keys()] if fused is None else learner.list_trainable_modules()
        own = find_own_method(type(self), STEP)
        obstacles = {
            "switched off": not self.wants_capture(),
            "fused losses, metrics once per update and fused optimizers are part of it": not (
                (flags.fused_loss or fused is None) and flags.deferred_metrics and flags.fused_optimizer
            ),
            f"{own.name if own else 'nothing'} is the learner's own": own is not None,
            "modules are compiled": self._torch_compile_complete_update or self._torch_compile_forward_train,
            "gradients are scaled": self._grad_scalers is not None,
            "learning rates have schedulers of PyTorch": self._lr_scheduler_classes is not None,
            "stateful modules have minibatches of several shapes": any(self.module[x].is_stateful() for x in modules),
            "several learners have batches of different shapes": self.has_varying_batches
            and self.config.num_learners > 1,
            "a module has a loss of its own": any(is_self_supervised(x) for _, x in self.module.items()),
            "the loss is RLlib's": fused is not None and any(fused.find_head(x) is None for x in modules),
        }
        return next((reason for reason, applies in obstacles.items() if applies), "")

    def _use_capture_stream(self) -> AbstractContextManager[None]:
        """Where the modules of several learners are made, so that their gradients can be averaged in a graph."""
        is_wanted = self.wants_capture() and self.config.num_learners > 1 and not self.has_varying_batches
        return use_capture_stream(self._device if is_wanted else "cpu")

    def _make_modules_ddp_if_necessary(self) -> None:
        with self._use_capture_stream():
            super()._make_modules_ddp_if_necessary()  # type: ignore[misc]

    def add_module(self, **kwargs: Any) -> Any:
        """Add a module, whose gradients can be averaged in a graph.

        Args:
            **kwargs: As of RLlib's learner.
        """
        with self._use_capture_stream():  # which holds captures
            return super().add_module(**kwargs)  # type: ignore[misc]

    remove_module = hold_captures_in("remove_module")
    get_state, set_state = hold_captures_in("get_state"), hold_captures_in("set_state")
    save_to_path, restore_from_path = hold_captures_in("save_to_path"), hold_captures_in("restore_from_path")

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
                max_graphs=self.max_graphs,
            )
            known.reason = obstacle or known.reason
        return known

    def describe_step(self) -> str:
        """Whether updates are captured, in words."""
        reason = self.find_step().reason
        return f"updates are not captured: {reason}" if reason else "updates are captured"

    def _copies_minibatches(self) -> bool:
        """Whether a step works on a copy of its minibatch, as a graph does."""
        return self._is_captured()

    def _is_captured(self) -> bool:
        """Whether steps are captured, as far as is known."""
        return self._step is not None and not self._step.reason

    def _update(self, batch: dict[str, Any]) -> tuple[Any, Any, Any]:
        step = self.find_step()
        if step.reason or not is_capturable(batch, step):
            self._log_results()  # of captured steps before it, whose metrics this one's replace
            stock: Any = super()
            results: tuple[Any, Any, Any] = stock._update(batch)
            return results
        self._compute_off_policyness(batch)  # type: ignore[attr-defined]
        coefficients = {name: list_coefficients(self, name) for name in batch}
        self._results = step({name: dict(columns) for name, columns in batch.items()}, coefficients)
        losses = self._results.losses
        if self.has_varying_batches:  # RLlib keeps them until after other updates, whose graphs share the memory
            losses = {name: loss.clone() for name, loss in losses.items()}
        if self._reads_metrics():
            self._log_results()
            if isinstance(self, FusedLossMixin):
                self._log_losses()
        return {}, losses, {}

    def _reads_metrics(self) -> bool:
        """Whether a method is the learner's own that may read metrics of a loss, where RLlib logs them."""
        if isinstance(self.metrics, StepMetrics):
            return False
        if isinstance(self, FusedLossMixin):
            return super()._reads_metrics()  # type: ignore[misc, no-any-return]
        return find_own_method(type(self), ("after_gradient_based_update",)) is not None

    def _make_step(self, batch: dict[str, Any], coefficients: dict[str, dict[str, Any]]) -> StepResults:
        """Update the modules with one minibatch."""
        learner: Any = self
        with self._give(coefficients) as metrics:
            minibatch = {name: SampleBatch(columns) for name, columns in batch.items()}
            losses = learner.compute_losses(fwd_out=self.module.forward_train(minibatch), batch=minibatch)
            self.apply_gradients(learner.postprocess_gradients(learner.compute_gradients(losses)))
            last = getattr(self, "_last_losses", {})
            parts = {name: x._replace(columns=dict(x.columns)) for name, x in last.items()}
            last.clear()
            detached = {name: loss.detach() for name, loss in losses.items()}
            return StepResults(detached, parts, metrics.values)

    @contextmanager
    def _give(self, coefficients: dict[str, dict[str, Any]]) -> Iterator[StepMetrics]:
        """Inside, a loss finds these coefficients where RLlib keeps them, and logs to what is yielded."""
        metrics = StepMetrics(self.metrics)
        given: dict[str, Any] = {"metrics": metrics}
        for module_id, values in coefficients.items():
            for place, value in values.items():
                given.setdefault(place, {})[module_id] = value if place == KL else GivenCoefficient(value)
        kept = {name: getattr(self, name) for name in given}
        vars(self).update(given)
        try:
            yield metrics
        finally:
            vars(self).update(kept)

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
        if self._is_captured() and self._num_not_finite.item():
            logger.warning("gradients of %d minibatches were not finite", self._num_not_finite.item())
            self._num_not_finite.zero_()
        super().after_gradient_based_update(timesteps=timesteps)  # type: ignore[misc]

    def _log_results(self) -> None:
        """Log what the last captured step logged, and keep its losses."""
        if self._results is not None:
            results = pytree.tree_map_only(Tensor, torch.clone, self._results)  # replays overwrite the graph's memory
            self._results = None
            if results.parts:
                self._last_losses.update(results.parts)
            for key, value in results.logged.items():
                self.metrics.log_value(key, value, window=1)


def is_capturable(batch: dict[str, Any], step: CapturedStep) -> bool:
    """Whether a batch has only what a graph can take; a warning names columns of objects or text, if not."""
    other = [
        name
        for columns in batch.values()
        for name, x in columns.items()
        if not all(map(is_input, pytree.tree_leaves(x)))
    ]
    if other:
        step.warn_once(f"the batch has columns that are no tensors: {', '.join(other)}")
    return not other


def list_coefficients(learner: Any, module_id: str) -> dict[str, Any]:
    """List a module's coefficients, inputs of a step since they change between updates, by where they are kept."""
    found = {ENTROPY: learner.entropy_coeff_schedulers_per_module[module_id].get_current_value()}
    return found | ({KL: learner.curr_kl_coeffs_per_module[module_id]} if hasattr(learner, KL) else {})
