"""Whether what is equal up to rounding learns as well: returns of Stable-Baselines3's algorithms and ours, by seed.

Rounding grows with every update, so runs of one seed differ in the end, and only many seeds say whether one arm learns
better. The control is stock with weights moved by 1e-7 of themselves before training: what rounding alone does.
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.learning import train_all
from benchmarks.results import Row, make_row


class Setting(NamedTuple):
    """What is learned, and from how many seeds."""

    algorithm: str
    task: str
    total_steps: int
    num_envs: int
    target_return: float
    seeds: int = 20


RECURRENT = Setting("RecurrentPPO", "CartPole-v1 without velocities", 50_000, 8, 450.0)
"""With the arguments of sb3-contrib's own test of learning."""
OTHERS = [
    Setting("A2C", "CartPole-v1", 100_000, 8, 450.0),
    Setting("MaskablePPO", "InvalidActionEnvDiscrete", 20_000, 4, 90.0),
    Setting("DQN", "CartPole-v1", 50_000, 1, 450.0),
    Setting("TD3", "Pendulum-v1", 8_000, 1, -250.0),
]
SETTINGS = {
    "cpu": [RECURRENT, *OTHERS],
    "cuda": [RECURRENT, *OTHERS],
    "quick": [x._replace(total_steps=300, seeds=1, target_return=-2000.0) for x in (RECURRENT, OTHERS[1])],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "RecurrentPPO": {
        **{"n_steps": 128, "learning_rate": 7e-4, "batch_size": 256, "n_epochs": 10, "max_grad_norm": 1},
        "gae_lambda": 0.98,
        "policy_kwargs": {
            **{"net_arch": {"vf": [64], "pi": []}, "lstm_hidden_size": 64, "ortho_init": False},
            "enable_critic_lstm": True,
        },
    },
    "A2C": {"n_steps": 16, "ent_coef": 0.0},
    "MaskablePPO": {"n_steps": 64, "gamma": 0.4},
    "DQN": {
        **{"learning_rate": 2.3e-3, "batch_size": 64, "learning_starts": 1000, "target_update_interval": 10},
        **{"train_freq": 64, "gradient_steps": 32, "exploration_fraction": 0.16, "exploration_final_eps": 0.04},
    },
    "TD3": {"gamma": 0.98, "learning_starts": 1000, "policy_kwargs": {"net_arch": [64, 64]}},
}
MODULES = {"RecurrentPPO": "contrib", "MaskablePPO": "contrib", "A2C": "captured", "DQN": "dqn", "TD3": "td3"}
FUSED = "fused Adam"
"""The arm of stock with PyTorch's fused Adam, which is ours for TD3 on a CPU."""
ARMS = dict.fromkeys(("RecurrentPPO", "TD3"), ("control", FUSED))
"""Besides stock and ours."""
EPISODES = 20


class Returns(NamedTuple):
    """Of one run."""

    arm: str
    trained: float
    """The mean of the last episodes of training."""
    evaluated: float
    """The mean of episodes without exploration."""


def measure(setting: Setting, options: Namespace) -> Iterator[Row]:
    """Quartiles over seeds, all values in the note, and how likely a difference of means as large is by chance."""
    arms = ("stock", *ARMS.get(setting.algorithm, ()), "ours")  # the quickest last
    runs = [(setting, *x, options.device) for x in itertools.product(arms, range(setting.seeds))]
    found = list(train_all(train, runs, options.jobs, time.time() + options.ends - time.perf_counter()))
    yield from compare_arms(arms, found, setting.target_return)


def compare_arms(arms: Sequence[str], found: list[Returns], target: float) -> Iterator[Row]:
    """The lines of all arms, of which stock is the first."""
    for arm in arms:
        returns = [x.evaluated for x in found if x.arm == arm]
        note = " ".join(f"{x:.0f}" for x in sorted(returns))
        yield make_row(arm, "return", "", returns, note)
        yield make_row(arm, "return in training", "", [x.trained for x in found if x.arm == arm])
        share = [sum(x >= target for x in returns) / len(returns)] if returns else []
        yield make_row(arm, "share of runs at the target", "", share, f"of {len(returns)}")
        for other in {"stock": (), "ours": ("stock", "control")}.get(arm, ("stock",)):
            if known := [x.evaluated for x in found if x.arm == other]:
                yield make_row(arm, f"chance of the difference from {other}", "", find_chance(known, returns))


def find_chance(first: list[float], second: list[float], trials: int = 20_000) -> float:
    """A two-sided permutation test of the difference of means."""
    values, generator = np.array([*first, *second]), np.random.default_rng(0)
    shuffled = generator.permuted(np.tile(values, (trials, 1)), axis=1)
    differences = shuffled[:, : len(first)].mean(1) - shuffled[:, len(first) :].mean(1)
    least = abs(np.mean(first) - np.mean(second)) - 1e-9
    return float((1 + (np.abs(differences) >= least).sum()) / (1 + trials))


def train(run: tuple[Setting, str, int, str]) -> Returns:
    """One run, with one thread."""
    from stable_baselines3.common import evaluation

    torch.set_num_threads(1)
    setting, arm, *_ = run
    model = make_model(*run)
    model.learn(setting.total_steps)
    model.get_env().training = False  # the normalisation stays as it is
    masked = "sb3_contrib.common.maskable.evaluation" if setting.algorithm == "MaskablePPO" else ""
    evaluate = (import_module(masked) if masked else evaluation).evaluate_policy
    returns, _ = evaluate(model, model.get_env(), EPISODES, return_episode_rewards=True)
    trained = [episode["r"] for episode in model.ep_info_buffer]
    return Returns(arm, float(np.mean(trained)), float(np.mean(returns)))


def make_model(setting: Setting, arm: str, seed: int, device: str) -> Any:
    """The algorithm of an arm."""
    name = setting.algorithm
    package = "sb3_contrib" if MODULES[name] == "contrib" else "stable_baselines3"
    kind, options = getattr(import_module(package), name), {**OPTIONS[name]}
    if arm == "ours":
        kind = getattr(import_module(f"rl_triton_adapters.sb3.{MODULES[name]}"), f"Triton{name}")
        options |= {"enabled": True} if name == "RecurrentPPO" else {}
    if arm == FUSED:
        kind = fuse_adam(kind)
    policy = "MlpLstmPolicy" if name == "RecurrentPPO" else "MlpPolicy"
    model = kind(policy, make_envs(setting), seed=seed, device=device, **options)
    if arm == "control":
        generator = torch.Generator().manual_seed(1000 + seed)
        for x in model.policy.parameters():
            noise = torch.randn(x.shape, generator=generator).to(x.device)
            x.data.mul_(1 + 1e-7 * noise)
    return model


def fuse_adam(kind: Any) -> Any:
    """Stock with PyTorch's fused Adam."""
    from rl_triton_adapters.common.optimizers import fuse_optimizer

    class Fused(kind):
        """That."""

        def train(self, *args: Any, **kwargs: Any) -> None:
            policy = self.policy
            for x in (policy.actor, policy.critic) if hasattr(policy, "actor") else (policy,):
                fuse_optimizer(x.optimizer)
            super().train(*args, **kwargs)

    return Fused


def make_envs(setting: Setting) -> Any:
    """Vectorized, with a monitor each."""
    from gymnasium.wrappers import TransformObservation
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    if setting.algorithm == "MaskablePPO":
        from sb3_contrib.common.envs import InvalidActionEnvDiscrete

        return make_vec_env(lambda: InvalidActionEnvDiscrete(dim=80, n_invalid_actions=60), setting.num_envs)
    if setting.algorithm != "RecurrentPPO":
        return make_vec_env(setting.task, setting.num_envs)

    def hide_velocities(env: Any) -> Any:
        space = type(env.observation_space)(env.observation_space.low[::2], env.observation_space.high[::2])
        return TransformObservation(env, lambda x: x[::2], space)

    return VecNormalize(make_vec_env("CartPole-v1", setting.num_envs, wrapper_class=hide_velocities))
