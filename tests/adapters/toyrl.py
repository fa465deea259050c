"""A framework as small as one can be, for which `toyrl_adapter` is the adapter: PPO in one environment of Gymnasium."""

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    """Logits and values of a hidden layer that both share."""

    def __init__(self, num_inputs, num_actions):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(num_inputs, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, num_actions), nn.Linear(16, 1)

    def forward(self, observations):
        hidden = self.trunk(observations)
        return Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)


class Agent:
    """Plays, and learns from what it has played."""

    def __init__(self, env, *, clip=0.2, entropy_coef=0.01, learning_rate=3e-3, num_steps=64, seed=0):
        torch.manual_seed(seed)
        self.env, self.clip, self.entropy_coef, self.num_steps = gym.make(env), clip, entropy_coef, num_steps
        self.gamma, self.lam, self.value_coef, self.max_grad_norm = 0.99, 0.95, 0.5, 0.5
        self.num_epochs, self.num_minibatches = 2, 4
        self.policy = Policy(self.env.observation_space.shape[0], int(self.env.action_space.n))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=learning_rate)
        self.observation, self.rollout = torch.tensor(self.env.reset(seed=seed)[0]), {}

    @torch.no_grad()
    def play(self):
        steps = []
        for _ in range(self.num_steps):
            distribution, value = self.policy(self.observation)
            action = distribution.sample()
            after, reward, terminated, truncated, _ = self.env.step(int(action))
            done = terminated or truncated
            log_prob = distribution.log_prob(action)
            steps.append((self.observation, action, log_prob, value, torch.tensor(reward).float(), torch.tensor(done)))
            self.observation = torch.tensor(self.env.reset()[0] if done else after)
        names = ("observations", "actions", "log_probs", "values", "rewards", "dones")
        self.rollout = dict(zip(names, map(torch.stack, zip(*steps, strict=True)), strict=True))
        last_value = self.policy(self.observation)[1]
        self.rollout["advantages"] = self.compute_advantages(last_value)
        self.rollout["returns"] = self.rollout["advantages"] + self.rollout["values"]

    def compute_advantages(self, last_value):
        rewards, values, dones = (self.rollout[name] for name in ("rewards", "values", "dones"))
        advantages, advantage, value = torch.zeros_like(rewards), 0.0, last_value
        for t in reversed(range(len(rewards))):
            goes_on = 1.0 - dones[t].float()
            delta = rewards[t] + self.gamma * value * goes_on - values[t]
            advantage = delta + self.gamma * self.lam * goes_on * advantage
            advantages[t], value = advantage, values[t]
        return advantages

    def compute_loss(self, batch):
        distribution, values = self.policy(batch["observations"])
        ratio = (distribution.log_prob(batch["actions"]) - batch["log_probs"]).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        policy_loss = -torch.min(ratio * batch["advantages"], clipped * batch["advantages"]).mean()
        value_loss = (values - batch["returns"]).square().mean()
        entropy = distribution.entropy().mean()
        loss = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy
        return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}

    def draw_minibatches(self):
        return torch.randperm(self.num_steps).chunk(self.num_minibatches)

    def update(self):
        """Learn from the rollout; the mean losses."""
        losses = []
        for _ in range(self.num_epochs):
            for indices in self.draw_minibatches():
                loss, parts = self.compute_loss({name: x[indices] for name, x in self.rollout.items()})
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
                self.optimizer.step()
                losses.append(parts)
        return {name: sum(x[name].item() for x in losses) / len(losses) for name in losses[0]}

    def learn(self, iterations):
        for _ in range(iterations):
            self.play()
            self.losses = self.update()
        return self
