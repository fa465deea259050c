"""skrl: the update of PPO and of A2C without a wait in a minibatch, which is a replay of a CUDA graph on a GPU."""

# mypy: allow-subclassing-any, allow-untyped-calls, disable-error-code="attr-defined"

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import mse_loss

from rl_triton_adapters._overrides import find_override
from rl_triton_adapters.updates import CapturedUpdate, DeferredChecks, find_pointers, find_reason

# isort: split
from skrl import config
from skrl.memories.torch import RandomMemory
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.resources.schedulers.torch import KLAdaptiveLR

SETTINGS = ("entropy_loss_scale", "ratio_clip", "value_clip", "value_loss_scale", "grad_norm_clip", "kl_threshold")
"""What a step reads of the configuration, besides the precision; where one changes, steps are captured again."""
MEMORY_METHODS = ("sample", "sample_by_index", "get_sampling_indexes")
KL, POLICY_LOSS, VALUE_LOSS, ENTROPY_LOSS, DEVIATION, HAS_STOPPED, IS_REFUSED = range(7)
"""What a step returns."""


def make_row(*statistics: Tensor) -> Tensor:
    """Statistics of a step, in the order of their names here."""
    return torch.stack([x.detach().float() for x in statistics])


def capture_update(stock: Callable[..., None]) -> Callable[..., None]:
    """Make an agent's `update` of one that is skrl's code with advantages of ours, which runs where ours does not.

    Args:
        stock: As `replace_gae` makes it of the update of PPO or A2C.
    """

    @wraps(stock)
    def update(self: Any, *, timestep: int, timesteps: int) -> None:
        self._find_step()
        if self._captured.stock:
            self._captured.warn_of_stock(type(self).__name__, "skrl")
            stock(self, timestep=timestep, timesteps=timesteps)
        else:
            self._complete_rollout(stock.__globals__["compute_gae"])
            self._update_models()

    return update


class CapturedPPOMixin:
    """The steps of a captured update of PPO. Put it in front of PPO of skrl; `update` is made by `capture_update`.

    Minibatches, learning rates and what is tracked are those of skrl, and operations are skrl's, one by one. Statistics
    are read once per epoch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._captured = CapturedUpdate(self._make_step)
        self._samples: dict[str, Tensor | None] = {}

    def describe_step(self) -> str:
        """Say in which of three ways updates are made, and why."""
        self._find_step()
        return self._captured.describe("those of skrl")

    def _find_step(self) -> None:
        scalers = [x for x in self._list_preprocessors() if isinstance(x, nn.Module)]
        self._captured.find_step(
            list(dict.fromkeys([self.policy, self.value, *scalers])),
            [self.optimizer],
            stock=self._find_stock_reason(),
            obstacle=find_reason({"kl_threshold with mixed precision": self._stops_early and self.cfg.mixed_precision}),
            is_averaged=config.torch.is_distributed,
        )

    def _find_stock_reason(self) -> str:
        if self.memory is None:
            return "the agent has no memory to learn from"
        empty = self._empty_preprocessor
        known = [x == empty or type(x) is RunningStandardScaler for x in self._list_preprocessors()]
        is_random = isinstance(self.memory, RandomMemory) and not find_override(self.memory, MEMORY_METHODS, ("skrl",))
        device = next(self.policy.parameters()).device
        return find_reason(
            {
                "with kl_threshold, one of several processes stops alone": config.torch.is_distributed
                and self._stops_early,
                "a preprocessor is not skrl's": not all(known),
                "the memory makes minibatches of its own": not is_random,
                "the memory lies on another device": any(x.device != device for x in self.memory.tensors.values()),
            }
        )

    def _list_preprocessors(self) -> list[Any]:
        return [self._observation_preprocessor, self._state_preprocessor]

    @property
    def _stops_early(self) -> bool:
        """Whether an epoch ends where the policy has moved too far."""
        return bool(getattr(self.cfg, "kl_threshold", 0))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(device_type=torch.device(self.device).type, enabled=self.cfg.mixed_precision)

    def _preprocess(self, observations: Any, states: Any, train: bool = False) -> dict[str, Any]:
        return {
            "observations": self._observation_preprocessor(observations, train=train),
            "states": self._state_preprocessor(states, train=train),
        }

    def _complete_rollout(self, compute_gae: Callable[..., tuple[Tensor, Tensor]]) -> None:
        """Compute returns and advantages, and standardise values, as skrl does."""
        memory, scale = self.memory, self._value_preprocessor
        with torch.no_grad(), self._autocast():
            inputs = self._preprocess(self._current_next_observations, self._current_next_states)
            self.value.enable_training_mode(False)
            last_values, _ = self.value.act(inputs, role="value")
            self.value.enable_training_mode(True)
            last_values = scale(last_values, inverse=True)
        names = ("rewards", "terminated", "truncated", "values")
        returns, advantages = compute_gae(
            **{name: memory.get_tensor_by_name(name) for name in names},
            last_values=last_values,
            discount_factor=self.cfg.discount_factor,
            lambda_coefficient=self.cfg.gae_lambda,
            time_limit_bootstrap=self.cfg.time_limit_bootstrap,
        )
        memory.set_tensor_by_name("values", scale(memory.get_tensor_by_name("values"), train=True))
        memory.set_tensor_by_name("returns", scale(returns, train=True))
        memory.set_tensor_by_name("advantages", advantages)

    def _update_models(self) -> None:
        """Make all steps, schedule the learning rate after each epoch, and track what skrl does."""
        self._samples = {name: self.memory.tensors_view.get(name) for name in self._tensors_names}
        settings = [getattr(self.cfg, name, None) for name in SETTINGS]
        self._captured.keep_settings([*settings, self.cfg.mixed_precision, self.scaler, *find_pointers(self._samples)])
        epochs = []
        for epoch in range(getattr(self.cfg, "learning_epochs", 1)):
            epochs.append(self._run_epoch(train=epoch == 0))
            if isinstance(self.scheduler, KLAdaptiveLR):
                kl = epochs[-1][:, KL].contiguous().mean()
                if config.torch.is_distributed:
                    kl = kl.to(self.device)
                    distributed.all_reduce(kl)
                    kl /= config.torch.world_size
                self.scheduler.step(kl.item())
            elif self.scheduler:
                self.scheduler.step()
        self._track_losses(torch.cat(epochs), len(epochs) * self.cfg.mini_batches)

    def _run_epoch(self, train: bool) -> Tensor:
        """Make one step with each minibatch; return their statistics, on the CPU.

        Args:
            train: Whether preprocessors take account of the observations.
        """
        step, rows = self._captured.step, []
        assert step is not None
        step.resume()
        self.memory.sample(names=[], batch_size=len(self.memory), mini_batches=self.cfg.mini_batches)
        minibatches = self.memory.get_sampling_indexes().to(self.device).tensor_split(self.cfg.mini_batches)
        for indices in minibatches:
            rows.append(step(indices, train).clone())
            if self._stops_early and rows[-1][HAS_STOPPED]:
                break
        history = torch.stack(rows).cpu()
        refused = history[:, IS_REFUSED].nonzero()
        if len(refused):
            self._evaluate_policy(self._gather_minibatch(minibatches[int(refused[0])]), train=False)
        return history

    def _gather_minibatch(self, indices: Tensor) -> dict[str, Any]:
        return {name: None if x is None else x.index_select(0, indices) for name, x in self._samples.items()}

    def _evaluate_policy(self, batch: dict[str, Any], train: bool) -> tuple[dict[str, Any], Tensor]:
        """The models' inputs, and log-probabilities of the actions that were taken."""
        inputs = self._preprocess(batch["observations"], batch["states"], train)
        _, outputs = self.policy.act({**inputs, "taken_actions": batch["actions"]}, role="policy")
        return inputs, outputs["log_prob"]

    def _make_step(self, indices: Tensor, train: bool) -> Tensor:
        """Update the models with one minibatch, and return statistics; a refused draw stops all further steps."""
        batch, step = self._gather_minibatch(indices), self._captured.step
        assert step is not None
        defers = DeferredChecks() if self._captured.is_captured else nullcontext()
        with self._autocast(), defers as checks:
            inputs, log_probs = self._evaluate_policy(batch, train)
            with torch.no_grad():
                ratio = log_probs - batch["log_prob"]
                kl = ((torch.exp(ratio) - 1) - ratio).mean()
                deviation = self.policy.distribution(role="policy").stddev.mean()
            none = torch.zeros_like(kl)
            stops = kl > self.cfg.kl_threshold if self._stops_early else none
            refused = checks.has_failed() if checks is not None and checks.results else none
            if checks is not None and (self._stops_early or checks.results):
                step.stop_if(stops.bool() | refused.bool())
            elif self._stops_early and stops:
                return make_row(kl, none, none, none, deviation, stops, refused)
            scale = self.cfg.entropy_loss_scale
            entropy_loss = -scale * self.policy.get_entropy(role="policy").mean() if scale else none
            values, _ = self.value.act(inputs, role="value")
            policy_loss, value_loss = self._compute_losses(log_probs, values, batch)
        self._step_optimizer(policy_loss + entropy_loss + value_loss)
        return make_row(kl, policy_loss, value_loss, entropy_loss, deviation, stops, refused)

    def _compute_losses(self, log_probs: Tensor, values: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The losses of policy and value."""
        advantages, clip, value_clip = batch["advantages"], self.cfg.ratio_clip, self.cfg.value_clip
        ratio = torch.exp(log_probs - batch["log_prob"])
        surrogate = torch.min(advantages * ratio, advantages * torch.clip(ratio, 1.0 - clip, 1.0 + clip))
        if value_clip > 0:
            values = batch["values"] + torch.clip(values - batch["values"], min=-value_clip, max=value_clip)
        return -surrogate.mean(), self.cfg.value_loss_scale * mse_loss(batch["returns"], values)

    def _step_optimizer(self, loss: Tensor) -> None:
        """Make a step with clipped gradients."""
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        models = [self.policy] if self.policy is self.value else [self.policy, self.value]
        if config.torch.is_distributed:
            for model in models:
                model.reduce_parameters()
        if self.cfg.grad_norm_clip > 0:
            self.scaler.unscale_(self.optimizer)
            parameters = chain.from_iterable(model.parameters() for model in models)
            nn.utils.clip_grad_norm_(parameters, self.cfg.grad_norm_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _track_losses(self, history: Tensor, count: int) -> None:
        """Track what skrl does: losses of the minibatches whose steps were made, over the number of all."""
        made = history[history[:, HAS_STOPPED] == 0].double().sum(dim=0) / count
        self.track_data("Loss / Policy loss", made[POLICY_LOSS].item())
        self.track_data("Loss / Value loss", made[VALUE_LOSS].item())
        if self.cfg.entropy_loss_scale:
            self.track_data("Loss / Entropy loss", made[ENTROPY_LOSS].item())
        self.track_data("Policy / Standard deviation", history[-1, DEVIATION].item())
        if self.scheduler:
            self.track_data("Learning / Learning rate", self.scheduler.get_last_lr()[0])


class CapturedA2CMixin(CapturedPPOMixin):
    """As `CapturedPPOMixin`, for A2C."""

    def _compute_losses(self, log_probs: Tensor, values: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return -(batch["advantages"] * log_probs).mean(), mse_loss(batch["returns"], values)
