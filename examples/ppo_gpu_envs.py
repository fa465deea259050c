"""PPO whose environments live on the training device as tensors, up to tens of thousands of them at once.

    python examples/ppo_gpu_envs.py --target-return 475         CartPole, small enough for a CPU
    python examples/ppo_gpu_envs.py --advantages stock          the loop, see stock()
    python examples/ppo_gpu_envs.py --env pendulum --gamma 0.9 --total-timesteps 800000 --target-return -300
    python examples/ppo_gpu_envs.py --device cuda --update captured --num-envs 16384 --num-steps 128 \\
        --num-minibatches 4 --update-epochs 4 --learning-rate 3e-3 --total-timesteps 63000000 --target-return 475

The environments are those of gpu_envs.py. A truncated step continues with its final value.
With `--update captured`, a rollout with its advantages is one CUDA graph, and a minibatch is another. On a CPU, with
`--update compiled`, all minibatches are in one compiled call.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

from command_line import COUNT, FACTOR, SEED, SHARE, Curves, check_rollout, device, judge, needing, run

with needing("cleanrl", __name__):
    import torch
    from gpu_envs import ENVIRONMENTS, Envs
    from torch import Tensor, nn
    from torch.distributions import Categorical, Distribution, Independent, Normal
    from tqdm import tqdm

    from rl_triton_core import compiled, compute_gae
    from rl_triton_core.capture import CapturedStep

# -- advantages -------------------------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """One window, [num_steps, num_envs, ...]. Flags and final values belong to the step that ends an episode."""

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_values: Tensor


def compute_stock_advantages(rollout: Rollout, next_value: Tensor, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """A loop over the steps, the last one first."""
    advantages, ahead = torch.zeros_like(rollout.rewards), torch.zeros_like(next_value)
    for t in reversed(range(args.num_steps)):
        done = rollout.terminated[t] | rollout.truncated[t]
        next_value = torch.where(done, rollout.final_values[t] * rollout.truncated[t], next_value)
        delta = rollout.rewards[t] + args.gamma * next_value - rollout.values[t]
        advantages[t] = ahead = delta + args.gamma * args.gae_lambda * ~done * ahead
        next_value = rollout.values[t]
    return advantages, advantages + rollout.values


def compute_triton_advantages(rollout: Rollout, next_value: Tensor, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The same numbers in one kernel."""
    rollout.final_values[-1] = torch.where(rollout.truncated[-1], rollout.final_values[-1], next_value)
    return compute_gae(
        rollout.rewards,
        rollout.values,
        rollout.terminated,
        rollout.truncated,
        bootstrap_values=rollout.final_values,
        gamma=args.gamma,
        lambda_=args.gae_lambda,
        time_dim=0,
    )


Advantages = Callable[[Rollout, Tensor, argparse.Namespace], tuple[Tensor, Tensor]]
ADVANTAGES: dict[str, Advantages] = {"stock": compute_stock_advantages, "triton": compute_triton_advantages}


# -- agent and training -----------------------------------------------------------------------------------------------


class Agent(nn.Module):
    """Actor and critic; the actor is categorical or Gaussian, as the environment asks."""

    def __init__(self, envs: Envs, hidden: int):
        super().__init__()
        self.actor = self.make_network(envs.observations, hidden, envs.actions, 0.01)
        self.critic = self.make_network(envs.observations, hidden, 1, 1.0)
        self.logstd = None if envs.discrete else nn.Parameter(torch.zeros(envs.actions))

    @staticmethod
    def make_network(inputs: int, hidden: int, outputs: int, std: float) -> nn.Sequential:
        first, second, last = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)
        for layer, gain in ((first, 2**0.5), (second, 2**0.5), (last, std)):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)

    def predict_value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def predict_policy(self, obs: Tensor) -> Distribution:
        output = self.actor(obs)
        if self.logstd is None:
            return Categorical(logits=output, validate_args=False)
        normal = Normal(output, self.logstd.exp(), validate_args=False)
        return Independent(normal, 1, validate_args=False)


def draw_actions(policy: Distribution) -> Tensor:
    """Actions; `sample` would have the host check the probabilities, and wait for them."""
    if isinstance(policy, Categorical):
        return (policy.logits - torch.empty_like(policy.logits).exponential_().log()).argmax(-1)
    return policy.rsample()


@torch.no_grad()
def collect_rollout(envs: Envs, agent: Agent, args: argparse.Namespace) -> Rollout:
    """Step all environments `num_steps` times; nothing leaves the device, and nothing waits for it."""
    rows = []
    for _ in range(args.num_steps):
        obs = envs.observe_state(envs.state)
        policy = agent.predict_policy(obs)
        action = draw_actions(policy)
        _, reward, terminated, truncated, final = envs.step(action)
        seen = obs, action, policy.log_prob(action), agent.predict_value(obs)
        rows.append((*seen, reward, terminated, truncated, agent.predict_value(final) * truncated))
    return Rollout(*map(torch.stack, zip(*rows, strict=True)))


def compute_loss(agent: Agent, batch: dict[str, Tensor], args: argparse.Namespace) -> Tensor:
    """Of a minibatch whose advantages are normalised."""
    policy, advantages = agent.predict_policy(batch["obs"]), batch["advantages"]
    ratio = (policy.log_prob(batch["actions"]) - batch["logprobs"]).exp()
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    value_loss = 0.5 * (agent.predict_value(batch["obs"]) - batch["returns"]).square().mean()
    return policy_loss + args.vf_coef * value_loss


def update_minibatch(
    agent: Agent, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], args: argparse.Namespace
) -> None:
    """One step of the optimizer."""
    advantages = batch["advantages"]
    normalized = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    optimizer.zero_grad()
    compute_loss(agent, batch | {"advantages": normalized}, args).backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()


def update_agent(update: Callable[[Tensor], None], size: int, args: argparse.Namespace) -> None:
    """Several epochs of minibatches of this many rows in all."""
    for _ in range(args.update_epochs):
        for rows in torch.randperm(size, device=args.device).chunk(args.num_minibatches):
            update(rows)


class Training:
    """Environments, an agent, and the two steps of an iteration: a rollout, and a minibatch of it."""

    def __init__(self, args: argparse.Namespace, compute_advantages: Advantages | None = None):
        torch.manual_seed(args.seed)
        self.args, self.compute_advantages = args, compute_advantages or ADVANTAGES[args.advantages]
        self.envs = envs = ENVIRONMENTS[args.env](args.num_envs, args.device, args.seed)
        self.agent = agent = Agent(envs, args.hidden).to(args.device)
        self.optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        self.data: dict[str, Tensor] = {}
        state, self.enabled = [envs.state, envs.elapsed], None if args.update == "captured" else False
        self.collect = CapturedStep(
            self.collect_data, modules=[agent], state=state, generators=[envs.generator], enabled=self.enabled
        )
        self.update = self.make_update()

    def make_update(self) -> CapturedStep:
        """The step of a minibatch."""
        return CapturedStep(self.update_rows, modules=[self.agent], optimizers=[self.optimizer], enabled=self.enabled)

    @torch.no_grad()
    def collect_data(self) -> dict[str, Tensor]:
        """A rollout with its advantages and returns, [num_steps, num_envs, ...]."""
        rollout = collect_rollout(self.envs, self.agent, self.args)
        next_value = self.agent.predict_value(self.envs.observe_state(self.envs.state))
        advantages, returns = self.compute_advantages(rollout, next_value, self.args)
        return rollout._asdict() | {"advantages": advantages, "returns": returns}

    def update_rows(self, rows: Tensor) -> None:
        """A step on some rows of the data."""
        batch = {name: x.index_select(0, rows) for name, x in self.data.items()}
        update_minibatch(self.agent, self.optimizer, batch, self.args)

    def run_iteration(self, learning_rate: float) -> None:
        """A rollout, and several epochs of minibatches."""
        for name, x in self.collect().items():
            flat = x.flatten(0, 1)
            self.data.setdefault(name, torch.empty_like(flat)).copy_(flat)  # where graphs find it
        self.optimizer.param_groups[0]["lr"] = learning_rate
        if self.args.update == "compiled":
            self.update_compiled()
        else:
            update_agent(self.update, len(self.data["obs"]), self.args)

    def update_compiled(self) -> None:
        """The epochs in compiled code."""
        data, args, agent = self.data, self.args, self.agent
        size, head = len(data["obs"]), "categorical" if agent.logstd is None else "gaussian"
        update = compiled.CompiledUpdate(agent.actor, agent.critic, self.optimizer, head=head, log_std=agent.logstd)
        actions = data["actions"].reshape(size, -1)
        update.run(
            compiled.Rollout(data["obs"], actions, data["advantages"], data["returns"], data["logprobs"]),
            (torch.randperm(size) for _ in range(args.update_epochs)),
            -(-size // args.num_minibatches),
            clip=args.clip_coef,
            value_coef=0.5 * args.vf_coef,
            normalize_advantages=True,
            max_grad_norm=args.max_grad_norm,
        )


def train_agent(args: argparse.Namespace, kind: type[Training] = Training) -> Agent:
    training = kind(args)
    curves = Curves(f"{args.log_dir}/{args.env}__ppo_gpu_envs__{args.advantages}__{args.update}__{args.seed}")
    batch_size = args.num_steps * args.num_envs
    iterations = args.total_timesteps // batch_size
    started = time.perf_counter()
    for iteration in (bar := tqdm(range(iterations), unit="update", disable=args.quiet)):
        training.run_iteration(args.learning_rate * (1 - iteration / iterations))
        reward, steps = training.data["rewards"].mean().item(), (iteration + 1) * batch_size
        bar.set_postfix_str(f"reward per step {reward:.2f}")
        curves.add_scalar("charts/reward_per_step", reward, steps)
        curves.add_scalar("charts/steps_per_second", steps / (time.perf_counter() - started), steps)
    curves.close()
    training.update.reset()  # graphs with operations of NCCL end before its processes part
    return training.agent


@torch.no_grad()
def evaluate_agent(agent: Agent, args: argparse.Namespace) -> Tensor:
    """Returns of one episode each of fresh environments, under the policy's most likely actions."""
    envs = ENVIRONMENTS[args.env](args.evaluation_episodes, args.device, args.seed + 1000)
    returns, running = torch.zeros_like(envs.elapsed), torch.ones_like(envs.elapsed)
    for _ in range(envs.time_limit):
        _, reward, terminated, truncated, _ = envs.step(agent.predict_policy(envs.observe_state(envs.state)).mode)
        returns += running * reward
        running *= ~(terminated | truncated)
    return returns


def parse_arguments(arguments: list[str] | None = None, description: str | None = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advantages", choices=list(ADVANTAGES), default="triton", help="who computes them")
    parser.add_argument("--update", choices=["eager", "captured", "compiled"], default="eager", help="of a GPU, a CPU")
    parser.add_argument("--env", choices=list(ENVIRONMENTS), default="cartpole")
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--seed", type=SEED, default=1)
    parser.add_argument("--total-timesteps", type=COUNT, default=400_000)
    parser.add_argument("--num-envs", type=COUNT, default=64)
    parser.add_argument("--num-steps", type=COUNT, default=64, help="steps of each environment per rollout")
    parser.add_argument("--hidden", type=COUNT, default=64, help="units of the networks' two layers")
    parser.add_argument("--learning-rate", type=FACTOR, default=1e-3, help="falls linearly to zero")
    parser.add_argument("--gamma", type=SHARE, default=0.99)
    parser.add_argument("--gae-lambda", type=SHARE, default=0.95)
    parser.add_argument("--num-minibatches", type=COUNT, default=8)
    parser.add_argument("--update-epochs", type=COUNT, default=10)
    parser.add_argument("--clip-coef", type=FACTOR, default=0.2)
    parser.add_argument("--vf-coef", type=FACTOR, default=0.5)
    parser.add_argument("--max-grad-norm", type=FACTOR, default=0.5)
    parser.add_argument("--evaluation-episodes", type=COUNT, default=64)
    parser.add_argument("--target-return", type=float, help="exit with status 1 if the evaluation stays below")
    parser.add_argument("--log-dir", default="runs", help="where the TensorBoard logs go")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return check_rollout(parser, parser.parse_args(arguments))


def main() -> int:
    args = parse_arguments()
    return judge(evaluate_agent(train_agent(args), args), args.target_return)


if __name__ == "__main__":
    run(main)
