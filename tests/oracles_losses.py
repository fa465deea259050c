"""The losses as their papers write them: float64, PyTorch's own distributions and gradients, nothing of ours."""

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence


class Oracle(NamedTuple):
    loss: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor
    approx_kl: torch.Tensor
    approx_kl_k1: torch.Tensor
    clip_fraction: torch.Tensor
    ratio_mean: torch.Tensor
    explained_variance: torch.Tensor
    ratio_min: torch.Tensor
    ratio_max: torch.Tensor


def categorical(logits, actions, old_logits=None):
    """Log-probability, entropy and KL from the old distribution, of one distribution or several side by side."""
    heads = [logits] if isinstance(logits, torch.Tensor) else logits
    actions = actions.reshape(*heads[0].shape[:-1], len(heads))
    new = [Categorical(logits=x.double()) for x in heads]
    log_prob = sum(d.log_prob(actions[..., i]) for i, d in enumerate(new))
    kl = 0.0
    if old_logits is not None:
        old_heads = [old_logits] if isinstance(old_logits, torch.Tensor) else old_logits
        kl = sum(kl_divergence(Categorical(logits=x.double()), d) for x, d in zip(old_heads, new, strict=True))
    return log_prob, sum(d.entropy() for d in new), kl


def gaussian(mean, log_std, actions, old_mean=None, old_log_std=None):
    new = Normal(mean.double(), log_std.double().exp().expand_as(mean))
    kl = 0.0
    if old_mean is not None:
        kl = kl_divergence(Normal(old_mean.double(), old_log_std.double().exp().expand_as(mean)), new).sum(-1)
    return new.log_prob(actions.double()).sum(-1), new.entropy().sum(-1), kl


def bernoulli(logits, actions, old_logits=None):
    new = Bernoulli(logits=logits.double())
    kl = 0.0 if old_logits is None else kl_divergence(Bernoulli(logits=old_logits.double()), new).sum(-1)
    return new.log_prob((actions != 0).double()).sum(-1), new.entropy().sum(-1), kl


def value_error(values, returns, old_values, value_clip, mode, kind, delta):
    def error(v):
        d = v - returns
        if kind == "mse":
            return d**2
        return torch.where(d.abs() <= delta, d**2 / 2, delta * (d.abs() - delta / 2))

    if value_clip is None:
        return error(values)
    if mode == "rllib":
        return error(values).clamp(0, value_clip)
    clipped = error(old_values + (values - old_values).clamp(-value_clip, value_clip))
    return clipped if mode == "sb3" else torch.maximum(error(values), clipped)


def estimate_kl(log_prob, ref_log_prob, estimator, log_ratio_clamp=None, kl_clip=None):
    x = ref_log_prob - log_prob
    bounded = x if log_ratio_clamp is None else x.clamp(-log_ratio_clamp, log_ratio_clamp)
    kl = {"k1": -x, "k2": x**2 / 2, "k3": bounded.exp() - 1 - bounded}[estimator.rstrip("+")]
    kl = kl if kl_clip is None else kl.clamp(max=kl_clip)
    if estimator.endswith("+"):
        score = x**2 / 2
        kl = score - score.detach() + kl.detach()
    return kl


def find_objective(surrogate, ratio, a, log_prob, low, high, dual_clip, tau, tau_negative):
    if surrogate == "cispo":
        return ratio.clamp(low, high).detach() * a * log_prob
    if surrogate == "sapo":
        temperature = torch.where(a > 0, tau * torch.ones_like(a), tau_negative)
        return a * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    if surrogate == "reinforce":
        return a * log_prob
    objective = torch.minimum(ratio * a, ratio.clamp(low, high) * a)
    return objective if dual_clip is None else torch.where(a < 0, torch.maximum(objective, dual_clip * a), objective)


UNUSED = ("values", "returns", "old_values", "ref_log_probs", "weights", "clip_high", "dual_clip", "value_clip")
UNUSED += ("log_ratio_clamp", "kl_clip", "divisor", "factors", "log_ratio")
DEFAULTS = dict.fromkeys(UNUSED) | {
    **{"clip": 0.2, "surrogate": "clip", "tau": 1.0, "tau_negative": 1.05, "kl_times_ratio": False},
    **{"value_clip_mode": "sb3", "value_loss": "mse", "huber_delta": 1.0, "value_factor": 1.0},
    **{"value_coef": 0.5, "entropy_coef": 0.0, "kl_coef": 0.0, "kl_estimator": "k1"},
    **{"normalize_advantages": False, "correction": 1, "epsilon": 1e-8},
}


def ppo(policy, old_log_probs, advantages, **options):
    """The loss of elements with weights: those of weight 0 are taken out before anything is computed."""
    assert options.keys() <= DEFAULTS.keys()
    o = SimpleNamespace(**DEFAULTS | options)
    log_prob, entropy, kl = policy
    w = torch.ones_like(log_prob) if o.weights is None else o.weights.double()
    keep = w.detach() != 0

    def kept(x):
        return x if not isinstance(x, torch.Tensor) else x.double().expand(keep.shape)[keep]

    w, log_prob, entropy, kl = w[keep], log_prob[keep], kept(entropy), kept(kl)
    old, a, ref = map(kept, (old_log_probs, advantages, o.ref_log_probs))
    v, r, v_old = map(kept, (o.values, o.returns, o.old_values))
    divisor = w.sum() if o.divisor is None else o.divisor

    def mean(x, by=None):
        return (w * x).sum() / (w.sum() if by is None else by)

    if o.normalize_advantages and w.sum() > o.correction:
        deviation = a - mean(a)
        a = deviation / (((w * deviation**2).sum() / (w.sum() - o.correction)).sqrt() + o.epsilon)
    log_ratio = log_prob - old if o.log_ratio is None else kept(o.log_ratio)
    if o.log_ratio_clamp is not None:
        log_ratio = log_ratio.clamp(-o.log_ratio_clamp, o.log_ratio_clamp)
    ratio = log_ratio.exp()
    low, high = 1 - o.clip, 1 + (o.clip if o.clip_high is None else o.clip_high)
    objective = find_objective(o.surrogate, ratio, a, log_prob, low, high, o.dual_clip, o.tau, o.tau_negative)
    objective = objective if o.factors is None else objective * kept(o.factors)
    if ref is not None:
        kl = estimate_kl(log_prob, ref, o.kl_estimator, o.log_ratio_clamp, o.kl_clip)
        kl = kl * ratio if o.kl_times_ratio else kl
    zero, nan = torch.zeros((), dtype=torch.float64), torch.tensor(torch.nan, dtype=torch.float64)
    error, explained = zero, nan
    if v is not None:
        error = o.value_factor * value_error(v, r, v_old, o.value_clip, o.value_clip_mode, o.value_loss, o.huber_delta)
        variance, unexplained = (mean(x**2) - mean(x) ** 2 for x in (r, r - v))
        explained = 1 - unexplained / variance
    parts = -mean(objective, divisor), mean(error, divisor), mean(entropy, divisor), mean(kl + zero, divisor)
    policy_loss, value_part, entropy_part, kl_part = parts
    loss = policy_loss + o.value_coef * value_part - o.entropy_coef * entropy_part + o.kl_coef * kl_part
    outside = (ratio < low) | (ratio > high)
    approx = mean(log_ratio.expm1() - log_ratio), mean(-log_ratio), mean(outside.double()), mean(ratio)
    return Oracle(loss, *parts, *approx, explained, ratio.min(), ratio.max())


def grpo(log_prob, old, advantages, mask, *, aggregation, normalizer=None, ratio="token", entropy=None, **options):
    """Rows of a matrix as sequences, whose tokens may have the ratio of all together."""
    if ratio != "token":
        change = torch.where(mask != 0, log_prob.double() - old, 0) * mask
        mean = (change.sum(-1) / mask.double().sum(-1).clamp(min=1e-300))[:, None].expand_as(log_prob)
        apart = log_prob - log_prob.detach() + mean.detach()
        options["log_ratio"] = mean if ratio == "sequence" else apart
    weights = mask.double()
    counts = weights.sum(-1)
    divisor = {"token-mean": counts.sum()}.get(aggregation, torch.tensor(float(len(mask)), dtype=torch.float64))
    if aggregation == "sequence-mean":
        weights = weights / counts.clamp(min=1e-300)[:, None]
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(mask)
    policy = log_prob.double(), -log_prob.double() if entropy is None else entropy, 0.0
    divisor = divisor if normalizer is None else normalizer
    return ppo(policy, old, advantages, weights=weights, divisor=divisor, **options)
