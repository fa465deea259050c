"""RSL-RL: PPO with the advantages and the loss of `rl_triton_core`, its update captured in a CUDA graph on a GPU.

One line of the training configuration turns it on, and another one off again:

    algorithm["class_name"] = "rl_triton_adapters.rsl_rl:TritonPPO"
    algorithm["triton"] = False

Minibatches, random numbers, logs and checkpoints are those of RSL-RL.
"""

# mypy: allow-subclassing-any, allow-untyped-calls

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from rl_triton_adapters._overrides import find_override, has_hooks
from rl_triton_adapters._switch import find_off_switch
from rl_triton_adapters._versions import explain_import
from rl_triton_adapters.updates import CapturedUpdate, find_pointers, find_reason
from rl_triton_core import compute_gae, normalize_advantages
from rl_triton_core.capture import CapturedStep, keep_buffers

try:
    from rsl_rl.algorithms import PPO
    from rsl_rl.modules.distribution import GaussianDistribution, HeteroscedasticGaussianDistribution

    from rl_triton_adapters._rsl_rl_step import StepMixin, is_known
except ImportError as error:
    raise explain_import(__name__, error, "rsl-rl-lib", "5.0.1", "rsl-rl") from error

__all__ = ["TritonPPO"]

SETTINGS = (
    *("clip_param", "value_loss_coef", "entropy_coef", "use_clipped_value_loss", "normalize_advantage_per_mini_batch"),
    *("max_grad_norm", "desired_kl", "schedule", "use_mixed_precision", "rnd", "symmetry", "grad_reduce_bucket_mb"),
)
"""The attributes of the algorithm that a step reads; where one changes, steps are captured again."""
SYMMETRY = ("use_data_augmentation", "use_mirror_loss", "mirror_loss_coeff", "data_augmentation_func")
"""Those of its symmetry."""
PACKAGES = ("rsl_rl", "torch")
"""Where methods are written that a step may go around, as it does with the following ones of a Gaussian policy."""
ACTOR_METHODS = ("__call__", "forward", "get_output_log_prob", "output_entropy")
DISTRIBUTION_METHODS = ("sample", "log_prob", "entropy", "mean", "std")
UPDATE_NORMALIZES = "update_normalization" in PPO.update.__code__.co_names
"""Whether observations are counted for normalisation by `update`, of the whole rollout, as RSL-RL does from 5.5 on.
Before, `process_env_step` counts them."""
RETURNS_KEEP_STATE = "get_hidden_state" in PPO.compute_returns.__code__.co_names
"""Whether `compute_returns` gives a recurrent critic its hidden state back, as RSL-RL does from 5.4 on."""


class TritonPPO(StepMixin, PPO):
    """`PPO` of RSL-RL with a scan for the advantages, a fused loss and a captured update.

    The adaptive learning rate stays on the device, and losses are read once per update: within an update nothing waits
    for the device. Where only RSL-RL's own update applies (see `obstacle`), that one runs, on the same advantages.

    Args:
        *args: As of `PPO`.
        triton: False is `PPO` of RSL-RL. A key of the algorithm's configuration, as `capture`.
        capture: False runs every step eagerly. None captures the update where the policy lies on a GPU.
        **kwargs: As of `PPO`.

    The loss is computed from the outputs of a Gaussian policy, or, where its distribution or a method is not RSL-RL's,
    from log-probabilities and entropies.

    Attributes:
        obstacle: Why the update is RSL-RL's own; empty if it is ours.

    Raises:
        TypeError: `triton` is no bool, or `capture` neither a bool nor None.
    """

    learning_rate: float

    def __init__(self, *args: Any, triton: bool = True, capture: bool | None = None, **kwargs: Any) -> None:
        if not isinstance(triton, bool):
            raise TypeError(f"triton: got {type(triton).__name__}, expected a bool")
        super().__init__(*args, **kwargs)
        self.triton = triton and not find_off_switch()
        self._is_gaussian = False
        self._rollout: dict[str, Any] = {}
        self._rate = torch.tensor(float(self.learning_rate), dtype=torch.float64, device=self.device)
        self._update = CapturedUpdate(self._update_minibatch, enabled=capture)
        self._find_step()
        if self.triton:
            self._update.warn_of_stock("TritonPPO", "PPO of RSL-RL")

    @property
    def obstacle(self) -> str:
        """Why the update is RSL-RL's own."""
        return self._update.stock

    def describe_step(self) -> str:
        """Say in which of three ways updates are made, and why."""
        self._find_step()
        return self._update.describe("those of RSL-RL")

    def _find_step(self) -> CapturedStep:
        modules, optimizers = [x for x in self._models if isinstance(x, nn.Module)], [self.optimizer]
        if hasattr(self.rnd, "compute_loss"):
            modules += [self.rnd.predictor, self.rnd.target, self.rnd.state_normalizer]
            optimizers.append(self.rnd.optimizer)
        return self._update.find_step(
            modules, optimizers, stock=self._find_obstacle(), state=[self._rate], is_averaged=self.is_multi_gpu
        )

    def _has_gaussian_policy(self) -> bool:
        """Whether the actor's outputs are those of a Gaussian, and nothing that is gone around was changed."""
        actor, distribution = self._models[0], getattr(self.actor, "distribution", None)
        return (
            type(distribution) in (GaussianDistribution, HeteroscedasticGaussianDistribution)
            and not find_override(actor, ACTOR_METHODS, PACKAGES)
            and not find_override(distribution, DISTRIBUTION_METHODS, PACKAGES)
            and not has_hooks(actor)
        )

    def _find_obstacle(self) -> str:
        recurrent = [x for x in self._models if x.is_recurrent]
        has_states = not recurrent or hasattr(self.storage, "saved_hidden_state_a")
        obstacles = {
            "switched off": not self.triton,
            "a model is no module of PyTorch": not all(isinstance(x, nn.Module) for x in self._models),
            "this RSL-RL records the states of recurrent models elsewhere": not has_states,
            "a recurrent model is not RSL-RL's": not all(map(is_known, recurrent)),
            "this RSL-RL distils random networks in its update": self.rnd and not hasattr(self.rnd, "compute_loss"),
            "this RSL-RL augments minibatches in its update": self.symmetry
            and not hasattr(self.symmetry, "compute_loss"),
            "random networks are distilled from padded episodes": self.rnd and recurrent,
            "there are more minibatches than samples": self._count_samples() < self.num_mini_batches,
        }
        return (
            find_reason(obstacles)
            or find_override(self, ["update"], PACKAGES, behind=TritonPPO)
            or find_override(self.storage, ["mini_batch_generator", "recurrent_mini_batch_generator"], PACKAGES)
        )

    def process_env_step(self, *args: Any, **kwargs: Any) -> None:
        """Record a step as `PPO` does, and keep statistics of observations where graphs read them."""
        step = self._update.step if self.triton and not UPDATE_NORMALIZES else None
        with keep_buffers(step.modules) if step else nullcontext():
            super().process_env_step(*args, **kwargs)

    # -- advantages ----------------------------------------------------------------------------------------------------

    def compute_returns(self, obs: Any) -> None:
        """Fill in the storage's returns and advantages; time-outs are in the rewards already, as in `PPO`."""
        if not self.triton or find_override(self, ["compute_returns"], PACKAGES, behind=TritonPPO):
            super().compute_returns(obs)
            return
        storage, hidden_state = self.storage, self.critic.get_hidden_state()
        last_values = self.critic(obs).detach()
        if RETURNS_KEEP_STATE:
            self.critic.reset(hidden_state=hidden_state)
        rewards, values, dones = (x.squeeze(-1) for x in (storage.rewards, storage.values, storage.dones))
        compute_gae(
            rewards,
            values,
            terminated=dones,
            bootstrap_values=last_values.squeeze(-1),
            gamma=self.gamma,
            lambda_=self.lam,
            time_dim=0,
            out=(storage.advantages.squeeze(-1), storage.returns.squeeze(-1)),
        )
        if not self.normalize_advantage_per_mini_batch:
            normalize_advantages(storage.advantages, out=storage.advantages)

    # -- the update ----------------------------------------------------------------------------------------------------

    def update(self) -> dict[str, float]:
        """Update actor and critic, as `PPO.update` does, and return the mean losses."""
        self._find_step()
        if self.obstacle:
            losses: dict[str, float] = super().update()
            return losses
        self._find_rollout()
        self._is_gaussian = self._has_gaussian_policy()
        settings = [self._is_gaussian, *(getattr(self, name, None) for name in SETTINGS)]
        settings += [getattr(self.symmetry, name, None) for name in SYMMETRY]
        self._update.keep_settings([*settings, *find_pointers(self._rollout)])
        self._rate.fill_(self.learning_rate)
        rows = self._update.run(self._list_minibatches() * self.num_learning_epochs)
        names = ["value", "surrogate", "entropy", *["rnd"] * bool(self.rnd), *["symmetry"] * bool(self.symmetry)]
        losses = dict(zip(names, rows.double().mean(dim=0).tolist(), strict=True))
        self.learning_rate = self._rate.item()
        if UPDATE_NORMALIZES:
            models = [*self._models, self.rnd] if self.rnd else self._models
            with keep_buffers(models):
                for model in models:
                    model.update_normalization(self.storage.observations.flatten(0, 1))
        self.storage.clear()
        return losses
