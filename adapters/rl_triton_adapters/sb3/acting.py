"""Stable-Baselines3: acting of on-policy algorithms, in compiled code on a CPU, captured on a GPU."""

from inspect import signature
from typing import Any

import torch
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from rl_triton_adapters.common.overrides import find_override
from rl_triton_adapters.common.update import DeferredChecks
from rl_triton_adapters.sb3.base import PACKAGES, AcceleratedAlgorithm, replace_methods
from rl_triton_adapters.sb3.compiled import Compiled, act, find_compiled
from rl_triton_adapters.sb3.policies import detach_distribution, draw_actions, find_head, kept_distribution


class ActingMixin(AcceleratedAlgorithm, OnPolicyAlgorithm):
    """Put ours in the place of the policy's `forward` and `predict_values` while a rollout is collected."""

    _compiled: Compiled | None = None
    _asks = True
    _find_compiled = find_compiled

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> bool:
        """Collect a rollout, as the stock algorithm does, with the policy's steps replaced."""
        if not self.is_accelerated or "forward" in vars(self.policy):
            return super().collect_rollouts(*args, **kwargs)
        methods = {"forward": self._act, "set_training_mode": self._modes.set_mode}
        if self.device.type == "cpu" and not find_override(self.policy, ["predict_values"], PACKAGES):
            methods["predict_values"] = self._predict_values
        self._asks = True
        with replace_methods(self.policy, **methods):
            return super().collect_rollouts(*args, **kwargs)

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
        """Return what the policy's `predict_values` does."""
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
        assert self._acting is not None
        if not (deterministic or self._acting.reason or torch.is_grad_enabled()):
            detach_distribution(self.policy)
            results = self._act_once(obs, masks)
            if not results[2].isnan().any():
                return results
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

    def _act_once(self, obs: Any, masks: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """The results of a captured step of acting, by one copy."""
        assert self._acting is not None
        masks = {name: None if x is None else torch.as_tensor(x, device=self.device) for name, x in masks.items()}
        actions, packed = self._acting(obs, masks)
        rows = packed.cpu()
        chosen = rows[:, :-2].reshape(actions.shape).to(actions.dtype)
        return chosen, rows[:, -2:-1], rows[:, -1]
