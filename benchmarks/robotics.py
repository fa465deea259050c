"""Time the advantage step of RSL-RL, RL-Games and skrl, and RSL-RL's update, against ours; write the times to a folder.

    .venv-frameworks/bin/python -m benchmarks.robotics FOLDER [--commit HASH] [--device cuda] [--quick]

Writes robotics.json: quartiles in milliseconds, and ratios. Advantages must agree before.
"""

import argparse
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import ppo_rl_games
import ppo_rsl_rl
from rl_games.torch_runner import Runner
from rsl_rl.runners import OnPolicyRunner
from skrl.agents.torch.ppo import ppo as stock_skrl

from benchmarks import files, harness
from benchmarks.harness import Call, Clock
from rl_triton_adapters.rl_games import register_agents
from rl_triton_adapters.skrl import estimate_advantages

SHAPES = ((24, 4096), (16, 8192), (4096, 16))  # steps, environments
UPDATED = SHAPES[0]
"""The shape at which an update is measured too."""
QUICK = ((4, 8),)
TURNS, CALLS = 5, 4
PROVIDERS = ("stock", "triton")
Calls = dict[str, Call]


def main(arguments: list[str] | None = None) -> None:
    parser = files.make_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="one small shape, to see that it runs")
    options = parser.parse_args(arguments)
    clock, rows = harness.make_clock(options.device), []
    for shape, (package, make_calls) in product(QUICK if options.quick else SHAPES, PACKAGES.items()):
        with redirect_stdout(StringIO()):
            stock, ours = (make_calls(provider, *shape, options.device) for provider in PROVIDERS)
        for step in stock:
            if step == "advantages" or shape in (UPDATED, *QUICK):
                about = {"package": package, "step": step, "num_steps": shape[0], "num_envs": shape[1]}
                rows.append({**about, **measure_step(clock, step, stock[step], ours[step])})
    files.save_rows(options, "robotics.json", rows, turns=TURNS, calls=CALLS, threads=torch.get_num_threads())


def measure_step(clock: Clock, step: str, stock: Call, ours: Call) -> files.Row:
    """A package's own code and ours in turn; of an update, which takes long, one call per turn."""
    want, _, got = stock(), ours(), ours()
    if step == "advantages":
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    burst = CALLS if step == "advantages" else 1
    times = harness.time_in_turns({"stock": stock, "adapter": ours}, clock, TURNS, burst)
    return {"milliseconds": harness.summarize_calls(times, 1e3), "speedup": harness.compare_with_stock(times)}


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


if __name__ == "__main__":
    main()
