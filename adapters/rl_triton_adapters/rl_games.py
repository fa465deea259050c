"""RL-Games: PPO agents with the advantages of `rl_triton_core`, and steps that are replays of CUDA graphs on a GPU.

One line turns them on, before the runner runs; configurations keep their names:

    register_agents(runner)

A key of the configuration turns them off again: ``params.config.rl_triton: False``.
"""

# mypy: allow-subclassing-any, allow-untyped-calls, disable-error-code="attr-defined, misc, call-arg"

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rl_triton_adapters.common import overrides
from rl_triton_adapters.common.check import with_check
from rl_triton_adapters.common.switch import check_enabled, find_off_switch
from rl_triton_adapters.common.update import CapturedUpdate, DeferredChecks, Described, find_reason
from rl_triton_adapters.common.versions import explained_import
from rl_triton_core import compute_gae
from rl_triton_core.capture import keep_buffers
from rl_triton_core.reach import is_written_in

with explained_import(__name__, "rl-games", "1.6.1"):
    from rl_games.algos_torch.a2c_continuous import A2CAgent
    from rl_games.algos_torch.a2c_discrete import DiscreteA2CAgent
    from rl_games.common.layers import recurrent

__all__ = ["TritonA2CAgent", "TritonAdvantagesMixin", "TritonDiscreteA2CAgent", "register_agents"]

PACKAGES = ("rl_games",)
INPUTS = ("entropy_coef", "e_clip", "critic_coef", "bounds_loss_coef")  # may be annealed; graphs keep others
CAPTURING_MODES = ("reduce-overhead", "max-autotune")  # in which `torch.compile` captures graphs of its own
RATE = 4  # where the learning rate is in what a step leaves

# -- advantages --------------------------------------------------------------------------------------------------------


class TritonAdvantagesMixin:
    """Compute advantages with `rl_triton_core`. Put it in front of an agent of RL-Games.

    Time-outs are in the rewards already, as RL-Games adds them; returns and normalisation are its own. A user's agent
    that has its own `discount_values` keeps it, unless its class says `discount_values =
    TritonAdvantagesMixin.discount_values`.
    """

    def __init__(self, base_name: str, params: dict[str, Any]) -> None:
        """Create the agent, as RL-Games does; `params["config"]["rl_triton"]` is the switch.

        Raises:
            TypeError: The switch is no bool.
        """
        self.enabled = check_enabled(params["config"].get("rl_triton", True), "rl_triton") and not find_off_switch()
        super().__init__(base_name, params)

    def discount_values(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the advantages of a rollout, as `estimate_advantages`, or as a user's agent does.

        Agents of adversarial motion priors give four arguments, as of `estimate_with_next_values`.
        """
        ours = [vars(x).get("discount_values") for x in type(self).__mro__].count(TritonAdvantagesMixin.discount_values)
        own = overrides.find_override(self, ["discount_values"], PACKAGES, behind=TritonAdvantagesMixin)
        if not self.enabled or (own and ours == 1):
            return super().discount_values(*args, **kwargs)  # type: ignore[no-any-return]
        estimate = estimate_with_next_values if len(args) + len(kwargs) == 4 else estimate_advantages
        return estimate(self, *args, **kwargs)


def estimate_advantages(
    agent: Any, fdones: Tensor, last_values: Tensor, mb_fdones: Tensor, mb_values: Tensor, mb_rewards: Tensor
) -> Tensor:
    """Compute the advantages of a rollout, with the arguments of the agent's `discount_values`.

    Rewards and values are [num_steps, num_envs, value_size], the last values without steps. Flags of floating point,
    [num_steps, num_envs], say whether the step before ended its episode, `fdones` whether the last one did.
    """
    dones = torch.cat([mb_fdones[1:], fdones.unsqueeze(0)]).unsqueeze(-1)
    flags = dones.expand_as(mb_rewards).flatten(1)
    return solve(agent, mb_values, mb_rewards, terminated=flags, bootstrap_values=last_values.flatten())


def estimate_with_next_values(
    agent: Any, mb_fdones: Tensor, mb_values: Tensor, mb_rewards: Tensor, mb_next_values: Tensor
) -> Tensor:
    """As `estimate_advantages`, where the value of the state after each step is given, 0 where the episode terminated.

    Flags say whether a step itself ended its episode.
    """
    flags = mb_fdones.unsqueeze(-1).expand_as(mb_rewards).flatten(1)
    return solve(agent, mb_values, mb_rewards, truncated=flags, next_values=mb_next_values.flatten(1))


def solve(agent: Any, values: Tensor, rewards: Tensor, **ends: Any) -> Tensor:
    """Compute advantages of these values and rewards, with what is said of ends of episodes."""
    numbers = {"gamma": agent.gamma, "lambda_": agent.tau, "time_dim": 0, "compute_returns": False}
    return compute_gae(rewards.flatten(1), values.flatten(1), **numbers, **ends).advantages.view(rewards.shape)


# -- captured updates --------------------------------------------------------------------------------------------------


def find_step(update: CapturedUpdate, trainer: Any, name: str, stock: str, *ours: Any) -> None:
    """Find out how the steps of a trainer, whose method of this name makes them, are made.

    `stock` says why they are RL-Games' own, and `ours` runs in the place of the method.
    """
    called = overrides.list_stock(type(trainer), name, PACKAGES)[0]
    replaced, settings = overrides.find_settings(trainer, [called], PACKAGES, (*INPUTS, "last_lr"))
    stock = stock or overrides.find_own([trainer], [called], PACKAGES, *ours) or replaced
    stock = stock or next(filter(None, map(find_unknown, list_zeroed(trainer))), "")
    update.find_step([trainer.model], [trainer.optimizer], stock=stock, is_averaged=trainer.multi_gpu)
    things = [*overrides.list_modules(trainer.model), trainer.optimizer]
    update.keep_settings([getattr(trainer, "scaler", None), *settings, overrides.reach([called], things, PACKAGES)])


@contextmanager
def replace_model(trainer: Any, is_captured: bool, numbers: dict[str, Any]) -> Iterator[None]:
    """Inside, a trainer has a model as a graph can have it, and these numbers."""
    model, kept = trainer.model, {name: getattr(trainer, name) for name in numbers}
    networks = list_zeroed(trainer) if is_captured else []
    trainer.model = getattr(model, "_orig_mod", model) if is_captured else model  # graphs need no compiler
    try:
        vars(trainer).update(numbers)
        for x in networks:
            x.forward = partial(run_steps, x)
        yield
    finally:
        for x in networks:
            del x.forward
        vars(trainer).update(kept)
        trainer.model = model


def list_zeroed(trainer: Any) -> list[Any]:
    """The recurrent networks whose states are 0 where an episode begins; a central value network has no choice."""
    is_zeroed = trainer.zero_rnn_on_done or not hasattr(trainer, "has_central_value")
    return [x for x in overrides.list_modules(trainer.model) if is_zeroed and isinstance(x, recurrent.RnnWithDones)]


def find_unknown(network: Any) -> str:
    """Why `run_steps` does not compute what one of them does; empty if it does."""
    things, called = (network, network.rnn), [recurrent.RnnWithDones.forward]
    own = overrides.reach(called, things, PACKAGES)[1] or overrides.find_own(things, called, PACKAGES)
    return own or "a recurrent network has hooks" * overrides.has_hooks(network.rnn)


def run_steps(network: Any, inputs: Tensor, states: Any, dones: Tensor, bptt_len: int) -> Any:
    """What one of them computes, without a look where episodes end: one step after the other.

    Inputs are [num_steps, num_envs, size], and `dones` [num_steps, num_envs, 1] says before which steps states are 0.
    """
    length = len(inputs) if inputs.shape[1] == 1 else 1  # of one environment, RL-Games' `squeeze` loses later ends
    outputs = []
    for x, done in zip(inputs.split(length), dones[::length], strict=True):
        output, states = network.rnn(x, recurrent.multiply_hidden(states, (1.0 - done).float().unsqueeze(0)))
        outputs.append(output)
    return torch.cat(outputs), states


class AgentUpdate(CapturedUpdate):
    """The steps of an agent, and of its `central_value_net`, whose `train_net` stays RL-Games' own."""

    def __init__(self, agent: Any) -> None:
        super().__init__(self.make_step)
        self.agent, self.central_value = agent, CapturedUpdate(self.make_critic_step)
        self.is_prepared = False
        self.checks = DeferredChecks()  # of the step that is made
        self.refusals: list[Tensor] = []  # of each step of an epoch, whether a check has failed
        self.has_fused_kernel = getattr(agent, "use_fused_kernel", False)  # RL-Games 2's, which takes numbers

    def prepare(self) -> None:
        """Find out how the steps of the moment are made."""
        agent, compiled = self.agent, self.agent.config.get("torch_compile")
        modes = compiled if isinstance(compiled, dict) else {"mode": compiled}
        mode = modes.get("mode")
        if agent.has_central_value:
            net, refusal = agent.central_value_net, self.find_refusal(modes.get("critic_mode", mode))
            refusal = refusal or overrides.find_override(net, ["train_net"], PACKAGES)
            find_step(self.central_value, net, "train_critic", refusal, AgentUpdate.train_critic)
        reasons = {
            "use_diagnostics reads from the device in every minibatch": getattr(agent, "use_diagnostics", False),
            "actor_loss_func is not RL-Games'": not is_written_in(PACKAGES, agent.actor_loss_func),
        }
        stock = self.find_refusal(mode) or find_reason(reasons)
        find_step(self, agent, "calc_gradients", stock)
        agent.use_fused_kernel = self.has_fused_kernel and bool(self.stock)

    def find_refusal(self, mode: Any) -> str:
        """Why steps are not captured with this mode of `torch.compile`; empty if they may be."""
        captures = f"torch_compile={mode} captures graphs of its own"
        return find_reason({"switched off": not self.agent.enabled, captures: mode in CAPTURING_MODES})

    def describe(self, whose: str = "those of RL-Games") -> str:
        """Say how the steps of the moment are made, and why."""
        updates = [super().describe(whose)] + [self.central_value.describe(whose)] * self.agent.has_central_value
        return "; of the central value network, ".join(updates)

    def recapture(self) -> None:
        """Forget the graphs, and why there are none."""
        super().recapture()
        self.central_value.recapture()

    def run_step(self, input_dict: dict[str, Any]) -> None:
        """Make a step with a minibatch, and leave what the agent's own does."""
        results = self.step(input_dict, {name: x for name, x in vars(self.agent).items() if name in INPUTS})
        result, self.agent.aux_loss_dict, refusals = pytree.tree_map_only(Tensor, Tensor.clone, results)
        self.agent.train_result = (*result[:RATE], self.agent.last_lr, *result[RATE + 1 :])
        self.refusals += refusals

    def make_step(self, input_dict: dict[str, Any], numbers: dict[str, Any]) -> tuple[Any, Any, list[Tensor]]:
        """One step; what it leaves, and whether a distribution has refused its arguments, if there was a check."""
        agent, self.checks = self.agent, DeferredChecks()
        try:
            with replace_model(agent, self.is_captured, numbers), self.checks if self.is_captured else nullcontext():
                super(CapturedUpdateMixin, agent).calc_gradients(input_dict)
            refusals = [self.checks.has_failed()] if self.checks.results else []
        finally:
            self.checks = DeferredChecks()
        return agent.train_result, agent.aux_loss_dict, refusals

    def train_critic(self, batch: dict[str, Any]) -> Tensor:
        """Train the central value network with a minibatch; its loss, which the host would wait for, stays there."""
        net = self.agent.central_value_net
        net.train()
        loss: Tensor = self.central_value.step(batch, net.e_clip)
        return loss.double()  # RL-Games adds numbers

    def make_critic_step(self, batch: dict[str, Any], e_clip: Any) -> Tensor:
        """One step of the central value network; its loss."""
        net = self.agent.central_value_net
        with replace_model(net, self.central_value.is_captured, {"e_clip": e_clip}):
            return Tensor.detach(net.calc_gradients(batch))


class CapturedUpdateMixin:
    """Capture an agent's `calc_gradients`, and the steps of its central value network. Put it in front of an agent.

    What surrounds a step stays RL-Games' own: minibatches, schedules of the learning rate, which the host reads the
    divergence for. All methods here are some of RL-Games': an agent's own names stay free.
    """

    def __init__(self, base_name: str, params: dict[str, Any]) -> None:
        self.aux_loss_dict: dict[str, Any] = {}  # agents of RL-Games 1.6.1 have none
        super().__init__(base_name, params)
        self._rl_triton = AgentUpdate(self)
        self._rl_triton.prepare()
        if self.enabled:
            self._rl_triton.warn_of_stock(type(self).__name__, "the agent of RL-Games")
            self._rl_triton.central_value.warn_of_stock("the central value network", "that of RL-Games")

    def prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the minibatches of an update, as the agent does, and keep statistics where graphs read them."""
        update = self._rl_triton
        update.prepare()
        update.step.resume()  # if it was stopped in the epoch before
        update.is_prepared, update.refusals = False, []
        models = [self.model, self.central_value_net.model] if self.has_central_value else [self.model]
        with keep_buffers(models):
            return super().prepare_dataset(*args, **kwargs)

    def train_central_value(self, *args: Any, **kwargs: Any) -> Any:
        """Train the central value network, as the agent does, by our steps unless they are its own."""
        if self._rl_triton.central_value.stock or not self.has_central_value:
            return super().train_central_value(*args, **kwargs)
        self.central_value_net.train_critic = self._rl_triton.train_critic
        try:
            loss = super().train_central_value(*args, **kwargs)
        finally:
            del self.central_value_net.train_critic
        return loss.item() if isinstance(loss, Tensor) else loss

    @with_check
    def calc_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step with a minibatch, as the agent does."""
        update = self._rl_triton
        if not update.is_prepared:  # again: what is called as an epoch begins may have changed something
            update.prepare()
            update.is_prepared = True
        if not update.is_captured:
            return super().calc_gradients(*args, **kwargs)
        return update.run_step(*args, **kwargs)

    def trancate_gradients_and_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step of the optimizer, unless a distribution of this update has refused its arguments."""
        update = self._rl_triton
        if update.checks.results:
            update.step.stop_if(update.checks.has_failed())
        return super().trancate_gradients_and_step(*args, **kwargs)

    def train_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """Play and update, as the agent does; a minibatch that a distribution has refused raises its error."""
        results = super().train_epoch(*args, **kwargs)
        refused = torch.stack(self._rl_triton.refusals).tolist() if self._rl_triton.refusals else []
        if any(refused):
            super().calc_gradients(self.dataset[refused.index(True) % len(self.dataset)])
        return results


class TritonA2CAgent(CapturedUpdateMixin, TritonAdvantagesMixin, A2CAgent, Described):
    """PPO of RL-Games for continuous actions, with the advantages of `rl_triton_core`, captured on a GPU."""


class TritonDiscreteA2CAgent(CapturedUpdateMixin, TritonAdvantagesMixin, DiscreteA2CAgent, Described):
    """PPO of RL-Games for discrete actions, with the advantages of `rl_triton_core`, captured on a GPU."""


def register_agents(runner: Any) -> None:
    """Let a `Runner`, which has not run yet, make these agents under the names `a2c_continuous` and `a2c_discrete`."""
    runner.algo_factory.register_builder("a2c_continuous", TritonA2CAgent)
    runner.algo_factory.register_builder("a2c_discrete", TritonDiscreteA2CAgent)
