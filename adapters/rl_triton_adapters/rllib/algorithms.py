"""PPO, IMPALA and APPO whose configs `enable_triton` has changed, by names that dicts, Ray Tune and YAML have for them.

    import rl_triton_adapters.rllib  # adds the names

    tune.Tuner("TritonPPO", param_space={"env": "CartPole-v1", "lr": tune.loguniform(1e-5, 1e-3)})

RLlib's own names mean what they did, unless `learner_config_dict` has the flag "rl_triton": then it counts.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import sys
from functools import wraps
from typing import Any, ClassVar

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPO
from ray.rllib.algorithms.impala import IMPALA
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.algorithms.registry import ALGORITHMS
from ray.tune.registry import TRAINABLE_CLASS, _global_registry, get_trainable_cls, register_trainable

from rl_triton_adapters.common.switch import Place
from rl_triton_adapters.rllib.config import enable_triton
from rl_triton_core.extending import say


class TritonAlgorithm(Algorithm):
    """Call `enable_triton` for the config, whatever it is given as. Put it in front of an algorithm of RLlib."""

    needs_flag: ClassVar[bool] = False
    """Whether nothing is called for a config without the flag "rl_triton"."""

    def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
        config = copy_config(config, self.get_default_config())
        if not self.needs_flag or "rl_triton" in config.learner_config_dict:
            enable_triton(config)
        super().__init__(config, *args, **kwargs)


def copy_config(config: Any, default: Any) -> Any:
    """A copy of an algorithm's config, whatever it is given as, that may be changed; `default` is of the algorithm."""
    if isinstance(config, type(default)):
        return config.copy(copy_frozen=False)
    given = config.to_dict() if isinstance(config, AlgorithmConfig) else config or {}
    return default.from_state(given) if "class" in given else default.update_from_dict(given)


def derive(stock: Any, needs_flag: bool) -> Any:
    """One of RLlib's algorithms, whose learners compute with `rl_triton_core` unless, or only if, a flag says so."""
    name, when = ("Flagged", "if a flag says so") if needs_flag else ("Triton", "unless a flag says otherwise")
    document = f"`{stock.__name__}` of RLlib, whose learners compute with `rl_triton_core` {when}."
    own = {"needs_flag": needs_flag, "__module__": __name__, "__doc__": document}
    return type(f"{name}{stock.__name__}", (TritonAlgorithm, stock), own)


TritonPPO = derive(PPO, needs_flag=False)
TritonIMPALA = derive(IMPALA, needs_flag=False)
TritonAPPO = derive(APPO, needs_flag=False)
OURS = TritonPPO, TritonIMPALA, TritonAPPO
FlaggedPPO, FlaggedIMPALA, FlaggedAPPO = FLAGGED = [derive(x, needs_flag=True) for x in (PPO, IMPALA, APPO)]


def list_places() -> list[Place]:
    """Where an algorithm is built, whose config is enabled there, unless it is one that `enable_triton` refuses."""
    stock = Algorithm.__init__

    @wraps(stock)
    def initialize(self: Any, config: Any = None, *args: Any, **kwargs: Any) -> None:
        try:
            config = enable_triton(copy_config(config, self.get_default_config()))
        except Exception as error:  # which must not end the program
            say(f"rl-triton: {type(self).__name__} stays as it is: {error}", sys.stderr)
        stock(self, config, *args, **kwargs)

    return [(Algorithm, "__init__", stock, initialize)]


def add_names() -> None:
    """Let RLlib and Ray Tune find these algorithms, by their names and by RLlib's."""
    for stock, ours, flagged in zip((PPO, IMPALA, APPO), OURS, FLAGGED, strict=True):
        name = stock.__name__
        ALGORITHMS[f"Triton{name}"] = lambda x=ours: (x, x.get_default_config())
        ALGORITHMS[name] = lambda x=flagged: (x, x.get_default_config())
        if _global_registry.contains(TRAINABLE_CLASS, name) and get_trainable_cls(name) is stock:
            register_trainable(name, flagged)  # Tune has looked for it before, and keeps what it found


add_names()
