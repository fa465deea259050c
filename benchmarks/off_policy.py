"""Off-policy algorithms of Stable-Baselines3: whole training, stock and ours, environment steps in turns.

All arms begin alike and make the same first gradient steps, after which parameters must agree; later ones enlarge what
is rounded. On a GPU, a third arm asks no more what its updates depend on: the bound of what questions cost.
"""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from benchmarks import harness
from benchmarks.end_to_end.sb3 import find_class
from benchmarks.results import Row, make_row
from rl_triton_core.testing import assert_close


class Setting(NamedTuple):
    """An algorithm with its defaults but for these: gradient steps after each `train_freq` steps of an environment."""

    algorithm: str
    env: str
    gradient_steps: int = 1
    train_freq: int = 1


class Frames(gym.ObservationWrapper):
    """CartPole whose observations are four frames of 84 x 84, as those of Atari's games are."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def observation(self, observation: Any) -> Any:
        """A grey for each number of the state."""
        grey = np.clip(128 + 40 * observation, 0, 255).astype(np.uint8)
        return np.broadcast_to(grey[:, None, None], (4, 84, 84))


PENDULUM, CARTPOLE = ("SAC", "TD3", "DDPG", "TQC", "CrossQ"), ("DQN", "QRDQN")
ALL = [Setting(x, "Pendulum-v1") for x in PENDULUM] + [Setting(x, "CartPole-v1") for x in CARTPOLE]
ALL.append(Setting("DQN", "CartPole-v1", train_freq=4))
MORE = [ALL[0]._replace(gradient_steps=8), Setting("DQN", "frames")]
SETTINGS = {"cpu": ALL, "cuda": [*ALL, *MORE], "quick": [ALL[0], ALL[-1]]}
FIRST, WARM_UP, TURN = 21, 40, 100
"""Steps of an environment: until the first gradient steps, until the first turn, and of a turn."""
SECONDS = 20.0


def measure(setting: Setting, options: Namespace) -> Iterator[Row]:
    """Environment steps per second of the arms, and their ratios, paired by turns."""
    models: dict[str, Any] = {}
    for name in ("stock", "ours", *["unasked"] * (options.device == "cuda")):
        model = make_model(name, setting, options.device)  # which sets the seeds
        models[name] = model.learn(FIRST)
        for x, y in zip(model.policy.parameters(), models["stock"].policy.parameters(), strict=True):
            assert_close(x, y, rtol=1e-3, name=name)
    for name, model in models.items():
        model.learn(WARM_UP, reset_num_timesteps=False)
        if name == "unasked":
            keep_answers(model)
    turn = 10 if options.quick else TURN
    times: dict[str, list[float]] = {name: [] for name in models}
    for order in harness.take_turns(models, options.seconds or SECONDS, least=2 if options.quick else 10):
        for name in order:
            train = partial(models[name].learn, turn, reset_num_timesteps=False)
            times[name].append(harness.time_call(train, options.device) / 1e6)
    for name, seconds in times.items():
        metric = "steps" if name != "unasked" else "bound of steps"
        yield make_row(name, metric, "per second", [turn / x for x in seconds])
    for name in [*times][1:]:
        pairs, metric = zip(times["stock"], times[name], strict=True), "speed-up" if name == "ours" else "its bound"
        yield make_row(name, metric, "×", [a / b for a, b in pairs], note=models[name].describe())


def make_model(arm: str, setting: Setting, device: str) -> Any:
    kind, (_, env, gradient_steps, train_freq) = find_class(arm, setting.algorithm), setting
    steps = {"learning_starts": 20, "gradient_steps": gradient_steps, "train_freq": train_freq}
    if env == "frames":
        return kind("CnnPolicy", Frames(), seed=0, device=device, buffer_size=20_000, **steps)
    return kind("MlpPolicy", env, seed=0, device=device, **steps)


def keep_answers(model: Any) -> None:
    """Let a model find its update, and what the graphs of it depend on, once and for all."""
    step = model._find_update()
    model._find_update = lambda: step
    for each in (step, model._acting):
        each.blocks += 1  # as if all that follows were inside `held`
