"""RL-Games: PPO agents with the advantages of `rl_triton_core` and captured updates.

One line turns them on, before the runner runs; configurations keep their names:

    register_agents(runner)

A key of the configuration turns them off again: ``params.config.rl_triton: False``.
"""

# mypy: allow-subclassing-any, allow-untyped-calls

from typing import Any

import torch
from torch import Tensor

from rl_triton_adapters.common.overrides import find_override
from rl_triton_adapters.common.switch import check_enabled, find_off_switch
from rl_triton_adapters.common.update import Described
from rl_triton_adapters.common.versions import explain_import
from rl_triton_core import compute_gae

try:
    from rl_games.algos_torch.a2c_continuous import A2CAgent
    from rl_games.algos_torch.a2c_discrete import DiscreteA2CAgent

    from rl_triton_adapters.rl_games.step import PACKAGES, CapturedUpdateMixin
except ImportError as error:
    raise explain_import(__name__, error, "rl-games", "1.6.1") from error

__all__ = ["TritonA2CAgent", "TritonAdvantagesMixin", "TritonDiscreteA2CAgent", "register_agents"]


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
        super().__init__(base_name, params)  # type: ignore[call-arg]

    def discount_values(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the advantages of a rollout, as `estimate_advantages`, or as a user's agent does.

        Agents of adversarial motion priors give four arguments, as of `estimate_with_next_values`.
        """
        ours = [vars(x).get("discount_values") for x in type(self).__mro__].count(TritonAdvantagesMixin.discount_values)
        own = find_override(self, ["discount_values"], PACKAGES, behind=TritonAdvantagesMixin)
        if not self.enabled or (own and ours == 1):
            stock: Tensor = super().discount_values(*args, **kwargs)  # type: ignore[misc]
            return stock
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


class TritonA2CAgent(CapturedUpdateMixin, TritonAdvantagesMixin, A2CAgent, Described):
    """PPO of RL-Games for continuous actions, with the advantages of `rl_triton_core`, captured on a GPU."""


class TritonDiscreteA2CAgent(CapturedUpdateMixin, TritonAdvantagesMixin, DiscreteA2CAgent, Described):
    """PPO of RL-Games for discrete actions, with the advantages of `rl_triton_core`, captured on a GPU."""


def register_agents(runner: Any) -> None:
    """Let a `Runner`, which has not run yet, make these agents under the names `a2c_continuous` and `a2c_discrete`."""
    runner.algo_factory.register_builder("a2c_continuous", TritonA2CAgent)
    runner.algo_factory.register_builder("a2c_discrete", TritonDiscreteA2CAgent)
