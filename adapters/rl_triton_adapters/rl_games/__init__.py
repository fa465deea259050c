"""RL-Games: PPO agents with the advantages of `rl_triton_core`, captured updates, and its loss of continuous actions.

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
from rl_triton_core.losses import LogProbs, ppo_loss
from rl_triton_core.reach import is_written_in

try:
    from rl_games.algos_torch.a2c_continuous import A2CAgent
    from rl_games.algos_torch.a2c_discrete import DiscreteA2CAgent
    from rl_games.common import common_losses

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
    """PPO of RL-Games for continuous actions, with advantages and loss of `rl_triton_core`, captured on a GPU.

    The loss is RL-Games' own with masks of sequences, several values per state, `use_experimental_cv: False` beside a
    central value network, mixed precision, `ppo: False`, or another `actor_loss_func` than the clipped one. A user's
    agent that this class stands in front of keeps its own `calc_losses`. An RL-Games without that method, such as 1.6.1
    and Isaac Lab's, computes the loss itself.
    """

    def calc_losses(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Compute the loss of a minibatch, as `compute_losses`, or as the agent does."""
        own = find_override(self, ["calc_losses"], PACKAGES, behind=TritonA2CAgent)
        losses = None if own or not self.enabled else compute_losses(self, *args, **kwargs)
        if losses is None:
            stock: tuple[Any, ...] = super().calc_losses(*args, **kwargs)
            return stock
        return losses


def compute_losses(
    agent: Any,
    actor_loss_func: Any,
    old_action_log_probs_batch: Tensor,
    action_log_probs: Tensor,
    advantage: Tensor,
    curr_e_clip: float,
    value_preds_batch: Tensor,
    values: Tensor,
    return_batch: Tensor,
    mu: Tensor,
    entropy: Tensor,
    rnn_masks: Tensor | None,
) -> tuple[Any, ...] | None:
    """Compute the loss of a minibatch, as `A2CAgent.calc_losses` does; None where it is to be RL-Games' own.

    Arguments are those of the method, log-probabilities negative ones: [batch], values and their targets
    [batch, value_size], means [batch, num_actions]. Results are its own too: total, actor's and critic's loss, entropy,
    loss of the bounds, and the masks' size or None.
    """
    is_known = actor_loss_func is common_losses.actor_loss and is_written_in(PACKAGES, actor_loss_func)
    clipped = agent.ppo and is_known and not agent._rl_triton.replaced
    plain = agent.has_value_loss and values.shape[-1] == 1 and rnn_masks is None and not agent.mixed_precision
    if not (clipped and plain):
        return None
    result = ppo_loss(
        LogProbs(-action_log_probs, entropy),
        None,
        -old_action_log_probs_batch,
        advantage,
        values=values.flatten(),
        returns=return_batch.flatten(),
        old_values=value_preds_batch.flatten(),
        clip=curr_e_clip,
        value_coef=0.5 * agent.critic_coef,
        value_clip=curr_e_clip if agent.clip_value else None,
        value_clip_mode="cleanrl",
        entropy_coef=agent.entropy_coef,
    )
    coef = agent.bounds_loss_coef  # None, where the configuration has none
    bounds = {"regularisation": agent.reg_loss, "bound": agent.bound_loss}.get(agent.bound_loss_type)
    b_loss = torch.zeros((), device=mu.device) if bounds is None or coef is None else bounds(mu).mean()
    loss = result.loss if coef is None else result.loss + b_loss * coef
    return loss, result.policy_loss, result.value_loss, result.entropy, b_loss, None


class TritonDiscreteA2CAgent(CapturedUpdateMixin, TritonAdvantagesMixin, DiscreteA2CAgent, Described):
    """PPO of RL-Games for discrete actions, with the advantages of `rl_triton_core`, captured on a GPU."""


def register_agents(runner: Any) -> None:
    """Let a runner make these agents under the names `a2c_continuous` and `a2c_discrete`.

    Args:
        runner: A `Runner` of RL-Games, which has not run yet.
    """
    runner.algo_factory.register_builder("a2c_continuous", TritonA2CAgent)
    runner.algo_factory.register_builder("a2c_discrete", TritonDiscreteA2CAgent)
