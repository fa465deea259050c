"""The loss of group relative policy optimisation (Shao et al. 2024, https://arxiv.org/abs/2402.03300)."""

from __future__ import annotations

import math
from typing import Any

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.arguments.side_effects import warn
from rl_triton_core._internal.backend import copy_to_host, needs_host
from rl_triton_core._internal.launch.fast_path import with_fast_path
from rl_triton_core._internal.loss.arguments import (
    Elements,
    Number,
    build_problem,
    check_coefficient,
    drop_graph,
    flatten,
)
from rl_triton_core._internal.loss.problem import LossProblem, PPOLoss
from rl_triton_core._internal.loss.sequences import Sequences
from rl_triton_core._internal.loss.solve import solve_loss
from rl_triton_core.losses.policies import LogProbs

RATIOS = ("token", "sequence", "sequence-token")
THROUGH_RATIO = ("clip", "sapo")
"""Surrogates whose gradient flows through the ratio: of a sequence's, into all of its tokens."""
AGGREGATIONS = ("token-mean", "sequence-mean", "sequence-sum")


@with_fast_path
def grpo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor | None,
    advantages: torch.Tensor,
    *,
    ref_log_probs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    surrogate: str = "clip",
    ratio: str = "token",
    clip: Number | None = 0.2,
    clip_high: Number | None = None,
    dual_clip: Number | None = None,
    tau: Number = 1.0,
    tau_negative: Number = 1.05,
    entropy_coef: Number = 0.0,
    kl_coef: Number = 0.0,
    kl_estimator: str = "k3",
    kl_times_ratio: bool = False,
    aggregation: str = "token-mean",
    normalizer: Number | None = None,
    log_ratio_clamp: Number | None = None,
    kl_clip: Number | None = None,
    backend: str | None = None,
) -> PPOLoss:
    r"""The surrogate loss of tokens, with KL divergence to a reference, over sequences of any lengths.

        loss of a token = weight·L + kl_coef·KL − entropy_coef·H

        surrogate          L
        "clip"             −min(r·A, clip(r, 1 − clip, 1 + clip_high)·A)                       PPO, GRPO
        "cispo"            −clip(r, 1 − clip, 1 + clip_high)·A·log π, r as a constant          CISPO
        "sapo"             −A·sigmoid(τ·(r − 1))·4/τ, τ = `tau` if A > 0, else `tau_negative`    SAPO
        "reinforce"        −A·log π                                                            REINFORCE, GPG

        ratio              r
        "token"            π/π_old of the token
        "sequence"         exp(mean of log π/π_old over the sequence's tokens): s                  GSPO
        "sequence-token"   the same value; its gradient is that of s·r/r, s and the divisor as constants    GSPO-token

        aggregation        the loss
        "token-mean"       sum over all tokens / number of tokens                              DAPO, BNPO
        "sequence-mean"    sum over sequences of the mean over their tokens / number of sequences    GRPO
        "sequence-sum"     sum over all tokens / number of sequences                           Dr. GRPO

        kl_estimator       KL, with x = ref_log_probs − log_probs                              its derivative
        "k1"               −x                                                                  1
        "k2"               x²/2                                                                −x
        "k3"               exp(x) − 1 − x                                                      1 − exp(x)
        "k1+", "k3+"       as "k1" and "k3"                                                    −x, as verl's

    `normalizer` takes the place of the number that the sum is divided by. Statistics beside the loss and its parts are
    means over tokens, each with its weight in the loss.

    Args:
        log_probs: Log-probabilities of the tokens under the policy, [num_sequences, num_tokens], or, with `cu_seqlens`,
            [num_tokens]; float32, bfloat16, float16, or float64 (not on the triton backend).
        old_log_probs: Those under the policy that drew the tokens, shaped like `log_probs`; None: under this one.
        advantages: A, one per sequence, [num_sequences] or [num_sequences, 1], or one per token, shaped like
            `log_probs`, or, with `cu_seqlens`, [1, num_tokens]. A flat one of as many sequences as tokens is per
            sequence, and a warning says so.
        ref_log_probs: Those under a reference policy, shaped like `log_probs`.
        entropy: Of the policy at each token, shaped like `log_probs`; None estimates it by −log_probs.
        mask: Which tokens count, shaped like `log_probs`: nonzero if bool or integer; a weight if floating point. What
            stands in a token of weight 0 is not read.
        weights: What multiplies the loss L of tokens, such as importance weights of the rollout's policy, or a mask of
            tokens that still count in the normaliser; shaped like `log_probs`, >= 0. None: 1.
        cu_seqlens: For sequences that lie end to end: where each starts, and the end of the last, [num_sequences + 1],
            int32 or int64, rising from 0 to num_tokens.
        surrogate: See above (CISPO: https://arxiv.org/abs/2506.13585, SAPO: https://arxiv.org/abs/2511.20347).
        ratio: See above (GSPO: https://arxiv.org/abs/2507.18071). ``"sequence"`` takes advantages per sequence. In
            statistics r is the ratio that is chosen here.
        clip: How far the ratio may fall below 1, and, without `clip_high`, rise above it; None does not clip.
        clip_high: How far the ratio may rise above 1.
        dual_clip: Where A < 0, the loss "clip" is at most −dual_clip·A (Ye et al. 2020); >= 1, or None.
        tau: τ of "sapo" where A > 0, at least 1e-6.
        tau_negative: τ of "sapo" elsewhere.
        entropy_coef: Coefficient of the entropy, which is maximised.
        kl_coef: Coefficient of the KL divergence.
        kl_estimator: How the divergence is estimated, see above; "k2+" is "k2".
        kl_times_ratio: Whether the divergence of a token is r·KL, which corrects it for tokens that another policy drew
            (DeepSeek-V3.2); not with the ratio "sequence".
        aggregation: See above.
        normalizer: What the sum is divided by, e.g. a number of tokens over all ranks; a number, or a tensor of one.
        log_ratio_clamp: The largest |log r|, and |x| of "k3", beyond which the derivative is 0; None does not clamp.
        kl_clip: The largest divergence of a token, beyond which its derivative is 0, but for "k1+" and
            "k3+"; None does not clip.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        The loss, its parts and statistics, as of `ppo_loss`.

    Raises:
        ValueError: A shape, device or value is wrong; other errors are those of `ppo_loss`.

    Example:
        >>> log_probs = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> grpo_loss(log_probs, None, torch.tensor([1.0, -1.0]), mask=mask).loss
        tensor(-0.3333)
    """
    policy = LogProbs(log_probs, entropy).check()
    if log_probs.ndim != (2 if cu_seqlens is None else 1):
        expected = "[num_sequences, num_tokens]" if cu_seqlens is None else "[num_tokens] with cu_seqlens"
        raise ValueError(f"log_probs: got shape {tuple(log_probs.shape)}, expected {expected}")
    problem = build_problem(
        policy,
        old_log_probs=log_probs.detach() if old_log_probs is None else old_log_probs,
        ref_log_probs=ref_log_probs,
        mask=mask,
        clip=clip,
        clip_high=clip_high,
        dual_clip=dual_clip,
        entropy_coef=entropy_coef,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        kl_times_ratio=kl_times_ratio,
        log_ratio_clamp=log_ratio_clamp,
        kl_clip=kl_clip,
        surrogate=surrogate,
        tau=tau,
        tau_negative=tau_negative,
    )
    check.check_choice("ratio", ratio, RATIOS)
    add_sequences(problem, policy.elements, advantages, cu_seqlens, warns=ratio != "sequence")
    factors = policy.elements.check_stream("weights", weights)
    if needs_host(log_probs.device):  # it may have no float64
        problem.streams, factors, normalizer = copy_to_host((problem.streams, factors, normalizer))
    sequences = Sequences(log_probs.shape, problem.streams.cu_seqlens, problem.streams.mask)
    crosses_tokens = ratio == "sequence" and surrogate in THROUGH_RATIO
    if crosses_tokens and not problem.per_sequence:
        raise ValueError(
            "ratio: got 'sequence' with advantages per token, expected 'sequence-token', or one advantage per sequence"
        )
    if kl_times_ratio and ratio == "sequence":
        raise ValueError("kl_times_ratio: got True with the ratio 'sequence', expected 'token' or 'sequence-token'")
    if factors is not None:
        add_weights(problem, sequences, factors, per_sequence=crosses_tokens)
    if ratio != "token":
        share_ratio(problem, sequences)
    aggregate_tokens(problem, sequences, check.check_choice("aggregation", aggregation, AGGREGATIONS), normalizer)
    return solve_loss(problem, policy.network, backend)


def add_sequences(problem: LossProblem, elements: Elements, advantages: Any, cu_seqlens: Any, warns: bool) -> None:
    """Where sequences begin and end, and advantages per token or per sequence."""
    per_token = [tuple(elements.shape)]
    if cu_seqlens is None:
        num_sequences, problem.length = elements.shape
    else:
        layout = check.check_sequences(elements.name, problem.inputs[0].view(-1), -1, cu_seqlens)
        problem.set_streams(cu_seqlens=layout.cu_seqlens)
        num_sequences = layout.num_envs
        per_token.append((1, *elements.shape))
    check.check_tensor("advantages", advantages, check.REAL_DTYPES)
    shape = tuple(advantages.shape)
    problem.per_sequence = shape in ((num_sequences,), (num_sequences, 1))
    if not problem.per_sequence and shape not in per_token:
        raise ValueError(
            f"advantages: got shape {shape}, expected {(num_sequences,)}, one per sequence, or "
            f"{tuple(elements.shape)}, one per token"
        )
    check.check_device("advantages", advantages, elements.device)
    check.check_detached("advantages", advantages)
    are_both = cu_seqlens is not None and problem.per_sequence and shape == per_token[0] and not check.is_traced()
    # unless each sequence is known to be a token
    if warns and are_both and (cu_seqlens.device.type in check.UNREAD or (cu_seqlens.diff() != 1).any()):
        text = "the shapes [num_sequences, 1] and [1, num_tokens] say which"
        warn(f"advantages: got as many as sequences and as tokens, and took one per sequence; {text}")
    problem.set_streams(advantages=flatten(drop_graph(advantages)))


def add_weights(problem: LossProblem, sequences: Sequences, weights: torch.Tensor, per_sequence: bool) -> None:
    """Weights as factors of the advantages, as they are not negative; of each sequence, their mean."""
    advantages = problem.streams.advantages
    assert advantages is not None
    if check.can_read_values(weights, ("grpo_loss", "weights", weights.dtype)):
        check.refuse_cells("weights", weights, weights < 0, sequences.mask, "numbers >= 0")
    if per_sequence:
        weights = sequences.average(weights)
    elif problem.per_sequence:
        advantages = sequences.spread(advantages)
    problem.per_sequence = per_sequence
    product = weigh_advantages(advantages, weights)
    problem.set_streams(advantages=product.to(check.find_precision((*problem.inputs, advantages))))


def weigh_advantages(advantages: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Products, 0 where one of the two is."""
    return torch.where((advantages == 0) | (weights == 0), 0, advantages * weights)


def share_ratio(problem: LossProblem, sequences: Sequences) -> None:
    """Let every token have the ratio of its sequence: by old log-probabilities that make it so."""
    log_probs, old = problem.inputs[0].detach().view(-1), problem.streams.old_log_probs
    assert old is not None
    dtype, log_probs = check.find_precision((log_probs, old)), log_probs.to(old.device).double()
    mean = sequences.spread(sequences.average(log_probs - old))
    shared = torch.where(mean == -math.inf, math.inf, log_probs - mean)  # where log_probs has a −∞ too
    problem.set_streams(old_log_probs=shared.to(dtype))


def aggregate_tokens(problem: LossProblem, sequences: Sequences, aggregation: str, normalizer: Any) -> None:
    """Weights of the sequences, and what the weighted sum is divided by."""
    if isinstance(normalizer, torch.Tensor):
        check.check_tensor("normalizer", normalizer, check.FLAG_DTYPES)
        normalizer = normalizer.double()  # a number of tokens, perhaps
    divisor = None if normalizer is None else check_coefficient("normalizer", normalizer, low=0.0)
    factor = 1.0
    if aggregation == "sequence-mean":
        if sequences.mask is None and sequences.cu_seqlens is None:
            factor = float(sequences.shape[1])
        else:
            problem.set_streams(scale=sequences.invert_counts(sequences.weigh(problem.like.view(-1))))
    if aggregation != "token-mean" and divisor is None:
        divisor = float(sequences.count)
    if isinstance(divisor, torch.Tensor):
        problem.set_streams(normalizer=divisor * factor)
    else:
        problem.normalizer = None if divisor is None else divisor * factor
