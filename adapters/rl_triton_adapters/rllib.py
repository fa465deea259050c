"""RLlib: learners of PPO, IMPALA and APPO that compute advantages and value targets with `rl_triton_core`.

One call turns them on, before the algorithm is built, and one flag off again:

    config = enable_triton(PPOConfig().environment("CartPole-v1"))
    config.learners(learner_config_dict={"rl_triton": False})

For PPO a piece of the learner's connector pipeline is replaced; for IMPALA and APPO the function `vtrace_torch`, in the
learner's loss and nowhere else. All else is RLlib's own. Tensors stay where they are; nothing waits for the device.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch

from rl_triton_adapters._rebinding import rebound
from rl_triton_core import check_backend, compute_gae, compute_vtrace, normalize_advantages

try:
    import ray
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
    from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner
    from ray.rllib.algorithms.bc import BCConfig
    from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
    from ray.rllib.algorithms.impala.torch.vtrace_torch_v2 import vtrace_torch
    from ray.rllib.algorithms.marwil import MARWILConfig
    from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
    from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate, GeneralAdvantageEstimation
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from ray.rllib.evaluation.postprocessing import Postprocessing
    from ray.rllib.utils.postprocessing.value_predictions import compute_value_targets
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
    "check_ray",
    "enable_triton",
    "vtrace",
]

OLDEST_RAY = (2, 56)

Config = TypeVar("Config", bound=AlgorithmConfig)


def enable_triton(config: Config, *, masked_statistics: bool = False, backend: str | None = None) -> Config:
    """Let an algorithm's learners compute with `rl_triton_core`.

    Sets `learner_class` and three entries of `learner_config_dict`: "rl_triton", unless it is there already,
    "rl_triton_masked_statistics" and "rl_triton_backend". Call it before the algorithm is built.

    Args:
        config: Of PPO, IMPALA or APPO, on the new API stack; changed in place.
        masked_statistics: Whether PPO standardises advantages over real steps alone. RLlib's own statistics count the
            extra slot of each episode too.
        backend: Name of a backend of `rl_triton_core`; None chooses by the learner's device.

    Returns:
        The same config.

    Raises:
        TypeError: The algorithm is another one, or has a learner class that does not derive from one of this module.
        ValueError: The config is for the old API stack, or asks for masked statistics without having any; there is no
            such backend.
        RuntimeError: The installed Ray is too old, or does not compute what this adapter was written for.
    """
    check_ray()
    check_backend(backend)
    learner_class = _triton_learner(config)
    if not config.enable_rl_module_and_learner:
        raise ValueError("config: got enable_rl_module_and_learner=False, expected the new API stack")
    if masked_statistics and not issubclass(learner_class, TritonPPOTorchLearner):
        raise ValueError(f"masked_statistics: got True for {type(config).__name__}, expected it for PPO alone")
    flags = {"rl_triton_masked_statistics": masked_statistics, "rl_triton_backend": backend}
    config.learners(learner_class=learner_class, learner_config_dict={"rl_triton": is_enabled(config), **flags})
    return config


def _triton_learner(config: Any) -> type:
    """The learner class for a config: its own if it is one of ours, else ours in the place of RLlib's."""
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
        raise TypeError(f"learner_class: got {current.__name__}, expected it to derive from {ours.__name__}")
    return ours if current is stock else current


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
            input_observation_space: As in `GeneralAdvantageEstimation`.
            input_action_space: Likewise.
            gamma: γ.
            lambda_: λ.
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
                columns.update(self._new_columns(columns, module.compute_values(columns), module.is_stateful()))

        rl_module.foreach_module(add_columns)
        return batch

    def _new_columns(self, columns: dict[str, Any], values: torch.Tensor, padded: bool) -> dict[str, torch.Tensor]:
        seq_lens = columns[Columns.SEQ_LENS] if padded else None
        in_use = None if seq_lens is None else slots_in_use(seq_lens, values.shape[1])
        advantages, value_targets = gae_of_slots(
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
        return {Postprocessing.ADVANTAGES: standardised, Postprocessing.VALUE_TARGETS: value_targets}


def gae_of_slots(
    columns: Mapping[str, torch.Tensor],
    values: torch.Tensor,
    seq_lens: torch.Tensor | None = None,
    in_use: torch.Tensor | None = None,
    *,
    gamma: float,
    lambda_: float,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages, not standardised, and value targets of all slots: one call, slots being one environment's steps.

    Args:
        columns: "rewards", "terminateds" and "truncateds", shaped like `values`.
        values: As in `following_values`.
        seq_lens: As in `following_values`.
        in_use: As from `slots_in_use`; goes together with `seq_lens`.
        gamma: γ.
        lambda_: λ.
        backend: Name of a backend of `rl_triton_core`; None chooses by the tensors' device.

    Returns:
        Advantages and value targets, shaped like `values`, 0 in the padding.
    """
    row = partial(torch.reshape, shape=(1, -1))
    advantages, value_targets = compute_gae(
        row(columns[Columns.REWARDS]),
        row(values),
        row(columns[Columns.TERMINATEDS]),
        row(columns[Columns.TRUNCATEDS]),
        next_values=row(following_values(values, seq_lens)),
        mask=None if in_use is None else row(in_use),
        gamma=gamma,
        lambda_=lambda_,
        backend=backend,
    )
    assert advantages is not None and value_targets is not None
    return advantages.view_as(values), value_targets.view_as(values)


def slots_in_use(seq_lens: torch.Tensor, max_seq_len: int) -> torch.Tensor:
    """False where a row is padded, [rows, max_seq_len]."""
    return torch.arange(max_seq_len, device=seq_lens.device) < seq_lens[:, None]


def following_values(values: torch.Tensor, seq_lens: torch.Tensor | None = None) -> torch.Tensor:
    """The value in the next slot, 0 behind the last one. Rows continue each other.

    Args:
        values: [slots], or [rows, max_seq_len] with `seq_lens`.
        seq_lens: How many slots of each row are in use, at least one, [rows]; None without padding.

    Returns:
        Shaped like `values`, of no meaning in the padding.
    """
    ahead = torch.cat([values.flatten()[1:], values.new_zeros(1)]).view(values.shape)
    if seq_lens is None:
        return ahead
    next_row = torch.cat([values[1:, 0], values.new_zeros(1)])
    return ahead.scatter(1, (seq_lens.long() - 1)[:, None], next_row[:, None])


class TritonPPOTorchLearner(PPOTorchLearner):
    """`PPOTorchLearner` whose connector pipeline has our piece in the place of `GeneralAdvantageEstimation`.

    Derive from it to have a learner of your own. Flags in `learner_config_dict`, see `enable_triton`:
    "rl_triton", "rl_triton_masked_statistics", "rl_triton_backend".
    """

    def build(self) -> None:
        """Build the learner, then replace the piece where it stands.

        Raises:
            RuntimeError: The pipeline has no such piece, or the installed Ray is not one that `check_ray` accepts.
            BackendUnavailableError: The backend asked for cannot run on the learner's device.
        """
        super().build()
        if not is_enabled(self.config):
            return
        check_ray()
        check_backend(chosen_backend(self.config), self._device)
        pieces = [] if self._learner_connector is None else self._learner_connector.connectors
        places = [i for i, piece in enumerate(pieces) if type(piece) is GeneralAdvantageEstimation]
        if not places and not any(isinstance(piece, TritonGeneralAdvantageEstimation) for piece in pieces):
            raise RuntimeError(
                f"{type(self).__name__}: got a learner pipeline without GeneralAdvantageEstimation, expected one to "
                'replace (learner_config_dict={"rl_triton": False} asks for none)'
            )
        for i in places:
            pieces[i] = TritonGeneralAdvantageEstimation(
                gamma=pieces[i].gamma,
                lambda_=pieces[i].lambda_,
                masked_statistics=self.config.learner_config_dict.get("rl_triton_masked_statistics", False),
                backend=chosen_backend(self.config),
            )


def is_enabled(config: Any) -> bool:
    """What the flag says; on without one."""
    return bool(config.learner_config_dict.get("rl_triton", True))


def chosen_backend(config: Any) -> str | None:
    """The backend that `enable_triton` was asked for."""
    name: str | None = config.learner_config_dict.get("rl_triton_backend")
    return name


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
    """
    targets, advantages = compute_vtrace(
        rewards,
        values,
        target_log_probs=target_action_log_probs,
        behaviour_log_probs=behaviour_action_log_probs,
        gamma=discounts,
        rho_bar=_clip(clip_rho_threshold),
        rho_bar_pg=_clip(clip_pg_rho_threshold),
        bootstrap_values=bootstrap_values,
        time_dim=0,
        backend=backend,
    )
    assert targets is not None and advantages is not None
    return targets, advantages


def _clip(threshold: float | torch.Tensor | None) -> float:
    return math.inf if threshold is None else float(threshold)


class _VTraceMixin:
    """Compute the loss of the learner that follows with our V-Trace, if the flag says so."""

    def build(self) -> None:
        """Build the learner.

        Raises:
            RuntimeError: The installed Ray is not one that `check_ray` accepts, or the loss calls no `vtrace_torch`.
            BackendUnavailableError: The backend asked for cannot run on the learner's device.
        """
        learner: Any = super()
        self._triton_loss = learner.compute_loss_for_module
        config = self.config  # type: ignore[attr-defined]
        if is_enabled(config):
            check_ray()
            self._triton_loss = _with_vtrace(self._triton_loss, partial(vtrace, backend=chosen_backend(config)))
        learner.build()
        if is_enabled(config):  # an error in the loss would end IMPALA's learner thread, and the algorithm would wait
            check_backend(chosen_backend(config), self._device)  # type: ignore[attr-defined]

    def compute_loss_for_module(self, **kwargs: Any) -> torch.Tensor:
        """The loss of one module: RLlib's own code."""
        loss: torch.Tensor = self._triton_loss(**kwargs)
        return loss


class TritonIMPALATorchLearner(_VTraceMixin, IMPALATorchLearner):
    """`IMPALATorchLearner` with our V-Trace. Derive from it to have a learner of your own."""


class TritonAPPOTorchLearner(_VTraceMixin, APPOTorchLearner):
    """`APPOTorchLearner` with our V-Trace. Derive from it to have a learner of your own."""


def _with_vtrace(method: Any, replacement: Callable[..., Any]) -> MethodType:
    """The same method, calling that where it called RLlib's `vtrace_torch`.

    Raises:
        RuntimeError: The method does not read that name.
    """
    function, name = method.__func__, "vtrace_torch"
    if name not in function.__code__.co_names:
        raise RuntimeError(f"{function.__qualname__}: got none in Ray {ray.__version__}, expected a call of {name}")
    return MethodType(rebound(function, {name: replacement}), method.__self__)


_LEARNERS = {
    PPOTorchLearner: TritonPPOTorchLearner,
    IMPALATorchLearner: TritonIMPALATorchLearner,
    APPOTorchLearner: TritonAPPOTorchLearner,
}


# ---------------------------------------------------------------------------------------------------------------------
# The installed Ray
# ---------------------------------------------------------------------------------------------------------------------


def check_ray() -> None:
    """See whether the installed Ray is one that this adapter was written for, by its version and by what it computes.

    Raises:
        RuntimeError: It is older than 2.56, or its flags, value targets or V-Trace differ on a small example.
    """
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if version < OLDEST_RAY:
        raise RuntimeError(
            f"rl_triton_adapters.rllib needs Ray 2.56 or newer, got {ray.__version__}: "
            'pip install "ray[rllib]>=2.56" (before that, flags stood one slot later)'
        )
    for what, theirs, ours in (_flags(), _value_targets(), _vtraces()):
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


def _flags() -> tuple[str, Any, Any]:
    """Flags as RLlib's connector sets them, and as they are expected."""
    episodes = [
        SingleAgentEpisode(
            observations=[0] * 3, actions=[0] * 2, rewards=[0.0] * 2, terminated=end, len_lookback_buffer=0
        )
        for end in (True, False)
    ]
    batch = AddOneTsToEpisodesAndTruncate()(rl_module=None, batch={}, episodes=episodes, shared_data={})
    names = (Columns.TERMINATEDS, Columns.TRUNCATEDS)
    return "flags", [np.concatenate([*batch[name].values()]) for name in names], [_SLOTS[name] for name in names]


def _value_targets() -> tuple[str, Any, Any]:
    """Value targets, RLlib's and ours."""
    values = torch.tensor([5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    columns = {name: column.numpy() for name, column in _SLOTS.items()}
    _, ours = gae_of_slots(_SLOTS, values, gamma=0.9, lambda_=0.8, backend="reference")
    return "value targets", compute_value_targets(values.numpy(), **columns, gamma=0.9, lambda_=0.8), ours


def _vtraces() -> tuple[str, Any, Any]:
    """Results of V-Trace, RLlib's and ours."""
    per_step = torch.tensor([[0.5, -0.5, 0.1], [0.0, 0.2, -0.4], [0.9, 0.0, 0.9], [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    names = ("target_action_log_probs", "behaviour_action_log_probs", "discounts", "rewards", "values")
    arguments = dict(zip(names, per_step[..., None], strict=True), bootstrap_values=torch.tensor([7.0]))
    theirs, ours = vtrace_torch(**arguments), vtrace(**arguments, backend="reference")
    return "V-Trace", torch.stack(theirs), torch.stack(ours)
