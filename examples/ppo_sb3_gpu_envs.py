"""PPO of Stable-Baselines3 on environments that are tensors: acting, rollouts and updates stay on the device.

    python examples/ppo_sb3_gpu_envs.py --device cuda                       4096 environments of CartPole-v1
    python examples/ppo_sb3_gpu_envs.py --device cuda --advantages stock    Stable-Baselines3's own PPO
    python examples/ppo_sb3_gpu_envs.py --num-envs 64 --iterations 20       on a CPU, where rollouts are NumPy arrays

`TensorVecEnv` has what every `VecEnv` has, made of tensors. For TritonPPO on a GPU, `step_tensors` is all that counts.
"""

import argparse
from abc import abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from command_line import COUNT, SEED, device, judge, needing, run

with needing("examples", __name__):
    import numpy as np
    import torch
    from gpu_envs import ENVIRONMENTS
    from gymnasium import spaces
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecEnv
    from torch import Tensor

    from rl_triton_adapters.sb3 import TritonPPO


class TensorVecEnv(VecEnv):
    """A `VecEnv` of environments that are stepped by tensors, with NumPy arrays for all who ask for these."""

    device: str

    @abstractmethod
    def reset_tensors(self) -> Tensor:
        """Start all episodes. Returns observations, [num_envs, ...]."""

    @abstractmethod
    def step_tensors(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Observations after a reset where an episode ended, rewards, terminated, truncated, final observations.

        A row each, ends are bool, and final observations are valid ones where no episode ended, too.
        """

    def reset(self) -> np.ndarray:
        self.episodes = np.zeros((self.num_envs, 2))
        return self.reset_tensors().cpu().numpy()

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = torch.as_tensor(actions, device=self.device)

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        found = (x.cpu().numpy() for x in self.step_tensors(self.actions))
        observations, rewards, terminated, truncated, final = found
        self.episodes += np.stack([rewards, np.ones_like(rewards)], axis=1)
        dones, infos = terminated | truncated, [{} for _ in rewards]
        for i in dones.nonzero()[0]:
            infos[i] = {"terminal_observation": final[i], "TimeLimit.truncated": bool(truncated[i] & ~terminated[i])}
            infos[i]["episode"] = {"r": self.episodes[i, 0], "l": int(self.episodes[i, 1])}
            self.episodes[i] = 0
        return observations, rewards, dones, infos

    def close(self) -> None:
        """Nothing is open."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [getattr(self, method_name)(*args, **kwargs) for _ in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]


class GpuVecEnv(TensorVecEnv):
    """Environments of gpu_envs.py."""

    def __init__(self, name: str, num_envs: int, device: str, seed: int = 0):
        kind = ENVIRONMENTS[name]
        self.device, self.make = device, lambda: kind(num_envs, device, seed)
        self.render_mode = None
        action_space = spaces.Discrete(kind.actions) if kind.discrete else spaces.Box(-2.0, 2.0, (kind.actions,))
        super().__init__(num_envs, spaces.Box(-np.inf, np.inf, (kind.observations,)), action_space)

    def reset_tensors(self) -> Tensor:
        self.envs = self.make()
        return self.envs.observe_state(self.envs.state)

    def step_tensors(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.envs.step(actions)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--env", choices=[*ENVIRONMENTS], default="cartpole")
    parser.add_argument("--num-envs", type=COUNT, default=4096)
    parser.add_argument("--num-steps", type=COUNT, default=24, help="steps of a rollout, in each environment")
    parser.add_argument("--iterations", type=COUNT, default=50, help="rollouts, each with an update")
    parser.add_argument("--advantages", choices=["stock", "triton"], default="triton", help="whose, and whose update")
    parser.add_argument("--device", type=device, default="cpu", help="a device of PyTorch, or auto")
    parser.add_argument("--seed", type=SEED, default=0)
    parser.add_argument("--target-return", type=float, help="exit with status 1 if the last episodes stay below")
    return parser.parse_args(argv)


def make_agent(args: argparse.Namespace, **changes: Any) -> PPO:
    """Networks and minibatches of a size that robots are trained with."""
    env = GpuVecEnv(args.env, args.num_envs, args.device, args.seed)
    settings = {"n_steps": args.num_steps, "batch_size": max(2, args.num_envs * args.num_steps // 4), "n_epochs": 5}
    settings |= {"policy_kwargs": {"net_arch": [64, 64]}, "seed": args.seed, "device": args.device, **changes}
    return (TritonPPO if args.advantages == "triton" else PPO)("MlpPolicy", env, **settings)


def main() -> int:
    args = parse_arguments()
    agent = make_agent(args)
    steps = args.num_envs * args.num_steps * args.iterations
    start = perf_counter()
    agent.learn(steps)
    seconds = perf_counter() - start
    print(f"{steps:,} steps in {seconds:.1f} s, {steps / seconds:,.0f} per second")
    return judge(torch.tensor([x["r"] for x in agent.ep_info_buffer or []]), args.target_return)


if __name__ == "__main__":
    run(main)
