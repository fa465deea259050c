"""verl: advantages, policy losses and log-probabilities of its trainers, computed with `rl_triton_core`.

One environment variable turns them on, in every process of a run, and another keeps them off:

    VERL_USE_EXTERNAL_MODULES=rl_triton_adapters.verl python -m verl.trainer.main_ppo ...
    RL_TRITON=0

Where this package is installed, ``RL_TRITON=1`` turns them on too, through verl's plugins. Either way the advantages of
`ESTIMATORS` are computed here, wherever verl computes them, and so are the policy losses of `LOSSES`, and
log-probabilities and entropies from logits, or from hidden states with ``use_fused_kernels``.
``actor_rollout_ref.actor.policy_loss.loss_mode=triton`` asks for the policy loss of vanilla. All else is verl's own.
Each process logs one line that says what it computes with.

Functions are called like verl's, with `backend` as a further argument.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from functools import partial, reduce
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

import rl_triton_core
from rl_triton_adapters.common.switch import find_off_switch
from rl_triton_adapters.common.update import Deferral, read_numbers
from rl_triton_adapters.common.versions import explained_import
from rl_triton_core import check_backend, compute_gae, normalize_advantages
from rl_triton_core.extending import check_choice, check_number
from rl_triton_core.losses import grpo_loss, linear_token_log_probs, token_log_probs

with explained_import(__name__, "verl", "0.7.1"):
    import verl
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

__all__ = [
    "compute_gae_advantage_return",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "install",
    "logprobs_from_logits",
    "uninstall",
]

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

    Arguments are verl's: [batch_size, response_length] each, of floating point, the mask also bool or of integers,
    nonzero where a token is valid, as at least two are. Results have verl's dtype. `backend` names one of
    `rl_triton_core`; None chooses by the tensors' device.

    Raises:
        ValueError: Fewer than two tokens are valid; else as `compute_gae`.
    """
    mask = response_mask != 0
    if (count := int(torch.count_nonzero(mask))) < 2:
        raise ValueError(f"response_mask: got {count} valid tokens, expected two or more: whitening needs a variance")
    options: dict[str, Any] = {"gamma": float(gamma), "lambda_": check_number("lam", lam, 0.0, 1.0), "mask": mask}
    advantages, returns = compute_gae(token_level_rewards, values, bootstrap_values=0.0, **options, backend=backend)
    dtype = reduce(torch.promote_types, (x.dtype for x in (token_level_rewards, response_mask, values)))
    options = {"correction": 1, "epsilon": 1e-8, "epsilon_mode": "variance"}
    whitened = normalize_advantages(advantages, mask, **options, backend=backend)
    return whitened.to(dtype), returns.to(dtype)


LOSS_NAME = "triton"
"""The policy loss that verl calls "vanilla", under another name."""


def make_policy_loss(name: str, mode: str = "token-mean") -> Callable[..., Any]:
    """Make one of verl's policy losses: the loss and its gradient in one pass, and verl's metrics in another.

    Arguments, results and what is logged are verl's: tensors [batch_size, response_length], a floating-point mask a
    weight, and the gradient flows to `log_prob` alone. `backend` names one of `rl_triton_core`; None chooses by the
    tensors' device. Where no token is valid the loss is 0, verl's NaN.
    """
    stock: Any = core_algos.POLICY_LOSS_REGISTRY.get("vanilla" if name == LOSS_NAME else name)

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
        # the eight bytes of an integer take time to read
        mask = response_mask if response_mask.is_floating_point() else response_mask != 0
        tensors = old_log_prob, log_prob.detach(), advantages
        options, weights = _choose_loss(name, config, *tensors), rollout_is_weights
        if "valid" in options:
            weights = options.pop("valid") * (1.0 if weights is None else weights)
        used = mode if name == "sapo" else loss_agg_mode  # as in verl
        aggregation, normalizer = _get_aggregation(mask, used, **config.global_batch_info)
        options |= {"mask": mask, "aggregation": aggregation, "normalizer": normalizer, "backend": backend}
        loss = grpo_loss(log_prob, old_log_prob, advantages, weights=weights, **options).loss
        with torch.no_grad(), Deferral():
            clean = (torch.where(mask.bool(), x, 0.0) for x in tensors)
            metrics = stock(*clean, mask, loss_agg_mode, config, rollout_is_weights)[1]
        return loss, dict(zip(metrics, read_numbers([*metrics.values()]), strict=True))

    compute.__name__ = compute.__qualname__ = f"compute_policy_loss_{name}"
    return compute


LOSSES = {name: make_policy_loss(name) for name in (LOSS_NAME, "cispo", "gpg", "dppo_tv", "dppo_kl")}
LOSSES |= {name: make_policy_loss(name, "seq-mean-token-mean") for name in ("gspo", "sapo")}
"""The policy losses by the name that a configuration has."""


def _choose_loss(name: str, config: Any, old: Any, new: Any, advantages: Any) -> dict[str, Any]:
    """Arguments of `grpo_loss` for one of the losses, and perhaps which tokens have one at all."""
    low, high = (config.clip_ratio if x is None else x for x in (config.clip_ratio_low, config.clip_ratio_high))
    most = config.get("clip_ratio_c", 3.0)
    clips = {"clip": low, "clip_high": high, "log_ratio_clamp": LOG_RATIO_CLAMP}
    if name == LOSS_NAME:
        return clips | {"dual_clip": most}
    if name == "gspo":  # of verl's bounds there is the upper one
        return clips | {"ratio": "sequence-token", "log_ratio_clamp": SEQUENCE_CLAMP}
    if name == "cispo":
        return clips | {"surrogate": "cispo"}
    if name == "sapo":
        tau = {"tau": float(config.tau_pos), "tau_negative": float(config.tau_neg)}
        return {"surrogate": "sapo", "log_ratio_clamp": LOG_RATIO_CLAMP, **tau}
    if name == "gpg":
        return {"surrogate": "reinforce"}
    p, q, rises = new.exp(), old.exp(), advantages > 0
    if name == "dppo_tv":
        valid = torch.where(rises, p - q <= high, p - q >= -low)
    else:  # of two outcomes: this token, or another
        kl = q * (old - new) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
        valid = torch.where(rises, (kl <= high) | (p <= q), (kl <= low) | (p >= q))
    return clips | {"surrogate": "cispo", "clip": None, "clip_high": most - 1, "valid": valid}


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


# -- from hidden states, with `use_fused_kernels` ----------------------------------------------------------------------


def fused_linear(
    hidden_states: torch.Tensor,
    vocab_weights: torch.Tensor,
    input_ids: torch.Tensor,
    temperature: float = 1.0,
    chunk_size: int = 512,
    *,
    backend: str | None = None,
) -> Any:
    """Log-probabilities, float32, and entropies, shaped like `input_ids`, as of verl's backend "torch".

    The logits are made chunk by chunk, and again for the gradient; `chunk_size` is not read. A weight that is shared
    out, and a temperature per token, are verl's own.
    """
    if not _is_plain(vocab_weights, temperature):
        stock = _get_stock("FusedLinearForPPOFunction")
        return stock.apply(hidden_states, vocab_weights, input_ids, temperature, chunk_size)
    options: dict[str, Any] = {"temperature": temperature, "entropy": True, "backend": backend}
    log_probs, entropy = linear_token_log_probs(hidden_states, vocab_weights, input_ids, **options)
    return log_probs.float(), entropy.to(hidden_states.dtype)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
    *,
    backend: str | None = None,
) -> Any:
    """The same, flat and in float32, as of verl's backend "triton".

    Reductions, and groups of several ranks, whose hidden states get the gradient of a part alone, are verl's own.
    """
    is_part = dist_process_group is not None and dist_process_group.size() > 1
    if is_part or reduction != "none" or not _is_plain(weight, temperature):
        return _get_stock("linear_cross_entropy")(hidden, weight, labels, temperature, reduction, dist_process_group)
    options: dict[str, Any] = {"temperature": temperature, "entropy": True, "backend": backend}
    return tuple(linear_token_log_probs(hidden.flatten(0, -2), weight, labels.flatten(), **options))


def _is_plain(weight: torch.Tensor, temperature: Any) -> bool:
    """Whether a weight is all here, and one temperature is that of all tokens."""
    return type(weight) in (torch.Tensor, torch.nn.Parameter) and isinstance(temperature, (int, float))


def _get_stock(name: str) -> Any:
    """The function of verl's whose place ours took."""
    return next((x for _, key, _, x in _replaced if key == name), None) or getattr(_find_module(name), name)


# -- aggregation -------------------------------------------------------------------------------------------------------


def _get_aggregation(
    mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    loss_scale_factor: float | None = None,
) -> tuple[str, Any]:
    """The aggregation of `grpo_loss`, and what the sum is divided by, for all ranks together."""
    aggregation, name = AGGREGATIONS[check_choice("loss_agg_mode", loss_agg_mode, [*AGGREGATIONS])]
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


# -- installation ------------------------------------------------------------------------------------------------------

ESTIMATORS: dict[str, Callable[..., Advantages]] = {"gae": compute_gae_advantage_return}
"""By the name of the estimator: the function, which is called like the one of verl's whose place it takes."""
_of_logits = logprobs_from_logits, entropy_from_logits, entropy_from_logits_with_chunking
TOKENS: dict[str, Callable[..., torch.Tensor]] = {x.__name__: x for x in _of_logits}
"""The same of functions of logits, which are in no registry."""
fused_linear.__name__ = "FusedLinearForPPOFunction"  # whose place it takes
LINEAR: dict[str, Callable[..., Any]] = {x.__name__: x for x in (fused_linear, linear_cross_entropy)}
"""The same of what makes the logits itself; verl calls `apply` of the first."""
PLACES = dict.fromkeys(TOKENS, "verl.utils.torch_functional") | {
    "FusedLinearForPPOFunction": "verl.utils.experimental.torch_functional",
    "linear_cross_entropy": "verl.utils.kernel.linear_cross_entropy",
}
"""The modules of these."""


_replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
"""Where a function of verl's was, by which name, ours, and verl's."""


def install(*, backend: str | None = None) -> None:
    """Let verl compute what the tables of this module name, in this process, and add the loss "triton".

    Functions of `verl.trainer.ppo.core_algos` and of `PLACES` are replaced, as attributes of the module and in its
    registry, and one line is logged. A module that imported one by name before keeps verl's. A second
    call changes nothing but the backend. Arguments and, on a small batch, numbers of both are compared: functions that
    differ stay verl's own, with a warning each, as GSPO does before 0.9.1.
    With RL_TRITON=0 all stay, and the policy loss is verl's "vanilla" under another name. `backend` names one of
    `rl_triton_core`; None chooses by the device of the tensors of each call.

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
    if off := find_off_switch():
        _replace(core_algos.POLICY_LOSS_REGISTRY, LOSS_NAME, core_algos.compute_policy_loss_vanilla)
        logger.info("verl %s computes with its own functions: %s", verl.__version__, off)
        return
    same = _find_same_functions()
    try:
        for name, ours in same.items():
            bound = ours if backend is None else partial(ours, backend=backend)
            if name != LOSS_NAME:
                value = SimpleNamespace(apply=bound) if ours is fused_linear else bound
                _replace(vars(_find_module(name)), ours.__name__, value)
            if name not in PLACES:
                of_losses, of_estimators = core_algos.POLICY_LOSS_REGISTRY, core_algos.ADV_ESTIMATOR_REGISTRY
                _replace(of_losses if name in LOSSES else of_estimators, name, bound)
    except BaseException:
        uninstall()
        raise
    losses, tokens = ([x for x in names if x in same] for names in (LOSSES, TOKENS))
    logger.info(
        "verl %s computes %s advantages%s with rl_triton_core %s, backend %s%s",
        verl.__version__,
        ", ".join(x for x in ESTIMATORS if x in same) or "no",
        " and log-probabilities from logits" + " and hidden states" * ({*LINEAR} <= {*same}) if tokens else "",
        rl_triton_core.__version__,
        backend or "that of the device",
        f", and the policy losses {', '.join(losses)} where the configuration names one" if losses else "",
    )


def uninstall() -> None:
    """Give this process's verl its own functions back. Without `install` before, nothing happens."""
    while _replaced:
        place, name, ours, stock = _replaced.pop()
        if place.get(name) is ours:
            del place[name]
            place.update({} if stock is None else {name: stock})


def _replace(place: dict[str, Any], name: str, ours: Any) -> None:
    """Put a function of ours in a module or a registry."""
    _replaced.append((place, name, ours, place.get(name)))
    place[name] = ours


def _find_module(name: str) -> Any:
    """Where verl's function is; None where this cannot be imported."""
    try:
        return import_module(PLACES[name]) if name in PLACES else core_algos
    except ImportError:
        return None


def _find_same_functions() -> dict[str, Callable[..., Any]]:
    """Find what of verl's may be replaced, by which function, and warn of what differs."""
    same, different = {}, []
    for name, ours in {**ESTIMATORS, **LOSSES, **TOKENS, **LINEAR}.items():
        attribute = "compute_policy_loss_vanilla" if name == LOSS_NAME else ours.__name__
        if stock := getattr(module := _find_module(name), attribute, None):
            if difference := _compare(name, ours, stock):
                place = f"{module.__name__.rpartition('.')[2]}.{attribute}"
                different.append(f"verl {verl.__version__}: {place} {difference}")
            else:
                same[name] = ours
    if not same:
        raise RuntimeError(different[0])
    for text in different:
        logger.warning("%s; verl's own stays", text)
    return same


def _compare(name: str, function: Callable[..., Any], stock: Callable[..., Any]) -> str:
    """Say that one of verl's functions takes other arguments than ours, or gives other numbers for three responses.

    Those of logits and hidden states are not called: with flash-attn, verl's take tensors of a GPU alone.
    """
    stock = getattr(getattr(stock, "__self__", stock), "forward", stock)  # of a `torch.autograd.Function`
    got, expected = (
        [y for y in inspect.signature(x).parameters if y not in ("ctx", "backend")] for x in (stock, function)
    )
    if got != expected or name in PLACES:
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
        for x, y in zip(stock(**wanted), function(**wanted, backend="reference"), strict=True)
    )
    return "" if same else "has other results than ours"


if os.environ.get("RL_TRITON") or __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    install()  # where RL_TRITON is the off switch, it says so
