"""RSL-RL: one step of `TritonPPO` with a minibatch, as a graph can hold it."""

# mypy: allow-untyped-calls, disable-error-code="attr-defined"

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rl_triton_adapters._overrides import find_override, has_hooks
from rl_triton_core.losses import Gaussian, LogProbs, Policy, ppo_loss

# isort: split
from rsl_rl.models import MLPModel, RNNModel
from rsl_rl.modules import RNN
from rsl_rl.modules.distribution import GaussianDistribution

MODEL_METHODS = ("__call__", "forward", "get_latent")
"""Of a recurrent model and of the parts that remember, which a step goes around."""
FIELDS = ("values", "returns", "advantages", "actions", "observations", "actions_log_prob")
"""What a step reads of the storage, besides the parameters of distributions."""


def map_fields(function: Callable[[Any], Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Apply a function to each tensor, or to each of a list of them."""
    return {name: [*map(function, x)] if isinstance(x, list) else function(x) for name, x in fields.items()}


def is_known(model: Any) -> bool:
    """Whether `compute_outputs` computes what a recurrent model does."""
    if not isinstance(model, RNNModel) or type(model.rnn) is not RNN:
        return False
    parts = (model, model.rnn, model.rnn.rnn)
    return not any(has_hooks(x) or find_override(x, MODEL_METHODS, ("rsl_rl", "torch")) for x in parts)


def compute_outputs(model: Any, observations: Any, states: list[Tensor], begins: Tensor) -> Tensor:
    """Compute what a recurrent model's last layers return for steps of whole rollouts.

    RSL-RL splits rollouts where episodes end, and pads the parts to one length: how many there are depends on the
    rollout. Here a step begins with the state that was recorded where an episode begins, and goes on elsewhere.

    Args:
        model: One that `is_known`.
        observations: [num_steps, num_envs].
        states: Recorded before each step, one of a GRU, two of an LSTM, each [num_steps, num_envs, num_layers, size].
        begins: Whether a step is the first one of an episode, or of the rollout, [num_steps, num_envs].
    """
    inputs = MLPModel.get_latent(model, observations)
    state, outputs = [], []
    for t, x in enumerate(inputs.split(1)):
        recorded = [x[t].swapaxes(0, 1).contiguous() for x in states]
        if t == 0:
            state = recorded
        else:
            state = [torch.where(begins[t, :, None], *pair) for pair in zip(recorded, state, strict=True)]
        output, following = model.rnn.rnn(x, state[0] if len(state) == 1 else tuple(state))
        state = [following] if len(state) == 1 else [*following]
        outputs.append(output)
    result: Tensor = model.mlp(torch.cat(outputs))
    return result


class StepMixin:
    """Minibatches of the storage, and the step of the optimizers with one of them. Put it in front of `PPO`."""

    @property
    def _models(self) -> list[Any]:
        """Actor and critic of the moment; what `torch.compile` has compiled, not compiled: graphs need no compiler."""
        pair = (self.actor, self.critic)
        return [x if not isinstance(x, nn.Module) or has_hooks(x) else x._modules.get("_orig_mod", x) for x in pair]

    @property
    def _is_recurrent(self) -> bool:
        return bool(self.actor.is_recurrent or self.critic.is_recurrent)

    def _count_samples(self) -> int:
        """The samples of a rollout; for recurrent models, the environments."""
        return int(self.storage.num_envs * (1 if self._is_recurrent else self.storage.num_transitions_per_env))

    def _list_minibatches(self) -> list[Tensor]:
        """The samples of each minibatch of an epoch."""
        size = self._count_samples() // self.num_mini_batches
        draw = torch.arange if self._is_recurrent else torch.randperm
        return [*draw(self.num_mini_batches * size, device=self.device).split(size)]

    def _find_rollout(self) -> None:
        """The storage as a graph reads it: one that has moved asks for another graph."""
        storage = self.storage
        rollout = {name: getattr(storage, name) for name in FIELDS} | {"parameters": [*storage.distribution_params]}
        if not self._is_recurrent:
            self._rollout = map_fields(lambda x: x.flatten(0, 1), rollout)
            return
        states = {"actor_states": storage.saved_hidden_state_a, "critic_states": storage.saved_hidden_state_c}
        rollout |= {name: [x.swapaxes(1, 2) for x in some or ()] for name, some in states.items()}
        self._rollout = rollout | {"dones": storage.dones.squeeze(-1)}

    def _gather_minibatch(self, indices: Tensor) -> SimpleNamespace:
        """These samples of the rollout; for recurrent models, all steps of these environments."""
        at = (slice(None), indices) if self._is_recurrent else indices
        batch = SimpleNamespace(**map_fields(lambda x: x[at], self._rollout))
        batch.old_actions_log_prob = batch.actions_log_prob
        if self._is_recurrent:
            batch.begins = torch.cat([torch.ones_like(batch.dones[:1]), batch.dones[:-1]]).bool()
        return batch

    def _update_minibatch(self, indices: Tensor) -> Tensor:
        """Make one step, and return the losses: value, surrogate, entropy, and those of extensions."""
        batch = self._gather_minibatch(indices)
        size, extra = len(indices), []
        if self.normalize_advantage_per_mini_batch and self.symmetry:
            batch.advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
        if self.symmetry:
            self.symmetry.augment_batch(batch, size)
        with torch.autocast(
            torch.device(self.device).type, torch.bfloat16, getattr(self, "use_mixed_precision", False)
        ):
            self._apply_actor(batch)
            values = self._apply_critic(batch)
            if self.desired_kl is not None and self.schedule == "adaptive":
                self._adapt_learning_rate(tuple(batch.parameters))
            loss, losses = self._compute_loss(batch, values, size)
            if self.rnd:
                extra.append(self.rnd.compute_loss(batch.observations[:size]))
            if self.symmetry:
                extra.append(self.symmetry.compute_loss(self._models[0], batch, size))
                if self.symmetry.use_mirror_loss:
                    loss = loss + self.symmetry.mirror_loss_coeff * extra[-1]
        self.optimizer.zero_grad()
        loss.backward()
        if self.rnd:
            self.rnd.optimizer.zero_grad()
            extra[0].backward()
        if self.is_multi_gpu:
            self.reduce_parameters()
        nn.utils.clip_grad_norm_(self.actor.parameters(), self.max_grad_norm)
        nn.utils.clip_grad_norm_(self.critic.parameters(), self.max_grad_norm)
        self.optimizer.step()
        if self.rnd:
            self.rnd.optimizer.step()
        return torch.stack([x.detach().float() for x in (*losses, *extra)])

    def _apply_actor(self, batch: SimpleNamespace) -> None:
        """Compute the actor's distribution, and draw from it as `PPO` does, for the same random numbers.

        A draw from `Normal` waits for the device; `randn_like` takes as many random numbers and does not.
        """
        actor = self._models[0]
        if not (self._is_gaussian or actor.is_recurrent):
            actor(batch.observations, masks=None, hidden_state=None, stochastic_output=True)
            return
        if actor.is_recurrent:
            outputs = compute_outputs(actor, batch.observations, batch.actor_states, batch.begins)
        else:
            outputs = actor.mlp(actor.get_latent(batch.observations))
        actor.distribution.update(outputs)
        if self._is_gaussian:
            torch.randn_like(actor.distribution.mean)
        else:
            actor.distribution.sample()

    def _apply_critic(self, batch: SimpleNamespace) -> Tensor:
        """Compute values."""
        critic = self._models[1]
        if critic.is_recurrent:
            return compute_outputs(critic, batch.observations, batch.critic_states, batch.begins)
        values: Tensor = critic(batch.observations, masks=None, hidden_state=None)
        return values

    def _adapt_learning_rate(self, old_parameters: tuple[Tensor, ...]) -> None:
        """Change the learning rate by the divergence from the policy that acted; on the device, where it is captured.

        Several processes take their mean divergence, and the rate of the first one, which is sent as float32.

        Args:
            old_parameters: Of the distribution that drew the minibatch's actions.
        """
        rate, target = self._rate, self.desired_kl
        with torch.no_grad():
            parameters = tuple(x[: len(old_parameters[0])] for x in self.actor.output_distribution_params)
            kl = self.actor.get_kl_divergence(old_parameters, parameters).mean()
            if self.is_multi_gpu:
                distributed.all_reduce(kl)
                kl /= self.gpu_world_size
            slower, faster = (rate / 1.5).clamp(min=1e-5), (rate * 1.5).clamp(max=1e-2)
            rate.copy_(torch.where(kl > target * 2, slower, torch.where((kl < target / 2) & (kl > 0), faster, rate)))
            if self.is_multi_gpu:
                sent = rate.float()
                distributed.broadcast(sent, src=0)
                rate.copy_(sent)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate.item()

    def _compute_loss(self, batch: SimpleNamespace, values: Tensor, size: int) -> tuple[Tensor, list[Tensor]]:
        """Compute the loss of one minibatch in one pass, and its parts.

        Args:
            batch: The minibatch.
            values: Of the critic.
            size: How many samples are the rollout's own: entropies of those that mirror them do not count.
        """
        is_augmented = not self._is_recurrent and len(values) > size
        result = ppo_loss(
            self._describe_policy(batch.actions, not is_augmented),
            batch.actions.flatten(0, -2) if self._is_gaussian else None,
            batch.old_actions_log_prob.flatten(),
            batch.advantages.flatten(),
            values=values.flatten().float(),
            returns=batch.returns.flatten(),
            old_values=batch.values.flatten(),
            clip=self.clip_param,
            value_coef=self.value_loss_coef,
            value_clip=self.clip_param if self.use_clipped_value_loss else None,
            value_clip_mode="cleanrl",
            entropy_coef=0.0 if is_augmented else self.entropy_coef,
            normalize_advantages=self.normalize_advantage_per_mini_batch and not self.symmetry,
        )
        loss, entropy = result.loss, result.entropy
        if is_augmented:
            entropy = self.actor.output_entropy[:size].mean()
            loss = loss - self.entropy_coef * entropy
        return loss, [result.value_loss, result.policy_loss, entropy]

    def _describe_policy(self, actions: Tensor, has_entropy: bool) -> Policy:
        """What the actor's last outputs are to the loss: mean and deviation where the policy is Gaussian."""
        if self._is_gaussian:
            distribution = self.actor.distribution
            mean, deviation = distribution.mean.flatten(0, -2).float(), distribution.std.flatten(0, -2).float()
            return Gaussian(mean, (deviation[0] if type(distribution) is GaussianDistribution else deviation).log())
        log_probs, entropy = self.actor.get_output_log_prob(actions), self.actor.output_entropy
        if entropy.shape != log_probs.shape:
            entropy = entropy.mean().expand_as(log_probs)  # which is all that PPO reads of it
        return LogProbs(log_probs.flatten().float(), entropy.flatten().float() if has_entropy else None)
