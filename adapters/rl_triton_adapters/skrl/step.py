"""skrl: the updates of PPO, A2C, IPPO and MAPPO without a wait in a minibatch, a replay of a CUDA graph on a GPU."""

# mypy: allow-subclassing-any, allow-untyped-calls

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from itertools import chain
from typing import Any

import torch
from skrl import config
from skrl.memories.torch import RandomMemory
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.resources.schedulers.torch import KLAdaptiveLR
from torch import Tensor, distributed, nn
from torch.nn import functional

from rl_triton_adapters.common.overrides import find_override, find_own, find_settings, list_modules, reach
from rl_triton_adapters.common.update import CapturedUpdate, DeferredChecks, find_pointers, find_reason

INPUTS = ("entropy_loss_scale", "value_loss_scale", "value_clip", "kl_threshold")  # may be annealed, and `ratio_clip`
PACKAGES = ("skrl",)
KL, POLICY_LOSS, VALUE_LOSS, ENTROPY_LOSS, DEVIATION, HAS_STOPPED, IS_REFUSED = range(7)  # in what a step returns


def make_row(*statistics: Tensor) -> Tensor:
    """Statistics of a step, in the order of their names here."""
    return torch.stack([x.detach().float() for x in statistics])


def capture_update(stock: Callable[..., None]) -> Callable[..., None]:
    """Make an agent's `update` of skrl's with our advantages, of `replace_gae`, which runs where ours does not."""

    @wraps(stock)
    def update(self: Any, **given: Any) -> None:
        steps = self._rl_triton[given["uid"]] if "uid" in given else self._rl_triton
        steps.prepare()
        if steps.stock:
            steps.warn_of_stock(type(self).__name__, "skrl")
            current = self._rl_triton_class.update
            (stock if current is self._rl_triton_stock else current)(self, **given)
        else:
            steps.complete_rollout(stock.__globals__["compute_gae"])
            steps.make_steps()

    return update


class PPOUpdate(CapturedUpdate):
    """The steps of an agent's update.

    Minibatches, learning rates and what is tracked are those of skrl, and operations are skrl's, one by one. Statistics
    are read once per epoch.
    """

    whose = "those of skrl"

    def __init__(self, agent: Any) -> None:
        super().__init__(self.make_step)
        self.agent, self.samples, self.found = agent, dict[str, Any](), list[Any]()

    def prepare(self) -> None:
        """Find out how the steps of the moment are made."""
        agent, preprocessors = self.agent, self.list_preprocessors()
        scalers = [x for x in preprocessors if isinstance(x, nn.Module)]
        self.find_step(
            list(dict.fromkeys([agent.policy, agent.value, *scalers])),
            [agent.optimizer],
            stock=self.find_stock_reason(preprocessors),
            obstacle=find_reason({"kl_threshold with mixed precision": self.stops_early and agent.cfg.mixed_precision}),
            is_averaged=config.torch.is_distributed,
        )

    def find_stock_reason(self, preprocessors: list[Any]) -> str:
        """Why skrl's own code runs; empty if ours does."""
        agent, memory = self.agent, self.agent.memory
        if memory is None:
            return "the agent has no memory to learn from"
        known = [x == agent._empty_preprocessor or type(x) is RunningStandardScaler for x in preprocessors]
        device, update = next(agent.policy.parameters()).device, [agent._rl_triton_stock]
        reasons = {
            "with kl_threshold, one of several processes stops alone": config.torch.is_distributed and self.stops_early,
            "a preprocessor is not skrl's": not all(known),
            "the memory makes minibatches of its own": not isinstance(memory, RandomMemory),
            "the memory lies on another device": any(x.device != device for x in memory.tensors.values()),
        }
        own = find_override(agent._rl_triton_class, ["update"], PACKAGES)
        own = own or find_own([memory], update, PACKAGES, PPOUpdate.complete_rollout)
        things, inputs = [memory, agent.optimizer], (*INPUTS, "ratio_clip")
        replaced, self.found = find_settings(agent.cfg, update, PACKAGES, inputs, things)
        return find_reason(reasons) or own or replaced

    def list_preprocessors(self) -> list[Any]:
        """Those of what the models are given."""
        return [self.agent._observation_preprocessor, self.agent._state_preprocessor]

    @property
    def stops_early(self) -> bool:
        """Whether an epoch ends where the policy has moved too far."""
        return bool(getattr(self.agent.cfg, "kl_threshold", 0))

    def autocast(self) -> torch.autocast:
        """The context of an agent's forward passes."""
        return torch.autocast(torch.device(self.agent.device).type, enabled=self.agent.cfg.mixed_precision)

    def preprocess(self, observations: Any, states: Any, train: bool = False) -> dict[str, Any]:
        """The models' inputs."""
        of_observations, of_states = self.list_preprocessors()
        return {"observations": of_observations(observations, train=train), "states": of_states(states, train=train)}

    def complete_rollout(self, compute_gae: Callable[..., tuple[Tensor, Tensor]]) -> None:
        """Compute returns and advantages, and standardise values, as skrl does."""
        agent, memory, scale = self.agent, self.agent.memory, self.agent._value_preprocessor
        with torch.no_grad(), self.autocast():
            inputs = self.preprocess(agent._current_next_observations, agent._current_next_states)
            agent.value.enable_training_mode(False)
            last_values, _ = agent.value.act(inputs, role="value")
            agent.value.enable_training_mode(True)
            last_values = scale(last_values, inverse=True)
        names = ("rewards", "terminated", "truncated", "values")
        returns, advantages = compute_gae(
            **{name: memory.get_tensor_by_name(name) for name in names},
            last_values=last_values,
            discount_factor=agent.cfg.discount_factor,
            lambda_coefficient=agent.cfg.gae_lambda,
            time_limit_bootstrap=agent.cfg.time_limit_bootstrap,
        )
        memory.set_tensor_by_name("values", scale(memory.get_tensor_by_name("values"), train=True))
        memory.set_tensor_by_name("returns", scale(returns, train=True))
        memory.set_tensor_by_name("advantages", advantages)

    def find_numbers(self) -> dict[str, float | None]:
        """The numbers that a step reads; where it reads others that have changed, it is captured again."""
        agent, cfg = self.agent, self.agent.cfg
        self.samples = {name: agent.memory.tensors_view.get(name) for name in agent._tensors_names}
        numbers = {name: getattr(cfg, name, None) for name in INPUTS}
        if hasattr(cfg, "ratio_clip"):
            numbers |= {"lowest_ratio": 1.0 - cfg.ratio_clip, "highest_ratio": 1.0 + cfg.ratio_clip}
        signs = [(not x, (x or 0) > 0) for x in numbers.values()]
        called = reach([agent._rl_triton_stock], chain(*map(list_modules, self.step.modules)), PACKAGES)
        self.keep_settings([signs, self.found, called, agent.scaler, find_pointers(self.samples)])
        return numbers

    def make_steps(self) -> None:
        """Make all steps, schedule the learning rate after each epoch, and track what skrl does."""
        agent, epochs, numbers = self.agent, [], self.find_numbers()
        for epoch in range(getattr(agent.cfg, "learning_epochs", 1)):
            epochs.append(self.run_epoch(epoch == 0, numbers))
            if isinstance(agent.scheduler, KLAdaptiveLR):
                kl = epochs[-1][:, KL].contiguous().mean()
                if config.torch.is_distributed:
                    kl = kl.to(agent.device)
                    distributed.all_reduce(kl)
                    kl /= config.torch.world_size
                agent.scheduler.step(kl.item())
            elif agent.scheduler:
                agent.scheduler.step()
        self.track_losses(torch.cat(epochs), len(epochs) * agent.cfg.mini_batches)

    def run_epoch(self, train: bool, numbers: dict[str, float | None]) -> Tensor:
        """Make one step with each minibatch, perhaps in preprocessors' training; return statistics, on the CPU."""
        step, memory, count, rows = self.step, self.agent.memory, self.agent.cfg.mini_batches, []
        step.resume()
        memory.sample(names=[], batch_size=len(memory), mini_batches=count)
        minibatches = memory.sampling_indexes.to(self.agent.device).tensor_split(count)
        with step.held():
            for indices in minibatches:
                rows.append(step(indices, train, numbers).clone())
                if self.stops_early and rows[-1][HAS_STOPPED]:
                    break
        history = torch.stack(rows).cpu()
        refused = history[:, IS_REFUSED].nonzero()
        if len(refused):
            self.evaluate_policy(self.gather_minibatch(minibatches[int(refused[0])]), train=False)
        return history

    def gather_minibatch(self, indices: Tensor) -> dict[str, Any]:
        """These samples of the memory."""
        return {name: None if x is None else x.index_select(0, indices) for name, x in self.samples.items()}

    def evaluate_policy(self, batch: dict[str, Any], train: bool) -> tuple[dict[str, Any], Tensor]:
        """The models' inputs, and log-probabilities of the actions that were taken."""
        inputs = self.preprocess(batch["observations"], batch["states"], train)
        _, outputs = self.agent.policy.act({**inputs, "taken_actions": batch["actions"]}, role="policy")
        return inputs, outputs["log_prob"]

    def find_deviation(self) -> Tensor:
        """That of the policy's last distribution."""
        return torch.mean(self.agent.policy.distribution(role="policy").stddev)

    def make_step(self, indices: Tensor, train: bool, numbers: dict[str, Any]) -> Tensor:
        """Update the models with one minibatch, and return statistics; a refused draw stops all further steps."""
        agent, batch = self.agent, self.gather_minibatch(indices)
        defers = DeferredChecks() if self.is_captured else nullcontext()
        with self.autocast(), defers as checks:
            inputs, log_probs = self.evaluate_policy(batch, train)
            with torch.no_grad():
                ratio = log_probs - batch["log_prob"]
                kl = ((torch.exp(ratio) - 1) - ratio).mean()
            none = torch.zeros_like(kl)
            deviation = self.find_deviation().detach() if self.is_captured else none
            stops = kl > numbers["kl_threshold"] if self.stops_early else none
            refused = checks.has_failed() if checks is not None and checks.results else none
            if checks is not None and (self.stops_early or checks.results):
                self.step.stop_if(stops.bool() | refused.bool())
            elif self.stops_early and stops:
                return make_row(kl, none, none, none, deviation, stops, refused)
            entropy_loss = none
            if agent.cfg.entropy_loss_scale:
                entropy = agent.policy.get_entropy(role="policy").mean()
                entropy_loss = (-numbers["entropy_loss_scale"] * entropy).to(entropy.dtype)
            policy_loss, value_loss = self.compute_losses(log_probs, inputs, batch, numbers)
        self.step_optimizer(policy_loss + entropy_loss + value_loss)
        return make_row(kl, policy_loss, value_loss, entropy_loss, deviation, stops, refused)

    def compute_losses(self, log_probs: Tensor, inputs: Any, batch: Any, numbers: Any) -> tuple[Tensor, Tensor]:
        """The losses of policy and value."""
        advantages, bound = batch["advantages"], numbers["value_clip"]
        ratio = torch.exp(log_probs - batch["log_prob"])
        clipped = torch.clip(ratio, numbers["lowest_ratio"], numbers["highest_ratio"])
        surrogate = torch.min(advantages * ratio, advantages * clipped)
        values, _ = self.agent.value.act(inputs, role="value")
        if self.agent.cfg.value_clip > 0:
            values = batch["values"] + torch.clip(values - batch["values"], min=-bound, max=bound)
        value_loss = functional.mse_loss(batch["returns"], values)
        return -surrogate.mean(), (numbers["value_loss_scale"] * value_loss).to(value_loss.dtype)

    def step_optimizer(self, loss: Tensor) -> None:
        """Make a step with clipped gradients."""
        agent = self.agent
        agent.optimizer.zero_grad()
        agent.scaler.scale(loss).backward()
        models = [agent.policy] if agent.policy is agent.value else [agent.policy, agent.value]
        if config.torch.is_distributed:
            for model in models:
                model.reduce_parameters()
        if agent.cfg.grad_norm_clip > 0:
            agent.scaler.unscale_(agent.optimizer)
            parameters = chain.from_iterable(model.parameters() for model in models)
            nn.utils.clip_grad_norm_(parameters, agent.cfg.grad_norm_clip)
        agent.scaler.step(agent.optimizer)
        agent.scaler.update()

    def track_losses(self, history: Tensor, count: int) -> None:
        """Track what skrl does: losses of the minibatches whose steps were made, over the number of all."""
        agent, made = self.agent, history[history[:, HAS_STOPPED] == 0].double().sum(dim=0) / count
        losses = {"Policy": POLICY_LOSS, "Value": VALUE_LOSS}
        for name, i in (losses | {"Entropy": ENTROPY_LOSS} if agent.cfg.entropy_loss_scale else losses).items():
            agent.track_data(f"Loss / {name} loss", made[i].item())
        deviation = history[-1, DEVIATION] if self.is_captured else self.find_deviation()
        agent.track_data("Policy / Standard deviation", deviation.item())
        if agent.scheduler:
            agent.track_data("Learning / Learning rate", agent.scheduler.get_last_lr()[0])


class A2CUpdate(PPOUpdate):
    """As `PPOUpdate`, for A2C."""

    def compute_losses(self, log_probs: Tensor, inputs: Any, batch: Any, numbers: Any) -> tuple[Tensor, Tensor]:
        """The losses of policy and value."""
        policy_loss = -(batch["advantages"] * log_probs).mean()
        values, _ = self.agent.value.act(inputs, role="value")
        return policy_loss, functional.mse_loss(batch["returns"], values)


class OneOfAgents:
    """What an update of PPO reads of its agent, of one of several, of which skrl has dictionaries under plurals."""

    def __init__(self, agents: Any, uid: str) -> None:
        self.agents, self.uid = agents, uid

    def __getattr__(self, name: str) -> Any:
        if name == "agents":  # of a copy that is not complete
            raise AttributeError(name)
        several = f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"
        found = getattr(self.agents, several if hasattr(self.agents, several) else name)
        return found.get(self.uid, found) if isinstance(found, dict) else found

    def track_data(self, tag: str, value: float) -> None:
        """As of skrl, under this agent's name."""
        self.agents.track_data(f"{tag} ({self.uid})", value)


class IPPOUpdate(PPOUpdate):
    """As `PPOUpdate`, for one of the agents of IPPO or MAPPO."""

    def prepare(self) -> None:
        """Find out how the steps of the moment are made, with this agent's settings."""
        self.agent.cfg = cfg = copy.copy(self.agent.agents.cfg)
        vars(cfg).update({name: x.get(self.agent.uid, x) for name, x in vars(cfg).items() if isinstance(x, dict)})
        super().prepare()


class AgentUpdates(dict[str, PPOUpdate]):
    """Updates by the names of agents that learn together, and how they are made."""

    def __init__(self, agents: Any) -> None:
        super().__init__({uid: IPPOUpdate(OneOfAgents(agents, uid)) for uid in agents.possible_agents})
        self.stock = ""

    def prepare(self) -> None:
        """Find out how the steps of the moment are made."""
        for update in self.values():
            update.prepare()
        self.stock = next(filter(None, (x.stock for x in self.values())), "")

    def describe(self) -> str:
        """Say how updates are made, and why; once, what is the same for all."""
        return "; ".join(dict.fromkeys(x.describe() for x in self.values()))

    def recapture(self) -> None:
        """Forget the graphs, and why there are none."""
        for update in self.values():
            update.recapture()
