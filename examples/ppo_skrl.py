"""PPO of skrl on environments that are tensors on the training device.

    python examples/ppo_skrl.py --target-return 475             CartPole, a minute on a CPU
    python examples/ppo_skrl.py --advantages stock              skrl's own advantages
    python examples/ppo_skrl.py --agent a2c --mini-batches 4    another agent

CartPole-v1 and Pendulum-v1 of Gymnasium, as examples/gpu_envs.py has them.
"""

import argparse
from typing import Any

from command_line import COUNT, SEED, SHARE, device, judge, needing, run

with needing("skrl", __name__):
    import torch
    from gpu_envs import ENVIRONMENTS, Envs
    from gymnasium import spaces
    from skrl.envs.wrappers.torch import Wrapper
    from skrl.utils.runner.torch import Runner
    from torch import Tensor

    from rl_triton_adapters.skrl import TritonRunner


class TensorEnv(Wrapper):
    """Environments of gpu_envs.py as skrl takes them."""

    def __init__(self, envs: Envs):
        super().__init__(envs)
        self._device = envs.state.device
        self.observation_space = spaces.Box(-float("inf"), float("inf"), (envs.observations,))
        self.action_space = spaces.Discrete(envs.actions) if envs.discrete else spaces.Box(-2.0, 2.0, (envs.actions,))

    observation_space = action_space = None  # properties of skrl's class

    @property
    def num_envs(self) -> int:
        return len(self._env.state)

    def reset(self) -> tuple[Tensor, dict]:
        return self._env.observe_state(self._env.state), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict]:
        chosen = actions.flatten() if self._env.discrete else actions
        observations, reward, terminated, truncated, _ = self._env.step(chosen)
        return observations, reward[:, None], terminated[:, None], truncated[:, None], {}

    def state(self) -> None: ...

    def render(self) -> None: ...

    def close(self) -> None: ...


def make_config(args: argparse.Namespace) -> dict:
    """The runner's configuration, as its YAML files have it."""
    network = [{"name": "net", "input": "OBSERVATIONS", "layers": [64, 64], "activations": "tanh"}]
    discrete = ENVIRONMENTS[args.env].discrete
    agent = {"class": args.agent.upper(), "rollouts": args.num_steps, "mini_batches": args.mini_batches}
    agent |= {"learning_epochs": 8} if args.agent == "ppo" else {}
    agent |= {"discount_factor": args.gamma, "learning_rate": 1e-3, "time_limit_bootstrap": True}
    agent |= {"experiment": {"directory": args.log_dir, "write_interval": 0, "checkpoint_interval": 0}}
    policy = "CategoricalMixin" if discrete else "GaussianMixin"
    return {
        "seed": args.seed,
        "models": {
            "separate": True,
            "policy": {"class": policy, "network": network, "output": "ACTIONS"},
            "value": {"class": "DeterministicMixin", "network": network, "output": "ONE"},
        },
        "memory": {"class": "RandomMemory", "memory_size": -1},
        "agent": agent,
        "trainer": {
            "class": "SequentialTrainer",
            "timesteps": args.iterations * args.num_steps,
            "environment_info": "",
            "disable_progressbar": args.quiet,
            "close_environment_at_exit": False,
        },
    }


def train_agent(args: argparse.Namespace) -> Any:
    env = TensorEnv(ENVIRONMENTS[args.env](args.num_envs, args.device, args.seed))
    runner = (TritonRunner if args.advantages == "triton" else Runner)(env, make_config(args))
    runner.run("train")
    return runner.agent


@torch.no_grad()
def evaluate_agent(agent: Any, args: argparse.Namespace) -> Tensor:
    """Returns of one episode each of fresh environments, under the policy's most likely actions."""
    env = TensorEnv(ENVIRONMENTS[args.env](args.evaluation_episodes, args.device, args.seed + 1000))
    returns, running = torch.zeros(env.num_envs, device=args.device), torch.ones(env.num_envs, device=args.device)
    observations, _ = env.reset()
    for _ in range(env.time_limit):
        _, outputs = agent.act(observations, None, timestep=0, timesteps=0)
        actions = outputs["net_output"].argmax(-1) if env.discrete else outputs["mean_actions"]
        observations, reward, terminated, truncated, _ = env.step(actions)
        returns += running * reward.flatten()
        running *= ~(terminated | truncated).flatten()
    return returns


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advantages", choices=["stock", "triton"], default="triton", help="who computes them")
    parser.add_argument("--agent", choices=["ppo", "a2c"], default="ppo")
    parser.add_argument("--env", choices=list(ENVIRONMENTS), default="cartpole")
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--seed", type=SEED, default=1)
    parser.add_argument("--iterations", type=COUNT, default=40)
    parser.add_argument("--num-envs", type=COUNT, default=64)
    parser.add_argument("--num-steps", type=COUNT, default=32, help="steps of each environment per iteration")
    parser.add_argument("--mini-batches", type=COUNT, default=4)
    parser.add_argument("--gamma", type=SHARE, default=0.99)
    parser.add_argument("--evaluation-episodes", type=COUNT, default=64)
    parser.add_argument("--target-return", type=float, help="exit with status 1 if the evaluation stays below")
    parser.add_argument("--log-dir", default="runs", help="where the TensorBoard logs go")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_arguments()
    return judge(evaluate_agent(train_agent(args), args), args.target_return)


if __name__ == "__main__":
    run(main)
