"""Off-policy algorithms of Stable-Baselines3: whole training, stock and ours, environment steps in turns.

All arms begin alike and make the same first gradient steps, after which parameters must agree; later ones enlarge what
is rounded. On a GPU, a third arm asks no more what its updates depend on: the bound of what questions cost.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

from benchmarks.harness import wait_for
from benchmarks.results import Row, make_row
from rl_triton_core.testing import assert_close


class Setting(NamedTuple):
    """An algorithm with its defaults but for these: gradient steps after each `train_freq` steps of an environment."""

    algorithm: str
    env: str
    gradient_steps: int = 1
    train_freq: int = 1


SAC, DQN = Setting("SAC", "Pendulum-v1"), Setting("DQN", "CartPole-v1")
ALL = [
    SAC,
    SAC._replace(gradient_steps=8),
    Setting("TD3", "Pendulum-v1"),
    Setting("DDPG", "Pendulum-v1"),
    DQN,
    DQN._replace(train_freq=4),
    Setting("TQC", "Pendulum-v1"),
    Setting("QRDQN", "CartPole-v1"),
    Setting("CrossQ", "Pendulum-v1"),
]
SETTINGS = {"cpu": [x for x in ALL if x.gradient_steps == 1], "cuda": ALL, "quick": [SAC, DQN]}
MODULES = {"SAC": "sac", "TD3": "td3", "DDPG": "td3", "DQN": "dqn"}
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
    times: dict[str, list[float]] = {name: [] for name in models}
    turn, ends = 10 if options.quick else TURN, time.perf_counter() + (options.seconds or SECONDS)
    while len(times["ours"]) < (2 if options.quick else 10) or time.perf_counter() < ends:
        for name in sorted(models, reverse=len(times["ours"]) % 2 == 1):
            times[name].append(time_turn(models[name], turn, options.device))
    for name, seconds in times.items():
        yield make_row(
            name, "steps" if name != "unasked" else "bound of steps", "per second", [turn / x for x in seconds]
        )
    for name in [*times][1:]:
        pairs, metric = zip(times["stock"], times[name], strict=True), "speed-up" if name == "ours" else "its bound"
        yield make_row(name, metric, "×", [a / b for a, b in pairs], note=models[name].describe())


def keep_answers(model: Any) -> None:
    """Let a model find its update, and what the graphs of it depend on, once and for all."""
    step = model._find_update()
    model._find_update = lambda: step
    step.blocks += 1  # as if all that follows were inside `held`


def time_turn(model: Any, steps: int, device: str) -> float:
    """The seconds that training takes for some steps of the environment."""
    start = time.perf_counter()
    model.learn(steps, reset_num_timesteps=False)
    wait_for(device)
    return time.perf_counter() - start


def make_model(name: str, setting: Setting, device: str) -> Any:
    """An algorithm that learns from its 20th step on."""
    kind, options = choose_class(name, setting.algorithm), setting._asdict()
    del options["algorithm"]
    return kind("MlpPolicy", options.pop("env"), learning_starts=20, seed=0, device=device, **options)


def choose_class(name: str, algorithm: str) -> Any:
    """The class of an arm."""
    if name == "stock":
        return getattr(import_module("stable_baselines3" if algorithm in MODULES else "sb3_contrib"), algorithm)
    module = MODULES.get(algorithm, "contrib_off_policy")
    return getattr(import_module(f"rl_triton_adapters.sb3.{module}"), f"Triton{algorithm}")
