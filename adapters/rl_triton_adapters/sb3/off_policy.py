"""Stable-Baselines3: what off-policy algorithms that take less time have in common.

A new one derives from `OffPolicyMixin` and the stock algorithm, and says what one gradient step is, as `TritonDQN` does
in `_learn`, and by their names what is logged of it.
"""

from collections.abc import Iterable
from inspect import signature
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from rl_triton_adapters.common.branches import Fork, Writes, branch_networks
from rl_triton_adapters.common.check import with_check
from rl_triton_adapters.common.modes import TrainingModes
from rl_triton_adapters.common.optimizers import clip_gradients, fused
from rl_triton_adapters.common.overrides import find_override, find_own, list_stock
from rl_triton_adapters.common.update import DeferredChecks
from rl_triton_adapters.sb3 import compiled_off_policy as compiled
from rl_triton_adapters.sb3.base import PACKAGES, AcceleratedAlgorithm, replace_methods
from rl_triton_adapters.sb3.minibatches import Form, Stored, draw_minibatches
from rl_triton_adapters.sb3.policies import detach_distribution, kept_distribution
from rl_triton_core.capture import CapturedStep
from rl_triton_core.extending import check_count

ACTORS = ("actor", "q_net", "quantile_net")  # what a policy acts with, by its names in the algorithms
NETWORKS = (*ACTORS, "critic", "actor_target", "critic_target", "q_net_target", "quantile_net_target")
"""What gradient steps call."""
CALLBACKS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Of models that learn: no attributes, which copies would have."""
LOGGED_FIRST = ("ent_coef", "actor_loss", "critic_loss")
"""Statistics of an update in the order of the stock algorithms' logs; the others follow."""


class Unread(NamedTuple):
    """The statistics of some gradient steps, on their way from the device."""

    names: list[list[str]]
    values: Tensor
    """In host memory: those of each step, and whether it was refused."""
    arrival: torch.cuda.Event | None
    batches: list[Any]


class OffPolicyMixin(AcceleratedAlgorithm, OffPolicyAlgorithm):
    """Learn and act in compiled code on a CPU, captured on a GPU. Put it in front of an off-policy algorithm."""

    read_settings: ClassVar[tuple[str, ...]] = ("gamma", "tau")
    transient: ClassVar[tuple[str, ...]] = (
        *AcceleratedAlgorithm.transient,
        *("_form", "_checks", "_is_learning", "_unfinished", "_writes", "_compiled", "_names", "_has_asked", "_stored"),
    )
    max_graphs: ClassVar[int] = 8
    eager_devices: ClassVar[tuple[str, ...]] = ("cuda",)  # on a CPU, nothing is gained
    _find_compiled, _predict_compiled = compiled.find_compiled, compiled.predict
    _find_own_steps = compiled.find_own_steps
    counts_each: ClassVar[int] = 0
    """1 where the stock algorithm counts an update before it draws the minibatch, not at the end of `train`."""

    actor: Any
    critic: Any
    critic_target: Any

    def __init__(self, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        self._form: Form | Stored | None = None
        self._stored: Stored | None = None
        self._checks: DeferredChecks | None = None
        self._writes = Writes()
        self._names: dict[tuple[Any, ...], list[str]] = {}  # of statistics, by the parts of a gradient step
        self._is_learning = self._has_asked = False
        self._compiled: compiled.Compiled | None = None
        self._unfinished: tuple[Unread, dict[str, list[float]]] | None = None
        super().__init__(*args, enabled=enabled, **kwargs)

    def find_obstacle(self) -> str:
        """As for all algorithms; a policy may be wrapped, too, as by `torch.compile`."""
        is_plain = hasattr(type(self.policy), "set_training_mode")
        return super().find_obstacle() or ("" if is_plain else f"the policy is wrapped in {type(self.policy).__name__}")

    # -- gradient steps ------------------------------------------------------------------------------------------------

    @with_check
    def train(self, gradient_steps: int, batch_size: int | None = None) -> None:
        """Make gradient steps, as the stock algorithm does."""
        batch_size = signature(super().train).parameters["batch_size"].default if batch_size is None else batch_size
        self._finish_update()
        stock = "" if compiled.find_known(self) else self._find_stock(asks=False)
        step, self._has_asked = self._update.step, True
        if stock or not (torch.is_grad_enabled() and gradient_steps):
            step.reset()
            super().train(gradient_steps, batch_size)
            return
        check_count("batch_size", batch_size)
        self._modes.set_mode(True)
        optimizers = self._list_optimizers()
        self._update_learning_rate(optimizers if len(optimizers) > 1 else optimizers[0])  # as the stock algorithms do
        if self._compiled is not None:
            self._log_history(compiled.run_compiled(self, self._compiled, gradient_steps, batch_size))
            return
        step.resume()
        with fused(optimizers if step.reason else ()):
            self._make_steps(step, gradient_steps, batch_size)
        if not (self._is_learning and self._can_act) or self._finds_others():
            self._finish_update()

    def _finds_others(self) -> str:
        """What of a user's runs before the next action: it may read a log, or write to arrays that the device reads."""
        own = find_own([self._logger], [Logger.record], PACKAGES)
        if own or not isinstance(self._form, Stored):
            return own
        moments = BaseCallback.on_rollout_start, BaseCallback.on_training_end
        own = find_own(list_callbacks(CALLBACKS.get(self)), moments, PACKAGES)
        return own or find_own([self], list_stock(type(self), "learn", PACKAGES), PACKAGES)

    def _list_networks(self) -> compiled.Networks | None:
        """What a compiled gradient step calls; None where there is no such step, and none of the methods for it."""
        return None

    def _draw_noise(self, count: int, size: int, width: int) -> dict[str, Tensor]:
        """The noise of so many gradient steps with minibatches of this size, as the stock algorithm draws it."""
        return {}

    def _make_steps(self, step: CapturedStep, count: int, size: int) -> None:
        """Make so many gradient steps with minibatches of this size; their last statistics are still to be read."""
        history: dict[str, list[float]] = {}
        unread, before, index = None, self._n_updates, 0
        self._n_updates += self.counts_each
        for form, batches in draw_minibatches(self, count, size):
            if unread is not None:
                self._read_statistics(unread, history)
            self._form = form
            self._update.keep_settings([*self._list_settings(), self._form])
            rows = []
            with step.held():
                for batch in batches:
                    parts = self._choose_parts(index)
                    row = (self._make_step if step.reason else step)(batch, *parts)
                    rows.append((self._names[parts], row if count == 1 else row.clone()))  # graphs use it again
                    index += 1
                    self._n_updates += self.counts_each if index < count else 0
            unread = start_reading(rows, batches)
        self._n_updates = before + count
        self._unfinished = unread and (unread, history)

    def _make_step(self, batch: Any, *parts: Any) -> Tensor:
        """One gradient step with a minibatch as it was drawn. Returns its statistics, and whether it was refused."""
        learn, step = self._learn_captured if self._update.is_captured else self._learn, self._update.step
        statistics = learn(self._unpack(batch), *parts)
        assert step is not None
        self._names[parts] = [*statistics]
        return torch.stack([*statistics.values(), step.stop])

    def _learn_captured(self, samples: Any, *parts: Any) -> dict[str, Tensor]:
        """As `_learn`; in a graph, distributions do not wait for the device."""
        try:
            watched, kept = self._writes.watch(self._list_modules()), kept_distribution(getattr(self, "actor", None))
            with watched, kept, branch_networks(self, "critic", "critic_target"), DeferredChecks() as self._checks:
                return self._learn(samples, *parts)
        finally:
            self._checks = None

    def _fork(self) -> Fork:
        """Where branches of a step begin, which have one after the other what writes buffers."""
        return Fork(is_serial=self._writes.are_there)

    def _unpack(self, batch: Any) -> Any:
        """The samples of a minibatch as it was drawn."""
        return batch if self._form is None else self._form.unpack(batch)

    def _list_modules(self) -> list[nn.Module]:
        """The networks that a callback has put in the place of the policy's, too."""
        networks, inside = map(vars(self).get, NETWORKS), self.policy._modules.values()
        return [self.policy, *(x for x in networks if isinstance(x, nn.Module) and x not in inside)]

    def _choose_parts(self, index: int) -> tuple[Any, ...]:
        """Which parts a gradient step has: the one with this index in its update."""
        return ()

    def _learn(self, batch: Any, *parts: Any) -> dict[str, Tensor]:
        """Make one gradient step. Returns what the stock algorithm logs, by its name."""
        raise NotImplementedError

    def _step_optimizer(self, optimizer: Optimizer, loss: Tensor, max_grad_norm: float | None = None) -> None:
        """Make a step of an optimizer, unless a distribution of this update has refused its arguments.

        With `max_grad_norm`, the gradients of the whole policy are clipped before.
        """
        if self._checks is not None and self._checks.results:
            assert self._update.step is not None
            self._update.step.stop_if(self._checks.has_failed())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if max_grad_norm is not None:
            clip_gradients(self.policy.parameters(), max_grad_norm)
        optimizer.step()

    def _evaluate_next(self, batch: Any, values: Tensor) -> Tensor:
        """What is learned: rewards and discounted values of the next observations, unless the episode is over."""
        discounts = getattr(batch, "discounts", None)
        discounts = self.gamma if discounts is None else discounts
        return batch.rewards + (1 - batch.dones) * discounts * values  # type: ignore[no-any-return]

    def _read_statistics(self, unread: Unread, history: dict[str, list[float]]) -> None:
        """Add the statistics of some gradient steps to those of the update; raise the error of one that was refused."""
        if unread.arrival is not None:
            unread.arrival.synchronize()
        values, is_refused = iter(unread.values.tolist()), False
        for names in unread.names:
            for name in names:
                history.setdefault(name, []).append(next(values))
            is_refused = bool(next(values))
        if is_refused:  # by a distribution, whose error says more
            for samples in map(self._unpack, unread.batches):
                for observations in (samples.observations, samples.next_observations):
                    getattr(self, "actor", self.policy)(observations)
            raise ValueError("actions: a distribution has refused its arguments, expected finite means and deviations")

    def _finish_update(self) -> None:
        """Read and log the statistics of the last update, if that is left to do."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            self._read_statistics(*unfinished)
            self._log_history(unfinished[1])

    @property
    def logger(self) -> Logger:
        """As of the stock algorithm; it has what the last update logs."""
        self._finish_update()
        return super().logger

    def learn(self, *args: Any, **kwargs: Any) -> Any:
        """Learn, as the stock algorithm does. An update's statistics are read when its next actions are known."""
        self._is_learning, self._has_asked = True, False
        try:
            super().learn(*args, **kwargs)
        finally:
            self._is_learning = False
            CALLBACKS.pop(self, None)
        self._finish_update()
        return self

    def _forget_inputs(self) -> None:
        self._modes = TrainingModes(self.policy, PACKAGES)

    def _log_history(self, history: dict[str, list[float]]) -> None:
        """Log what the stock algorithm logs of an update."""
        logger = self.logger
        logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name in sorted(history, key=lambda x: [*LOGGED_FIRST, x].index(x)):
            values = history[name]
            logger.record(f"train/{name}", np.mean(values) if len(values) > 1 else np.float64(*values))

    # -- acting --------------------------------------------------------------------------------------------------------

    def _list_actors(self) -> list[nn.Module]:
        """The one of the networks that `_predict` calls, without the critics."""
        inside = self.policy._modules
        chosen = [x for x in map(inside.get, ACTORS) if x is not None]
        return [self.policy] if find_override(type(self.policy), ["_predict"], PACKAGES) else chosen

    @property
    def _can_act(self) -> bool:
        """Whether acting is captured, as far as is known."""
        is_captured = self._acting is not None and not self._acting.reason
        return is_captured and vars(self.policy).keys().isdisjoint(("_predict", "obs_to_tensor", "set_training_mode"))

    def collect_rollouts(self, env: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
        """Collect a rollout, as the stock algorithm does, with the policy's steps captured."""
        CALLBACKS[self], has_asked, self._has_asked = callback, self._has_asked, False  # since the last gradient step
        if not has_asked:
            self._find_update()
        known = None if self.acts_exactly or self._update.stock else self._compiled
        if known is not None and not (has_asked and self._is_learning and known.is_alone):
            known = self._find_compiled(asks=False)[0]
        is_compiled = known is not None and known.acts
        if self._update.stock or not (is_compiled or self._can_act):
            return super().collect_rollouts(env, callback, *args, **kwargs)
        methods: dict[str, Any] = {"set_training_mode": self._modes.set_mode}
        methods |= {"predict": self._predict_compiled} if is_compiled else {"_predict": self._act}
        if not is_compiled and not find_override(type(self.policy), ["obs_to_tensor"], PACKAGES):
            methods["obs_to_tensor"] = self._convert_observation
        with replace_methods(self.policy, **methods):
            return super().collect_rollouts(env, callback, *args, **kwargs)

    def _sample_action(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock algorithm's. Where an environment steps, the device reads nothing of the buffer any more."""
        actions = super()._sample_action(*args, **kwargs)
        self._finish_update()
        return actions

    def _convert_observation(self, observation: Any) -> tuple[Any, bool]:
        """Return what the policy's `obs_to_tensor` does, without waiting for the device: it may still learn."""
        on_host = SimpleNamespace(observation_space=self.policy.observation_space, device=torch.device("cpu"))
        tensors, is_vectorized = type(self.policy).obs_to_tensor(on_host, observation)  # type: ignore[arg-type]
        return pytree.tree_map(lambda x: x.to(self.device, non_blocking=True), tensors), is_vectorized

    def _act(self, observation: Any, deterministic: bool = False) -> Tensor:
        """Return what the policy's `_predict` does, in host memory; where that raises an error, so does this."""
        assert self._acting is not None
        if self._acting.modules != self._list_actors():
            self._find_update()
        if not torch.is_grad_enabled():
            detach_distribution(getattr(self, "actor", None))
            actions: Tensor = self._acting(observation, deterministic).cpu()
            self._finish_update()
            if not actions.isnan().any():
                return actions
        return type(self.policy)._predict(self.policy, observation, deterministic)

    def _compute_actions(self, observation: Any, deterministic: bool) -> Tensor:
        """Actions; NaN where a distribution refuses its arguments."""
        with kept_distribution(getattr(self, "actor", None)), DeferredChecks() as checks:
            actions = type(self.policy)._predict(self.policy, observation, deterministic)
        return checks.mark_refused(actions)  # type: ignore[no-any-return]


def list_callbacks(callback: Any) -> list[Any]:
    """A callback with all those that it holds."""
    found = [] if callback is None else [callback]
    for x in found:
        parts = (z for y in vars(x).values() for z in (y if isinstance(y, list) else [y]))
        found += [y for y in parts if isinstance(y, BaseCallback) and all(y is not z for z in found)]
    return found


def start_reading(rows: list[tuple[list[str], Tensor]], batches: list[Any]) -> Unread:
    """Copy the statistics of some gradient steps to host memory; on a GPU, do not wait for them."""
    values, arrival = torch.cat([x for _, x in rows]) if len(rows) > 1 else rows[0][1], None
    if values.is_cuda:
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        values = values.to("cpu", non_blocking=True)
        arrival.record()
    return Unread([names for names, _ in rows], values, arrival, batches)


@torch.no_grad()
def average_parameters(parameters: Iterable[Tensor], targets: Iterable[Tensor], tau: float) -> None:
    """Move targets towards learned parameters: target = (1 - tau) target + tau parameter, in a few kernels."""
    pairs = {y.data_ptr(): (x, y) for x, y in zip(parameters, targets, strict=True)}  # one may have several names
    if pairs:
        sources, followers = zip(*pairs.values(), strict=True)
        torch._foreach_mul_(followers, 1 - tau)
        torch._foreach_add_(followers, sources, alpha=tau)
