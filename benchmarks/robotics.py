"""The advantage step of RSL-RL, RL-Games and skrl, and RSL-RL's update, against ours; advantages agree before."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import ppo_rl_games
import ppo_rsl_rl
from rl_games.torch_runner import Runner
from rsl_rl.runners import OnPolicyRunner
from skrl.agents.torch.ppo import ppo as stock_skrl

from benchmarks import harness
from benchmarks.results import Row
from rl_triton_adapters.rl_games import register_agents
from rl_triton_adapters.skrl import estimate_advantages

Calls = dict[str, harness.Call]


class Setting(NamedTuple):
    """A package, and the shape of its rollout."""

    package: str
    num_steps: int
    num_envs: int


NAMES = ("rsl_rl", "rl_games", "skrl")
ALL = [Setting(name, *shape) for shape in ((24, 4096), (16, 8192), (4096, 16)) for name in NAMES]
SETTINGS = {"cpu": ALL, "cuda": ALL, "quick": [Setting(name, 4, 8) for name in NAMES]}
UPDATED = (24, 4)
"""Steps of the rollouts with which an update is measured too."""
TURNS, CALLS = 5, 4


def measure(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    """A package's own code and ours in turn; of an update, which takes long, one call per turn."""
    with redirect_stdout(StringIO()):
        about = setting.num_steps, setting.num_envs, options.device
        stock, ours = (PACKAGES[setting.package](provider, *about) for provider in ("stock", "triton"))
    for step in stock if setting.num_steps in UPDATED else ["advantages"]:
        want, _, got = stock[step](), ours[step](), ours[step]()
        if step == "advantages":
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        arms, burst = {"stock": stock[step], "ours": ours[step]}, CALLS if step == "advantages" else 1
        times = harness.time_in_turns(arms, options.device, turns=TURNS, burst=burst, warm_up=False)
        yield from harness.list_times(times, unit="ms", step=step)


def make_rsl_rl_calls(provider: str, num_steps: int, num_envs: int, device: str) -> Calls:
    """`compute_returns` with a critic of eight units, which it evaluates first, and `update` with RSL-RL's networks."""
    flags = {"--advantages": provider, "--num-envs": num_envs, "--num-steps": num_steps, "--device": device}
    args = ppo_rsl_rl.parse_arguments(list_arguments(flags))
    small, observations = make_rsl_rl_algorithm(args, [8])
    default, last_observations = make_rsl_rl_algorithm(args, [256, 256, 256])
    with torch.inference_mode():
        default.compute_returns(last_observations)

    @torch.inference_mode()
    def compute_advantages() -> Tensor:
        small.compute_returns(observations)
        return small.storage.advantages

    return {"advantages": compute_advantages, "update": default.update}


def make_rsl_rl_algorithm(args: argparse.Namespace, hidden_dims: list[int]) -> tuple[Any, Any]:
    """An algorithm with a rollout, and the observations after it."""
    config = ppo_rsl_rl.make_config(args)
    for network in ("actor", "critic"):
        config[network] |= {"hidden_dims": hidden_dims, "activation": "elu"}
    torch.manual_seed(0)
    env = ppo_rsl_rl.TensorEnv(args.env, args.num_envs, args.device, seed=0)
    alg = OnPolicyRunner(env, config, device=args.device).alg
    with torch.inference_mode():
        for _ in range(args.num_steps):
            observations, *outcome = env.step(alg.act(env.get_observations()))
            alg.process_env_step(observations, *outcome)
    return alg, observations


def make_rl_games_calls(provider: str, num_steps: int, num_envs: int, device: str) -> Calls:
    """`discount_values` of an agent."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"--advantages": provider, "--num-envs": num_envs, "--num-steps": num_steps, "--device": device}
        flags |= {"--env": "pendulum", "--log-dir": folder}
        config = ppo_rl_games.make_config(ppo_rl_games.parse_arguments(list_arguments(flags)))
        runner = Runner()
        register_agents(runner)
        runner.load(config)
        agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
    rewards, values, last_values, flags_ended = draw_rollout(num_steps, num_envs, device)
    ended = flags_ended.float().squeeze(-1)
    return {"advantages": lambda: agent.discount_values(ended[-1], last_values, ended[:-1], values, rewards)}


def make_skrl_calls(provider: str, num_steps: int, num_envs: int, device: str) -> Calls:
    """The function that an agent's update calls."""
    rewards, values, last_values, ended = draw_rollout(num_steps, num_envs, device)
    function = estimate_advantages if provider == "triton" else stock_skrl.compute_gae
    flags = {"terminated": ended[1:], "truncated": ended[:-1] & ~ended[1:], "time_limit_bootstrap": True}
    return {"advantages": lambda: function(rewards=rewards, values=values, last_values=last_values, **flags)[1]}


def list_arguments(flags: dict[str, Any]) -> list[str]:
    """The flags as a command line has them."""
    return [str(x) for flag in flags.items() for x in flag]


def draw_rollout(num_steps: int, num_envs: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, last values, and whether an episode ended at each of the steps and before the first."""
    generator = torch.Generator(device).manual_seed(0)
    rewards, values = torch.randn(2, num_steps, num_envs, 1, generator=generator, device=device)
    ended = torch.rand(num_steps + 1, num_envs, 1, generator=generator, device=device) < 0.01
    return rewards, values, torch.randn(num_envs, 1, generator=generator, device=device), ended


PACKAGES = {"rsl_rl": make_rsl_rl_calls, "rl_games": make_rl_games_calls, "skrl": make_skrl_calls}
