"""RSL-RL: one step of `TritonPPO` with a minibatch, as a graph can hold it."""

# mypy: allow-untyped-calls

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from rsl_rl import modules
from rsl_rl.algorithms import PPO
from torch import Tensor, distributed, nn
from torch.distributions import Normal
from torch.overrides import TorchFunctionMode

from rl_triton_adapters.common.overrides import find_override, find_own, find_settings, has_hooks, list_modules, reach
from rl_triton_adapters.common.update import CapturedUpdate, find_pointers, find_reason
from rl_triton_adapters.rsl_rl import older
from rl_triton_adapters.rsl_rl.older import PACKAGES, UPDATE_NORMALIZES, Part
from rl_triton_core.capture import keep_buffers
from rl_triton_core.losses import Gaussian, LogProbs, Policy, ppo_loss

OWN: Any = getattr(modules, "distribution", None)  # RSL-RL's distributions; up to version 4, it has PyTorch's `Normal`
DEVIATION = "std" if OWN else "stddev"
GAUSSIANS = (OWN.GaussianDistribution, OWN.HeteroscedasticGaussianDistribution) if OWN else (Normal,)
INPUTS = ("clip_param", "value_loss_coef", "entropy_coef", "desired_kl")  # may be annealed; graphs keep others
FIELDS = ("values", "returns", "advantages", "actions", "observations", "actions_log_prob")  # of the storage, in a step
gather_inputs = older.MLPModel.get_latent  # which a recurrent model's own calls


def compute_latents(model: Any, observations: Any, states: list[Tensor], begins: Tensor) -> Tensor:
    """Compute what a recurrent model's last layers are given at the steps of whole rollouts.

    RSL-RL splits rollouts where episodes end, and pads the parts to one length: how many there are depends on the
    rollout. Here a step begins with the state that was recorded where an episode begins, and goes on elsewhere.

    Observations are [num_steps, num_envs], and so is whether a step is the first of an episode or of the rollout.
    States before each step, one of a GRU, two of an LSTM, are [num_steps, num_envs, num_layers, size] each.
    """
    inputs = gather_inputs(model, observations)
    state, outputs = list[Tensor](), []
    for t, x in enumerate(inputs.split(1)):
        recorded = [x[t].swapaxes(0, 1).contiguous() for x in states]
        pairs = zip(recorded, state, strict=True)
        state = [torch.where(begins[t, :, None], *pair) for pair in pairs] if t else recorded
        output, following = model.rnn.rnn(x, state[0] if len(state) == 1 else tuple(state))
        state = [following] if len(state) == 1 else [*following]
        outputs.append(output)
    return torch.cat(outputs)


class Draws(TorchFunctionMode):
    """Inside, `Normal` is drawn from by the same random numbers, without a wait for the device to check deviations."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.normal and not kwargs and all(isinstance(x, Tensor) for x in args):
            return torch.addcmul(args[0], args[1], torch.randn_like(args[0]))
        return function(*args, **(kwargs or {}))


class Update(CapturedUpdate):
    """The steps of an algorithm with the minibatches of its storage; behind our class is RSL-RL's or the user's."""

    whose = "those of RSL-RL"

    def __init__(self, alg: Any, behind: type, capture: bool | None) -> None:
        super().__init__(self.make_step, enabled=capture)
        self.alg, self.behind, self.rollout = alg, behind, dict[str, Any]()
        self.unfused, self.replaced, self.found = "", "", list[Any]()
        self.symmetry: Any = None  # of the update
        self.rate = torch.tensor(float(alg.learning_rate), dtype=torch.float64, device=alg.device)

    def prepare(self) -> None:
        """Find out how the steps of the moment are made."""
        alg, models = self.alg, [x for x in self.modules if isinstance(x, nn.Module)]
        optimizers = [alg.optimizer]
        if alg.rnd:
            models += [alg.rnd.predictor, alg.rnd.target, alg.rnd.state_normalizer]
            optimizers.append(vars(alg).get("rnd_optimizer") or alg.rnd.optimizer)
        self.find_step(models, optimizers, stock=self.find_obstacle(), state=[self.rate], is_averaged=alg.is_multi_gpu)
        self.unfused = "" if self.stock else self.find_unfused()

    def describe(self, whose: str = "") -> str:
        """Say how updates are made, and why the loss is computed from log-probabilities, if it is."""
        return super().describe(whose) + f"; losses are those of log-probabilities: {self.unfused}" * bool(self.unfused)

    def find_obstacle(self) -> str:
        """Why the update is RSL-RL's own; empty if it is ours. Of recurrent models, `compute_latents` has to be so."""
        alg, recurrent = self.alg, [x for x in self.modules if x.is_recurrent]
        storage = alg.storage  # which `PPO` makes later, up to 3.1
        networks = [getattr(x, "rnn", None) for x in self.models if x.is_recurrent]
        is_known = all(isinstance(x, older.RNNModel) for x in recurrent) and {*map(type, networks)} <= {older.RNN}
        parts = [*recurrent, *networks, *(x.rnn for x in networks if x)] if is_known else []
        obstacles = {
            "switched off": not alg.enabled,
            "a model is no module of PyTorch": not all(isinstance(x, nn.Module) for x in self.modules),
            "this RSL-RL records the states of recurrent models elsewhere": storage and recurrent and not self.states,
            "extensions are given padded episodes": recurrent and (alg.rnd or alg.symmetry),
            "there are more minibatches than samples": storage and self.count_samples() < alg.num_mini_batches,
            "a recurrent model is not RSL-RL's": not is_known,
            "a recurrent model has hooks": any(map(has_hooks, parts)),
        }
        things = [storage, alg.optimizer, *chain(*map(list_modules, parts))]
        replaced, self.found = find_settings(alg, [PPO.update], PACKAGES, (*INPUTS, "learning_rate"), things)
        ours = (*SHARED, Update.apply_actor, Update.compute_entropy)
        return (
            find_reason(obstacles)
            or find_own(parts, [PPO.update], PACKAGES, *ours)
            or find_override(alg, ["update"], PACKAGES, behind=self.behind)
            or find_own([storage], [PPO.update], PACKAGES, Update.make_steps)
            or replaced
        )

    def find_unfused(self) -> str:
        """Why the loss is computed from log-probabilities rather than from what a Gaussian is made of; empty if not."""
        actor, distribution = self.modules[0], getattr(self.models[0], "distribution", None)
        known, self.replaced = reach([PPO.update], chain(*map(list_modules, self.modules)), PACKAGES)
        self.found = [*self.found, known]
        if type(distribution) not in GAUSSIANS:
            return f"{type(distribution).__name__} is no Gaussian of RSL-RL's"
        ours = (*SHARED, Update.draw, Part.__call__, nn.Module._call_impl)
        return find_own([actor, distribution], [PPO.update], PACKAGES, *ours) or self.replaced

    def make_steps(self) -> dict[str, float]:
        """Make all steps with a rollout, and return the mean losses."""
        alg = self.alg
        self.find_rollout()
        numbers, size = self.find_numbers(), self.count_samples() // alg.num_mini_batches
        draw = torch.arange if self.is_recurrent else torch.randperm
        minibatches = draw(alg.num_mini_batches * size, device=alg.device).split(size)  # the same in all epochs
        self.rate.fill_(alg.learning_rate)
        try:
            rows = self.run([*minibatches] * alg.num_learning_epochs, numbers)
        finally:
            alg.learning_rate = self.rate.item()
        names = [older.VALUE, "surrogate", "entropy", *["rnd"] * bool(alg.rnd), *["symmetry"] * bool(alg.symmetry)]
        losses = dict(zip(names, rows.double().mean(dim=0).tolist(), strict=True))
        if UPDATE_NORMALIZES:
            models = [*self.models, alg.rnd] if alg.rnd else self.models
            with keep_buffers(models):
                for model in models:
                    model.update_normalization(alg.storage.observations.flatten(0, 1))
        alg.storage.clear()
        return losses

    def find_numbers(self) -> dict[str, float | None]:
        """The numbers that a step reads; where it reads others that have changed, it is captured again."""
        alg, numbers = self.alg, {name: getattr(self.alg, name) for name in INPUTS}
        settings = [*self.found, self.unfused, find_pointers(self.rollout)]
        self.symmetry = older.Symmetry(**alg.symmetry) if isinstance(alg.symmetry, dict) else alg.symmetry
        if self.symmetry:
            methods = [getattr(x, "__func__", x) for x in (self.symmetry.compute_loss, self.symmetry.augment_batch)]
            numbers["mirror_loss_coeff"] = self.symmetry.mirror_loss_coeff
            settings += [methods, find_settings(self.symmetry, [PPO.update, *methods], PACKAGES, numbers)[1]]
        if alg.rnd:
            methods = [getattr(getattr(alg.rnd, x, None), "__func__", None) for x in ("get_rnd_state", "compute_loss")]
            found = find_settings(alg.rnd, [older.compute_rnd_loss, *filter(None, methods)], PACKAGES, ())
            settings += [type(alg.rnd), methods, found[1]]
        self.keep_settings(settings)
        return numbers

    @property
    def modules(self) -> list[Any]:
        """Actor and critic of the moment, or the policy that is both; not compiled: graphs need no compiler."""
        own = [self.alg.policy] if older.MLPModel is Part else [self.alg.actor, self.alg.critic]
        return [x if not isinstance(x, nn.Module) or has_hooks(x) else x._modules.get("_orig_mod", x) for x in own]

    @property
    def models(self) -> list[Any]:
        """Actor and critic of the moment."""
        own = self.modules
        return own if len(own) == 2 else [Part(own[0], role) for role in ("actor", "critic")]

    @property
    def states(self) -> list[Any]:
        """The recorded states of actor and critic, if they are recorded where RSL-RL does."""
        return [x for name, x in vars(self.alg.storage).items() if name.startswith("saved_hidden_state")]

    @property
    def is_recurrent(self) -> bool:
        """Whether a minibatch is all steps of some environments."""
        return any(x.is_recurrent for x in self.modules)

    def count_samples(self) -> int:
        """The samples of a rollout; for recurrent models, the environments."""
        storage = self.alg.storage
        return int(storage.num_envs * (1 if self.is_recurrent else storage.num_transitions_per_env))

    def find_rollout(self) -> None:
        """The storage as a graph reads it: one that has moved asks for another graph."""
        storage = self.alg.storage
        old = [*storage.distribution_params] if OWN else [storage.mu, storage.sigma]
        shape: Any = (lambda x: x) if self.is_recurrent else (lambda x: x.flatten(0, 1))
        self.rollout = {name: shape(getattr(storage, name)) for name in FIELDS} | {"parameters": [*map(shape, old)]}
        if self.is_recurrent:
            for name, states in zip(("actor_states", "critic_states"), self.states, strict=True):
                self.rollout[name] = [x.swapaxes(1, 2) for x in states or ()]
            self.rollout["dones"] = storage.dones.squeeze(-1)

    def gather_minibatch(self, indices: Tensor) -> SimpleNamespace:
        """These samples of the rollout; for recurrent models, all steps of these environments."""
        at = (slice(None), indices) if self.is_recurrent else indices
        fields = self.rollout.items()
        batch = SimpleNamespace(**{k: [y[at] for y in x] if isinstance(x, list) else x[at] for k, x in fields})
        batch.old_actions_log_prob = batch.actions_log_prob
        if self.is_recurrent:
            batch.begins = torch.cat([torch.ones_like(batch.dones[:1]), batch.dones[:-1]]).bool()
        return batch

    def make_step(self, indices: Tensor, numbers: dict[str, Any]) -> Tensor:
        """Make one step, and return the losses: value, surrogate, entropy, and those of extensions."""
        alg, symmetry, batch = self.alg, self.symmetry, self.gather_minibatch(indices)
        size, extra = len(batch.values), []
        if symmetry and alg.normalize_advantage_per_mini_batch:
            batch.advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
        if symmetry:
            symmetry.augment_batch(batch, size)
        with torch.autocast(torch.device(alg.device).type, torch.bfloat16, getattr(alg, "use_mixed_precision", False)):
            loss, losses = self.compute_loss(batch, numbers, size)
            if alg.rnd:
                extra.append(older.compute_rnd_loss(alg.rnd, batch.observations[:size]))
            if symmetry:
                extra.append(symmetry.compute_loss(self.models[0], batch, size))
                if symmetry.use_mirror_loss:
                    loss = loss + numbers["mirror_loss_coeff"] * extra[-1]
        for optimizer, x in zip(self.step.optimizers, (loss, *extra), strict=False):
            optimizer.zero_grad()
            x.backward()
        if alg.is_multi_gpu:
            alg.reduce_parameters()
        for module in self.modules:
            nn.utils.clip_grad_norm_(module.parameters(), alg.max_grad_norm)
        for optimizer in self.step.optimizers:
            optimizer.step()
        return torch.stack([x.detach().float() for x in (*losses, *extra)])

    def draw(self, batch: SimpleNamespace) -> None:
        """Compute the actor's distribution, and draw from it as `PPO` does, for the same random numbers."""
        actor = self.models[0]
        with Draws() if not self.replaced else nullcontext():  # a mode calls functions of PyTorch by their names again
            if not actor.is_recurrent:
                actor(batch.observations, masks=None, hidden_state=None, stochastic_output=True)
                return
            latents = compute_latents(actor, batch.observations, batch.actor_states, batch.begins)
            if OWN:
                actor.distribution.update(actor.mlp(latents))
            else:
                actor._update_distribution(latents)
            actor.distribution.sample()

    def apply_actor(self, batch: SimpleNamespace) -> Policy:
        """What the loss reads of the actor: mean and deviation where it is Gaussian, else log-probabilities."""
        self.draw(batch)
        actor = self.models[0]
        if self.unfused:
            return LogProbs(actor.get_output_log_prob(batch.actions).flatten().float())
        distribution = actor.distribution
        mean, deviation = (x.flatten(0, -2).float() for x in (distribution.mean, getattr(distribution, DEVIATION)))
        is_shared = deviation.stride(0) == 0  # by all samples: it was expanded
        return Gaussian(mean, (deviation[0] if is_shared else deviation).log())

    def compute_entropy(self, size: int) -> Tensor:
        """The mean entropy of the actor's distribution, of this many samples."""
        return self.models[0].output_entropy[:size].mean()  # type: ignore[no-any-return]

    def adapt_learning_rate(self, target: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Change the learning rate by the divergence from the policy that acted; on the device, where it is captured.

        Several processes take their mean divergence, and the rate of the first one, which is sent as float32.
        """
        alg, rate = self.alg, self.rate
        with torch.no_grad():
            if OWN:
                kl = self.models[0].get_kl_divergence(old, new).mean()
            else:
                (old_mean, old_std), (mean, std) = old, new
                far = (old_std.square() + (old_mean - mean).square()) / (2.0 * std.square())
                kl = ((std / old_std + 1e-5).log() + far - 0.5).sum(dim=-1).mean()
            if alg.is_multi_gpu:
                distributed.all_reduce(kl)
                kl /= alg.gpu_world_size
            slower, faster = (rate / 1.5).clamp(min=1e-5), (rate * 1.5).clamp(max=1e-2)
            rate.copy_(torch.where(kl > target * 2, slower, torch.where((kl < target / 2) & (kl > 0), faster, rate)))
            if alg.is_multi_gpu:
                sent = rate.float()
                distributed.broadcast(sent, src=0)
                rate.copy_(sent)
        for group in alg.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate.item()

    def compute_loss(self, batch: SimpleNamespace, numbers: dict[str, Any], size: int) -> tuple[Tensor, list[Tensor]]:
        """Compute the loss of one minibatch in one pass, and its parts. What is the user's is called as `PPO` does.

        Entropies of samples beyond `size` do not count: they mirror those of the rollout.
        """
        alg, policy, (actor, critic) = self.alg, self.apply_actor(batch), self.models
        if critic.is_recurrent:
            values = critic.mlp(compute_latents(critic, batch.observations, batch.critic_states, batch.begins))
        else:
            values = critic(batch.observations, masks=None, hidden_state=None)
        given = actor.output_distribution_params if OWN else (actor.output_mean, actor.output_std)
        parameters = tuple(x[:size] for x in given)
        is_fused = not self.unfused and len(values) == size
        entropy = None if is_fused else self.compute_entropy(size)
        if alg.desired_kl is not None and alg.schedule == "adaptive":
            self.adapt_learning_rate(numbers["desired_kl"], tuple(batch.parameters), parameters)
        # Attributes that are read here do not count as replaced: a policy has one called entropy.
        loss, surrogate_loss, value_loss, mean_entropy, *_ = ppo_loss(
            policy,
            None if self.unfused else batch.actions.flatten(0, -2),
            batch.old_actions_log_prob.flatten(),
            batch.advantages.flatten(),
            values=values.flatten().float(),
            returns=batch.returns.flatten(),
            old_values=batch.values.flatten(),
            clip=numbers["clip_param"],
            value_coef=numbers["value_loss_coef"],
            value_clip=numbers["clip_param"] if alg.use_clipped_value_loss else None,
            value_clip_mode="cleanrl",
            entropy_coef=numbers["entropy_coef"] if is_fused else 0.0,
            normalize_advantages=alg.normalize_advantage_per_mini_batch and not self.symmetry,
        )
        if entropy is None:
            return loss, [value_loss, surrogate_loss, mean_entropy]
        return loss - numbers["entropy_coef"] * entropy, [value_loss, surrogate_loss, entropy]


SHARED = (Update.make_steps, Update.compute_loss, Update.adapt_learning_rate)  # call methods as `PPO.update` does
