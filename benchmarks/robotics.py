"""The advantage step and the update of RSL-RL, RL-Games and skrl against ours; advantages agree before."""

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
import ppo_skrl
from gpu_envs import ENVIRONMENTS
from rl_games.torch_runner import Runner
from rsl_rl.runners import OnPolicyRunner
from skrl.agents.torch.ppo import ppo as stock_skrl
from skrl.utils.runner.torch import Runner as SkrlRunner

from benchmarks import harness
from benchmarks.results import Row
from rl_triton_adapters.rl_games import register_agents
from rl_triton_adapters.skrl import TritonRunner, estimate_advantages

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
EPOCHS, MINIBATCHES, HIDDEN = 5, 4, [256, 256, 256]
"""Of an update, as in Isaac Lab's configurations."""
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
    default, last_observations = make_rsl_rl_algorithm(args, HIDDEN)
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
    """`discount_values` of an agent, and `train_epoch` with a rollout that is there already."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"--advantages": provider, "--num-envs": num_envs, "--num-steps": num_steps, "--device": device}
        flags |= {"--env": "pendulum", "--log-dir": folder}
        config = ppo_rl_games.make_config(ppo_rl_games.parse_arguments(list_arguments(flags)))
        config["params"]["network"]["mlp"] |= {"units": HIDDEN, "activation": "elu"}
        config["params"]["config"] |= {"mini_epochs": EPOCHS, "normalize_input": True, "normalize_value": True}
        runner = Runner()
        register_agents(runner)
        runner.load(config)
        agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
    rewards, values, last_values, flags_ended = draw_rollout(num_steps, num_envs, device)
    ended = flags_ended.float().squeeze(-1)
    compute_advantages = lambda: agent.discount_values(ended[-1], last_values, ended[:-1], values, rewards)  # noqa: E731
    if num_steps not in UPDATED:
        return {"advantages": compute_advantages}
    agent.init_tensors()
    agent.obs = agent.env_reset()
    with torch.no_grad():
        rollout = agent.play_steps()
    if device == "cuda":
        agent.model = torch.compile(agent.model)  # as the runner does
    agent.play_steps = lambda: dict(rollout)
    return {"advantages": compute_advantages, "update": agent.train_epoch}


def make_skrl_calls(provider: str, num_steps: int, num_envs: int, device: str) -> Calls:
    """The function that an agent's update calls, and the update."""
    rewards, values, last_values, ended = draw_rollout(num_steps, num_envs, device)
    function = estimate_advantages if provider == "triton" else stock_skrl.compute_gae
    flags = {"terminated": ended[1:], "truncated": ended[:-1] & ~ended[1:], "time_limit_bootstrap": True}
    calls = {"advantages": lambda: function(rewards=rewards, values=values, last_values=last_values, **flags)[1]}
    return calls | ({"update": make_skrl_update(provider, num_steps, num_envs, device)} if num_steps in UPDATED else {})


def make_skrl_update(provider: str, num_steps: int, num_envs: int, device: str) -> harness.Call:
    """An agent's update, with a rollout in its memory."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"--num-envs": num_envs, "--num-steps": num_steps, "--mini-batches": MINIBATCHES}
        arguments |= {"--env": "pendulum", "--device": device, "--log-dir": folder}
        config = ppo_skrl.make_config(ppo_skrl.parse_arguments(list_arguments(arguments)))
        config["agent"] |= {"learning_epochs": EPOCHS, "learning_rate_scheduler": "KLAdaptiveLR"}
        config["agent"] |= dict.fromkeys(("observation_preprocessor", "value_preprocessor"), "RunningStandardScaler")
        for part in ("policy", "value"):
            config["models"][part]["network"] = [
                {"name": "net", "input": "OBSERVATIONS", "layers": HIDDEN, "activations": "elu"}
            ]
        env = ppo_skrl.TensorEnv(ENVIRONMENTS["pendulum"](num_envs, device, 0))
        agent = (TritonRunner if provider == "triton" else SkrlRunner)(env, config).agent
        agent.init()
    agent.enable_training_mode(True)
    observations, about = env.reset()[0], {"timestep": 0, "timesteps": num_steps}
    for _ in range(num_steps):
        with torch.no_grad():
            actions, _ = agent.act(observations, None, **about)
            following, rewards, terminated, truncated, infos = env.step(actions)
            agent.record_transition(
                observations=observations,
                states=None,
                actions=actions,
                rewards=rewards,
                next_observations=following,
                next_states=None,
                terminated=terminated,
                truncated=truncated,
                infos=infos,
                **about,
            )
        observations = following
    agent.enable_models_training_mode(True)
    return lambda: agent.update(**about)


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
