"""The equations of log-probabilities from logits, each written once. A logit is (x − peak)/temperature here.

Sums over a part of the vocabulary are those of exp(logit) and of exp(logit)·logit, relative to the part's largest x.
With powers of 2 in the place of exp, logits, moments and entropies are in units of ln 2.
"""

from __future__ import annotations

from typing import Any

from rl_triton_core._internal.equations.primitives import exp, log, select


def limit_logit(logit: Any) -> Any:
    """−1000 where it is less, −∞ too: the exponential is 0 there, and so is the product of both."""
    return select(logit < -1000.0, -1000.0, logit)


def weigh_logit(logit: Any) -> tuple[Any, Any]:
    """What a logit adds to the sums."""
    logit = limit_logit(logit)
    weight = exp(logit)
    return weight, weight * logit


def shift_sums(total: Any, moment: Any, change: Any) -> tuple[Any, Any]:
    """The sums relative to a higher peak, `change` being the old logit of the old peak less its new one, <= 0."""
    change = limit_logit(change)
    factor = exp(change)
    return factor * total, factor * (moment + total * change)


def read_sums(logit: Any, total: Any, moment: Any) -> tuple[Any, Any, Any]:
    """From the sums over the vocabulary: log p = logit − log Σ exp,  H = log Σ exp − Σ p·logit,  and log Σ exp."""
    log_total = log(total)
    return logit - log_total, log_total - moment / total, log_total


def differentiate_logit(log_prob: Any, is_token: Any, entropy: Any, by_log_prob: Any, by_entropy: Any) -> Any:
    """∂ log p[token] / ∂ logit = 1[token] − p,  ∂H / ∂ logit = −p·(log p + H)."""
    log_prob = limit_logit(log_prob)
    probability = exp(log_prob)
    surprise = probability * (log_prob + entropy)
    return by_log_prob * (select(is_token, 1.0, 0.0) - probability) - by_entropy * surprise
