"""RLlib: learners of PPO, IMPALA and APPO that compute advantages and value targets with `rl_triton_core`.

One call turns them on, before the algorithm is built, and one flag off again:

    config = enable_triton(PPOConfig().environment("CartPole-v1"))
    config.learners(learner_config_dict={"rl_triton": False})

For PPO a piece of the learner's connector pipeline is replaced while the pipeline runs; for IMPALA and APPO the
function `vtrace_torch`, in the learner's loss and nowhere else. Parts of an update take less time than RLlib's: see
`_rllib_updates`. Tensors stay where they are. All else is RLlib's own.
A learner compiles what it needs when it is built, logs one line that says what it computes with, and says in the metric
"rl_triton" of every update whether its advantages or V-Trace were ours.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, MethodType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from rl_triton_adapters._copies import copy_function
from rl_triton_core import check_backend, compute_gae, compute_vtrace, normalize_advantages

try:
    import ray
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
    from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner
    from ray.rllib.algorithms.bc import BCConfig
    from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
    from ray.rllib.algorithms.impala.torch.vtrace_torch_v2 import make_time_major, vtrace_torch
    from ray.rllib.algorithms.marwil import MARWILConfig
    from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
    from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate, GeneralAdvantageEstimation
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from ray.rllib.evaluation.postprocessing import Postprocessing
    from ray.rllib.utils import force_list
    from ray.rllib.utils.metrics import ALL_MODULES
    from ray.rllib.utils.postprocessing.value_predictions import compute_value_targets

    from rl_triton_adapters._rllib_appo import FusedAPPOLossMixin
    from rl_triton_adapters._rllib_captured import CapturedUpdateMixin
    from rl_triton_adapters._rllib_updates import FusedLossMixin, FusedUpdateMixin
except ImportError as error:
    raise ImportError(
        "rl_triton_adapters.rllib needs RLlib 2.56 or newer, which could not be imported: "
        "pip install rl-triton-core[rllib]"
    ) from error

__all__ = [
    "TritonAPPOTorchLearner",
    "TritonGeneralAdvantageEstimation",
    "TritonIMPALATorchLearner",
    "TritonPPOTorchLearner",
    "check_learners",
    "check_ray",
    "enable_triton",
    "vtrace",
]

OLDEST_RAY = (2, 56)
METRIC = "rl_triton"
"""1 in the results of an update, under "__all_modules__", if all learners computed advantages or V-Trace with ours."""

Config = TypeVar("Config", bound=AlgorithmConfig)
logger = logging.getLogger("ray.rllib.rl_triton")  # follows the log level that RLlib sets for itself


def enable_triton(config: Config, *, masked_statistics: bool | None = None, backend: str | None = None) -> Config:
    """Let an algorithm's learners compute with `rl_triton_core`.

    Sets `learner_class` and the flags in `learner_config_dict` that docs/rllib.md lists. Entries that are there already
    stay, unless an argument says otherwise. Adds `check_learners` to the callbacks `on_algorithm_init`. Call it before
    the algorithm is built.

    Args:
        config: Config of PPO, IMPALA or APPO, on the new API stack; changed in place.
        masked_statistics: Whether PPO standardises advantages over real steps alone. RLlib's own statistics count the
            extra slot of each episode too. None keeps what the config says, which is False by default.
        backend: Name of a backend of `rl_triton_core`. None keeps what the config says, which by default is that the
            learner's device decides.

    Returns:
        The same config.

    Raises:
        TypeError: The algorithm is another one, or has a learner class that does not derive from one of this module; a
            flag is no bool.
        ValueError: The config is for the old API stack, or asks for masked statistics without having any; there is no
            such backend, or an entry of `learner_config_dict` looks like a flag of this module and is none.
        RuntimeError: The installed Ray is too old, or does not compute what this adapter was written for.
    """
    check_ray()
    learner_class = _choose_learner_class(config)
    if not config.enable_rl_module_and_learner:
        raise ValueError("config: got enable_rl_module_and_learner=False, expected the new API stack")
    arguments = {"rl_triton_masked_statistics": masked_statistics, "rl_triton_backend": backend}
    given = {name: value for name, value in arguments.items() if value is not None}
    flags = read_flags({**config.learner_config_dict, **given})
    if flags.masked_statistics and not issubclass(learner_class, TritonPPOTorchLearner):
        raise ValueError(f"masked_statistics: got True for {type(config).__name__}, expected it for PPO alone")
    config.learners(learner_class=learner_class, learner_config_dict=dict(zip(_FLAG_DEFAULTS, flags, strict=True)))
    callbacks = force_list(config.callbacks_on_algorithm_init)
    if check_learners not in callbacks:
        config.callbacks(on_algorithm_init=[*callbacks, check_learners])
    return config


class Flags(NamedTuple):
    """What `learner_config_dict` asks of our learners, by the names of `_FLAG_DEFAULTS`."""

    enabled: bool
    masked_statistics: bool
    backend: str | None
    fused_loss: bool
    deferred_metrics: bool
    sliced_minibatches: bool
    fused_optimizer: bool
    captured_update: bool


_FLAG_DEFAULTS = {
    "rl_triton": True,
    "rl_triton_masked_statistics": False,
    "rl_triton_backend": None,
    "rl_triton_fused_loss": True,
    "rl_triton_deferred_metrics": True,
    "rl_triton_sliced_minibatches": True,
    "rl_triton_fused_optimizer": True,
    "rl_triton_captured_update": True,
}


def read_flags(learner_config_dict: Mapping[Any, Any]) -> Flags:
    """Read our flags among the entries of `learner_config_dict`.

    Raises:
        TypeError: A flag is no bool.
        ValueError: An entry begins with "rl_tri" and is none of the flags, or there is no such backend.
    """
    unknown = [x for x in learner_config_dict if str(x).startswith("rl_tri") and x not in _FLAG_DEFAULTS]
    if unknown:
        raise ValueError(f"learner_config_dict: got {unknown[0]!r}, expected one of {', '.join(_FLAG_DEFAULTS)}")
    flags = Flags(*(learner_config_dict.get(name, default) for name, default in _FLAG_DEFAULTS.items()))
    for name, flag in zip(_FLAG_DEFAULTS, flags, strict=True):
        if not isinstance(flag, bool) and name != "rl_triton_backend":
            raise TypeError(f"learner_config_dict: got {name}={flag!r}, expected True or False")
    check_backend(flags.backend)
    return flags


def _choose_learner_class(config: Any) -> type:
    """The learner class for a config: its own if it derives from one of ours, else ours in the place of RLlib's."""
    if not isinstance(config, AlgorithmConfig):
        raise TypeError(f"config: got {type(config).__name__}, expected a PPOConfig, IMPALAConfig or APPOConfig")
    current = config.learner_class
    bases = current.__mro__ if isinstance(current, type) else ()
    stock = next((base for base in bases if base in _LEARNERS), None)
    if isinstance(config, MARWILConfig) and not isinstance(config, BCConfig):
        raise TypeError(
            f"config: got {type(config).__name__}, expected a PPOConfig, IMPALAConfig or APPOConfig. MARWIL computes "
            "advantages where offline data are read: leave the call out, or replace the connector in a "
            "prelearner_class, see docs/rllib.md"
        )
    if stock is None:
        raise TypeError(
            f"config: got {type(config).__name__} with the learner {getattr(current, '__name__', current)}, which has "
            "nothing to replace, expected a PPOConfig, IMPALAConfig or APPOConfig"
        )
    ours = _LEARNERS[stock]
    if current is not stock and ours not in bases:
        raise TypeError(
            f"learner_class: got {current.__name__}, expected it to derive from {ours.__name__}: "
            f"{_suggest_learner_class(current)}"
        )
    return ours if current is stock else current


def _suggest_learner_class(learner_class: type) -> str:
    """The line that makes a learner class of the user's one that computes with `rl_triton_core`."""
    ours = next((_LEARNERS[base].__name__ for base in learner_class.__mro__ if base in _LEARNERS), "one of ours")
    return f"class Mine({learner_class.__name__}, {ours}): pass"


def check_learners(algorithm: Any, **kwargs: Any) -> None:
    """Check that every learner of an algorithm is one of ours, unless the flag "rl_triton" is False.

    Algorithms of a config that `enable_triton` changed run it when they are built, as a callback `on_algorithm_init`.
    Learners log there what they compute with.

    Args:
        algorithm: Algorithm that was built.
        **kwargs: Not read; RLlib passes more to its callbacks.

    Raises:
        RuntimeError: Some learner is RLlib's own, for instance because `learner_class` was set after `enable_triton`,
            or has a `build` that does not call ours.
    """
    if not read_flags(algorithm.config.learner_config_dict).enabled:
        return
    learners = [answer.get() for answer in algorithm.learner_group.foreach_learner(_describe_learner)]
    wrong = [learner for learner in learners if learner.advice]
    if wrong:
        raise RuntimeError(
            f"rl_triton: {len(wrong)} of {len(learners)} learners compute with RLlib's own: got {wrong[0].name}, "
            f"{wrong[0].advice}; "
            'learner_config_dict={"rl_triton": False} keeps RLlib\'s own'
        )


class _LearnerDescription(NamedTuple):
    name: str
    advice: str
    """What makes it one of ours; empty if it is."""


def _describe_learner(learner: Any) -> _LearnerDescription:
    learner_class, advice = learner.config.learner_class, ""  # a remote learner's own type is a wrapper that Ray makes
    if not isinstance(learner, _TritonLearnerMixin):
        line = _suggest_learner_class(learner_class)
        advice = f"expected one that derives from ours: {line}. Set learner_class before enable_triton"
    elif not learner.uses_triton():
        advice = "expected its build() to call super().build()"
    else:
        learner.log_description()
    return _LearnerDescription(learner_class.__name__, advice)


class _TritonLearnerMixin:
    """Say what a learner computes with: in one line, and in a metric of every update."""

    config: Any
    metrics: Any
    _device: Any
    describe_losses: Any
    describe_step: Any

    def __init__(self, **kwargs: Any) -> None:
        """Create the learner, which is not built yet.

        Args:
            **kwargs: Passed on to RLlib.

        Raises:
            TypeError: A flag is no bool.
            ValueError: An entry of `learner_config_dict` looks like a flag of this module and is none.
        """
        super().__init__(**kwargs)
        self._flags = read_flags(self.config.learner_config_dict)
        self._is_ready = self._is_described = self._used_estimator = False

    def uses_triton(self) -> bool:
        """Whether this learner computes with `rl_triton_core` what is not its own: it is switched on, and was built."""
        return self._is_ready

    def describe(self) -> str:
        """What this learner, which is built, computes with, in words."""
        what = f"{self.config.learner_class.__name__} computes {self._describe_estimator()}, on {self._device}"
        return "; ".join([what, self.describe_losses(), self.describe_step()])

    def log_description(self) -> None:
        """Log it, once."""
        if not self._is_described:
            logger.info("%s", self.describe())
            self._is_described = True

    def _describe_estimator(self) -> str:
        raise NotImplementedError

    def _describe_backend(self) -> str:
        return f"rl_triton_core, backend {self._flags.backend or 'that of the device'}"

    def before_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Log what the learner computes with, before its first update, and do what RLlib does.

        Args:
            timesteps: Steps that were sampled and trained on.
        """
        self.log_description()  # not in `build`, since a class in front of this one may still change the pipeline
        super().before_gradient_based_update(timesteps=timesteps)  # type: ignore[misc]

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Log the metric, and do what RLlib does after an update.

        Args:
            timesteps: Steps that were sampled and trained on.
        """
        super().after_gradient_based_update(timesteps=timesteps)  # type: ignore[misc]
        self.metrics.log_value((ALL_MODULES, METRIC), float(self._was_estimated()), window=1)

    def _was_estimated(self) -> bool:
        """Whether advantages or V-Trace of the last update were computed with `rl_triton_core`."""
        used, self._used_estimator = self._used_estimator, False
        return used


# ---------------------------------------------------------------------------------------------------------------------
# PPO
# ---------------------------------------------------------------------------------------------------------------------


class TritonGeneralAdvantageEstimation(GeneralAdvantageEstimation):
    """`GeneralAdvantageEstimation` with the numbers of `rl_triton_core.compute_gae`, for every module in the batch.

        δ[t] = r[t] + γ·V[t+1] − V[t]          r[t] − V[t] where terminateds[t]
        A[t] = δ[t] + γλ·A[t+1]                δ[t] where terminateds[t] or truncateds[t]
        value_targets[t] = A[t] + V[t]
        advantages[t] = (A[t] − μ) / max(σ, 1e-4)

    t counts slots: the steps of each episode, end to end, with an extra slot behind them that holds the bootstrap
    value. V is 0 behind the last one. As in RLlib, extra slots carry the advantage of the episode that follows, and μ
    and σ count them, unless `masked_statistics` are asked for.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        gamma: float,
        lambda_: float,
        masked_statistics: bool = False,
        backend: str | None = None,
    ) -> None:
        """Create the connector.

        Args:
            input_observation_space: Observation space of the environment, for RLlib's base class.
            input_action_space: Action space of the environment, for RLlib's base class.
            gamma: Discount γ per step.
            lambda_: λ in [0, 1].
            masked_statistics: Whether μ and σ are those of real steps, "loss_mask"; other advantages are then 0.
            backend: Name of a backend of `rl_triton_core`; None chooses by the tensors' device.
        """
        super().__init__(input_observation_space, input_action_space, gamma=gamma, lambda_=lambda_)
        self.masked_statistics = masked_statistics
        self.backend = backend

    @torch.no_grad()
    def __call__(self, *, rl_module: Any, episodes: Any, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add the columns "advantages" and "value_targets" to the batch of every module that has a value function.

        Args:
            rl_module: The learner's MultiRLModule.
            episodes: Not read: the batch says where they end.
            batch: Columns per module, tensors [slots] or, for stateful modules, [rows, max_seq_len] with "seq_lens".
            **kwargs: Not read.

        Returns:
            The same batch.
        """

        def add_columns(module_id: str, module: Any) -> None:
            if module_id in batch and isinstance(module, ValueFunctionAPI):
                columns = batch[module_id]
                values = module.compute_values(columns)
                if values.shape != columns[Columns.REWARDS].shape:
                    raise ValueError(
                        f"compute_values of module {module_id!r}: got shape {tuple(values.shape)}, expected "
                        f"{tuple(columns[Columns.REWARDS].shape)}, one value per slot"
                    )
                columns.update(self._compute_columns(columns, values, module.is_stateful()))

        rl_module.foreach_module(add_columns)
        return batch

    @torch.no_grad()
    def warm_up(self, rl_module: Any, num_slots: int, device: torch.device | str) -> None:
        """Compute the columns of an empty batch for each module, so that no later batch compiles anything.

        Args:
            rl_module: The learner's MultiRLModule.
            num_slots: Slots of a batch.
            device: Device of the batches.
        """

        def compute_empty_columns(module_id: str, module: Any) -> None:
            if not isinstance(module, ValueFunctionAPI):
                return
            shape: tuple[int, ...] = (num_slots,)
            columns = {}
            if module.is_stateful():
                max_seq_len = module.model_config["max_seq_len"]
                shape = (math.ceil(num_slots / max_seq_len), max_seq_len)
                columns[Columns.SEQ_LENS] = torch.full(shape[:1], max_seq_len, device=device)
            for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.LOSS_MASK):
                columns[name] = torch.zeros(shape, dtype=torch.bool, device=device)
            columns[Columns.REWARDS] = torch.zeros(shape, device=device)
            self._compute_columns(columns, columns[Columns.REWARDS], module.is_stateful())

        rl_module.foreach_module(compute_empty_columns)

    def _compute_columns(
        self, columns: dict[str, Any], values: torch.Tensor, is_padded: bool
    ) -> dict[str, torch.Tensor]:
        seq_lens = columns[Columns.SEQ_LENS] if is_padded else None
        in_use = None if seq_lens is None else mask_padding(seq_lens, values.shape[1])
        advantages, value_targets = compute_gae_of_slots(
            columns, values, seq_lens, in_use, gamma=self.gamma, lambda_=self.lambda_, backend=self.backend
        )
        standardised = normalize_advantages(
            advantages,
            columns[Columns.LOSS_MASK] if self.masked_statistics else in_use,
            correction=0,
            epsilon=1e-4,
            epsilon_mode="floor",
            backend=self.backend,
        )
        return {Postprocessing.ADVANTAGES: standardised.float(), Postprocessing.VALUE_TARGETS: value_targets.float()}


TritonGeneralAdvantageEstimation.__name__ = GeneralAdvantageEstimation.__name__
"""By which RLlib finds pieces and names their timers."""


def compute_gae_of_slots(
    columns: Mapping[str, Any],
    values: torch.Tensor,
    seq_lens: torch.Tensor | None = None,
    in_use: torch.Tensor | None = None,
    *,
    gamma: float,
    lambda_: float,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute advantages, not standardised, and value targets of all slots, in one call.

    Args:
        columns: "rewards", "terminateds" and "truncateds", shaped like `values`: tensors, or arrays of NumPy.
        values: Values of all slots, [slots], or [rows, max_seq_len] with `seq_lens`. Rows continue each other.
        seq_lens: How many slots of each row are in use, at least one, [rows]; None without padding.
        in_use: False where a row is padded, shaped like `values`; goes together with `seq_lens`.
        gamma: Discount γ per step.
        lambda_: λ in [0, 1].
        backend: Name of a backend of `rl_triton_core`; None chooses by the tensors' device.

    Returns:
        Advantages and value targets, shaped like `values`, 0 in the padding.
    """

    def as_row(column: Any) -> torch.Tensor:  # slots are the steps of one environment
        return torch.as_tensor(column, device=values.device).reshape(1, -1)

    rewards = as_row(columns[Columns.REWARDS])
    advantages, value_targets = compute_gae(
        rewards if rewards.is_floating_point() else rewards.to(values.dtype),
        as_row(values),
        as_row(columns[Columns.TERMINATEDS]),
        as_row(columns[Columns.TRUNCATEDS]),
        next_values=as_row(shift_values(values, seq_lens)),
        mask=None if in_use is None else as_row(in_use),
        gamma=gamma,
        lambda_=lambda_,
        backend=backend,
    )
    assert advantages is not None and value_targets is not None
    return advantages.view_as(values), value_targets.view_as(values)


def mask_padding(seq_lens: torch.Tensor, max_seq_len: int) -> torch.Tensor:
    """Say which slots of padded rows are in use, [rows, max_seq_len]: False in the padding."""
    return torch.arange(max_seq_len, device=seq_lens.device) < seq_lens[:, None]


def shift_values(values: torch.Tensor, seq_lens: torch.Tensor | None = None) -> torch.Tensor:
    """Take the value of the next slot for each slot, 0 after the last one.

    Args:
        values: [slots], or [rows, max_seq_len] with `seq_lens`. Rows continue each other.
        seq_lens: How many slots of each row are in use, at least one, [rows]; None without padding.

    Returns:
        Shaped like `values`, of no meaning in the padding.
    """
    next_values = torch.cat([values.flatten()[1:], values.new_zeros(1)]).view(values.shape)
    if seq_lens is None:
        return next_values
    next_row = torch.cat([values[1:, 0], values.new_zeros(1)])
    return next_values.scatter(1, (seq_lens.long() - 1)[:, None], next_row[:, None])


class TritonPPOTorchLearner(
    _TritonLearnerMixin, CapturedUpdateMixin, FusedLossMixin, FusedUpdateMixin, PPOTorchLearner
):
    """`PPOTorchLearner` with our advantages in the place of RLlib's, and with updates that cost less.

    Its pipeline is RLlib's, and may be changed like RLlib's: a `GeneralAdvantageEstimation` that is in it is replaced
    while the pipeline runs. Derive from it to have a learner of your own. Its flags are entries of
    `learner_config_dict`, see `enable_triton`.
    """

    def build(self) -> None:
        """Build the learner, and compile what it needs.

        Raises:
            RuntimeError: The installed Ray is not one that `check_ray` accepts.
            BackendUnavailableError: The backend asked for cannot run on the learner's device.
        """
        super().build()
        if self._flags.enabled:
            check_ray()
            self._is_ready = True
            for piece in self._list_connectors():
                if is_ours(ours := self._choose_connector(piece)):
                    ours.warm_up(self.module, self.config.train_batch_size_per_learner, self._device)

    def _list_connectors(self) -> list[Any]:
        return [] if self._learner_connector is None else self._learner_connector.connectors

    def _choose_connector(self, piece: Any) -> Any:
        """Ours in the place of one that is RLlib's, any other as it is: a class derived from it is the user's."""
        if not self._is_ready or type(piece) is not GeneralAdvantageEstimation:
            return piece
        flags = self._flags
        return TritonGeneralAdvantageEstimation(
            gamma=piece.gamma,
            lambda_=piece.lambda_,
            masked_statistics=flags.masked_statistics,
            backend=flags.backend,
        )

    def find_estimator(self) -> Any:
        """The piece that has the last word on advantages; None if none is known."""
        pieces = [x for x in self._list_connectors() if isinstance(x, GeneralAdvantageEstimation)]
        return self._choose_connector(pieces[-1]) if pieces else None

    def _describe_estimator(self) -> str:
        piece = self.find_estimator()
        if piece is None:
            return "advantages without GeneralAdvantageEstimation"
        who = "RLlib" if type(piece) is GeneralAdvantageEstimation else type(piece).__name__
        return f"advantages with {self._describe_backend() if is_ours(piece) else who}"

    def _make_batch_if_necessary(self, training_data: Any) -> Any:
        """Run the pipeline with our piece where RLlib's stands, if there are episodes."""
        self._used_estimator = training_data.episodes is not None and is_ours(self.find_estimator())
        with self._replace_connectors():
            return super()._make_batch_if_necessary(training_data=training_data)

    @contextmanager
    def _replace_connectors(self) -> Iterator[None]:
        """Inside, our pieces are in the pipeline; what a piece does to the pipeline inside stays."""
        pieces = self._list_connectors()
        chosen = [*map(self._choose_connector, pieces)]
        replaced = dict(zip(map(id, chosen), pieces, strict=True))
        pieces[:] = chosen
        try:
            yield
        finally:
            pieces[:] = [replaced.get(id(piece), piece) for piece in pieces]


def is_ours(piece: Any) -> bool:
    """Whether a piece computes advantages with `rl_triton_core`."""
    return isinstance(piece, TritonGeneralAdvantageEstimation)


# ---------------------------------------------------------------------------------------------------------------------
# IMPALA, APPO
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def vtrace(
    *,
    target_action_log_probs: torch.Tensor,
    behaviour_action_log_probs: torch.Tensor,
    discounts: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    bootstrap_values: torch.Tensor,
    clip_rho_threshold: float | torch.Tensor | None = 1.0,
    clip_pg_rho_threshold: float | torch.Tensor | None = 1.0,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """V-Trace, with the arguments and results of RLlib's `vtrace_torch`, by `rl_triton_core.compute_vtrace`.

    Args:
        target_action_log_probs: log π(a_t|s_t), [T, B]; any strides, as all of these.
        behaviour_action_log_probs: log μ(a_t|s_t), [T, B].
        discounts: γ per step, 0 where an episode ends, [T, B].
        rewards: [T, B].
        values: V(s_t), [T, B].
        bootstrap_values: V(s_T), [B].
        clip_rho_threshold: ρ̄ of the value targets; None for no clip.
        clip_pg_rho_threshold: ρ̄ of the advantages; None for no clip.
        backend: Name of a backend of `rl_triton_core`; None chooses by the tensors' device.

    Returns:
        vs and pg_advantages, [T, B], without a graph.

    Raises:
        ValueError: A tensor is not shaped like `rewards`, as values [T, B, 1] are not.
    """
    per_step = {
        "target_action_log_probs": target_action_log_probs,
        "behaviour_action_log_probs": behaviour_action_log_probs,
        "discounts": discounts,
        "values": values,
    }
    for name, tensor in per_step.items():
        if tensor.shape != rewards.shape:
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, expected {tuple(rewards.shape)}, that of rewards"
            )
    targets, advantages = compute_vtrace(
        rewards,
        values,
        target_log_probs=target_action_log_probs,
        behaviour_log_probs=behaviour_action_log_probs,
        gamma=discounts,
        rho_bar=_convert_clip(clip_rho_threshold),
        rho_bar_pg=_convert_clip(clip_pg_rho_threshold),
        bootstrap_values=bootstrap_values,
        time_dim=0,
        backend=backend,
    )
    assert targets is not None and advantages is not None
    return targets, advantages


def _convert_clip(threshold: float | torch.Tensor | None) -> float:
    return math.inf if threshold is None else float(threshold)


class _VTraceMixin(_TritonLearnerMixin):
    """Compute the loss of the learner that follows with our V-Trace, if the flag says so."""

    module: Any
    _step: Any

    def build(self) -> None:
        """Build the learner, and compile what it needs.

        Raises:
            RuntimeError: The installed Ray is not one that `check_ray` accepts, the loss of RLlib calls no
                `vtrace_torch`, or a loss of the user's does not call that of this class.
            BackendUnavailableError: The backend asked for cannot run on the learner's device.
        """
        learner: Any = super()
        self._triton_loss = learner.compute_loss_for_module
        if self._flags.enabled:
            check_ray()
            _check_losses_call_ours(type(self))
            self._triton_loss = _replace_vtrace(self._triton_loss, self.compute_vtrace)
            self._is_ready = True
        learner.build()
        if self._flags.enabled:  # an error in the loss would end IMPALA's learner thread, and the algorithm would wait
            self._warm_up()

    def _describe_estimator(self) -> str:
        return f"V-Trace with {self._describe_backend() if self._is_ready else 'RLlib'}"

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> torch.Tensor:
        """The loss of one module: RLlib's own code, with our V-Trace.

        Args:
            module_id: Name of the module.
            config: Config of the module.
            batch: Minibatch of the module.
            fwd_out: What its `forward_train` returned.

        Returns:
            The loss, a tensor without dimensions.
        """
        loss: torch.Tensor = self._triton_loss(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        return loss

    def _was_estimated(self) -> bool:
        is_replayed = self._step is not None and bool(self._step.captured)  # a graph calls nothing
        return super()._was_estimated() or (self._is_ready and is_replayed)

    def compute_vtrace(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute V-Trace as the flags say, in a loss of your own: call it where you called `vtrace_torch`.

        Args:
            **arguments: Arguments of `vtrace_torch`.

        Returns:
            vs and pg_advantages, [T, B].
        """
        if not self._flags.enabled:
            return vtrace_torch(**arguments)  # type: ignore[no-any-return]
        self._used_estimator = True
        return vtrace(**arguments, backend=self._flags.backend)

    def _warm_up(self) -> None:
        """Compute V-Trace of an empty batch for each module, laid out as the loss does it."""
        num_slots = self.config.minibatch_size or self.config.train_batch_size_per_learner
        for module_id in self.module.keys():  # noqa: SIM118 (a MultiRLModule is no dict)
            module = self.module[module_id].unwrapped()
            if module.is_stateful():
                max_seq_len = module.model_config["max_seq_len"]
                rows = torch.zeros(math.ceil(num_slots / max_seq_len), max_seq_len, device=self._device)
                zeros = make_time_major(rows, recurrent_seq_len=max_seq_len)
            else:
                slots = torch.zeros(num_slots, device=self._device)
                zeros = make_time_major(slots, trajectory_len=self.config.get_rollout_fragment_length())
            names = ("target_action_log_probs", "behaviour_action_log_probs", "discounts", "rewards", "values")
            vtrace(
                **dict.fromkeys(names, zeros),
                bootstrap_values=zeros[0].clone(),
                clip_rho_threshold=self.config.vtrace_clip_rho_threshold,
                clip_pg_rho_threshold=self.config.vtrace_clip_pg_rho_threshold,
                backend=self._flags.backend,
            )


class TritonIMPALATorchLearner(CapturedUpdateMixin, _VTraceMixin, FusedUpdateMixin, IMPALATorchLearner):
    """`IMPALATorchLearner` with our V-Trace. Derive from it to have a learner of your own."""

    has_varying_batches = True


class TritonAPPOTorchLearner(CapturedUpdateMixin, FusedAPPOLossMixin, _VTraceMixin, FusedUpdateMixin, APPOTorchLearner):
    """`APPOTorchLearner` with our V-Trace and loss. Derive from it to have a learner of your own."""

    has_varying_batches = True


def _replace_vtrace(method: Any, replacement: Callable[..., Any]) -> MethodType:
    """Copy a method so that it calls the replacement where it called RLlib's `vtrace_torch`.

    Raises:
        RuntimeError: The method does not read that name.
    """
    function, name = method.__func__, "vtrace_torch"
    if name not in function.__code__.co_names:
        raise RuntimeError(f"{function.__qualname__}: got none in Ray {ray.__version__}, expected a call of {name}")
    return MethodType(copy_function(function, {name: replacement}), method.__self__)


def _check_losses_call_ours(learner_class: type) -> None:
    """Check that a loss in front of ours calls it, or the learner's `compute_vtrace`.

    Raises:
        RuntimeError: It does neither, so that RLlib's V-Trace, or none, would be computed.
    """
    for base in learner_class.__mro__[: learner_class.__mro__.index(_VTraceMixin)]:
        loss = inspect.unwrap(vars(base).get("compute_loss_for_module", _VTraceMixin.compute_loss_for_module))
        code = getattr(loss, "__code__", None)
        if loss is _VTraceMixin.compute_loss_for_module or code is None:  # Ray wraps the methods of remote learners
            continue
        if not {"compute_loss_for_module", "compute_vtrace"}.intersection(_names_in_code(code)):
            raise RuntimeError(
                f"{loss.__qualname__}: got a loss that does not call ours, expected it to call "
                "super().compute_loss_for_module(**kwargs), or self.compute_vtrace where it calls vtrace_torch "
                '(learner_config_dict={"rl_triton": False} keeps RLlib\'s own)'
            )


def _names_in_code(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes that a function's code uses, those of inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in_code(constant)


_LEARNERS = {
    PPOTorchLearner: TritonPPOTorchLearner,
    IMPALATorchLearner: TritonIMPALATorchLearner,
    APPOTorchLearner: TritonAPPOTorchLearner,
}


# ---------------------------------------------------------------------------------------------------------------------
# The installed Ray
# ---------------------------------------------------------------------------------------------------------------------


def check_ray() -> None:
    """Check that the installed Ray is one that this adapter was written for: its version, and what it computes.

    Raises:
        RuntimeError: It is older than 2.56, or its flags, value targets or V-Trace differ on a small example.
    """
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < OLDEST_RAY:
        raise RuntimeError(
            f"rl_triton_adapters.rllib needs Ray 2.56 or newer, got {ray.__version__}: "
            'pip install "ray[rllib]>=2.56" (before that, flags stood one slot later)'
        )
    for what, theirs, ours in (_compare_flags(), _compare_value_targets(), _compare_vtrace()):
        if not np.allclose(theirs, ours, rtol=1e-5, atol=1e-5):
            raise RuntimeError(
                f"Ray {ray.__version__} has other {what} than the releases that rl_triton_adapters.rllib was written "
                f"for: got {np.asarray(theirs).tolist()}, expected {np.asarray(ours).tolist()}"
            )


_SLOTS = {
    Columns.REWARDS: torch.tensor([1.0, 2.0, 0.0, 3.0, 4.0, 0.0]),
    Columns.TERMINATEDS: torch.tensor([False, True, False, False, False, False]),
    Columns.TRUNCATEDS: torch.tensor([False, False, False, False, True, False]),
}
"""Two episodes of two steps, each with its extra slot: one terminated, one went on when sampling stopped."""


def _compare_flags() -> tuple[str, Any, Any]:
    """Return flags as RLlib's connector sets them, and as they are expected."""
    episodes = [
        SingleAgentEpisode(
            observations=[0] * 3, actions=[0] * 2, rewards=[0.0] * 2, terminated=end, len_lookback_buffer=0
        )
        for end in (True, False)
    ]
    batch = AddOneTsToEpisodesAndTruncate()(rl_module=None, batch={}, episodes=episodes, shared_data={})
    names = (Columns.TERMINATEDS, Columns.TRUNCATEDS)
    return "flags", [np.concatenate([*batch[name].values()]) for name in names], [_SLOTS[name] for name in names]


def _compare_value_targets() -> tuple[str, Any, Any]:
    """Return value targets, RLlib's and ours."""
    values = torch.tensor([5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    columns = {name: column.numpy() for name, column in _SLOTS.items()}
    _, ours = compute_gae_of_slots(_SLOTS, values, gamma=0.9, lambda_=0.8, backend="reference")
    return "value targets", compute_value_targets(values.numpy(), **columns, gamma=0.9, lambda_=0.8), ours


def _compare_vtrace() -> tuple[str, Any, Any]:
    """Return results of V-Trace, RLlib's and ours."""
    per_step = torch.tensor([[0.5, -0.5, 0.1], [0.0, 0.2, -0.4], [0.9, 0.0, 0.9], [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    names = ("target_action_log_probs", "behaviour_action_log_probs", "discounts", "rewards", "values")
    arguments = dict(zip(names, per_step[..., None], strict=True), bootstrap_values=torch.tensor([7.0]))
    theirs, ours = vtrace_torch(**arguments), vtrace(**arguments, backend="reference")
    return "V-Trace", torch.stack(theirs), torch.stack(ours)
