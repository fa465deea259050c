"""Off-policy algorithms of Stable-Baselines3: whole training, stock and ours, environment steps in turns.

All arms begin alike and make the same first gradient steps, after which parameters must agree; later ones enlarge what
is rounded. On a GPU, a third arm asks no more what its updates depend on: the bound of what questions cost.
"""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks import harness
from benchmarks.end_to_end.sb3 import find_class
from benchmarks.harness import Options, Rows, Setting, make_row
from benchmarks.settings import TABLE


class Frames(gym.ObservationWrapper):
    """CartPole whose observations are four frames of 84 x 84, as those of Atari's games are."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def observation(self, observation: Any) -> Any:
        """A grey for each number of the state."""
        grey = np.clip(128 + 40 * observation, 0, 255).astype(np.uint8)
        return np.broadcast_to(grey[:, None, None], (4, 84, 84))


FIRST, WARM_UP, TURN = 21, 40, 100
"""Steps of an environment: until the first gradient steps, until the first turn, and of a turn."""


def measure(setting: Setting, options: Options) -> Rows:
    """Environment steps per second of the arms, and their ratios, paired by turns."""
    models: dict[str, Any] = {}
    for name in ("stock", "ours", *["unasked"] * (options.device == "cuda")):
        model = make_model(name, setting, options.device)  # which sets the seeds
        models[name] = model.learn(FIRST)
        harness.compare_parameters(name, model.policy, models["stock"].policy)
    for name, model in models.items():
        model.learn(WARM_UP, reset_num_timesteps=False)
        if name == "unasked":
            keep_answers(model)
    turn = max(setting.train_freq, 10 if options.quick else TURN)
    calls = {name: partial(model.learn, turn, reset_num_timesteps=False) for name, model in models.items()}
    times = harness.time_rounds(calls, options)
    for name, found in times.items():
        metric = "steps" if name != "unasked" else "bound of steps"
        yield make_row(name, metric, "per second", [1e6 * turn / x for x in found])
    for name in [*times][1:]:
        yield harness.make_ratio(name, "speed-up" if name == "ours" else "its bound", times, models[name].describe())


def make_model(arm: str, setting: Setting, device: str) -> Any:
    kind, (env, _, variant) = find_class(setting.algorithm, arm != "stock"), setting.env.partition(", ")
    steps = {"learning_starts": 20, "gradient_steps": setting.gradient_steps, "train_freq": setting.train_freq}
    steps |= TABLE["off_policy"]["options"].get(variant or env, {})
    task = ("CnnPolicy", Frames()) if env == "frames" else ("MlpPolicy", env)
    return kind(*task, seed=0, device=device, **steps)


def keep_answers(model: Any) -> None:
    """Let a model find its update, and what the graphs of it depend on, once and for all."""
    step = model._find_update()
    model._find_update = lambda: step
    for each in (step, model._acting):
        each.blocks += 1  # as if all that follows were inside `held`
