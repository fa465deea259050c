"""The equations of the losses, each written once, with its derivatives.

Each backend compiles them (`equations.compile`), so an equation runs as Triton code, as Numba code and on PyTorch
tensors. The loss of an element of a minibatch is computed in three parts:

* a `Head` turns network outputs into log-probability, entropy and, with an old network's outputs, exact KL;
* `compute_terms` turns these into the terms that are averaged, and into derivatives of the loss by them;
* the head turns those derivatives into derivatives by the network outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rl_triton_core._internal.equations.compile import Chosen, Language, compile_equation, unbound
from rl_triton_core._internal.equations.primitives import exp, log, multiply_or_zero, select

distance = clipped_value = estimate_kl = weigh_kl = surrogate = unbound


def clamp(x: Any, low: Any, high: Any) -> Any:
    """The number in [low, high] that is nearest to x; NaN stays."""
    return select(x < low, low, select(x > high, high, x))


def is_unequal(x: Any, y: Any) -> Any:
    """Whether both are numbers, and different ones."""
    return (x < y) | (x > y)


def exp_remainder(x: Any) -> Any:
    """The remainder exp(x) − 1 − x. Near 0, where that would cancel, its Taylor series."""
    near = clamp(x, -0.5, 0.5)
    series = 1.1470745597729725e-11 + near * 7.647163731819816e-13
    series = 2.08767569878681e-09 + near * (1.6059043836821613e-10 + near * series)
    series = 2.755731922398589e-07 + near * (2.505210838544172e-08 + near * series)
    series = 2.48015873015873e-05 + near * (2.7557319223985893e-06 + near * series)
    series = 0.001388888888888889 + near * (0.0001984126984126984 + near * series)
    series = 0.041666666666666664 + near * (0.008333333333333333 + near * series)
    series = near * near * (0.5 + near * (0.16666666666666666 + near * series))
    return select(near == x, series, exp(x) - 1.0 - x)


def log_sigmoid(x: Any) -> Any:
    """The logarithm of `sigmoid`: −log(1 + exp(−x))."""
    return select(x < 0.0, x, 0.0) - log(1.0 + exp(select(x < 0.0, x, -x)))


def sigmoid(x: Any) -> Any:
    """1/(1 + exp(−x))."""
    small = exp(select(x < 0.0, x, -x))
    return select(x < 0.0, small, 1.0) / (1.0 + small)


# -- terms of the loss ------------------------------------------------------------------------------------------------


class Coefficients(NamedTuple):
    """The numbers of a loss. One that is not wanted is infinite if it bounds something, else 0."""

    clip: Any = math.inf
    clip_high: Any = math.inf
    dual_clip: Any = math.inf
    value_coef: Any = 0.0
    value_clip: Any = math.inf
    huber_delta: Any = 1.0
    value_factor: Any = 1.0
    entropy_coef: Any = 0.0
    kl_coef: Any = 0.0
    log_ratio_clamp: Any = math.inf
    kl_clip: Any = math.inf
    tau: Any = 1.0
    tau_negative: Any = 1.0


def clip_surrogate(log_prob: Any, ratio: Any, advantage: Any, low: Any, high: Any, coefficients: Any) -> Any:
    """The clipped loss of PPO: −min(r·A, clip(r)·A); where A < 0 at most −dual_clip·A."""
    free = multiply_or_zero(advantage, ratio)
    clipped = multiply_or_zero(advantage, clamp(ratio, low, high))
    objective = select(clipped < free, clipped, free)
    least = select(advantage < 0.0, coefficients.dual_clip * advantage, objective)
    loss = -select(objective < least, least, objective)
    return loss, select((clipped < free) | (objective < least), 0.0, -free), 0.0


def weigh_score(log_prob: Any, ratio: Any, advantage: Any, low: Any, high: Any, coefficients: Any) -> Any:
    """The loss of CISPO: −clip(r)·A·log π, where no gradient flows through the ratio."""
    weight = multiply_or_zero(advantage, clamp(ratio, low, high))
    return -multiply_or_zero(weight, log_prob), 0.0, -weight


def gate_ratio(log_prob: Any, ratio: Any, advantage: Any, low: Any, high: Any, coefficients: Any) -> Any:
    """The loss of SAPO: −A·sigmoid(τ·(r − 1))·4/τ, with a τ for A > 0 and one for others."""
    tau = select(advantage > 0.0, coefficients.tau, coefficients.tau_negative)
    x = tau * (ratio - 1.0)
    slope = multiply_or_zero(4.0 * sigmoid(x) * sigmoid(-x), ratio)
    loss = multiply_or_zero(advantage, sigmoid(x) * 4.0 / tau)
    return -loss, -multiply_or_zero(advantage, slope), 0.0


def score(log_prob: Any, ratio: Any, advantage: Any, low: Any, high: Any, coefficients: Any) -> Any:
    """The loss of REINFORCE: −A·log π."""
    return -multiply_or_zero(advantage, log_prob), 0.0, -advantage


def square_error(error: Any, delta: Any) -> tuple[Any, Any]:
    """The squared error and its derivative."""
    return error * error, 2.0 * error


def huber_loss(error: Any, delta: Any) -> tuple[Any, Any]:
    """Huber's loss and its derivative."""
    slope = clamp(error, -delta, delta)
    return slope * (error - 0.5 * slope), slope


def omit_value(value: Any, old: Any, target: Any, bound: Any, delta: Any) -> tuple[Any, Any]:
    """Without values."""
    return 0.0, 0.0


def clip_change(value: Any, old: Any, target: Any, bound: Any, delta: Any) -> tuple[Any, Any]:
    """The error of a value that moves at most `bound` away from the old one (Stable-Baselines3)."""
    change = value - old
    clipped = clamp(change, -bound, bound)
    loss, slope = distance(old + clipped - target, delta)
    return loss, select(clipped == change, slope, 0.0)


def clip_change_or_not(value: Any, old: Any, target: Any, bound: Any, delta: Any) -> tuple[Any, Any]:
    """The larger of the errors of the clipped value and of the value itself (CleanRL)."""
    clipped, clipped_slope = clip_change(value, old, target, bound, delta)
    loss, slope = distance(value - target, delta)
    return select(clipped > loss, clipped, loss), select(clipped > loss, clipped_slope, slope)


def clip_error(value: Any, old: Any, target: Any, bound: Any, delta: Any) -> tuple[Any, Any]:
    """The error of the value, at most `bound` (RLlib)."""
    loss, slope = distance(value - target, delta)
    return select(loss > bound, bound, loss), select(loss > bound, 0.0, slope)


def omit_kl(x: Any, bound: Any, most: Any) -> tuple[Any, Any]:
    """Without a reference policy."""
    return 0.0, 0.0


def estimate_k1(x: Any, bound: Any, most: Any) -> tuple[Any, Any]:
    """−x, where x is the reference's log-probability minus the policy's; and its derivative by the latter."""
    return select(-x > most, most, -x), select(-x > most, 0.0, 1.0)


def estimate_k2(x: Any, bound: Any, most: Any) -> tuple[Any, Any]:
    """The value x²/2."""
    kl = 0.5 * x * x
    return select(kl > most, most, kl), select(kl > most, 0.0, -x)


def estimate_k3(x: Any, bound: Any, most: Any) -> tuple[Any, Any]:
    """The value exp(x) − 1 − x."""
    clamped = clamp(x, -bound, bound)
    kl = exp_remainder(clamped)
    return select(kl > most, most, kl), select((kl > most) | is_unequal(clamped, x), 0.0, -(kl + clamped))


def estimate_k1_straight_through(x: Any, bound: Any, most: Any) -> tuple[Any, Any]:
    """The value of k1 with the derivative of k2."""
    kl, _ = estimate_k1(x, bound, most)
    return kl, -x


def estimate_k3_straight_through(x: Any, bound: Any, most: Any) -> tuple[Any, Any]:
    """The value of k3 with the derivative of k2."""
    kl, _ = estimate_k3(x, bound, most)
    return kl, -x


def keep_kl(kl: Any, slope: Any, ratio: Any, is_clamped: Any) -> tuple[Any, Any]:
    """The divergence as it is."""
    return kl, slope


def multiply_by_ratio(kl: Any, slope: Any, ratio: Any, is_clamped: Any) -> tuple[Any, Any]:
    """The value r·KL, for tokens that another policy drew; its gradient flows through both, but for a clamped r."""
    by_ratio = multiply_or_zero(slope + select(is_clamped, 0.0, kl), ratio)
    return select(ratio == 0.0, 0.0, multiply_or_zero(kl, ratio)), select(ratio == 0.0, 0.0, by_ratio)


def compute_terms(
    policy: Any,
    old_log_prob: Any,
    advantage: Any,
    ref_log_prob: Any,
    value: Any,
    target: Any,
    old_value: Any,
    coefficients: Any,
) -> tuple[tuple[Any, ...], tuple[Any, Any, Any], Any]:
    """Terms of an element, as `TERMS`; derivatives of its loss by log-probability, entropy, exact KL; by the value."""
    log_prob, entropy, exact_kl = policy
    value_coef, factor = coefficients.value_coef, coefficients.value_factor
    entropy_coef, kl_coef = coefficients.entropy_coef, coefficients.kl_coef
    bound, most = coefficients.log_ratio_clamp, coefficients.kl_clip
    low, high = 1.0 - coefficients.clip, 1.0 + coefficients.clip_high
    change = log_prob - old_log_prob
    log_ratio = clamp(change, -bound, bound)
    ratio, is_clamped = exp(log_ratio), is_unequal(log_ratio, change)
    surrogate_loss, by_ratio, slope = surrogate(log_prob, ratio, advantage, low, high, coefficients)
    slope = slope + select(is_clamped, 0.0, by_ratio)
    value_error, value_slope = clipped_value(
        value, old_value, target, coefficients.value_clip, coefficients.huber_delta
    )
    kl, kl_slope = estimate_kl(ref_log_prob - log_prob, bound, most)
    kl, kl_slope = weigh_kl(kl, kl_slope, ratio, is_clamped)
    clipped = select((ratio < low) | (ratio > high), 1.0, 0.0)
    value_loss, whole_kl = multiply_or_zero(factor, value_error), kl + exact_kl
    averaged = surrogate_loss, value_loss, entropy, whole_kl, exp_remainder(log_ratio), -log_ratio, clipped, ratio
    by_policy = (slope + multiply_or_zero(kl_coef, kl_slope), -entropy_coef, kl_coef)
    return averaged, by_policy, multiply_or_zero(value_coef * factor, value_slope)


TERMS = ("policy_loss", "value_loss", "entropy", "kl", "approx_kl", "approx_kl_k1", "clip_fraction", "ratio_mean")
"""The terms, in order. The first four are divided by the loss's normaliser, the others by the sum of the weights."""
STATISTICS = (*TERMS, "explained_variance", "ratio_min", "ratio_max")
"""What `summarize_terms` returns after the loss."""


def combine_terms(policy: Any, value: Any, entropy: Any, kl: Any, coefficients: Any) -> Any:
    """The loss. A term with the coefficient 0 is only for the log, and may be infinite there."""
    loss = policy + multiply_or_zero(coefficients.value_coef, value)
    return loss - multiply_or_zero(coefficients.entropy_coef, entropy) + multiply_or_zero(coefficients.kl_coef, kl)


def summarize_terms(
    averaged: Any, weight: Any, moments: Any, extremes: Any, divisor: Any, coefficients: Any, undefined: Any
) -> tuple[Any, ...]:
    """The loss and the statistics, from the terms' weighted sums, the weights' sum, and what `undefined` is, NaN.

    `moments` are weighted sums of the value target, its square, its error and the square of that; `extremes` the least
    and the largest ratio; `divisor` the loss's normaliser.
    """
    policy, value, entropy, kl, approx_kl, approx_kl_k1, clipped, ratio = averaged
    target, target_square, error, error_square = moments
    least, largest = extremes
    each = invert_or_zero(divisor)
    policy, value = multiply_or_zero(each, policy), multiply_or_zero(each, value)
    entropy, kl = multiply_or_zero(each, entropy), multiply_or_zero(each, kl)
    share = invert_or_zero(weight)
    variance = target_square * share - target * share * target * share
    unexplained = error_square * share - error * share * error * share
    varies = variance > 1e-14 * target_square * share
    explained = select(varies, 1.0 - unexplained / select(varies, variance, 1.0), undefined)
    loss = combine_terms(policy, value, entropy, kl, coefficients)
    approx_kl, approx_kl_k1, clipped, ratio = approx_kl * share, approx_kl_k1 * share, clipped * share, ratio * share
    least, largest = select(weight == 0.0, 0.0, least), select(weight == 0.0, 0.0, largest)
    return loss, policy, value, entropy, kl, approx_kl, approx_kl_k1, clipped, ratio, explained, least, largest


def invert_or_zero(x: Any) -> Any:
    """1/x, which is 0 where x is."""
    return select(x == 0.0, 0.0, 1.0 / select(x == 0.0, 1.0, x))


# -- heads ------------------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """How log-probability and entropy come from a network's outputs x and y, over a last dimension.

    Of every element of that dimension `sums` gives three numbers. Their sums, in `readout`, give log-probability and
    entropy, and go into `slopes`: the derivatives by x and y, given those by log-probability and entropy. Of an
    old network `kl_sums` gives two numbers, `kl` the divergence from its outputs, and `kl_slopes` its derivatives.
    """

    sums: Callable[..., Any]
    """(x, y, action, peak) -> three numbers. The action is that of this dimension, or whether it is this one."""
    readout: Callable[..., Any]
    """sums -> (log-probability, entropy)."""
    slopes: Callable[..., Any]
    """(x, y, action, peak, sums, derivatives by log-probability and entropy) -> derivatives by x and y."""
    kl_sums: Callable[..., Any] = unbound
    """(x, y, old x, old y, peak, old peak) -> two numbers."""
    kl: Callable[..., Any] = unbound
    """(sums, kl_sums) -> KL(old ‖ new)."""
    kl_slopes: Callable[..., Any] = unbound
    """(x, y, old x, old y, peak, old peak, sums, kl_sums) -> derivatives of the KL by x and y."""
    indexed: bool = False
    """Whether an action is the index of a dimension, and `peak` the largest x over them; else the peak is 0."""


def given_sums(x: Any, y: Any, action: Any, peak: Any) -> tuple[Any, Any, Any]:
    """Log-probability and entropy as they are."""
    return x, y, 0.0


def given_readout(sums: Any) -> tuple[Any, Any]:
    """Log-probability and entropy."""
    return sums[0], sums[1]


def given_slopes(x: Any, y: Any, action: Any, peak: Any, sums: Any, by_log_prob: Any, by_entropy: Any) -> Any:
    """Derivatives as they are."""
    return by_log_prob, by_entropy


def sampled_sums(x: Any, y: Any, action: Any, peak: Any) -> tuple[Any, Any, Any]:
    """Log-probability, and its negative as an estimate of the entropy."""
    return x, -x, 0.0


def sampled_slopes(x: Any, y: Any, action: Any, peak: Any, sums: Any, by_log_prob: Any, by_entropy: Any) -> Any:
    """Derivative by the log-probability alone."""
    return by_log_prob - by_entropy, 0.0


def categorical_sums(x: Any, y: Any, action: Any, peak: Any) -> tuple[Any, Any, Any]:
    """The chosen logit, exp(logit) and exp(logit)·logit, all less the largest logit."""
    logit = x - peak
    weight = exp(logit)
    return select(action, logit, 0.0), weight, multiply_or_zero(weight, logit)


def categorical_readout(sums: Any) -> tuple[Any, Any]:
    """From the sums: log p[a] = x[a] − log Σ exp x,  H = log Σ exp x − Σ p·x."""
    log_total = log(sums[1])
    return sums[0] - log_total, log_total - sums[2] / sums[1]


def categorical_slopes(x: Any, y: Any, action: Any, peak: Any, sums: Any, by_log_prob: Any, by_entropy: Any) -> Any:
    """∂ log p[a] / ∂x = 1[a] − p,  ∂H/∂x = −p·(log p + H)."""
    _, entropy = categorical_readout(sums)
    probability = exp(x - peak) / sums[1]
    surprise = multiply_or_zero(probability, x - peak - log(sums[1]) + entropy)
    return by_log_prob * (select(action, 1.0, 0.0) - probability) - by_entropy * surprise, 0.0


def categorical_kl_sums(x: Any, y: Any, old: Any, old_y: Any, peak: Any, old_peak: Any) -> tuple[Any, Any]:
    """The weights exp(old logit), and that times the difference of the logits."""
    weight = exp(old - old_peak)
    return weight, multiply_or_zero(weight, old - old_peak - (x - peak))


def categorical_kl(sums: Any, kl_sums: Any) -> Any:
    """Σ p_old·(log p_old − log p)."""
    return kl_sums[1] / kl_sums[0] - log(kl_sums[0]) + log(sums[1])


def categorical_kl_slopes(
    x: Any, y: Any, old: Any, old_y: Any, peak: Any, old_peak: Any, sums: Any, kl_sums: Any
) -> tuple[Any, Any]:
    """Of the logits: p − p_old."""
    return exp(x - peak) / sums[1] - exp(old - old_peak) / kl_sums[0], 0.0


def gaussian_sums(x: Any, y: Any, action: Any, peak: Any) -> tuple[Any, Any, Any]:
    """−z²/2 − log σ − log √(2π) with z = (a − μ)/σ, and log σ + 1/2 + log √(2π). x is the mean, y is log σ."""
    z = (action - x) * exp(-y)
    return -0.5 * z * z - y - 0.9189385332046727, y + 1.4189385332046727, 0.0


def gaussian_slopes(x: Any, y: Any, action: Any, peak: Any, sums: Any, by_log_prob: Any, by_entropy: Any) -> Any:
    """∂ log p / ∂μ = z/σ,  ∂ log p / ∂ log σ = z² − 1,  ∂H / ∂ log σ = 1."""
    z = (action - x) * exp(-y)
    return multiply_or_zero(by_log_prob, z * exp(-y)), multiply_or_zero(by_log_prob, z * z - 1.0) + by_entropy


def gaussian_kl_sums(x: Any, y: Any, old: Any, old_y: Any, peak: Any, old_peak: Any) -> tuple[Any, Any]:
    """Each dimension's log σ − log σ_old + (σ_old² + (μ_old − μ)²)/(2σ²) − 1/2."""
    z = (old - x) * exp(-y)
    return y - old_y + 0.5 * (exp(2.0 * (old_y - y)) + z * z - 1.0), 0.0


def first_sum(sums: Any, kl_sums: Any) -> Any:
    """The divergence of independent dimensions is the sum of theirs."""
    return kl_sums[0]


def gaussian_kl_slopes(x: Any, y: Any, old: Any, old_y: Any, peak: Any, old_peak: Any, sums: Any, kl_sums: Any) -> Any:
    """By μ and log σ."""
    z = (old - x) * exp(-y)
    return -z * exp(-y), 1.0 - exp(2.0 * (old_y - y)) - z * z


def bernoulli_sums(x: Any, y: Any, action: Any, peak: Any) -> tuple[Any, Any, Any]:
    """The log-probability of the action, which is 1 with probability sigmoid(x), and the entropy."""
    size = select(x < 0.0, -x, x)
    entropy = log(1.0 + exp(-size)) + multiply_or_zero(exp(-size), size) / (1.0 + exp(-size))
    return log_sigmoid(select(action == 0.0, -x, x)), entropy, 0.0


def bernoulli_slopes(x: Any, y: Any, action: Any, peak: Any, sums: Any, by_log_prob: Any, by_entropy: Any) -> Any:
    """∂ log p / ∂x = a − p,  ∂H/∂x = −x·p·(1 − p)."""
    by_x = select(action == 0.0, -sigmoid(x), sigmoid(-x))
    return by_log_prob * by_x - by_entropy * multiply_or_zero(sigmoid(x) * sigmoid(-x), x), 0.0


def bernoulli_kl_sums(x: Any, y: Any, old: Any, old_y: Any, peak: Any, old_peak: Any) -> tuple[Any, Any]:
    """Each action's p_old·(log p_old − log p) + (1 − p_old)·(log(1 − p_old) − log(1 − p))."""
    ones = multiply_or_zero(sigmoid(old), log_sigmoid(old) - log_sigmoid(x))
    return ones + multiply_or_zero(sigmoid(-old), log_sigmoid(-old) - log_sigmoid(-x)), 0.0


def bernoulli_kl_slopes(x: Any, y: Any, old: Any, old_y: Any, peak: Any, old_peak: Any, sums: Any, kl_sums: Any) -> Any:
    """Of the logits: p − p_old."""
    return sigmoid(x) - sigmoid(old), 0.0


HEADS = {
    "given": Head(given_sums, given_readout, given_slopes),
    "sampled": Head(sampled_sums, given_readout, sampled_slopes),
    "categorical": Head(
        categorical_sums,
        categorical_readout,
        categorical_slopes,
        categorical_kl_sums,
        categorical_kl,
        categorical_kl_slopes,
        indexed=True,
    ),
    "gaussian": Head(gaussian_sums, given_readout, gaussian_slopes, gaussian_kl_sums, first_sum, gaussian_kl_slopes),
    "bernoulli": Head(
        bernoulli_sums, given_readout, bernoulli_slopes, bernoulli_kl_sums, first_sum, bernoulli_kl_slopes
    ),
}
"""Log-probabilities with entropies ("given") and without ("sampled"), and distributions, by their inputs x and y."""

# -- choices ----------------------------------------------------------------------------------------------------------

SURROGATES = {"clip": clip_surrogate, "cispo": weigh_score, "sapo": gate_ratio, "reinforce": score}
"""Each gives the loss of an element, its derivative by the logarithm of the ratio, and one by log π beside that."""
DISTANCES = {"mse": square_error, "huber": huber_loss}
CLIPS = {"none": omit_value, "sb3": clip_change, "cleanrl": clip_change_or_not, "rllib": clip_error}
ESTIMATORS = {"none": omit_kl, "k1": estimate_k1, "k2": estimate_k2, "k3": estimate_k3}
ESTIMATORS |= {"k1+": estimate_k1_straight_through, "k2+": estimate_k2, "k3+": estimate_k3_straight_through}

KL_WEIGHTS = {"none": keep_kl, "ratio": multiply_by_ratio}


class Choices(NamedTuple):
    """The equations that a call chooses, by name."""

    head: str
    distance: str = "mse"
    clipped_value: str = "none"
    estimate_kl: str = "none"
    surrogate: str = "clip"
    weigh_kl: str = "none"

    @property
    def chosen(self) -> Chosen:
        """The equations, by what they are called in others."""
        return (
            ("distance", DISTANCES[self.distance]),
            ("clipped_value", CLIPS[self.clipped_value]),
            ("estimate_kl", ESTIMATORS[self.estimate_kl]),
            ("surrogate", SURROGATES[self.surrogate]),
            ("weigh_kl", KL_WEIGHTS[self.weigh_kl]),
        )


PARTS = ("sums", "readout", "slopes", "kl_sums", "kl", "kl_slopes")
"""Equations of a head."""


def compile_equations(choices: Choices, language: Language, equations: Sequence[Any] = ()) -> dict[str, Any]:
    """Equations of a call by name: the `PARTS` of its head that there are, and others."""
    parts = {name: getattr(HEADS[choices.head], name) for name in PARTS}
    named = {name: part for name, part in parts.items() if part is not unbound} | {x.__name__: x for x in equations}
    return {name: compile_equation(x, language, choices.chosen) for name, x in named.items()}
