"""`PPO.train` of Stable-Baselines3 on a CPU, per minibatch: stock, and `TritonPPO` without and with a compiled update.

All arms have one thread. The rollout is random, for a policy of two networks with two hidden layers and Tanh. An update
has one epoch and at least four minibatches. After the first one, parameters must be stock's within rounding. Layers of
any size are compiled here, to see from which on they should not be: `networks.MAX_WEIGHTS`.
"""

from typing import Any

import numpy as np
import torch
from gymnasium import Env, spaces
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger

from benchmarks import harness
from benchmarks.harness import Options, Rows, Setting
from rl_triton_adapters.sb3 import TritonPPO
from rl_triton_core._internal.mlp import networks

SAMPLES = 512  # at least so many of a rollout, and four minibatches


class Eager(TritonPPO):
    """Makes one step after the other."""

    def _make_step(self, *args: Any) -> torch.Tensor:
        return super()._make_step(*args)


class Task(Env[Any, Any]):
    def __init__(self, setting: Setting) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (setting.observations,))
        self.action_space = spaces.Box(-1, 1, (setting.actions,))


def measure(setting: Setting, options: Options) -> Rows:
    torch.set_num_threads(1)
    networks.MAX_WEIGHTS = max(networks.MAX_WEIGHTS, setting.hidden**2)
    models = {name: make_model(kind, setting) for name, kind in (("stock", PPO), ("eager", Eager), ("ours", TritonPPO))}
    for name, model in models.items():
        np.random.seed(0)  # noqa: NPY002
        model.train()
        harness.compare_parameters(name, model.policy, models["stock"].policy)
    assert models["ours"].describe() == "updates are compiled" != models["eager"].describe()
    arms = {name: model.train for name, model in models.items()}
    times = harness.time_in_turns(arms, "cpu", options.seconds, options.rounds)
    count = models["stock"].n_steps // setting.batch_size
    per_minibatch = {name: [[x / count for x in burst] for burst in bursts] for name, bursts in times.items()}
    yield from harness.list_times(per_minibatch, metric="minibatch")


def make_model(kind: type[PPO], setting: Setting) -> PPO:
    count = max(4, SAMPLES // setting.batch_size) * setting.batch_size
    sizes: dict[str, Any] = {"n_steps": count, "batch_size": setting.batch_size, "n_epochs": 1}
    network = {"net_arch": [setting.hidden] * 2}
    model = kind("MlpPolicy", Task(setting), **sizes, policy_kwargs=network, learning_rate=1e-5, device="cpu", seed=0)
    model.set_logger(Logger(None, []))
    buffer, rng = model.rollout_buffer, np.random.default_rng(0)
    for name in ("observations", "actions", "advantages", "returns", "values", "log_probs"):
        array = getattr(buffer, name)
        array[:] = rng.normal(size=array.shape)
    buffer.log_probs[:] = -2 - 0.1 * np.abs(buffer.log_probs)
    buffer.pos, buffer.full = count, True
    return model
