"""RSL-RL: PPO with the advantages and the loss of `rl_triton_core`, its update captured in a CUDA graph on a GPU.

One line of the training configuration turns it on, and another one off again:

    algorithm["class_name"] = "rl_triton_adapters.rsl_rl:TritonPPO"
    algorithm["triton"] = False

Minibatches, random numbers, logs and checkpoints are those of RSL-RL.
"""

# mypy: allow-subclassing-any, allow-untyped-calls

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rl_triton_adapters._overrides import find_override, has_hooks
from rl_triton_adapters._switch import find_off_switch
from rl_triton_adapters._versions import explain_import
from rl_triton_adapters.updates import CapturedUpdate, find_pointers, find_reason
from rl_triton_core import compute_gae, normalize_advantages
from rl_triton_core.capture import CapturedStep
from rl_triton_core.losses import Gaussian, LogProbs, Policy, PPOLoss, ppo_loss

try:
    from rsl_rl.algorithms import PPO
    from rsl_rl.modules.distribution import GaussianDistribution, HeteroscedasticGaussianDistribution
except ImportError as error:
    raise explain_import(__name__, error, "rsl-rl-lib", "5.0.1", "rsl-rl") from error

__all__ = ["TritonPPO"]

LOSS_SETTINGS = ("clip_param", "value_loss_coef", "entropy_coef", "use_clipped_value_loss")
SETTINGS = (*LOSS_SETTINGS, "normalize_advantage_per_mini_batch", "max_grad_norm", "desired_kl", "schedule")
"""The attributes of the algorithm that a step reads; where one changes, steps are captured anew."""
PACKAGES = ("rsl_rl", "torch")
"""Where methods are written that a step may go around, as it does with the following ones of a Gaussian policy."""
ACTOR_METHODS = ("__call__", "forward", "get_output_log_prob", "output_entropy")
DISTRIBUTION_METHODS = ("sample", "log_prob", "entropy", "mean", "std")
UPDATE_NORMALIZES = "update_normalization" in PPO.update.__code__.co_names
"""Whether observations are counted for normalisation by `update`, of the whole rollout, as RSL-RL does from 5.5 on.
Before, `process_env_step` counts them."""
RETURNS_KEEP_STATE = "get_hidden_state" in PPO.compute_returns.__code__.co_names
"""Whether `compute_returns` gives a recurrent critic its hidden state back, as RSL-RL does from 5.4 on."""


class TritonPPO(PPO):
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
        if not hasattr(self, "_raw_actor"):  # RSL-RL 5.0, which compiles no models
            self._raw_actor, self._raw_critic = self.actor, self.critic
        self.triton = triton and not find_off_switch()
        self._is_gaussian = False
        self._rollout: dict[str, Any] = {}
        self._rate = torch.tensor(float(self.learning_rate), dtype=torch.float64, device=self.device)
        self._update = CapturedUpdate(self._update_minibatch, enabled=capture)
        self._find_step()
        if self.triton and self.obstacle:
            warnings.warn(f"TritonPPO updates as PPO of RSL-RL does: {self.obstacle}", RuntimeWarning, stacklevel=2)

    @property
    def obstacle(self) -> str:
        """Why the update is RSL-RL's own."""
        return self._update.stock

    def _find_step(self) -> CapturedStep:
        modules = [self._raw_actor, self._raw_critic]
        return self._update.find_step(modules, [self.optimizer], stock=self._find_obstacle(), state=[self._rate])

    def _has_gaussian_policy(self) -> bool:
        """Whether the actor's outputs are those of a Gaussian, and nothing that is gone around was changed."""
        distribution = self.actor.distribution
        return (
            type(distribution) in (GaussianDistribution, HeteroscedasticGaussianDistribution)
            and not find_override(self._raw_actor, ACTOR_METHODS, PACKAGES)
            and not find_override(distribution, DISTRIBUTION_METHODS, PACKAGES)
            and not any(map(has_hooks, (self.actor, self._raw_actor)))
        )

    def _find_obstacle(self) -> str:
        obstacles = {
            "switched off": not self.triton,
            "recurrent policies have minibatches of their own": self.actor.is_recurrent or self.critic.is_recurrent,
            "random network distillation has a loss of its own": self.rnd is not None,
            "symmetry augments minibatches": self.symmetry is not None,
            "gradients are averaged over several GPUs": self.is_multi_gpu,
            "mixed precision was asked for": getattr(self, "use_mixed_precision", False),
        }
        return (
            find_reason(obstacles)
            or find_override(self, ["update"], PACKAGES, behind=TritonPPO)
            or find_override(self.storage, ["mini_batch_generator"], PACKAGES)
        )

    def process_env_step(self, *args: Any, **kwargs: Any) -> None:
        """Record a step as `PPO` does, and keep statistics of observations where graphs read them."""
        has_graphs = self.triton and not UPDATE_NORMALIZES
        with _keep_buffers(self._raw_actor, self._raw_critic) if has_graphs else nullcontext():
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
        settings = [self._is_gaussian, *(getattr(self, name) for name in SETTINGS)]
        self._update.keep_settings([*settings, *find_pointers(self._rollout)])
        self._rate.fill_(self.learning_rate)
        size = self.storage.num_envs * self.storage.num_transitions_per_env // self.num_mini_batches
        minibatches = torch.randperm(self.num_mini_batches * size, device=self.device).split(size)
        rows = self._update.run(minibatches * self.num_learning_epochs)
        value, surrogate, entropy = rows.double().mean(dim=0).tolist()
        self.learning_rate = self._rate.item()
        if UPDATE_NORMALIZES:
            with _keep_buffers(self._raw_actor, self._raw_critic):
                self.actor.update_normalization(self._rollout["observations"])
                self.critic.update_normalization(self._rollout["observations"])
        self.storage.clear()
        return {"value": value, "surrogate": surrogate, "entropy": entropy}

    def _find_rollout(self) -> None:
        """Flatten the storage, where a graph reads it: a storage that has moved asks for another graph."""
        storage = self.storage
        scalars = {
            "values": storage.values,
            "returns": storage.returns,
            "advantages": storage.advantages,
            "old_log_probs": storage.actions_log_prob,
        }
        self._rollout = {name: x.flatten() for name, x in scalars.items()}
        self._rollout |= {"observations": storage.observations.flatten(0, 1), "actions": storage.actions.flatten(0, 1)}
        self._rollout |= {f"parameter {i}": x.flatten(0, 1) for i, x in enumerate(storage.distribution_params)}

    def _update_minibatch(self, indices: Tensor) -> Tensor:
        """Make one step of the optimizer, and return the losses: value, surrogate, entropy."""
        batch = {name: x[indices] for name, x in self._rollout.items()}
        self._apply_actor(batch["observations"])
        values = self.critic(batch["observations"], masks=None, hidden_state=None).flatten()
        if self.desired_kl is not None and self.schedule == "adaptive":
            self._adapt_learning_rate(tuple(x for name, x in batch.items() if name.startswith("parameter")))
        result = self._compute_loss(batch, values)
        self.optimizer.zero_grad()
        result.loss.backward()
        nn.utils.clip_grad_norm_(self.actor.parameters(), self.max_grad_norm)
        nn.utils.clip_grad_norm_(self.critic.parameters(), self.max_grad_norm)
        self.optimizer.step()
        return torch.stack([result.value_loss, result.policy_loss, result.entropy]).detach()

    def _apply_actor(self, observations: Any) -> None:
        """Compute the actor's distribution, and draw from it as `PPO` does, for the same random numbers.

        A draw from `Normal` waits for the device; `randn_like` takes as many random numbers and does not.
        """
        if not self._is_gaussian:
            self.actor(observations, masks=None, hidden_state=None, stochastic_output=True)
            return
        self.actor.distribution.update(self.actor.mlp(self.actor.get_latent(observations)))
        torch.randn_like(self.actor.distribution.mean)

    def _adapt_learning_rate(self, old_parameters: tuple[Tensor, ...]) -> None:
        """Change the learning rate by the divergence from the policy that acted; on the device, where it is captured.

        Args:
            old_parameters: Of the distribution that drew the minibatch's actions.
        """
        rate, target = self._rate, self.desired_kl
        with torch.no_grad():
            kl = self.actor.get_kl_divergence(old_parameters, self.actor.output_distribution_params).mean()
            slower, faster = (rate / 1.5).clamp(min=1e-5), (rate * 1.5).clamp(max=1e-2)
            rate.copy_(torch.where(kl > target * 2, slower, torch.where((kl < target / 2) & (kl > 0), faster, rate)))
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate.item()

    def _compute_loss(self, batch: dict[str, Tensor], values: Tensor) -> PPOLoss:
        """Compute the loss of one minibatch in one pass."""
        return ppo_loss(
            self._describe_policy(batch["actions"]),
            batch["actions"] if self._is_gaussian else None,
            batch["old_log_probs"],
            batch["advantages"],
            values=values,
            returns=batch["returns"],
            old_values=batch["values"],
            clip=self.clip_param,
            value_coef=self.value_loss_coef,
            value_clip=self.clip_param if self.use_clipped_value_loss else None,
            value_clip_mode="cleanrl",
            entropy_coef=self.entropy_coef,
            normalize_advantages=self.normalize_advantage_per_mini_batch,
        )

    def _describe_policy(self, actions: Tensor) -> Policy:
        """What the actor's last outputs are to the loss: mean and deviation where the policy is Gaussian."""
        if self._is_gaussian:
            distribution = self.actor.distribution
            deviation = distribution.std[0] if type(distribution) is GaussianDistribution else distribution.std
            return Gaussian(distribution.mean, deviation.log())
        log_probs, entropy = self.actor.get_output_log_prob(actions), self.actor.output_entropy
        if entropy.shape != log_probs.shape:
            entropy = entropy.mean().expand_as(log_probs)  # which is all that PPO reads of it
        return LogProbs(log_probs, entropy)


@contextmanager
def _keep_buffers(*modules: nn.Module) -> Iterator[None]:
    """Keep buffers that are replaced inside where they lie, since graphs know them by their addresses."""
    before = [(module, dict(module._buffers)) for parent in modules for module in parent.modules()]
    yield
    for module, buffers in before:
        for name, buffer in buffers.items():
            replaced = module._buffers[name]
            if buffer is not None and replaced is not None and replaced is not buffer:
                module._buffers[name] = buffer.copy_(replaced)
