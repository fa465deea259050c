"""Stable-Baselines3: what off-policy algorithms with less work per step have in common.

A new one derives from `OffPolicyMixin` and the stock algorithm, and says what one gradient step is:

    class TritonDQN(OffPolicyMixin, DQN):
        def _learn(self, batch): ...  # one gradient step: what is logged, by its name
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from rl_triton_adapters._optimizers import fuse_optimizer
from rl_triton_adapters.sb3.base import AcceleratedAlgorithm, replace_method
from rl_triton_adapters.sb3.minibatches import Form, draw_minibatches, unpack_minibatch
from rl_triton_adapters.sb3.policies import DeferredChecks
from rl_triton_core.capture import CapturedStep

# isort: split
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm


class OffPolicyMixin(AcceleratedAlgorithm, OffPolicyAlgorithm):
    """Make gradient steps and act with fewer operations; on a GPU, with captured ones.

    Put it in front of an off-policy algorithm. Where `is_accelerated` is False, that algorithm's own methods run, and
    `describe_step` says why.
    """

    settings: ClassVar[tuple[str, ...]] = ("gamma", "tau")
    transient: ClassVar[tuple[str, ...]] = (*AcceleratedAlgorithm.transient, "_form", "_checks")
    max_graphs: ClassVar[int] = 8

    def __init__(self, *args: Any, acceleration: str | bool = "auto", **kwargs: Any) -> None:
        self._form: Form | None = None
        self._checks: DeferredChecks | None = None
        super().__init__(*args, acceleration=acceleration, **kwargs)

    # -- gradient steps ------------------------------------------------------------------------------------------------

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Make gradient steps, as the stock algorithm does."""
        step = self._find_update()
        if self._update.stock:
            step.reset()
            super().train(gradient_steps, batch_size)
            return
        optimizers = self._list_optimizers()
        for optimizer in optimizers if step.reason else ():
            fuse_optimizer(optimizer)
        self._prepare_policy()
        self._update_learning_rate(optimizers)
        step.resume()
        history: dict[str, list[float]] = {}
        index = 0
        packs = self.device.type != "cpu" or not step.reason
        for form, batches in draw_minibatches(self, gradient_steps, batch_size, packs):
            self._form = form
            self._update.keep_settings([*self._list_settings(), self._form])
            rows = []
            for batch in batches:
                self._n_updates += 1
                rows.append(self._call_step(step, batch, self._choose_parts(index)))
                index += 1
            if self._read_rows(rows, history):
                self._raise_refusal(batches)
        self._log_history(history)

    def _call_step(self, step: CapturedStep, batch: Any, parts: tuple[bool, ...]) -> tuple[list[str], Tensor]:
        """Make one gradient step; the names and values of its statistics, and last whether it was refused."""
        statistics = self._make_step(batch, *parts) if step.reason else step(batch, *parts)
        return [*statistics], torch.stack([*statistics.values(), step.stop])  # a copy: graphs use their memory again

    def _make_step(self, batch: Any, *parts: bool) -> dict[str, Tensor]:
        """One gradient step with a minibatch as it was drawn; in a graph, distributions do not wait for the device."""
        samples = self._unpack(batch)
        if not self._update.is_captured:
            return self._learn(samples, *parts)
        try:
            with DeferredChecks() as self._checks:
                return self._learn(samples, *parts)
        finally:
            self._checks = None

    def _unpack(self, batch: Any) -> Any:
        """The samples of a minibatch as it was drawn."""
        return batch if self._form is None else unpack_minibatch(batch, self._form)

    def _prepare_policy(self) -> None:
        """Before the first gradient step of an update."""
        self.policy.set_training_mode(True)

    def _choose_parts(self, index: int) -> tuple[bool, ...]:
        """Which parts a gradient step has: the one with this index in its update, which `_n_updates` has counted."""
        return ()

    def _learn(self, batch: Any, *parts: bool) -> dict[str, Tensor]:
        """Make one gradient step. Returns what the stock algorithm logs, by its name."""
        raise NotImplementedError

    def _step_optimizer(self, optimizer: Optimizer, loss: Tensor) -> None:
        """Make a step of an optimizer, unless a distribution of this update has refused its arguments."""
        if self._checks is not None and self._checks.results:
            assert self._update.step is not None
            self._update.step.stop_if(~torch.stack(self._checks.results).all())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def _evaluate_next(self, batch: Any, values: Tensor) -> Tensor:
        """What is learned: rewards and discounted values of the next observations, unless the episode is over."""
        discounts = getattr(batch, "discounts", None)
        discounts = self.gamma if discounts is None else discounts
        targets: Tensor = batch.rewards + (1 - batch.dones) * discounts * values
        return targets

    def _raise_refusal(self, batches: list[Any]) -> None:
        """Raise the error of the distribution that has refused its arguments in one of these gradient steps."""
        for batch in batches:
            samples = self._unpack(batch)
            for observations in (samples.observations, samples.next_observations):
                self.actor(observations)
        raise ValueError("actions: a distribution has refused its arguments, expected finite means and deviations")

    def _read_rows(self, rows: list[tuple[list[str], Tensor]], history: dict[str, list[float]]) -> bool:
        """Add the statistics of some gradient steps to those of the update; whether the last one was refused."""
        values, is_refused = iter(torch.cat([row for _, row in rows]).tolist()), False
        for names, _ in rows:
            for name in names:
                history.setdefault(name, []).append(next(values))
            is_refused = bool(next(values))
        return is_refused

    def _log_history(self, history: dict[str, list[float]]) -> None:
        """Log what the stock algorithm logs of an update."""
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name, values in history.items():
            self.logger.record(f"train/{name}", np.mean(values))

    # -- acting --------------------------------------------------------------------------------------------------------

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> Any:
        """Collect a rollout, as the stock algorithm does, with the policy's steps captured."""
        is_captured = self.is_accelerated and self._acting is not None and not self._acting.reason
        if not is_captured or "_predict" in vars(self.policy):
            return super().collect_rollouts(*args, **kwargs)
        with replace_method(self.policy, "_predict", self._act):
            return super().collect_rollouts(*args, **kwargs)

    def _act(self, observation: Any, deterministic: bool = False) -> Tensor:
        """Return what the policy's `_predict` does, in host memory; where that raises an error, so does this."""
        assert self._acting is not None
        actions: Tensor = self._acting(observation, deterministic).cpu()
        if not actions.isnan().any():
            return actions
        stock: Tensor = type(self.policy)._predict(self.policy, observation, deterministic)
        return stock

    def _compute_actions(self, observation: Any, deterministic: bool) -> Tensor:
        """Actions; NaN where a distribution refuses its arguments."""
        with DeferredChecks() as checks:
            actions = type(self.policy)._predict(self.policy, observation, deterministic)
        marked: Tensor = checks.mark_refused(actions)
        return marked


@torch.no_grad()
def average_parameters(parameters: Iterable[Tensor], targets: Iterable[Tensor], tau: float) -> None:
    """Move target parameters towards the learned ones: target = (1 - tau) target + tau parameter, a few kernels.

    Args:
        parameters: The learned ones.
        targets: Those that follow them.
        tau: In [0, 1]; at 1, targets are the learned ones.
    """
    sources, followers = list(parameters), list(targets)
    if followers:
        torch._foreach_mul_(followers, 1 - tau)
        torch._foreach_add_(followers, sources, alpha=tau)
