"""The call that lets an algorithm's learners compute with `rl_triton_core`, and the check that they do.

PPO, IMPALA and APPO whose configs it has changed have names for dicts, Ray Tune and YAML:

    import rl_triton_adapters.rllib  # adds the names

    tune.Tuner("TritonPPO", param_space={"env": "CartPole-v1", "lr": tune.loguniform(1e-5, 1e-3)})

RLlib's own names mean what they did, unless `learner_config_dict` has the flag "rl_triton": then it counts.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import sys
from functools import cache, wraps
from typing import Any, ClassVar, TypeVar

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPO
from ray.rllib.algorithms.impala import IMPALA
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.algorithms.registry import ALGORITHMS
from ray.rllib.utils import force_list
from ray.rllib.utils.metrics import LEARNER_RESULTS
from ray.tune.registry import TRAINABLE_CLASS, _global_registry, get_trainable_cls, register_trainable

from rl_triton_adapters.common.switch import Place
from rl_triton_adapters.rllib.check import check_ray, read_flags
from rl_triton_adapters.rllib.env_runner import TritonSingleAgentEnvRunner
from rl_triton_adapters.rllib.learners import LEARNERS, METRIC, TritonLearner, TritonPPOTorchLearner
from rl_triton_core.extending import say

Config = TypeVar("Config", bound=AlgorithmConfig)
OLD_STACK = "config of enable_triton: got enable_rl_module_and_learner=False, expected the new API stack"
KNOWN_CONFIGS = "a PPOConfig, IMPALAConfig or APPOConfig"


def enable_triton(config: Config, *, masked_statistics: bool | None = None, backend: str | None = None) -> Config:
    """Let an algorithm's learners compute with `rl_triton_core`.

    Sets `learner_class` and the flags in `learner_config_dict` that docs/rllib.md lists. Entries that are there already
    stay, unless an argument says otherwise. Adds `check_learners` to the callbacks `on_algorithm_init` and
    `forget_metric` to those `on_train_result`. Call it before the algorithm is built.

    Args:
        config: Config of PPO, IMPALA or APPO, on the new API stack; changed in place, and returned.
        masked_statistics: Whether PPO standardises advantages over real steps alone. RLlib's own statistics count the
            extra slot of each episode too. None keeps what the config says, which is False by default.
        backend: Name of a backend of `rl_triton_core`. None keeps what the config says, which by default is that the
            learner's device decides.

    Raises:
        TypeError: The algorithm is another one, or has a learner class that does not derive from one of this module; a
            flag is no bool.
        ValueError: The config is for the old API stack, or asks for masked statistics without having any; there is no
            such backend, or an entry of `learner_config_dict` looks like a flag of this module and is none.
        RuntimeError: The installed Ray is too old, or does not compute what this adapter was written for.
    """
    learner_class = choose_learner_class(config)
    if not config.enable_rl_module_and_learner:
        raise ValueError(OLD_STACK)
    arguments = {"rl_triton_masked_statistics": masked_statistics, "rl_triton_backend": backend}
    given = {name: value for name, value in arguments.items() if value is not None}
    flags = read_flags({**config.learner_config_dict, **given})
    if flags.rl_triton:
        check_ray()
    if flags.rl_triton_masked_statistics and not issubclass(learner_class, TritonPPOTorchLearner):
        raise ValueError(f"masked_statistics: got True for {type(config).__name__}, expected it for PPO alone")
    config.learners(learner_class=learner_class, learner_config_dict=flags._asdict())
    if not isinstance(config, TritonConfig):
        config.__class__ = derive_config_class(type(config))  # type: ignore[arg-type]
    callbacks: dict[str, Any] = {"on_algorithm_init": check_learners, "on_train_result": forget_metric}
    for name, callback in callbacks.items():
        known = force_list(getattr(config, f"callbacks_{name}"))
        if callback not in known:
            config.callbacks(**{name: [*known, callback]})
    return config


class TritonConfig(AlgorithmConfig):
    """In front of the class of a config that `enable_triton` has changed; its state is one of the class behind."""

    def validate(self) -> None:
        """RLlib's checks, after ours: the old API stack has no callbacks, and RLlib would blame them."""
        if not self.enable_rl_module_and_learner:
            raise ValueError(OLD_STACK)
        super().validate()

    def choose_env_runner(self) -> dict[str, Any]:
        """Our env runner, where RLlib would choose its own for one agent: algorithms are made of the state or dict."""
        has_own = self.is_multi_agent or self.output or not self.enable_env_runner_and_connector_v2
        return {} if has_own or self.env_runner_cls is not None else {"env_runner_cls": TritonSingleAgentEnvRunner}

    def to_dict(self) -> dict[str, Any]:
        """RLlib's dict, with an env runner."""
        return {**super().to_dict(), **self.choose_env_runner()}

    def get_state(self) -> dict[str, Any]:
        """RLlib's state, with an env runner."""
        return {**super().get_state(), "class": type(self).__mro__[2], **self.choose_env_runner()}

    def __reduce__(self) -> Any:
        """By the class behind, which Python finds."""
        return create_config, (type(self).__mro__[2],), vars(self)


@cache
def derive_config_class(kind: Any) -> Any:
    """A class of configs with our checks in front of its own."""
    return type(kind.__name__, (TritonConfig, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def create_config(kind: type) -> Any:
    """A config that `enable_triton` has changed, from the class it had before, without attributes yet."""
    return object.__new__(derive_config_class(kind))


def forget_metric(metrics_logger: Any, **kwargs: Any) -> None:
    """Let the algorithm forget our metric: in the results of an iteration without an update, RLlib's would say NaN."""
    metrics_logger.delete(LEARNER_RESULTS, *METRIC, key_error=False)


def choose_learner_class(config: Any) -> type:
    """The learner class for a config: its own if it derives from one of ours, else ours in the place of RLlib's."""
    if not isinstance(config, AlgorithmConfig):
        raise TypeError(f"config: got {type(config).__name__}, expected {KNOWN_CONFIGS}")
    current = config.learner_class
    bases = current.__mro__ if isinstance(current, type) else ()
    stock = next((base for base in bases if base in LEARNERS), None)
    if stock is None:
        raise TypeError(
            f"config: got {type(config).__name__} with the learner {getattr(current, '__name__', current)}, which has "
            f"nothing to replace, expected {KNOWN_CONFIGS}. Leave the call out; for MARWIL, see docs/rllib.md"
        )
    ours = LEARNERS[stock]
    if current is not stock and ours not in bases:
        raise TypeError(
            f"learner_class: got {current.__name__}, expected it to derive from {ours.__name__}: "
            f"{suggest_learner_class(current)}"
        )
    return ours if current is stock else current


def suggest_learner_class(learner_class: type) -> str:
    """The line that makes a learner class of the user's one that computes with `rl_triton_core`."""
    ours = next((LEARNERS[base].__name__ for base in learner_class.__mro__ if base in LEARNERS), "one of ours")
    return f"class Mine({learner_class.__name__}, {ours}): pass"


def check_learners(algorithm: Any, **kwargs: Any) -> None:
    """Check that every learner of an algorithm is one of ours, unless the flag "rl_triton" is False.

    Algorithms of a config that `enable_triton` changed run it when they are built, as a callback `on_algorithm_init`.
    Learners log there what they compute with. What RLlib passes to its callbacks besides is not read.

    Raises:
        RuntimeError: Some learner is RLlib's own, for instance because `learner_class` was set after `enable_triton`,
            or has a `build` that does not call ours.
    """
    if not read_flags(algorithm.config.learner_config_dict).rl_triton:
        return
    advices = [answer.get() for answer in algorithm.learner_group.foreach_learner(advise_learner)]
    wrong = [advice for advice in advices if advice]
    if wrong:
        raise RuntimeError(
            f"rl_triton: {len(wrong)} of {len(advices)} learners compute with RLlib's own: {wrong[0]}; "
            'learner_config_dict={"rl_triton": False} keeps RLlib\'s own'
        )


def advise_learner(learner: Any) -> str:
    """What makes a learner one of ours; empty if it is one, which then logs what it computes with."""
    learner_class = learner.config.learner_class  # a remote learner's own type is a wrapper that Ray makes
    if not isinstance(learner, TritonLearner):
        line = suggest_learner_class(learner_class)
        expected = f"one that derives from ours: {line}. Set learner_class before enable_triton"
    elif not learner.uses_triton:
        expected = "its build() to call super().build()"
    else:
        learner.log_description()
        return ""
    return f"got {learner_class.__name__}, expected {expected}"


# -- algorithms by name ------------------------------------------------------------------------------------------------


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
    for stock, ours, flagged in zip((PPO, IMPALA, APPO), (TritonPPO, TritonIMPALA, TritonAPPO), FLAGGED, strict=True):
        name = stock.__name__
        ALGORITHMS[f"Triton{name}"] = lambda x=ours: (x, x.get_default_config())
        ALGORITHMS[name] = lambda x=flagged: (x, x.get_default_config())
        if _global_registry.contains(TRAINABLE_CLASS, name) and get_trainable_cls(name) is stock:
            register_trainable(name, flagged)  # Tune has looked for it before, and keeps what it found


add_names()
