"""verl: advantages and the policy loss of its trainers, computed with `rl_triton_core`.

One environment variable turns them on, in every process of a run, and another keeps them off:

    VERL_USE_EXTERNAL_MODULES=rl_triton_adapters.verl python -m verl.trainer.main_ppo ...
    RL_TRITON=0

Where this package is installed, ``RL_TRITON=1`` turns them on too, through verl's plugins. Either way GAE, GRPO and
REINFORCE++ are computed here, wherever verl computes them, and so are the policy losses gspo, cispo, sapo and gpg.
``actor_rollout_ref.actor.policy_loss.loss_mode=triton`` asks for the one of vanilla. All else is verl's own. Each
process logs one line that says what it computes with.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import numpy.typing as npt
import torch

import rl_triton_core
from rl_triton_adapters._switch import find_off_switch
from rl_triton_adapters._versions import explain_import
from rl_triton_core import check_backend, compute_discounted_returns, compute_gae, normalize_advantages
from rl_triton_core.losses import group_normalize, grpo_loss

try:
    import verl
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig
except ImportError as error:
    raise explain_import(__name__, error, "verl", "0.7.1") from error

__all__ = [
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss_cispo",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_sapo",
    "compute_policy_loss_triton",
    "compute_reinforce_plus_plus_outcome_advantage",
    "install",
    "uninstall",
]

KNOWN_VERSIONS = ("0.9.0", "0.9.1")
LOSS_NAME = "triton"
LOG_RATIO_CLAMP, SEQUENCE_CLAMP = 20.0, 10.0

Advantages = tuple[torch.Tensor, torch.Tensor]
logger = logging.getLogger(__name__)


@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
    *,
    backend: str | None = None,
) -> Advantages:
    """Compute generalised advantage estimates of responses, whitened, and value targets.

        δ[t] = r[t] + γ·V[t'] − V[t]          t' is the next valid token; V = 0 behind the last one
        A[t] = δ[t] + γλ·A[t']
        returns[t] = A[t] + V[t]
        advantages[t] = (A[t] − μ) / √(σ² + 1e-8)

    μ and σ² are those of the valid tokens, with Bessel's correction. Tokens that are masked are as if deleted; both
    results are 0 there, where verl leaves numbers that nothing reads.

    Args:
        token_level_rewards: r, [batch_size, response_length], floating point.
        values: V, shaped like `token_level_rewards`, floating point.
        response_mask: Nonzero where a token is valid, shaped like `token_level_rewards`; bool, integer, or floating
            point 0 and 1. At least two tokens are.
        gamma: Discount γ per token, finite and >= 0.
        lam: λ in [0, 1].
        backend: Name of a backend of `rl_triton_core`; None chooses by the tensors' device.

    Returns:
        (advantages, returns), of the dtype that verl's are.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, or fewer than two tokens are valid.
    """
    _check_tokens(token_level_rewards=token_level_rewards, values=values, response_mask=response_mask)
    _check_lam(lam)
    mask = _get_flags(response_mask)
    advantages, returns = compute_gae(
        token_level_rewards,
        values,
        gamma=float(gamma),
        lambda_=float(lam),
        bootstrap_values=0.0,
        mask=mask,
        backend=backend,
    )
    assert returns is not None
    dtype = torch.promote_types(token_level_rewards.dtype, values.dtype)
    return _whiten(advantages, mask, backend).to(dtype), returns.to(dtype)


@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: npt.NDArray[Any],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """Compute advantages of responses relative to the others to the same prompt.

        score = Σ r          advantage = (score − μ) / (σ + ε)          μ and σ, unbiased, of the group

    A score is the sum over the valid tokens, where verl's takes in rewards at masked ones. The response of a group of
    one has μ = 0 and σ = 1. Responses of equal scores have the advantage 0, where verl may have rounding errors divided
    by ε.

    Args:
        token_level_rewards: r, [batch_size, response_length], floating point.
        response_mask: Nonzero where a token is valid, shaped like `token_level_rewards`.
        index: The group of each response, [batch_size]; of any hashable objects, such as the strings in "uid".
        epsilon: ε, finite and >= 0.
        norm_adv_by_std_in_grpo: Whether to divide.
        config: Not read.

    Returns:
        (advantages, advantages): the response's at its valid tokens, 0 elsewhere.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not.
    """
    if not isinstance(norm_adv_by_std_in_grpo, bool):
        raise TypeError(f"norm_adv_by_std_in_grpo: got {type(norm_adv_by_std_in_grpo).__name__}, expected a bool")
    _check_tokens(token_level_rewards=token_level_rewards, response_mask=response_mask)
    valid = response_mask != 0
    scores = torch.where(valid, token_level_rewards, 0).sum(dim=-1)
    groups = _number_groups(index, scores)
    mode = "mean-std" if norm_adv_by_std_in_grpo else "mean"
    relative = group_normalize(scores, groups, mode=mode, epsilon=epsilon).to(scores.dtype)
    single = torch.bincount(groups)[groups] == 1
    scores = torch.where(single, scores / (1 + epsilon) if norm_adv_by_std_in_grpo else scores, relative)
    advantages = torch.where(valid, scores.unsqueeze(-1), 0)
    return advantages, advantages


@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    *,
    backend: str | None = None,
    **kwargs: Any,
) -> Advantages:
    """Compute discounted returns of responses, and their advantages: the returns, whitened.

        returns[t] = r[t] + γ·returns[t']          t' is the next valid token
        advantages[t] = (returns[t] − μ) / √(σ² + 1e-8)

    μ and σ² are those of the valid tokens, with Bessel's correction. Both results are 0 at tokens that are masked.

    Args:
        token_level_rewards: r, [batch_size, response_length], floating point.
        response_mask: Nonzero where a token is valid, shaped like `token_level_rewards`; bool, integer, or floating
            point 0 and 1. At least two tokens are.
        config: Of the algorithm; its `gamma` is γ, finite and >= 0.
        backend: Name of a backend of `rl_triton_core`; None chooses by the tensors' device.
        **kwargs: Not read. verl passes the same arguments to every estimator.

    Returns:
        (advantages, returns), of the dtype of `token_level_rewards`.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, or fewer than two tokens are valid.
    """
    if config is None:
        raise ValueError("config: got None, expected that of the algorithm, with gamma")
    _check_tokens(token_level_rewards=token_level_rewards, response_mask=response_mask)
    mask = _get_flags(response_mask)
    returns = compute_discounted_returns(
        token_level_rewards, gamma=float(config.gamma), bootstrap_values=0.0, mask=mask, backend=backend
    )
    dtype = token_level_rewards.dtype
    return _whiten(returns, mask, backend).to(dtype), returns.to(dtype)


def compute_policy_loss_triton(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute the loss that verl calls "vanilla", and its gradient, in one pass.

        log r = log_prob − old_log_prob, within ±20
        loss of a token = −min(r·A, clip(r, 1 − low, 1 + high)·A), at most −c·A where A < 0

    Args:
        old_log_prob: Log-probabilities under the policy that drew the tokens, [batch_size, response_length].
        log_prob: Log-probabilities under the policy, shaped like `old_log_prob`. The gradient flows to them alone.
        advantages: A, shaped like `old_log_prob`, detached.
        response_mask: Nonzero where a token is valid, shaped like `old_log_prob`; a weight if floating point.
        loss_agg_mode: How losses of tokens become one: ``"token-mean"``, ``"token-sum"``, ``"seq-mean-token-sum"``,
            ``"seq-mean-token-sum-norm"`` or ``"seq-mean-token-mean"``.
        config: Of the actor: `clip_ratio`, `clip_ratio_low` and `clip_ratio_high`, `clip_ratio_c` (c, > 1), and
            `global_batch_info`, with the numbers that a loss over several ranks and micro-batches is divided by.
        rollout_is_weights: Importance weights, >= 0, that multiply the losses of tokens; shaped like `old_log_prob`.
        backend: Name of a backend of `rl_triton_core`; None chooses by the tensors' device.

    Returns:
        The loss, and what is logged: how often the clip holds, the mean of −log r, and how often c holds. Where no
        token is valid the loss is 0, verl's NaN.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not.
    """
    low, high, most = _get_clips(config)
    arguments = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, backend)
    loss, mask = _compute_loss(*arguments, clip=low, clip_high=high, dual_clip=most, log_ratio_clamp=LOG_RATIO_CLAMP)
    log_ratio = _clamp_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    free, clipped = advantages * ratio, advantages * ratio.clamp(1 - low, 1 + high)
    bounded = (advantages < 0) & (torch.minimum(free, clipped) < advantages * most)
    return loss, _average_metrics(mask, clipped < free, log_ratio, bounded)


def compute_policy_loss_gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute the loss that verl calls "gspo", and its gradient, in one pass: PPO's with the ratio of the response.

    The arguments are those of `compute_policy_loss_triton`; `clip_ratio_c` is not read. The logarithm of the response's
    ratio is kept within ±10, of which verl has the upper bound.

    Returns:
        The loss, and what is logged, by verl's names.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not.
    """
    low, high, _ = _get_clips(config)
    arguments = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, backend)
    options: dict[str, Any] = {
        "ratio": "sequence-token",
        "log_ratio_clamp": SEQUENCE_CLAMP,
        "clip": low,
        "clip_high": high,
    }
    loss, mask = _compute_loss(*arguments, **options)
    log_ratio = torch.where(mask != 0, log_prob.detach() - old_log_prob, 0)
    ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1)).clamp(max=SEQUENCE_CLAMP).exp()[:, None]
    clipped = advantages * ratio.clamp(1 - low, 1 + high) < advantages * ratio
    return loss, _average_metrics(mask, clipped, log_ratio)


def compute_policy_loss_cispo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute the loss that verl calls "cispo", and its gradient, in one pass: −A·log_prob, weighted by the clipped r.

    The arguments are those of `compute_policy_loss_triton`; `clip_ratio_c` is not read.

    Returns:
        The loss, and what is logged, by verl's names.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not.
    """
    low, high, _ = _get_clips(config)
    arguments = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, backend)
    options: dict[str, Any] = {"surrogate": "cispo", "log_ratio_clamp": LOG_RATIO_CLAMP, "clip": low, "clip_high": high}
    loss, mask = _compute_loss(*arguments, **options)
    log_ratio = _clamp_log_ratio(log_prob, old_log_prob)
    ratio = log_ratio.exp()
    return loss, _average_metrics(mask, (ratio < 1 - low) | (ratio > 1 + high), log_ratio)


def compute_policy_loss_sapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute the loss that verl calls "sapo", and its gradient, in one pass: a soft gate in the place of the clip.

    The arguments are those of `compute_policy_loss_triton`, and `tau_pos` and `tau_neg` of the config. As in verl,
    `loss_agg_mode` is not read: it is "seq-mean-token-mean".

    Returns:
        The loss, and what is logged, by verl's names.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not.
    """
    _check_config(config)
    arguments = old_log_prob, log_prob, advantages, response_mask, "seq-mean-token-mean", config, rollout_is_weights
    options: dict[str, Any] = {
        "tau": float(config.tau_pos),
        "tau_negative": float(config.tau_neg),
        "log_ratio_clamp": LOG_RATIO_CLAMP,
    }
    loss, mask = _compute_loss(*arguments, backend, surrogate="sapo", **options)
    return loss, _average_metrics(mask, None, _clamp_log_ratio(log_prob, old_log_prob))


def compute_policy_loss_gpg(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute the loss that verl calls "gpg", and its gradient, in one pass: −A·log_prob.

    The arguments are those of `compute_policy_loss_triton`; of the config, `global_batch_info` is read.

    Returns:
        The loss, and nothing to be logged.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not.
    """
    _check_config(config)
    arguments = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, backend)
    return _compute_loss(*arguments, surrogate="reinforce")[0], {}


def _compute_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: torch.Tensor | None,
    backend: str | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss of tokens as verl aggregates it, and the mask as flags or weights."""
    tensors = {"log_prob": log_prob, "old_log_prob": old_log_prob, "advantages": advantages}
    if rollout_is_weights is not None:
        tensors["rollout_is_weights"] = rollout_is_weights
    _check_tokens(**tensors, response_mask=response_mask)
    mask = _get_flags(response_mask)
    aggregation, normalizer = _get_aggregation(mask, loss_agg_mode, **config.global_batch_info)
    result = grpo_loss(
        log_prob,
        old_log_prob,
        advantages,
        mask=mask,
        weights=rollout_is_weights,
        aggregation=aggregation,
        normalizer=normalizer,
        backend=backend,
        **options,
    )
    return result.loss, mask


# ---------------------------------------------------------------------------------------------------------------------
# Arguments and metrics
# ---------------------------------------------------------------------------------------------------------------------


def _check_tokens(**tensors: Any) -> None:
    """Check that arguments are tensors with one number per token of each response."""
    (first, shaped), *_ = tensors.items()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
    if shaped.ndim != 2:
        raise ValueError(f"{first}: got shape {tuple(shaped.shape)}, expected [batch_size, response_length]")
    for name, tensor in tensors.items():
        if tensor.shape != shaped.shape:
            got, wanted = tuple(tensor.shape), tuple(shaped.shape)
            raise ValueError(f"{name}: got shape {got}, expected {wanted}, that of {first}")


def _get_flags(response_mask: torch.Tensor) -> torch.Tensor:
    """The mask as bool if it is of integers, whose eight bytes take time to read."""
    return response_mask if response_mask.is_floating_point() else response_mask != 0


def _check_lam(lam: Any) -> None:
    """Check that λ is in [0, 1], under the name that it has here."""
    if not 0 <= float(lam) <= 1:
        raise ValueError(f"lam: got {lam!r}, expected a number in [0, 1]")


def _whiten(advantages: torch.Tensor, mask: torch.Tensor, backend: str | None) -> torch.Tensor:
    """Normalise over the valid tokens, of which there have to be two, as in verl."""
    count = int(torch.count_nonzero(mask))
    if count < 2:
        raise ValueError(f"response_mask: got {count} valid tokens, expected two or more: whitening needs a variance")
    return normalize_advantages(advantages, mask, correction=1, epsilon=1e-8, epsilon_mode="variance", backend=backend)


def _number_groups(index: Any, scores: torch.Tensor) -> torch.Tensor:
    """The number of each response's group, counted in the order in which groups appear."""
    labels: Iterable[Hashable] = index.tolist() if hasattr(index, "tolist") else index
    numbers: dict[Hashable, int] = {}
    groups = [numbers.setdefault(label, len(numbers)) for label in labels]
    if len(groups) != len(scores):
        raise ValueError(f"index: got {len(groups)} groups, expected one per response ({len(scores)})")
    return torch.tensor(groups, dtype=torch.int64, device=scores.device)


def _check_config(config: Any) -> None:
    """Check that there is one."""
    if config is None:
        raise ValueError("config: got None, expected that of the actor, with clip_ratio")


def _get_clips(config: Any) -> tuple[float, float, float]:
    """How far the ratio may fall and rise, and c."""
    _check_config(config)
    low, high = (
        config.clip_ratio if bound is None else bound for bound in (config.clip_ratio_low, config.clip_ratio_high)
    )
    most = config.get("clip_ratio_c", 3.0)
    for name, number in (("clip_ratio_low", low), ("clip_ratio_high", high)):
        if not number >= 0:
            raise ValueError(f"{name}: got {number!r}, expected a number >= 0")
    if not most > 1:
        raise ValueError(f"clip_ratio_c: got {most!r}, expected a number > 1")
    return low, high, most


def _get_aggregation(
    mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    loss_scale_factor: float | None = None,
) -> tuple[str, Any]:
    """The aggregation of `grpo_loss`, and what the sum is divided by, for all ranks together."""
    if loss_agg_mode not in AGGREGATIONS:
        raise ValueError(f"loss_agg_mode: got {loss_agg_mode!r}, expected one of {', '.join(AGGREGATIONS)}")
    aggregation, name = AGGREGATIONS[loss_agg_mode]
    divisor = {"batch_num_tokens": batch_num_tokens, "global_batch_size": global_batch_size, "": 1}[name]
    if divisor is None and dp_size > 1:
        raise ValueError(f"{name}: got None with dp_size={dp_size}, expected the number of all ranks")
    if divisor is None:
        divisor = mask.sum() if name == "batch_num_tokens" else (mask != 0).any(dim=-1).sum()
    if loss_agg_mode == "seq-mean-token-sum-norm":
        divisor = divisor * (mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return aggregation, divisor / dp_size


AGGREGATIONS = {
    "token-mean": ("token-mean", "batch_num_tokens"),
    "token-sum": ("token-mean", ""),
    "seq-mean-token-sum": ("sequence-sum", "global_batch_size"),
    "seq-mean-token-sum-norm": ("sequence-sum", "global_batch_size"),
    "seq-mean-token-mean": ("sequence-mean", "global_batch_size"),
}
"""By verl's name: that of `grpo_loss`, and the number in `global_batch_info` that the sum is divided by, if any."""


def _clamp_log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor) -> torch.Tensor:
    """The logarithm of the ratio, within the bounds that verl has."""
    return (log_prob.detach() - old_log_prob).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


@torch.no_grad()
def _average_metrics(
    mask: torch.Tensor, clipped: torch.Tensor | None, log_ratio: torch.Tensor, bounded: torch.Tensor | None = None
) -> dict[str, float]:
    """The metrics of verl's losses, by its own arithmetic; the host waits for the device once."""
    flags = [log_ratio.new_zeros(()) if x is None else x.to(log_ratio) for x in (clipped, bounded)]
    numbers = torch.stack([x.expand_as(log_ratio) for x in (flags[0], -log_ratio, flags[1])])
    means = (torch.where(mask.bool(), numbers, 0.0) * mask).sum(dim=(1, 2)) / (mask.sum() + 1e-8)
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return dict(zip(names, means.tolist(), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Installation
# ---------------------------------------------------------------------------------------------------------------------

ESTIMATORS: dict[str, Callable[..., Advantages]] = {
    "gae": compute_gae_advantage_return,
    "grpo": compute_grpo_outcome_advantage,
    "reinforce_plus_plus": compute_reinforce_plus_plus_outcome_advantage,
}
"""By the name of the estimator: the function, which is called like the one of `core_algos` whose place it takes."""
LOSSES: dict[str, Callable[..., tuple[torch.Tensor, dict[str, Any]]]] = {
    "gspo": compute_policy_loss_gspo,
    "cispo": compute_policy_loss_cispo,
    "sapo": compute_policy_loss_sapo,
    "gpg": compute_policy_loss_gpg,
}
"""The same of policy losses."""
_stock: dict[str, Callable[..., Any]] = {}
_installed: dict[str, Callable[..., Any]] = {}


def install(*, backend: str | None = None) -> None:
    """Let this process's verl compute here what `ESTIMATORS` and `LOSSES` name, and register the policy loss "triton".

    Functions of `verl.trainer.ppo.core_algos` are replaced, as attributes of the module and in its registry, and one
    line is logged. A second call changes nothing but the backend. A version of verl that this module does not know is
    warned of, and compared with on a small batch: functions that differ stay verl's own, with a warning each, as
    REINFORCE++ does before 0.9. With RL_TRITON=0 all stay, and the policy loss is verl's "vanilla" under another name.

    Args:
        backend: Name of a backend of `rl_triton_core`; None chooses by the device of the tensors of each call.

    Raises:
        ValueError: There is no such backend, or another policy loss is called "triton".
        RuntimeError: All of verl's functions take other arguments, or have other results, than those here.
    """
    check_backend(backend)
    uninstall()
    if LOSS_NAME in core_algos.POLICY_LOSS_REGISTRY:
        raise ValueError(f"verl: got another policy loss of the name {LOSS_NAME!r}, expected none")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)  # verl sets the root logger to WARNING
    off = find_off_switch()
    if off:
        core_algos.POLICY_LOSS_REGISTRY[LOSS_NAME] = core_algos.compute_policy_loss_vanilla
        logger.info("verl %s computes with its own functions: %s", verl.__version__, off)
        return
    same = _find_same_functions()
    for name, function, registry in _list_places():
        if function in same:
            _stock[name] = getattr(core_algos, function.__name__)
            _installed[name] = _bind_backend(function, backend)
            setattr(core_algos, function.__name__, _installed[name])
            registry[name] = _installed[name]
    if compute_policy_loss_triton in same:
        core_algos.POLICY_LOSS_REGISTRY[LOSS_NAME] = _bind_backend(compute_policy_loss_triton, backend)
    losses = [*([LOSS_NAME] if compute_policy_loss_triton in same else []), *(x for x in LOSSES if x in _installed)]
    logger.info(
        "verl %s computes %s advantages with rl_triton_core %s, backend %s%s",
        verl.__version__,
        ", ".join(x for x in _installed if x in ESTIMATORS) or "no",
        rl_triton_core.__version__,
        backend or "that of the device",
        f", and the policy losses {', '.join(losses)} where the configuration names one" if losses else "",
    )


def uninstall() -> None:
    """Give this process's verl its own functions back. Without `install` before, nothing happens."""
    for name, function, registry in _list_places():
        ours = _installed.get(name)
        if ours is not None and getattr(core_algos, function.__name__) is ours:
            setattr(core_algos, function.__name__, _stock[name])
        if ours is not None and registry.get(name) is ours:
            registry[name] = _stock[name]
    loss = core_algos.POLICY_LOSS_REGISTRY.get(LOSS_NAME)
    if getattr(loss, "func", loss) in (compute_policy_loss_triton, core_algos.compute_policy_loss_vanilla):
        del core_algos.POLICY_LOSS_REGISTRY[LOSS_NAME]
    _stock.clear()
    _installed.clear()


def _list_places() -> list[tuple[str, Callable[..., Any], dict[str, Callable[..., Any]]]]:
    """The names in verl's registries that stand for functions here."""
    kinds = (ESTIMATORS, core_algos.ADV_ESTIMATOR_REGISTRY), (LOSSES, core_algos.POLICY_LOSS_REGISTRY)
    return [(name, function, registry) for functions, registry in kinds for name, function in functions.items()]


def _bind_backend(function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    """The function, computing with this backend if it has one."""
    if backend is None or "backend" not in inspect.signature(function).parameters:
        return function
    return partial(function, backend=backend)


def _find_same_functions() -> list[Callable[..., Any]]:
    """Find the functions here that verl's may be replaced by, and warn of the others and of a version not known."""
    places: dict[str, Callable[..., Any]] = {function.__name__: function for _, function, _ in _list_places()}
    places |= {"compute_policy_loss_vanilla": compute_policy_loss_triton}
    known = verl.__version__ in KNOWN_VERSIONS
    differences = {
        name: _compare_arguments(name, function) or ("" if known else _compare_numbers(name, function))
        for name, function in places.items()
    }
    found = [f"verl {verl.__version__}: core_algos.{name} {x}" for name, x in differences.items() if x]
    if len(found) == len(places):
        raise RuntimeError(found[0])
    for text in found:
        logger.warning("%s; verl's own stays", text)
    if not known:
        logger.warning(
            "verl %s is not a version that rl_triton_adapters.verl was tested with (%s). Checked: the arguments of %s, "
            "and their numbers on a small batch",
            verl.__version__,
            ", ".join(KNOWN_VERSIONS),
            ", ".join(places),
        )
    return [function for name, function in places.items() if not differences[name]]


def _compare_arguments(name: str, function: Callable[..., Any]) -> str:
    """Say which arguments one of verl's functions takes; nothing if they are those of ours."""
    found = getattr(core_algos, name, None)
    got = None if found is None else list(inspect.signature(found).parameters)
    expected = [parameter for parameter in inspect.signature(function).parameters if parameter != "backend"]
    return "" if got == expected else f"takes {got}, expected {expected}"


def _compare_numbers(name: str, function: Callable[..., Any]) -> str:
    """Say that one of verl's functions gives other numbers than ours, on a batch of three responses."""
    generator = torch.Generator().manual_seed(0)
    rewards, values, log_prob = torch.randn(3, 3, 6, generator=generator, dtype=torch.float64).unbind()
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    arguments = {
        "token_level_rewards": rewards * mask,  # verl's GRPO counts those of masked tokens
        "values": values,
        "response_mask": mask,
        "gamma": 0.9,
        "lam": 0.8,
        "index": ["a", "b", "a"],
        "config": config if "loss" in name else core_algos.AlgoConfig(gamma=0.9),
        "old_log_prob": values,
        "log_prob": log_prob,
        "advantages": rewards,
    }
    wanted = {x: arguments[x] for x in inspect.signature(function).parameters if x in arguments}
    stock, ours = getattr(core_algos, name)(**wanted), _bind_backend(function, "reference")(**wanted)
    same = all(
        all(abs(got[key] - expected[key]) < 1e-6 for key in expected)
        if isinstance(expected, dict)
        else torch.allclose(got * mask if got.ndim else got, expected, rtol=1e-6, atol=1e-6)
        for got, expected in zip(stock, ours, strict=True)
    )
    return "" if same else f"has other results than in {', '.join(KNOWN_VERSIONS)}"


def _is_requested() -> bool:
    """Whether the environment names this module by verl's variable, or has ours, which may be the off switch."""
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    return bool(os.environ.get("RL_TRITON")) or __name__ in modules


if _is_requested():
    install()
