"""PPO in a single file, in CleanRL's manner, the advantages computed by rl_triton_core. Learns CartPole-v1.

    python examples/ppo_cleanrl.py                                  --advantages triton is the default
    python examples/ppo_cleanrl.py --advantages stock               CleanRL's ten-line loop in its place, see stock()
    python examples/ppo_cleanrl.py --env-id Pendulum-v1 --gamma 0.9 any environment with Box observations
    python examples/ppo_cleanrl.py --device cuda --update captured  minibatches are replayed as a CUDA graph

Time limits are no terminations here: a truncated step continues with the value of the episode's final observation.
"""

import argparse
from collections import deque
from typing import Any, NamedTuple

from command_line import COUNT, FACTOR, SEED, SHARE, Curves, check_rollout, device, environment, judge, needing, run

with needing("cleanrl", __name__):
    import gymnasium as gym
    import numpy as np
    import torch
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from torch import Tensor, nn
    from torch.distributions import Categorical, Distribution, Independent, Normal
    from tqdm import tqdm

    from rl_triton_adapters.cleanrl import gae
    from rl_triton_core.capture import CapturedStep
    from rl_triton_core.losses import LogProbs, PPOLoss, ppo_loss


class Rollout(NamedTuple):
    """One window, [num_steps, num_envs, ...]. `dones` arrive with the observation, `truncations` end the step."""

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    rewards: Tensor
    dones: Tensor
    values: Tensor
    truncations: Tensor
    final_values: Tensor


# -- advantages -------------------------------------------------------------------------------------------------------


def compute_stock_advantages(
    rollout: Rollout, next_value: Tensor, next_done: Tensor, args: argparse.Namespace
) -> tuple[Tensor, Tensor]:
    """The loop of CleanRL, with γ·V(final observation) in the rewards of truncated steps."""
    rewards = rollout.rewards + args.gamma * rollout.final_values * rollout.truncations
    advantages, lastgaelam = torch.zeros_like(rewards), torch.zeros_like(next_done)
    nonterminal, nextvalues = 1.0 - next_done, next_value
    for t in reversed(range(args.num_steps)):
        delta = rewards[t] + args.gamma * nextvalues * nonterminal - rollout.values[t]
        advantages[t] = lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
        nonterminal, nextvalues = 1.0 - rollout.dones[t], rollout.values[t]
    return advantages, advantages + rollout.values


def compute_triton_advantages(
    rollout: Rollout, next_value: Tensor, next_done: Tensor, args: argparse.Namespace
) -> tuple[Tensor, Tensor]:
    """The same numbers by rl_triton_core."""
    return gae(
        rollout.rewards, rollout.values, rollout.dones, next_value, next_done, args.gamma, args.gae_lambda,
        truncations=rollout.truncations, final_values=rollout.final_values,
    )  # fmt: skip


ADVANTAGES = {"stock": compute_stock_advantages, "triton": compute_triton_advantages}


# -- agent ------------------------------------------------------------------------------------------------------------


def layer_init(layer: nn.Linear, std: float = 2**0.5) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def make_network(inputs: int, outputs: int, std: float) -> nn.Sequential:
    return nn.Sequential(
        layer_init(nn.Linear(inputs, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, outputs), std),
    )


class Agent(nn.Module):
    """Actor and critic; the actor is categorical or Gaussian, as the action space asks."""

    def __init__(self, envs: SyncVectorEnv):
        super().__init__()
        obs_space, space = envs.single_observation_space, envs.single_action_space
        if not isinstance(obs_space, gym.spaces.Box) or not isinstance(space, gym.spaces.Discrete | gym.spaces.Box):
            text = f"--env-id: got {obs_space} and {space}, expected Box observations, and Discrete or Box actions"
            raise argparse.ArgumentTypeError(text)
        self.discrete = isinstance(space, gym.spaces.Discrete)
        self.actions = int(space.n) if self.discrete else int(np.prod(space.shape))
        inputs = int(np.prod(obs_space.shape))
        self.critic, self.actor = make_network(inputs, 1, std=1.0), make_network(inputs, self.actions, std=0.01)
        self.logstd = nn.Parameter(torch.zeros(1 if self.discrete else self.actions))

    def predict_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs.flatten(1)).squeeze(-1)

    def predict_policy(self, obs: Tensor) -> Distribution:
        output = self.actor(obs.flatten(1))
        if self.discrete:  # a check of arguments would wait for the device
            return Categorical(logits=output, validate_args=False)
        return Independent(Normal(output, self.logstd.exp(), validate_args=False), 1)


# -- environments -----------------------------------------------------------------------------------------------------


def make_envs(env_id: str, num_envs: int) -> SyncVectorEnv:
    """In mode SAME_STEP `step` returns the reset observation, and infos["final_obs"] holds the final one."""
    return SyncVectorEnv([lambda: gym.make(env_id)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def step_envs(envs: SyncVectorEnv, action: Tensor) -> Any:
    space, actions = envs.single_action_space, action.cpu().numpy()
    if isinstance(space, gym.spaces.Box):
        actions = np.clip(actions.reshape(-1, *space.shape), space.low, space.high)
    return envs.step(actions)


class Collector:
    """Steps the environments from window to window."""

    def __init__(self, envs: SyncVectorEnv, agent: Agent, args: argparse.Namespace):
        self.envs, self.agent, self.args = envs, agent, args
        self.next_obs = self.as_tensor(envs.reset(seed=args.seed)[0])
        self.next_done = torch.zeros(args.num_envs, device=args.device)
        self.running, self.returns = np.zeros(args.num_envs), deque[float](maxlen=100)

    def as_tensor(self, array: Any) -> Tensor:
        return torch.as_tensor(np.asarray(array), dtype=torch.float32, device=self.args.device)

    @torch.no_grad()
    def collect_rollout(self) -> Rollout:
        columns: list[list[Tensor]] = [[] for _ in Rollout._fields]
        for _ in range(self.args.num_steps):
            obs, done = self.next_obs, self.next_done
            policy = self.agent.predict_policy(obs)
            action = policy.sample()
            next_obs, reward, terminated, truncated, infos = step_envs(self.envs, action)
            cut = truncated & ~terminated
            final_values = torch.zeros(len(cut), device=obs.device)
            if cut.any():
                final_values[torch.as_tensor(cut, device=obs.device)] = self.agent.predict_value(
                    self.as_tensor(np.stack(infos["final_obs"][cut]))
                )
            self.next_obs, self.next_done = self.as_tensor(next_obs), self.as_tensor(terminated | truncated)
            self.count_returns(reward, terminated | truncated)
            values, rewards, truncations = self.agent.predict_value(obs), self.as_tensor(reward), self.as_tensor(cut)
            row = obs, action, policy.log_prob(action), rewards, done, values, truncations, final_values
            for column, entry in zip(columns, row, strict=True):
                column.append(entry)
        return Rollout(*map(torch.stack, columns))

    def count_returns(self, reward: np.ndarray, done: np.ndarray) -> None:
        self.running += reward
        self.returns.extend(self.running[done])
        self.running[done] = 0.0


# -- training ---------------------------------------------------------------------------------------------------------


def compute_loss(agent: Agent, batch: dict[str, Tensor], clip: float, args: argparse.Namespace) -> PPOLoss:
    policy, values = agent.predict_policy(batch["obs"]), agent.predict_value(batch["obs"])
    return ppo_loss(
        LogProbs(policy.log_prob(batch["actions"]), policy.entropy()), None, batch["logprobs"], batch["advantages"],
        normalize_advantages=True, values=values, returns=batch["returns"],
        clip=clip, value_coef=args.vf_coef, value_factor=0.5, entropy_coef=args.ent_coef,
    )  # fmt: skip


class Learner:
    """Updates an agent; with `--update captured`, a minibatch is a CUDA graph where there is a GPU."""

    def __init__(self, agent: Agent, args: argparse.Namespace):
        self.agent, self.args = agent, args
        self.optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        self.data: dict[str, Tensor] = {}
        enabled = None if args.update == "captured" else False
        self.update = CapturedStep(self.update_rows, modules=[agent], optimizers=[self.optimizer], enabled=enabled)

    def update_rows(self, rows: Tensor, clip: float) -> dict[str, Tensor]:
        """A step on some rows of the data."""
        batch = {name: x.index_select(0, rows) for name, x in self.data.items()}
        losses = compute_loss(self.agent, batch, clip, self.args)
        self.optimizer.zero_grad()
        losses.loss.backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        return {name: x.detach() for name, x in losses._asdict().items()}

    def update_agent(self, data: dict[str, Tensor], left: float) -> dict[str, Tensor]:
        """Several epochs of minibatches; `left` is the share of training still to come, by which step and clip fall."""
        for name, x in data.items():
            self.data.setdefault(name, torch.empty_like(x)).copy_(x)  # where the graph finds it
        self.optimizer.param_groups[0]["lr"] = left * self.args.learning_rate
        losses: dict[str, Tensor] = {}
        for _ in range(self.args.update_epochs):
            for rows in torch.randperm(len(data["obs"])).to(self.args.device).chunk(self.args.num_minibatches):
                losses = self.update(rows, left * self.args.clip_coef)
        return losses


def train_agent(args: argparse.Namespace) -> tuple[Agent, list[float]]:
    """Returns the agent and, for each iteration, the mean return of the last 100 episodes."""
    torch.manual_seed(args.seed)
    envs = make_envs(args.env_id, args.num_envs)
    agent = Agent(envs).to(args.device)
    learner, collector, curve = Learner(agent, args), Collector(envs, agent, args), []
    batch_size = args.num_steps * args.num_envs
    iterations = args.total_timesteps // batch_size
    curves = Curves(f"{args.log_dir}/{args.env_id}__ppo_cleanrl__{args.advantages}__{args.seed}")
    for iteration in (bar := tqdm(range(iterations), unit="update", disable=args.quiet)):
        rollout = collector.collect_rollout()
        with torch.no_grad():
            next_value = agent.predict_value(collector.next_obs)
        advantages, returns = ADVANTAGES[args.advantages](rollout, next_value, collector.next_done, args)
        data = rollout._asdict() | {"advantages": advantages, "returns": returns}
        losses = learner.update_agent({name: x.flatten(0, 1) for name, x in data.items()}, 1 - iteration / iterations)
        curve.append(float(np.mean(collector.returns)) if collector.returns else float("nan"))
        bar.set_postfix_str(f"return {curve[-1]:.1f}")
        global_step = (iteration + 1) * batch_size
        curves.add_scalar("charts/episodic_return", curve[-1], global_step)
        curves.add_scalar("charts/learning_rate", learner.optimizer.param_groups[0]["lr"], global_step)
        for name, loss in losses.items():
            curves.add_scalar(f"losses/{name}", loss.item(), global_step)
    curves.close()
    envs.close()
    return agent, curve


@torch.no_grad()
def evaluate_agent(agent: Agent, args: argparse.Namespace) -> np.ndarray:
    """Returns of one episode each of fresh environments, under the policy's most likely actions."""
    envs = make_envs(args.env_id, args.evaluation_episodes)
    obs, _ = envs.reset(seed=args.seed + 1000)
    returns, running = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
    while running.any():
        policy = agent.predict_policy(torch.as_tensor(obs, dtype=torch.float32, device=args.device))
        obs, reward, terminated, truncated, _ = step_envs(envs, policy.mode)
        returns += running * reward
        running &= ~(terminated | truncated)
    envs.close()
    return returns


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advantages", choices=list(ADVANTAGES), default="triton", help="who computes them")
    parser.add_argument("--update", choices=["eager", "captured"], default="eager")
    parser.add_argument("--env-id", type=environment, default="CartPole-v1")
    parser.add_argument("--seed", type=SEED, default=1)
    parser.add_argument("--total-timesteps", type=COUNT, default=150_000)
    parser.add_argument("--num-envs", type=COUNT, default=8)
    parser.add_argument("--num-steps", type=COUNT, default=256, help="steps of each environment per rollout")
    parser.add_argument("--learning-rate", type=FACTOR, default=1e-3, help="falls linearly to zero")
    parser.add_argument("--gamma", type=SHARE, default=0.99)
    parser.add_argument("--gae-lambda", type=SHARE, default=0.95)
    parser.add_argument("--num-minibatches", type=COUNT, default=8)
    parser.add_argument("--update-epochs", type=COUNT, default=10)
    parser.add_argument("--clip-coef", type=FACTOR, default=0.2, help="falls linearly to zero")
    parser.add_argument("--ent-coef", type=FACTOR, default=0.0)
    parser.add_argument("--vf-coef", type=FACTOR, default=0.5)
    parser.add_argument("--max-grad-norm", type=FACTOR, default=0.5)
    parser.add_argument("--evaluation-episodes", type=COUNT, default=20)
    parser.add_argument("--target-return", type=float, help="exit with status 1 if the evaluation stays below")
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--log-dir", default="runs", help="where the TensorBoard logs go")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return check_rollout(parser, parser.parse_args(arguments))


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)  # networks this small lose time to more
    agent, _ = train_agent(args)
    return judge(evaluate_agent(agent, args), args.target_return)


if __name__ == "__main__":
    run(main)
