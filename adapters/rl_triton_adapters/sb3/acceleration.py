"""Stable-Baselines3: what algorithms with less work per step have in common.

A new one derives from `AcceleratedMixin` and the stock algorithm, and says what one step and one update are:

    class TritonA2C(AcceleratedMixin, A2C):
        def _make_step(self, indices): ...  # one gradient step: the tensors that are logged, stacked
        def _make_updates(self, update): ...  # all steps of `train`, and the logs
"""

from typing import Any, ClassVar

import torch

from rl_triton_adapters.common.check import with_check
from rl_triton_adapters.common.optimizers import clip_gradients, fused
from rl_triton_adapters.common.overrides import find_own, list_stock
from rl_triton_adapters.common.switch import check_enabled, find_off_switch
from rl_triton_adapters.sb3.acting import ActingMixin
from rl_triton_adapters.sb3.base import DEVICES, PACKAGES, AcceleratedAlgorithm, replace_methods
from rl_triton_adapters.sb3.buffers import rollout_buffer_class_for
from rl_triton_adapters.sb3.compiled import compile_update
from rl_triton_adapters.sb3.modes import TrainingModes
from rl_triton_adapters.sb3.policies import detach_distribution
from rl_triton_adapters.sb3.rollout import RolloutMixin
from rl_triton_core.capture import CapturedStep


class AcceleratedMixin(RolloutMixin, ActingMixin):
    """Update and act with fewer operations; on a GPU, with captured ones.

    Put it in front of an on-policy algorithm. Where `is_accelerated` is False, that algorithm's own methods run, and
    `describe` says why.
    """

    sde_devices: ClassVar[tuple[str, ...]] = DEVICES
    read_settings: ClassVar[tuple[str, ...]] = ("ent_coef", "vf_coef", "max_grad_norm", "normalize_advantage")
    transient: ClassVar[tuple[str, ...]] = (
        *AcceleratedAlgorithm.transient,
        *("_compiled", "_asks", "_rollout", "_parameters", "_clip_ranges", "_chooses_buffer"),
    )

    _clip_ranges: dict[str, Any]
    _parameters: list[torch.Tensor]

    def _setup_model(self) -> None:
        """Choose the buffer, where none was asked for, for the model's life only: checkpoints are stock ones."""
        self.enabled = check_enabled(self.enabled)  # `load` has set it
        kwargs = dict(self.rollout_buffer_kwargs)
        self._chooses_buffer = self.rollout_buffer_class is None
        if self._chooses_buffer:
            kwargs.pop("backend", None)  # of ours alone
            if self.enabled and not find_off_switch():
                self.rollout_buffer_class = rollout_buffer_class_for(self.observation_space, type(self), verbose=0)
            else:
                self.rollout_buffer_kwargs = kwargs
        super()._setup_model()
        self.rollout_buffer_kwargs = kwargs
        if self.device.type == "cpu" and not self.find_obstacle():
            compile_update(self)

    def _maybe_recommend_cpu(self, *args: Any, **kwargs: Any) -> None:
        """Leave the advice to train on a CPU to what trains as the stock algorithm."""
        if self.find_obstacle():
            super()._maybe_recommend_cpu(*args, **kwargs)

    def find_obstacle(self) -> str:
        """As for all algorithms; a buffer may make minibatches of its own, or rounding decide where an update stops."""
        buffer, kl = self.rollout_buffer, getattr(self, "target_kl", None)
        is_rounded = not (kl is None or kl > torch.finfo(torch.float32).eps)
        stock = list_stock(type(buffer), "get", (*PACKAGES, "rl_triton_adapters"))
        reason = super().find_obstacle() or find_own([buffer], stock, PACKAGES)
        return reason or f"a target_kl of {kl} is left to rounding" * is_rounded

    def _forget_inputs(self) -> None:
        self._rollout, self._modes = {}, TrainingModes(self.policy)

    @with_check
    def train(self) -> None:
        """Update the policy, as the stock algorithm does."""
        update = self._find_update()
        if self._update.stock or not self._can_update():
            self._train_as_stock(update)
            return
        self._update.keep_settings(self._list_settings())
        self._modes.set_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        answers = self._ask_schedules()
        if answers:
            answers["_update_learning_rate"] = lambda _: None  # as the mode, they have been set
            with replace_methods(self.policy, set_training_mode=lambda _: None), replace_methods(self, **answers):
                self._train_as_stock(update)
            return
        self._compiled = self._find_compiled()[0] if update.reason else None
        self._parameters = list(self.policy.parameters())
        try:
            self._copy_rollout()
            if self.use_sde:
                detach_distribution(self.policy)
            update.resume()
            with fused([self.policy.optimizer] if update.reason and self._compiled is None else []):
                self._make_updates(update)
        finally:
            if update.reason:  # no graph reads it
                self._rollout = {}

    def _train_as_stock(self, update: CapturedStep) -> None:
        """Update the policy by the stock algorithm's own method."""
        update.reset()
        self._rollout = {}
        super().train()

    def _can_update(self) -> bool:
        """Whether this update's rollout, and what is around it, are such that our steps are those of the stock one."""
        return torch.is_grad_enabled()

    def _ask_schedules(self) -> dict[str, Any]:
        """Ask for what an update depends on, once; the answers, as attributes, if the stock update has to be made."""
        return {}

    def _make_updates(self, update: CapturedStep) -> None:
        """Make all steps with the rollout, captured where that is possible, and log what the stock algorithm logs."""
        raise NotImplementedError

    def _step_optimizer(self, loss: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
        """Make a step of the optimizer, with clipped gradients, unless the update stops before; whether it has stopped.

        That and `stops` are on the device.
        """
        step = self._update.step
        assert step is not None
        if not step.reason:
            step.stop_if(stops)
            stops = step.stop
        elif stops:
            return stops
        self.policy.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_gradients(self._parameters, self.max_grad_norm)
        self.policy.optimizer.step()
        return stops

    def _check_minibatch(self, indices: torch.Tensor) -> None:
        """Raise the policy's error if it refuses these samples of the rollout."""
        batch = self._gather_minibatch(indices)
        self.policy.evaluate_actions(*(batch[x] for x in ("observations", "actions", "action_masks") if x in batch))

    def _log_update(self, **numbers: Any) -> None:
        """Log numbers of an update in this order: the stock algorithm's, which a log may keep."""
        for name, x in numbers.items():
            self.logger.record(f"train/{name}", x, **({"exclude": "tensorboard"} if name == "n_updates" else {}))
