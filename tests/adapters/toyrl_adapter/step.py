"""toyrl: one step with a minibatch, as a graph can hold it."""

import torch
from torch import nn
from toyrl import Agent, Policy

from rl_triton_adapters.common.overrides import find_override, find_own, find_settings, has_hooks, list_modules
from rl_triton_adapters.common.update import CapturedUpdate, find_pointers, find_reason
from rl_triton_core.losses import Categorical, ppo_loss

PACKAGES = ("toyrl", "toyrl_adapter")
INPUTS = ("clip", "entropy_coef", "value_coef")
"""Numbers of the agent that may be annealed: graphs keep its other attributes."""
LOSSES = ("policy_loss", "value_loss", "entropy")


class Update(CapturedUpdate):
    """The steps of an agent. `kind` is our class: what stands behind it is toyrl's or the user's."""

    whose = "those of toyrl"

    def __init__(self, agent, kind):
        super().__init__(self.make_step)
        self.agent, self.kind, self.found = agent, kind, []

    def prepare(self):
        """Find out how the steps of the moment are made."""
        agent, policy = self.agent, self.agent.policy
        parts = list_modules(policy)
        replaced, self.found = find_settings(agent, [Agent.update], PACKAGES, INPUTS, [*parts, agent.optimizer])
        reasons = {
            "switched off": not agent.enabled,
            f"{type(policy).__name__} is no Policy of toyrl": type(policy) is not Policy,
            "the policy has hooks": any(map(has_hooks, (policy, policy.actor, policy.critic))),
        }
        self.find_step(
            [policy],
            [agent.optimizer],
            stock=find_reason(reasons)
            or find_override(agent, ["update"], PACKAGES, behind=self.kind)
            or find_own([agent, *parts], [Agent.update], PACKAGES, Update.make_steps, Update.make_step)
            or replaced,
        )

    def make_steps(self):
        """Make all steps with a rollout; the mean losses."""
        agent = self.agent
        self.keep_settings([*self.found, find_pointers(agent.rollout)])
        minibatches = [x for _ in range(agent.num_epochs) for x in agent.draw_minibatches()]
        rows = self.run(minibatches, {name: getattr(agent, name) for name in INPUTS})
        return dict(zip(LOSSES, rows.double().mean(dim=0).tolist(), strict=True))

    def make_step(self, indices, numbers):
        """One step with these samples of the rollout; its losses."""
        agent, policy = self.agent, self.agent.policy
        batch = {name: x[indices] for name, x in agent.rollout.items()}
        hidden = policy.trunk(batch["observations"])
        result = ppo_loss(
            Categorical(policy.actor(hidden)),
            batch["actions"],
            batch["log_probs"],
            batch["advantages"],
            values=policy.critic(hidden).squeeze(-1),
            returns=batch["returns"],
            normalize_advantages=False,
            **numbers,
        )
        agent.optimizer.zero_grad()
        result.loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), agent.max_grad_norm)
        agent.optimizer.step()
        return torch.stack([getattr(result, name).detach() for name in LOSSES])
