"""Stable-Baselines3: what algorithms with less work per step have in common.

A new one derives from `AcceleratedMixin` and the stock algorithm, and says what one step and one update are:

    class TritonA2C(AcceleratedMixin, A2C):
        def _make_step(self, indices): ...  # one gradient step: the tensors that are logged, stacked
        def _make_updates(self, update): ...  # all steps of `train`, and the logs
"""

from inspect import signature
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import explained_variance
from torch.utils import _pytree as pytree

from rl_triton_adapters.common.check import with_check
from rl_triton_adapters.common.modes import TrainingModes
from rl_triton_adapters.common.optimizers import clip_gradients, fused
from rl_triton_adapters.common.overrides import find_override, find_own, list_stock
from rl_triton_adapters.common.switch import check_enabled, find_off_switch
from rl_triton_adapters.common.update import DeferredChecks
from rl_triton_adapters.sb3.base import DEVICES, PACKAGES, AcceleratedAlgorithm, replace_methods
from rl_triton_adapters.sb3.buffers import rollout_buffer_class_for, to_arrays
from rl_triton_adapters.sb3.compiled import Compiled, act, find_compiled
from rl_triton_adapters.sb3.policies import detach_distribution, draw_actions, find_head, kept_distribution, list_sizes
from rl_triton_adapters.sb3.tensor_envs import TensorRollouts, find_rollouts
from rl_triton_core.capture import CapturedStep
from rl_triton_core.extending import say


class AcceleratedMixin(AcceleratedAlgorithm, OnPolicyAlgorithm):
    """Update and act in compiled code on a CPU, captured on a GPU. Put it in front of an on-policy algorithm."""

    fields: ClassVar[tuple[str, ...]] = ("observations", "actions", "values", "log_probs", "advantages", "returns")
    """The attributes of the rollout buffer that a step reads."""
    sde_devices: ClassVar[tuple[str, ...]] = DEVICES
    read_settings: ClassVar[tuple[str, ...]] = ("ent_coef", "vf_coef", "max_grad_norm", "normalize_advantage")
    transient: ClassVar[tuple[str, ...]] = (
        *AcceleratedAlgorithm.transient,
        *("_compiled", "_asks", "_rollout", "_parameters", "_clip_ranges", "_chooses_buffer", "_rollouts"),
    )

    _asks = True
    _chooses_buffer = False
    _clip_ranges: dict[str, Any]
    _compiled: Compiled | None = None
    _find_compiled = find_compiled
    _make_updates: Any
    """Make all steps with the rollout, captured where that is possible, and log what the stock algorithm logs."""
    _parameters: list[torch.Tensor]
    _rollout: dict[str, Any]
    _rollouts: TensorRollouts | None = None

    def _excluded_save_params(self) -> list[str]:
        """A buffer class that was chosen here, too."""
        return [*super()._excluded_save_params(), *["rollout_buffer_class"] * self._chooses_buffer]

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
        if self.device.type == "cpu" and not self.find_obstacle() and (compiled := self._find_compiled()[0]):
            seconds = compiled.update.compile() + compiled.acting.compile()
            compiled.draw(np.empty((0, sum(list_sizes(self.policy.action_dist))), np.float32))
            if seconds > 1 and self.verbose >= 1:
                say(f"Compiled the update in {seconds:.1f} s; other processes load it from disk")

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
        self._rollout, self._modes = {}, TrainingModes(self.policy, PACKAGES)

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
            buffer: Any = self.rollout_buffer
            assert buffer.full, f"the rollout is not complete: {buffer.pos} of {buffer.buffer_size} steps were added"
            for name in self.fields:  # flattened as by `RolloutBuffer.get`; for graphs, in the same place
                self._rollout[name] = self._copy_field(self._rollout.get(name), self._flatten_field(name), name)
            buffer.generator_ready = True
            if self.use_sde:
                detach_distribution(self.policy)
            update.resume()
            with fused([self.policy.optimizer] if update.reason and self._compiled is None else []):
                self._make_updates(update)
        finally:
            if update.reason:  # no graph reads it
                self._rollout = {}

    def _train_as_stock(self, update: CapturedStep) -> None:
        update.reset()
        self._rollout = {}
        super().train()

    def _can_update(self) -> bool:
        """Whether this update's rollout, and what is around it, are such that our steps are those of the stock one."""
        return torch.is_grad_enabled()

    def _ask_schedules(self) -> dict[str, Any]:
        """Ask for what an update depends on, once; the answers, as attributes, if the stock update has to be made."""
        return {}

    def _step_optimizer(self, loss: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
        """Make a step of the optimizer, with clipped gradients, unless the update stops before; whether it has stopped.

        That and `stops` are on the device.
        """
        step = self._update.step
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

    # -- acting, in the place of the policy's `forward` and `predict_values` while a rollout is collected --------------

    def collect_rollouts(self, env: Any, *args: Any, **kwargs: Any) -> bool:
        """Collect a rollout, as the stock algorithm does, with the policy's steps replaced."""
        if not self.is_accelerated or "forward" in vars(self.policy):
            return super().collect_rollouts(env, *args, **kwargs)
        self._rollouts = find_rollouts(self, env, self._rollouts, super().collect_rollouts)
        if self._rollouts is not None:
            return self._rollouts.collect(self, *args, **kwargs)
        methods = {"forward": self._act, "set_training_mode": self._modes.set_mode}
        if self.device.type == "cpu" and not find_override(self.policy, ["predict_values"], PACKAGES):
            methods["predict_values"] = self._predict_values
        self._asks = True
        with replace_methods(self.policy, **methods):
            return super().collect_rollouts(env, *args, **kwargs)

    def _act_compiled(self, *inputs: Any, **options: Any) -> Any:
        """As `act`; None where the policy does something else, which is asked when it first acts in a rollout."""
        if self.acts_exactly or self._update.is_captured or torch.is_grad_enabled():
            return None
        if self._asks or (self._compiled is not None and not self._compiled.is_of(self.policy)):
            self._asks = False
            self._find_compiled(asks=False)
        detach_distribution(self.policy)
        return None if self._compiled is None else act(self, *inputs, **options)

    def _predict_values(self, obs: Any) -> Any:
        values = self._act_compiled(obs, values_alone=True)
        return type(self.policy).predict_values(self.policy, obs) if values is None else values

    def _act(self, obs: Any, deterministic: bool = False, *rest: Any, **masks: Any) -> tuple[torch.Tensor, ...]:
        """Return what the policy's `forward` does, in host memory; where that raises an error, so does this."""
        if rest:
            given = signature(type(self.policy).forward).bind(self.policy, obs, deterministic, *rest)
            masks |= dict([*given.arguments.items()][3:])
        results: tuple[torch.Tensor, ...] | None = None if deterministic else self._act_compiled(obs, **masks)
        if results is not None:
            return results
        if not (deterministic or self._acting.reason or torch.is_grad_enabled()):
            detach_distribution(self.policy)
            tensors = {name: None if x is None else torch.as_tensor(x, device=self.device) for name, x in masks.items()}
            actions, packed = self._acting(obs, tensors)
            rows = packed.cpu()  # all results by one copy
            if not rows[:, -1].isnan().any():
                return rows[:, :-2].reshape(actions.shape).to(actions.dtype), rows[:, -2:-1], rows[:, -1]
        more = {"deterministic": True, **masks} if deterministic else masks
        return type(self.policy).forward(self.policy, obs, **more)

    def _compute_actions(self, observations: Any, masks: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions, and everything as one row of floats per environment: actions, value, log-probability."""
        has_masks = masks.get("action_masks") is not None
        if find_head(self.policy) is not None and has_masks == hasattr(self.policy.action_dist, "apply_masking"):
            actions, values, log_probs = draw_actions(self.policy, observations, **masks)
        else:
            with kept_distribution(self.policy), DeferredChecks() as checks:
                actions, values, log_probs = type(self.policy).forward(self.policy, observations, **masks)
            log_probs = checks.mark_refused(log_probs)
        columns = [actions.flatten(1) if actions.ndim > 1 else actions[:, None], values, log_probs[:, None]]
        return actions, torch.cat([x.float() for x in columns], dim=1)

    # -- the rollout, as steps read it ---------------------------------------------------------------------------------

    def _flatten_field(self, name: str) -> Any:
        """A field of the buffer, flattened there."""
        buffer: Any = self.rollout_buffer
        stored = getattr(buffer, name)
        if not buffer.generator_ready and isinstance(stored, dict):
            for key, x in stored.items():  # one after the other: each takes as much memory again
                stored[key] = buffer.swap_and_flatten(x)
        elif not buffer.generator_ready:
            setattr(buffer, name, buffer.swap_and_flatten(stored))
        return getattr(buffer, name)

    def _copy_field(self, known: Any, arrays: Any, name: str) -> Any:
        """Return a flattened field of the buffer as a step reads it."""
        if isinstance(arrays, dict):
            return {key: self._copy_field((known or {}).get(key), x, name) for key, x in arrays.items()}
        source = arrays if isinstance(arrays, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(arrays))
        if name == "action_masks":
            source = source.bool()
        elif name == "actions":
            source = source.long().flatten() if isinstance(self.action_space, spaces.Discrete) else source.float()
        elif name != "observations":
            source = source.flatten()
        if self.device.type == "cpu" and not self._update.is_captured:
            return source
        if known is None or known.shape != source.shape:
            self._update.reset()  # its graphs read the tensor that was there
            return source.to(self.device, copy=True)
        return known.copy_(source)

    def _draw_permutation(self) -> torch.Tensor:
        """Return the order of the rollout's samples, from the draw of `RolloutBuffer.get`."""
        count = self.rollout_buffer.buffer_size * self.rollout_buffer.n_envs
        return torch.from_numpy(np.random.permutation(count)).to(self.device)  # noqa: NPY002

    def _gather_minibatch(self, indices: torch.Tensor) -> dict[str, Any]:
        """Return these samples of the rollout, by the names of `fields`."""
        return pytree.tree_map(lambda x: x.index_select(0, indices), self._rollout)  # type: ignore[no-any-return]

    def _describe_rollout(self) -> dict[str, Any]:
        """What all algorithms log besides: how good the values were, and the deviation of actions, if it is learned."""
        values, returns = to_arrays((self.rollout_buffer.values, self.rollout_buffer.returns))
        found = {"explained_variance": explained_variance(values.flatten(), returns.flatten())}
        return found | ({"std": self.policy.log_std.exp().mean().item()} if hasattr(self.policy, "log_std") else {})
