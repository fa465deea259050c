"""Whole iterations, rollout and update, of PPO of Stable-Baselines3 with environments that are tensors.

*Stock* is Stable-Baselines3's own and *arrays* TritonPPO, both with the environments' NumPy arrays; *ours* is TritonPPO
with their tensors. *RSL-RL* is our adapter of that package, if installed, with networks and minibatches of that size.
"""

from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import ppo_sb3_gpu_envs
import torch
from stable_baselines3.common.vec_env import VecEnvWrapper

from benchmarks import harness
from benchmarks.harness import Options, Rows, Setting, make_row
from benchmarks.settings import find_missing

HIDDEN = [256, 256, 256]


class Arrays(VecEnvWrapper):
    """Environments whose tensors nobody asks for."""

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        return self.venv.step_wait()


def measure(setting: Setting, options: Options) -> Rows:
    """One iteration each, in turns."""
    flags = ["--env", setting.env, "--num-envs", str(setting.num_envs), "--num-steps", str(setting.num_steps)]
    flags += ["--device", options.device]
    torch.backends.cuda.matmul.allow_tf32 = False
    agents = {
        "stock": make_sb3([*flags, "--advantages", "stock"]),
        "arrays": make_sb3(flags, Arrays),
        "ours": make_sb3(flags),
    }
    steps = setting.num_envs * setting.num_steps
    arms = {name: partial(agent.learn, steps, reset_num_timesteps=False) for name, agent in agents.items()}
    missing = find_missing(["rsl_rl"])
    with redirect_stdout(StringIO()):
        arms |= {} if missing else {"RSL-RL": make_rsl_rl(flags)}
        for arm in (*arms.values(), *arms.values()):  # the second update is the first that is a graph
            arm()
        assert (agents["arrays"]._rollouts, agents["ours"]._rollouts is None) == (None, options.device == "cpu")
        times = harness.time_in_turns(arms, options.device, turns=options.rounds, burst=1)
    yield from harness.list_times(times, unit="ms", step="iteration")
    for metric in ("full", "over ours") if missing else ():
        yield make_row("RSL-RL", metric, "", [], "rsl_rl is not installed", step="iteration")


def make_sb3(flags: list[str], wrapper: Any = lambda env: env) -> Any:
    args = ppo_sb3_gpu_envs.parse_arguments(flags)
    agent = ppo_sb3_gpu_envs.make_agent(args, policy_kwargs={"net_arch": HIDDEN, "activation_fn": torch.nn.ELU})
    agent.set_env(wrapper(agent.get_env()))
    return agent


def make_rsl_rl(flags: list[str]) -> Callable[[], Any]:
    import ppo_rsl_rl

    args = ppo_rsl_rl.parse_arguments(flags)
    config = ppo_rsl_rl.make_config(args)
    for network in ("actor", "critic"):
        config[network] |= {"hidden_dims": HIDDEN, "activation": "elu"}
    env = ppo_rsl_rl.TensorEnv(args.env, args.num_envs, args.device, seed=0)
    return partial(ppo_rsl_rl.OnPolicyRunner(env, config, device=args.device).learn, 1)
