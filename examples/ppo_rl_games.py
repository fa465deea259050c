"""PPO of RL-Games on environments that are tensors on the training device.

    python examples/ppo_rl_games.py --target-return 475         CartPole, a minute on a CPU
    python examples/ppo_rl_games.py --advantages stock          RL-Games' own advantages
    python examples/ppo_rl_games.py --env pendulum --gamma 0.9 --epochs 150      continuous actions

CartPole-v1 and Pendulum-v1 of Gymnasium, as examples/gpu_envs.py has them.
"""

import argparse
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import Any

from command_line import COUNT, SEED, SHARE, device, judge, needing, run

with needing("rl-games", __name__):
    import torch
    from gpu_envs import ENVIRONMENTS
    from gymnasium import spaces
    from rl_games.common import env_configurations, vecenv
    from rl_games.common.ivecenv import IVecEnv
    from rl_games.torch_runner import Runner
    from torch import Tensor

    from rl_triton_adapters.rl_games import register_agents


class TensorEnv(IVecEnv):
    """Environments of gpu_envs.py as RL-Games takes them."""

    def __init__(self, num_envs: int, env: str, device: str, seed: int):
        self.envs = ENVIRONMENTS[env](num_envs, device, seed)

    def reset(self) -> Tensor:
        return self.envs.observe_state(self.envs.state)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, dict]:
        observations, reward, terminated, truncated, _ = self.envs.step(actions)
        return observations, reward, terminated | truncated, {"time_outs": truncated}

    def get_env_info(self) -> dict:
        limits = spaces.Box(-2.0, 2.0, (self.envs.actions,))
        return {
            "observation_space": spaces.Box(-float("inf"), float("inf"), (self.envs.observations,)),
            "action_space": spaces.Discrete(self.envs.actions) if self.envs.discrete else limits,
        }


vecenv.register("TENSORS", lambda _, num_envs, **options: TensorEnv(num_envs, **options))
env_configurations.register("tensors", {"vecenv_type": "TENSORS"})


def make_config(args: argparse.Namespace) -> dict:
    """RL-Games' configuration; `rl_triton` is the switch."""
    discrete = ENVIRONMENTS[args.env].discrete
    sigma = {"mu_activation": "None", "sigma_activation": "None", "mu_init": {"name": "default"}}
    sigma |= {"sigma_init": {"name": "const_initializer", "val": 0}, "fixed_sigma": True}
    network = {
        "name": "actor_critic",
        "separate": True,
        "space": {"discrete": {}} if discrete else {"continuous": sigma},
    }
    network["mlp"] = {"units": [64, 64], "activation": "tanh", "initializer": {"name": "default"}}
    config = {
        "name": args.env,
        "rl_triton": args.advantages == "triton",
        "env_name": "tensors",
        "env_config": {"env": args.env, "device": args.device, "seed": args.seed},
        "device": args.device,
        "train_dir": args.log_dir,
        "num_actors": args.num_envs,
        "horizon_length": args.num_steps,
        "minibatch_size": args.num_envs * args.num_steps // 4,
        "mini_epochs": 8,
        "max_epochs": args.epochs,
        "gamma": args.gamma,
        "tau": 0.95,
        "learning_rate": 1e-3,
        "lr_schedule": "adaptive",
        "kl_threshold": 0.01,
        "e_clip": 0.2,
        "clip_value": True,
        "critic_coef": 1.0,
        "entropy_coef": 0.0,
        "bounds_loss_coef": 0.0,
        "grad_norm": 0.5,
        "truncate_grads": True,
        "normalize_advantage": True,
        "normalize_input": False,
        "normalize_value": False,
        "reward_shaper": {"scale_value": 0.1},
        "print_stats": not args.quiet,
        "save_best_after": args.epochs,
    }
    model = {"name": "discrete_a2c" if discrete else "continuous_a2c_logstd"}
    algorithm = {"name": "a2c_discrete" if discrete else "a2c_continuous"}
    return {
        "params": {
            "seed": args.seed,
            "torch_threads": 1,
            "algo": algorithm,
            "model": model,
            "network": network,
            "config": config,
        }
    }


def train_agent(args: argparse.Namespace) -> Any:
    runner = Runner()
    register_agents(runner)
    with redirect_stdout(StringIO()) if args.quiet else nullcontext():
        runner.load(make_config(args))
        agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
        agent.train()
    return agent


@torch.no_grad()
def evaluate_agent(agent: Any, args: argparse.Namespace) -> Tensor:
    """Returns of one episode each of fresh environments, under the policy's most likely actions."""
    env = TensorEnv(args.evaluation_episodes, args.env, args.device, args.seed + 1000)
    returns, running = torch.zeros_like(env.envs.elapsed), torch.ones_like(env.envs.elapsed)
    agent.model.eval()
    observations = env.reset()
    for _ in range(env.envs.time_limit):
        output = agent.model({"is_train": False, "prev_actions": None, "obs": observations, "rnn_states": None})
        actions = output["logits"].argmax(-1) if env.envs.discrete else agent.preprocess_actions(output["mus"])
        observations, reward, done, _ = env.step(actions)
        returns += running * reward
        running *= ~done
    return returns


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advantages", choices=["stock", "triton"], default="triton", help="whose")
    parser.add_argument("--env", choices=list(ENVIRONMENTS), default="cartpole")
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--seed", type=SEED, default=1)
    parser.add_argument("--epochs", type=COUNT, default=40)
    parser.add_argument("--num-envs", type=COUNT, default=64)
    parser.add_argument("--num-steps", type=COUNT, default=32, help="steps of each environment per epoch")
    parser.add_argument("--gamma", type=SHARE, default=0.99)
    parser.add_argument("--evaluation-episodes", type=COUNT, default=64)
    parser.add_argument("--target-return", type=float, help="exit with status 1 if the evaluation stays below")
    parser.add_argument("--log-dir", default="runs", help="where the TensorBoard logs and checkpoints go")
    parser.add_argument("--quiet", action="store_true", help="no line per epoch")
    args = parser.parse_args(arguments)
    if args.num_envs * args.num_steps % 4:
        parser.error(f"--num-steps: got {args.num_steps}, expected four equal minibatches")
    return args


def main() -> int:
    args = parse_arguments()
    return judge(evaluate_agent(train_agent(args), args), args.target_return)


if __name__ == "__main__":
    run(main)
