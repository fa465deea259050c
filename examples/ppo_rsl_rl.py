"""PPO of RSL-RL 5 on environments that are tensors on the training device.

    python examples/ppo_rsl_rl.py --target-return 475           CartPole, a minute on a CPU
    python examples/ppo_rsl_rl.py --advantages stock          RSL-RL's own advantages and update
    python examples/ppo_rsl_rl.py --env pendulum --gamma 0.9 --iterations 150 --target-return -300
    python examples/ppo_rsl_rl.py --device cuda --num-envs 4096 --num-steps 24 --target-return 475

CartPole-v1 and Pendulum-v1 of Gymnasium, as examples/gpu_envs.py has them; a push to the left or to the right is the
sign of a continuous action, since RSL-RL has no others.
"""

import argparse
from contextlib import nullcontext, redirect_stdout
from io import StringIO

from command_line import COUNT, SEED, SHARE, device, judge, needing, run

with needing("rsl-rl", __name__):
    import torch
    from gpu_envs import ENVIRONMENTS
    from rsl_rl.env import VecEnv
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict
    from torch import Tensor


class TensorEnv(VecEnv):
    """Environments of gpu_envs.py as RSL-RL takes them."""

    def __init__(self, name: str, num_envs: int, device: str, seed: int):
        self.envs = ENVIRONMENTS[name](num_envs, device, seed)
        self.num_envs, self.num_actions, self.device = num_envs, 1, device
        self.max_episode_length, self.cfg = self.envs.time_limit, {}

    @property
    def episode_length_buf(self) -> Tensor:
        return self.envs.elapsed

    @episode_length_buf.setter
    def episode_length_buf(self, lengths: Tensor) -> None:
        self.envs.elapsed.copy_(lengths)

    def get_observations(self) -> TensorDict:
        observations = self.envs.observe_state(self.envs.state)
        return TensorDict({"state": observations}, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict]:
        chosen = (actions[:, 0] > 0).float() if self.envs.discrete else actions
        _, reward, terminated, truncated, _ = self.envs.step(chosen)
        return self.get_observations(), reward, terminated | truncated, {"time_outs": truncated}


def make_config(args: argparse.Namespace) -> dict:
    """The runner's configuration; `enabled` is the switch."""
    network = {"class_name": "MLPModel", "hidden_dims": [64, 64], "activation": "tanh"}
    return {
        "num_steps_per_env": args.num_steps,
        "save_interval": 1000,
        "obs_groups": {"actor": ["state"], "critic": ["state"]},
        "actor": {**network, "distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": network,
        "algorithm": {
            "class_name": "rl_triton_adapters.rsl_rl:TritonPPO",
            "enabled": args.advantages == "triton",
            "gamma": args.gamma,
            "entropy_coef": 0.0,
            "desired_kl": 0.01,
        },
    }


def train_agent(args: argparse.Namespace) -> OnPolicyRunner:
    torch.manual_seed(args.seed)
    env = TensorEnv(args.env, args.num_envs, args.device, args.seed)
    with redirect_stdout(StringIO()) if args.quiet else nullcontext():
        runner = OnPolicyRunner(env, make_config(args), log_dir=args.log_dir, device=args.device)
        runner.learn(args.iterations)
    return runner


@torch.inference_mode()
def evaluate_agent(runner: OnPolicyRunner, args: argparse.Namespace) -> Tensor:
    """Returns of one episode each of fresh environments, under the policy's mean actions."""
    env = TensorEnv(args.env, args.evaluation_episodes, args.device, args.seed + 1000)
    policy, observations = runner.get_inference_policy(args.device), env.get_observations()
    returns, running = torch.zeros(env.num_envs, device=args.device), torch.ones(env.num_envs, device=args.device)
    for _ in range(env.max_episode_length):
        observations, reward, done, _ = env.step(policy(observations))
        returns += running * reward
        running *= ~done
    return returns


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advantages", choices=["stock", "triton"], default="triton", help="whose, and whose update")
    parser.add_argument("--env", choices=list(ENVIRONMENTS), default="cartpole")
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--seed", type=SEED, default=1)
    parser.add_argument("--iterations", type=COUNT, default=60)
    parser.add_argument("--num-envs", type=COUNT, default=128)
    parser.add_argument("--num-steps", type=COUNT, default=32, help="steps of each environment per iteration")
    parser.add_argument("--gamma", type=SHARE, default=0.99)
    parser.add_argument("--evaluation-episodes", type=COUNT, default=64)
    parser.add_argument("--target-return", type=float, help="exit with status 1 if the evaluation stays below")
    parser.add_argument("--log-dir", help="where the TensorBoard logs and checkpoints go, if anywhere")
    parser.add_argument("--quiet", action="store_true", help="no table per iteration")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_arguments()
    return judge(evaluate_agent(train_agent(args), args), args.target_return)


if __name__ == "__main__":
    run(main)
