"""verl: advantages, policy losses and log-probabilities of its trainers, computed with `rl_triton_core`.

One environment variable turns them on, in every process of a run, and another keeps them off:

    VERL_USE_EXTERNAL_MODULES=rl_triton_adapters.verl python -m verl.trainer.main_ppo ...
    RL_TRITON=0

Where this package is installed, ``RL_TRITON=1`` turns them on too, through verl's plugins. Either way the advantages of
`ESTIMATORS` are computed here, wherever verl computes them, and so are the policy losses of `LOSSES`, and
log-probabilities and entropies from logits. ``actor_rollout_ref.actor.policy_loss.loss_mode=triton`` asks for the
policy loss of vanilla. All else is verl's own. Each process logs one line that says what it computes with.

Functions are called like verl's. Where a signature has a minibatch, that is `(old_log_prob, log_prob, advantages,
response_mask, loss_agg_mode, config, rollout_is_weights, *, backend)`, as `help` shows.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import rl_triton_core
from rl_triton_adapters.common.switch import find_off_switch
from rl_triton_adapters.common.versions import explain_import
from rl_triton_core import check_backend, compute_gae, normalize_advantages
from rl_triton_core.extending import check_number
from rl_triton_core.losses import grpo_loss, token_log_probs

try:
    import verl
    from verl.trainer.ppo import core_algos
    from verl.utils import torch_functional
    from verl.workers.config import ActorConfig
except ImportError as error:
    raise explain_import(__name__, error, "verl", "0.7.1") from error

__all__ = [
    "compute_gae_advantage_return",
    "compute_policy_loss_cispo",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_sapo",
    "compute_policy_loss_triton",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "install",
    "logprobs_from_logits",
    "uninstall",
]

LOG_RATIO_CLAMP, SEQUENCE_CLAMP = 20.0, 10.0

Advantages = tuple[torch.Tensor, torch.Tensor]
PolicyLoss = Callable[..., tuple[torch.Tensor, dict[str, Any]]]
Request = tuple[dict[str, Any], dict[str, torch.Tensor] | None]
"""Arguments of `grpo_loss`, and what metrics are computed of, if there are any."""
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

    Arguments are verl's: [batch_size, response_length] each, of floating point, the mask also bool or of integers,
    nonzero where a token is valid, as at least two are. Results have verl's dtype. `backend` names one of
    `rl_triton_core`; None chooses by the tensors' device.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, or fewer than two tokens are valid.
    """
    _check_tokens(token_level_rewards=token_level_rewards, values=values, response_mask=response_mask)
    mask = response_mask != 0
    if (count := int(torch.count_nonzero(mask))) < 2:
        raise ValueError(f"response_mask: got {count} valid tokens, expected two or more: whitening needs a variance")
    advantages, returns = compute_gae(
        token_level_rewards,
        values,
        gamma=float(gamma),
        lambda_=check_number("lam", lam, 0.0, 1.0),
        bootstrap_values=0.0,
        mask=mask,
        backend=backend,
    )
    of_product = torch.promote_types(token_level_rewards.dtype, response_mask.dtype)
    dtype = torch.promote_types(of_product, values.dtype)
    whitened = normalize_advantages(
        advantages, mask, correction=1, epsilon=1e-8, epsilon_mode="variance", backend=backend
    )
    return whitened.to(dtype), returns.to(dtype)


class Minibatch(NamedTuple):
    """What the equations of a policy loss read, without a graph: [batch_size, response_length] each."""

    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor | None

    @property
    def log_ratio(self) -> torch.Tensor:
        """The logarithm of the ratio, within the bounds that verl has."""
        return (self.log_prob - self.old_log_prob).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


LOSS_ARGUMENTS = """

    Arguments, results and what is logged are those of verl's policy losses: tensors [batch_size, response_length], a
    floating-point mask a weight, and the gradient flows to `log_prob` alone. `backend` names one of `rl_triton_core`;
    None chooses by the tensors' device. Where no token is valid the loss is 0, verl's NaN.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not.
    """
LOSS_NAME, LOSSES = "triton", dict[str, PolicyLoss]()
"""The policy losses by the name that a configuration has; verl's "vanilla" is the first."""


def _as_policy_loss(mode: str = "token-mean") -> Callable[[Callable[[Minibatch, Any], Request]], PolicyLoss]:
    """Call a function of a minibatch and a config, which chooses a loss of `grpo_loss`, as verl calls policy losses."""

    def decorate(choose: Callable[[Minibatch, Any], Request]) -> PolicyLoss:
        def compute(
            old_log_prob: torch.Tensor,
            log_prob: torch.Tensor,
            advantages: torch.Tensor,
            response_mask: torch.Tensor,
            loss_agg_mode: str = mode,
            config: Any = None,
            rollout_is_weights: torch.Tensor | None = None,
            *,
            backend: str | None = None,
        ) -> tuple[torch.Tensor, dict[str, Any]]:
            if config is None:
                raise ValueError("config: got None, expected that of the actor, with clip_ratio")
            tensors = {"log_prob": log_prob, "old_log_prob": old_log_prob, "advantages": advantages}
            weights = {} if rollout_is_weights is None else {"rollout_is_weights": rollout_is_weights}
            _check_tokens(**tensors, **weights, response_mask=response_mask)
            # the eight bytes of an integer take time to read
            mask = response_mask if response_mask.is_floating_point() else response_mask != 0
            minibatch = Minibatch(log_prob.detach(), old_log_prob, advantages, mask, rollout_is_weights)
            chosen, logged = choose(minibatch, config)
            options = {"log_ratio_clamp": LOG_RATIO_CLAMP, "weights": rollout_is_weights, **chosen}
            loss_agg_mode = options.pop("loss_agg_mode", loss_agg_mode)
            aggregation, normalizer = _get_aggregation(mask, loss_agg_mode, **config.global_batch_info)
            options |= {"mask": mask, "aggregation": aggregation, "normalizer": normalizer, "backend": backend}
            loss = grpo_loss(log_prob, old_log_prob, advantages, **options).loss
            return loss, {} if logged is None else _average_metrics(minibatch, **logged)

        compute.__name__ = compute.__qualname__ = choose.__name__
        compute.__doc__ = (choose.__doc__ or "").rstrip() + LOSS_ARGUMENTS
        LOSSES[compute.__name__.removeprefix("compute_policy_loss_")] = compute
        return compute

    return decorate


@_as_policy_loss()
def compute_policy_loss_triton(minibatch: Minibatch, config: Any) -> Request:
    """Compute the loss that verl calls "vanilla", and its gradient, in one pass.

        log r = log_prob − old_log_prob, within ±20
        loss of a token = −min(r·A, clip(r, 1 − low, 1 + high)·A), at most −c·A where A < 0

    Of the config are read `clip_ratio`, `clip_ratio_low` and `clip_ratio_high`, and `clip_ratio_c`, c, which is > 1.
    """
    low, high, most = _get_clips(config)
    a, ratio = minibatch.advantages, minibatch.log_ratio.exp()
    free, clipped = a * ratio, a * ratio.clamp(1 - low, 1 + high)
    bounded = (a < 0) & (torch.minimum(free, clipped) < a * most)
    options = {"clip": low, "clip_high": high, "dual_clip": most}
    return options, {"clipped": clipped < free, "bounded": bounded}


@_as_policy_loss("seq-mean-token-mean")
def compute_policy_loss_gspo(minibatch: Minibatch, config: Any) -> Request:
    """Compute the loss that verl calls "gspo", and its gradient, in one pass: PPO's with the ratio of the response.

    Of the config are read the clips, without `clip_ratio_c`. The logarithm of the response's ratio is kept within ±10,
    of which verl has the upper bound.
    """
    low, high, _ = _get_clips(config)
    old, a, mask = minibatch.old_log_prob, minibatch.advantages, minibatch.mask
    log_ratio = torch.where(mask != 0, minibatch.log_prob - old, 0)
    ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1)).clamp(max=SEQUENCE_CLAMP).exp()[:, None]
    clipped = a * ratio.clamp(1 - low, 1 + high) < a * ratio
    options = {"ratio": "sequence-token", "log_ratio_clamp": SEQUENCE_CLAMP, "clip": low, "clip_high": high}
    return options, {"clipped": clipped, "log_ratio": log_ratio}


@_as_policy_loss()
def compute_policy_loss_cispo(minibatch: Minibatch, config: Any) -> Request:
    """Compute the loss that verl calls "cispo", and its gradient, in one pass: −A·log_prob, weighted by the clipped r.

    Of the config are read the clips, without `clip_ratio_c`.
    """
    low, high, _ = _get_clips(config)
    ratio = minibatch.log_ratio.exp()
    options = {"surrogate": "cispo", "clip": low, "clip_high": high}
    return options, {"clipped": (ratio < 1 - low) | (ratio > 1 + high)}


@_as_policy_loss("seq-mean-token-mean")
def compute_policy_loss_sapo(minibatch: Minibatch, config: Any) -> Request:
    """Compute the loss that verl calls "sapo", and its gradient, in one pass: a soft gate in the place of the clip.

    Of the config are read `tau_pos` and `tau_neg`. As in verl, `loss_agg_mode` is not: it is "seq-mean-token-mean".
    """
    tau = {"tau": float(config.tau_pos), "tau_negative": float(config.tau_neg)}
    return {"surrogate": "sapo", "loss_agg_mode": "seq-mean-token-mean", **tau}, {}


@_as_policy_loss()
def compute_policy_loss_gpg(minibatch: Minibatch, config: Any) -> Request:
    """Compute the loss that verl calls "gpg", and its gradient, in one pass: −A·log_prob. Nothing is logged."""
    return {"surrogate": "reinforce"}, None


@_as_policy_loss()
def compute_policy_loss_dppo_tv(minibatch: Minibatch, config: Any) -> Request:
    """Compute the loss that verl calls "dppo_tv", and its gradient, in one pass: −A·log_prob, weighted by min(r, c).

    A token whose probability has risen by more than `clip_ratio_high` where A > 0, or fallen by more than
    `clip_ratio_low` elsewhere, has no loss. The config's `clip_ratio_c` is c.
    """
    low, high, _ = _get_clips(config)
    change = minibatch.log_prob.exp() - minibatch.old_log_prob.exp()
    return _truncate_ratio(minibatch, config, change <= high, change >= -low)


@_as_policy_loss()
def compute_policy_loss_dppo_kl(minibatch: Minibatch, config: Any) -> Request:
    """Compute the loss that verl calls "dppo_kl": as "dppo_tv", with a bound on the KL divergence of the token.

    The divergence is that of two outcomes: this token, or another.
    """
    low, high, _ = _get_clips(config)
    log_prob, old_log_prob, *_ = minibatch
    p, q = log_prob.exp(), old_log_prob.exp()
    kl = q * (old_log_prob - log_prob) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return _truncate_ratio(minibatch, config, (kl <= high) | (p <= q), (kl <= low) | (p >= q))


def _truncate_ratio(minibatch: Minibatch, config: Any, rising: torch.Tensor, falling: torch.Tensor) -> Request:
    """The loss of DPPO, for tokens whose probability should rise or fall and that may still do so."""
    most = _get_clips(config)[2]
    valid = torch.where(minibatch.advantages > 0, rising, falling)
    weights = valid.to(minibatch.log_prob.dtype)
    if minibatch.weights is not None:
        weights = weights * minibatch.weights
    options = {"surrogate": "cispo", "clip": None, "clip_high": most - 1, "weights": weights}
    return options, {"clipped": ~valid, "bounded": valid & (minibatch.log_ratio.exp() > most)}


# -- log-probabilities and entropies from logits -----------------------------------------------------------------------


def logprobs_from_logits(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True, *, backend: str | None = None
) -> torch.Tensor:
    """Compute log-probabilities of tokens in one pass over the logits: float32, or float64 if the logits are.

    With `inplace_backward`, the gradient is written into the memory of the logits, [..., vocab_size], which must not be
    read afterwards; not of logits that are a leaf. Errors are those of `token_log_probs`.
    """
    given_up = inplace_backward and not (logits.requires_grad and logits.is_leaf)
    return token_log_probs(logits, labels, inplace_backward=given_up, backend=backend).log_probs


def entropy_from_logits(logits: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Compute entropies in one pass over the logits, [..., vocab_size]: [...], float32 or float64."""
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return token_log_probs(logits, tokens, entropy=True, backend=backend).entropy


def entropy_from_logits_with_chunking(
    logits: torch.Tensor, chunk_size: int = 2048, *, backend: str | None = None
) -> torch.Tensor:
    """The same. `chunk_size` is not read: no second tensor of the logits' size arises."""
    return entropy_from_logits(logits, backend=backend)


# -- arguments and metrics ---------------------------------------------------------------------------------------------


def _check_tokens(**tensors: Any) -> None:
    """Check that arguments are tensors with one number per token of each response."""
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
        got, wanted = tuple(tensor.shape), tuple(tensors[first].shape)
        if len(wanted) != 2:
            raise ValueError(f"{first}: got shape {wanted}, expected [batch_size, response_length]")
        if got != wanted:
            raise ValueError(f"{name}: got shape {got}, expected {wanted}, that of {first}")


def _get_clips(config: Any) -> tuple[float, float, float]:
    """How far the ratio may fall and rise, and c."""
    low, high = (config.clip_ratio if x is None else x for x in (config.clip_ratio_low, config.clip_ratio_high))
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


@torch.no_grad()
def _average_metrics(
    minibatch: Minibatch,
    clipped: torch.Tensor | None = None,
    bounded: torch.Tensor | None = None,
    log_ratio: torch.Tensor | None = None,
) -> dict[str, float]:
    """The metrics of verl's losses, by its own arithmetic; the host waits for the device once."""
    mask, log_ratio = minibatch.mask, minibatch.log_ratio if log_ratio is None else log_ratio
    flags = [log_ratio.new_zeros(()) if x is None else x.to(log_ratio) for x in (clipped, bounded)]
    numbers = torch.stack([x.expand_as(log_ratio) for x in (flags[0], -log_ratio, flags[1])])
    means = (torch.where(mask.bool(), numbers, 0.0) * mask).sum(dim=(1, 2)) / (mask.sum() + 1e-8)
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return dict(zip(names, means.tolist(), strict=True))


# -- installation ------------------------------------------------------------------------------------------------------

ESTIMATORS: dict[str, Callable[..., Advantages]] = {"gae": compute_gae_advantage_return}
"""By the name of the estimator: the function, which is called like the one of verl's whose place it takes."""
TOKENS: dict[str, Callable[..., torch.Tensor]] = {
    function.__name__: function
    for function in (logprobs_from_logits, entropy_from_logits, entropy_from_logits_with_chunking)
}
"""The same of functions of logits, which are in no registry."""


class Place(NamedTuple):
    """Where verl has a function whose place one of this module takes."""

    name: str
    function: Callable[..., Any]
    module: Any
    registry: dict[str, Callable[..., Any]]
    attribute: str
    """What the function is called in verl's module."""


_stock: dict[str, Callable[..., Any]] = {}
_installed: dict[str, Callable[..., Any]] = {}


def install(*, backend: str | None = None) -> None:
    """Let verl compute what `ESTIMATORS`, `LOSSES` and `TOKENS` name here, in this process, and add the loss "triton".

    Functions of `verl.trainer.ppo.core_algos` and `verl.utils.torch_functional` are replaced, as attributes of the
    module and in its registry, and one line is logged. A module that imported one by name before keeps verl's. A second
    call changes nothing but the backend. Arguments and, on a small batch, numbers of both are compared: functions that
    differ stay verl's own, with a warning each, as GSPO does before 0.9.1.
    With RL_TRITON=0 all stay, and the policy loss is verl's "vanilla" under another name.

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
        core_algos.POLICY_LOSS_REGISTRY[LOSS_NAME] = _installed[LOSS_NAME] = core_algos.compute_policy_loss_vanilla
        logger.info("verl %s computes with its own functions: %s", verl.__version__, off)
        return
    try:
        for place in _find_same_places():
            _installed[place.name] = ours = _bind_backend(place.function, backend)
            if place.name != LOSS_NAME:
                _stock[place.name] = getattr(place.module, place.attribute)
                setattr(place.module, place.attribute, ours)
            place.registry[place.name] = ours
    except BaseException:
        uninstall()
        raise
    losses, tokens = ([x for x in names if x in _installed] for names in (LOSSES, TOKENS))
    logger.info(
        "verl %s computes %s advantages%s with rl_triton_core %s, backend %s%s",
        verl.__version__,
        ", ".join(x for x in ESTIMATORS if x in _installed) or "no",
        " and log-probabilities from logits" if tokens else "",
        rl_triton_core.__version__,
        backend or "that of the device",
        f", and the policy losses {', '.join(losses)} where the configuration names one" if losses else "",
    )


def uninstall() -> None:
    """Give this process's verl its own functions back. Without `install` before, nothing happens."""
    for place in [x for x in _list_places() if x.name in _installed]:
        ours, stock = _installed[place.name], _stock.get(place.name)
        if stock is not None and getattr(place.module, place.attribute) is ours:
            setattr(place.module, place.attribute, stock)
        if place.registry.get(place.name) is ours:
            del place.registry[place.name]
            place.registry.update({} if stock is None else {place.name: stock})
    _stock.clear()
    _installed.clear()


def _list_places() -> list[Place]:
    """All places."""
    kinds: list[tuple[dict[str, Any], Any, dict[str, Any]]] = [
        (ESTIMATORS, core_algos, core_algos.ADV_ESTIMATOR_REGISTRY),
        (LOSSES, core_algos, core_algos.POLICY_LOSS_REGISTRY),
        (TOKENS, torch_functional, {}),
    ]
    return [
        Place(name, f, module, registry, "compute_policy_loss_vanilla" if name == LOSS_NAME else f.__name__)
        for functions, module, registry in kinds
        for name, f in functions.items()
    ]


def _bind_backend(function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    """The function, computing with this backend."""
    return function if backend is None else partial(function, backend=backend)


def _find_same_places() -> list[Place]:
    """Find what of verl's may be replaced, and warn of what differs."""
    same, different = [], []
    for place in [x for x in _list_places() if hasattr(x.module, x.attribute)]:
        if difference := _compare(place):
            name = f"{place.module.__name__.rpartition('.')[2]}.{place.attribute}"
            different.append(f"verl {verl.__version__}: {name} {difference}")
        else:
            same.append(place)
    if not same:
        raise RuntimeError(different[0])
    for text in different:
        logger.warning("%s; verl's own stays", text)
    return same


def _compare(place: Place) -> str:
    """Say that one of verl's functions takes other arguments than ours, or gives other numbers for three responses.

    Those of logits are not called: with flash-attn, verl's take tensors of a GPU alone.
    """
    stock = getattr(place.module, place.attribute)
    got, ours = (list(inspect.signature(x).parameters) for x in (stock, place.function))
    expected = [x for x in ours if x != "backend"]
    if got != expected or place.name in TOKENS:
        return "" if got == expected else f"takes {got}, expected {expected}"
    generator = torch.Generator().manual_seed(0)
    rewards, values, log_prob = torch.randn(3, 3, 6, generator=generator, dtype=torch.float64).unbind()
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    arguments = {"token_level_rewards": rewards, "values": values, "response_mask": mask, "gamma": 0.9, "lam": 0.8}
    arguments |= {"old_log_prob": -values.exp(), "log_prob": -log_prob.exp(), "advantages": rewards}
    arguments["config"] = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    arguments["loss_agg_mode"] = "seq-mean-token-sum"  # the default of none: before 0.9.1, verl's GSPO does not read it
    wanted = {x: arguments[x] for x in expected if x in arguments}
    same = all(
        all(abs(x[key] - y[key]) < 1e-6 for key in y)
        if isinstance(y, dict)
        else torch.allclose(x.double() * mask, y * mask, rtol=1e-6, atol=1e-6)
        for x, y in zip(stock(**wanted), place.function(**wanted, backend="reference"), strict=True)
    )
    return "" if same else "has other results than ours"


def _is_requested() -> bool:
    """Whether the environment names this module by verl's variable, or has ours, which may be the off switch."""
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    return bool(os.environ.get("RL_TRITON")) or __name__ in modules


if _is_requested():
    install()
