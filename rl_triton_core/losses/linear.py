"""From hidden states of a language model: log-probabilities of tokens, and the loss of GRPO, without all logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.backend import choose_backend, needs_host
from rl_triton_core._internal.loss.problem import PPOLoss
from rl_triton_core._internal.loss.sequences import Sequences
from rl_triton_core._internal.loss.solve import LossFunction, get_gradients
from rl_triton_core._internal.tokens.linear import LinearFunction, LinearGradients, LinearTokens
from rl_triton_core._internal.tokens.problem import Stream, TokenLogProbs, TokenProblem, TokenResults
from rl_triton_core._internal.tokens.split import check_part
from rl_triton_core.losses.grpo import THROUGH_RATIO, grpo_loss, weigh_advantages
from rl_triton_core.losses.tokens import LOWEST_TEMPERATURE, check_tokens


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    mask: torch.Tensor | None = None,
    chunk: int | None = None,
    group: distributed.ProcessGroup | str | None = None,
    first: int = 0,
    backend: str | None = None,
) -> TokenLogProbs:
    r"""Log-probabilities of tokens, and entropies, from hidden states: the logits of one chunk of tokens at a time.

        logits = hidden · weightᵀ + bias,  then as `token_log_probs`

    Results and gradients are those of the layer and `token_log_probs`; the gradient makes the logits again. Those of
    weight and bias are summed in float32 over chunks, and in float64 if they are. A second derivative is refused.
    Under autocast the product is made in its dtype. torch.compile leaves the call as it is.

    Args:
        hidden: What the last layer takes, [..., H]; dtypes as of the logits of `token_log_probs`.
        weight: Of the last layer, perhaps tied to the embedding, [V, H]. Only what requires grad gets a gradient: with
            a frozen layer, hidden states alone.
        tokens: The index of each token in the vocabulary, [...], of any integer dtype.
        bias: Of the last layer, [V], or None.
        temperature: What logits are divided by, finite and at least 1e-6.
        entropy: Whether to compute entropies.
        mask: Nonzero where a token counts, [...]. Elsewhere neither hidden states nor token are read; results and
            gradient are 0 there. None: everywhere.
        chunk: Tokens of a chunk; None: those of about 2 GiB of logits on a GPU, 64 MiB elsewhere, at least 256; 4096
            with a group.
        group: As of `token_log_probs`, where each rank has the same hidden states and, of the layer, the rows of its
            part. Numbers are exchanged chunk by chunk; the gradients by hidden states are added up over the ranks.
        first: As of `token_log_probs`.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        TokenLogProbs(log_probs, entropy), [...] each, float32, or float64 if the hidden states are.

    Raises:
        ValueError: As of `token_log_probs`, as other errors are.

    Example:
        >>> linear_token_log_probs(torch.zeros(1, 3), torch.ones(4, 3), torch.tensor([2])).log_probs
        tensor([-1.3863])
    """
    call = check_linear(hidden, weight, bias, tokens, mask, temperature, chunk, backend, group, first)
    found = LinearFunction.apply(*call[:3], call, check.check_bool("entropy", entropy))  # type: ignore[no-untyped-call]
    shaped: Any = (None if x is None else x.view(tokens.shape) for x in found)
    return TokenLogProbs(*shaped)


def check_linear(
    hidden: Any, weight: Any, bias: Any, tokens: Any, mask: Any, temperature: Any, chunk: Any, backend: Any, *place: Any
) -> LinearTokens:
    """Check what log-probabilities are made of, and what `check_part` takes; under autocast, a layer in its dtype."""
    check.check_tensor("hidden", hidden)
    if not hidden.ndim or not hidden.shape[-1]:
        raise ValueError(f"hidden: got shape {tuple(hidden.shape)}, expected a last dimension of size 1 or more")
    check.check_tensor("weight", weight)
    if weight.ndim != 2 or not len(weight) or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected [V, {hidden.shape[-1]}], V at least 1")
    if bias is not None:
        check.check_tensor("bias", bias)
        check.check_shape("bias", bias, weight.shape[:1], "that of the weight without the last", hidden.device)
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and (x.dtype, x.device) != (hidden.dtype, hidden.device):
            raise ValueError(f"{name}: got {x.dtype} on {x.device}, expected {hidden.dtype} on {hidden.device}")
    check_tokens(tokens, mask, hidden.shape[:-1], "that of the hidden states without the last", hidden.device)
    temperature = check.check_number("temperature", temperature, LOWEST_TEMPERATURE, math.inf)
    size = None if chunk is None else check.check_count("chunk", chunk)
    part = check_part(*place)
    own = tokens if part is None else part.find_own(tokens, len(weight))
    flat = own.reshape(-1), None if mask is None else mask.reshape(-1)
    return LinearTokens(hidden.reshape(-1, hidden.shape[-1]), weight, bias, *flat, temperature, size, backend, part)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_grpo_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    old_log_probs: torch.Tensor | None,
    advantages: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    reference: Sequence[torch.Tensor] | None = None,
    ref_log_probs: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    ratio: str = "token",
    aggregation: str = "token-mean",
    normalizer: float | torch.Tensor | None = None,
    chunk: int | None = None,
    group: distributed.ProcessGroup | str | None = None,
    first: int = 0,
    backend: str | None = None,
    **options: Any,
) -> PPOLoss:
    r"""The loss of GRPO from hidden states: the logits of one chunk of tokens at a time, made once.

        log_probs, entropy of hidden · weightᵀ + bias as of `token_log_probs`,  then as `grpo_loss`

    Loss, statistics and gradients are those of the layer, `token_log_probs` and `grpo_loss`; the gradient is made
    together with the loss, while the logits of a chunk are there, and `backward` multiplies it. Sums are kept in
    float32 over chunks, as of `linear_token_log_probs`.

    Args:
        hidden: What the last layer takes, [num_sequences, num_tokens, H], or, with `cu_seqlens`, [num_tokens, H].
        weight: Of the last layer, as of `linear_token_log_probs`.
        tokens: The index of each token in the vocabulary, one per hidden state, of any integer dtype.
        old_log_probs: As of `grpo_loss`.
        advantages: As of `grpo_loss`.
        bias: Of the last layer, [V], or None.
        temperature: What logits are divided by, finite and at least 1e-6.
        entropy: Whether the entropy is that of the distribution of each token; False estimates it by −log_probs.
        reference: Hidden states, weight and perhaps bias of a reference policy, in place of `ref_log_probs`.
        ref_log_probs: As of `grpo_loss`.
        mask: As of `grpo_loss`; where it is 0, neither hidden states nor token are read.
        weights: As of `grpo_loss`.
        cu_seqlens: As of `grpo_loss`.
        ratio: As of `grpo_loss`. With those of sequences, a chunk has whole ones, at least one, and the ends of packed
            ones are read from the device.
        aggregation: As of `grpo_loss`.
        normalizer: As of `grpo_loss`.
        chunk: Tokens of a chunk, as of `linear_token_log_probs`.
        group: As of `linear_token_log_probs`, of the reference too.
        first: As of `token_log_probs`.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.
        **options: The other arguments of `grpo_loss`, such as `surrogate`, `clip` and `kl_coef`.

    Returns:
        The loss, its parts and statistics, as of `ppo_loss`.

    Raises:
        ValueError: A shape, device or value is wrong; other errors are those of `ppo_loss`.

    Example:
        >>> hidden, tokens = torch.zeros(1, 2, 3), torch.tensor([[2, 0]])
        >>> linear_grpo_loss(hidden, torch.ones(4, 3), tokens, None, torch.tensor([1.0])).loss
        tensor(-1.)
    """
    call = check_linear(hidden, weight, bias, tokens, mask, temperature, chunk, backend, group, first)
    check.check_bool("entropy", entropy)
    if tokens.ndim != (2 if cu_seqlens is None else 1):
        expected = "[num_sequences, num_tokens], or [num_tokens] with cu_seqlens"
        raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, expected {expected}")
    about = {"temperature": temperature, "mask": mask, "chunk": chunk, "group": group, "first": first}
    log_probs_of = partial(linear_token_log_probs, backend=backend, **about)
    if reference is not None:
        if ref_log_probs is not None:
            raise ValueError("reference: got one together with ref_log_probs, expected one of the two")
        if not isinstance(reference, (tuple, list)) or len(reference) not in (2, 3):
            raise ValueError(f"reference: got {len(reference)} of them, expected hidden states, weight, perhaps a bias")
        with torch.no_grad():
            ref_log_probs = log_probs_of(*reference[:2], tokens, bias=(*reference, None)[2]).log_probs
    streams = {"old_log_probs": old_log_probs, "ref_log_probs": ref_log_probs, "weights": weights, "mask": mask}
    options |= {"cu_seqlens": cu_seqlens, "ratio": ratio, "aggregation": aggregation, "normalizer": normalizer}
    loss_of: Callable[..., PPOLoss] = grpo_loss
    whole = partial(loss_of, advantages=advantages, backend=backend, **streams, **options)
    whole(torch.zeros(tokens.shape, device=tokens.device))  # refuses what is wrong before any product
    layer = hidden, weight, bias
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in layer]
    if not any(wanted) or needs_host(hidden.device):
        found = log_probs_of(hidden, weight, tokens, bias=bias, entropy=entropy)
        return whole(found.log_probs, entropy=found.entropy)
    result, gradients = evaluate_with_gradients(call, wanted, tokens.shape, entropy, whole)
    targets = [None if x is None or not want else (x.shape, x.dtype) for x, want in zip(layer, wanted, strict=True)]
    written = (result.loss, result.loss, *(x for x in gradients if x is not None))
    scale = choose_backend(backend, hidden.device).loss.scale_gradients
    return result._replace(loss=LossFunction.apply(written, targets, scale, *layer))  # type: ignore[no-untyped-call]


@torch.no_grad()
def evaluate_with_gradients(
    call: LinearTokens, wanted: Sequence[bool], shape: torch.Size, has_entropy: bool, whole: partial[PPOLoss]
) -> tuple[PPOLoss, Sequence[Stream]]:
    """The loss that `whole` is of all tokens, and its gradients by what is wanted of hidden states, weight and bias."""
    given = whole.keywords
    sequences, ratio, weights = Sequences(shape, given["cu_seqlens"], call.mask), given["ratio"], given["weights"]
    shares, factor = share_tokens(sequences, call.tokens, given["aggregation"], given["normalizer"]), None
    if call.hidden.dtype == torch.float16 and shares.numel():  # its range may be too small before the loss is scaled
        factor = shares.abs().amax()
        shares = shares / torch.where(factor == 0, 1, factor)
    advantages = given["advantages"]
    streams = {name: given[name] for name in ("old_log_probs", "ref_log_probs", "weights", "advantages")}
    streams["mask"] = shares.to(check.find_precision((call.hidden,)))
    if weights is not None and ratio == "sequence" and given.get("surrogate", "clip") in THROUGH_RATIO:
        streams["weights"] = None
        advantages = weigh_advantages(advantages.reshape(-1), sequences.average(weights.reshape(-1)))
        advantages = advantages.to(check.find_precision((call.hidden, given["advantages"])))
    if advantages.shape in ((sequences.count,), (sequences.count, 1)):
        streams["advantages"] = sequences.spread(advantages.reshape(-1))
    streams = {name: None if x is None else x.reshape(-1) for name, x in streams.items()}
    ratio_of_chunk = ratio if ratio == "token" else "sequence-token"
    loss_of = partial(whole, ratio=ratio_of_chunk, aggregation="token-mean", normalizer=1.0)
    ends = None if ratio == "token" else sequences.find_starts(torch.device("cpu"))[1:].tolist()
    chunks = call.list_chunks(ends)
    sums = LinearGradients(call, wanted, len(chunks) > 1 or factor is not None)
    starts = sequences.find_starts(call.tokens.device)

    def add(part: slice, rows: torch.Tensor, problem: TokenProblem, results: TokenResults) -> None:
        sums.add(part, rows, problem, results, differentiate_chunk(loss_of, streams, starts, part, results))

    log_probs, *_, entropies = call.evaluate(chunks, has_entropy, add)
    result = whole(log_probs.view(shape), entropy=None if entropies is None else entropies.view(shape))
    return result, sums.finish(factor)


def share_tokens(sequences: Sequences, tokens: torch.Tensor, aggregation: str, normalizer: Any) -> torch.Tensor:
    """The weight of each token in the loss; 0 where the loss is divided by 0."""
    shares = sequences.weigh(tokens)
    usual = shares.sum() if aggregation == "token-mean" else float(sequences.count)
    divisor = usual if normalizer is None else normalizer
    if aggregation == "sequence-mean":
        shares = shares * sequences.spread(sequences.invert_counts(shares))
    if isinstance(divisor, torch.Tensor):
        return torch.where(divisor == 0, 0, shares / divisor)
    return shares / float(divisor) if divisor else 0 * shares


def differentiate_chunk(
    loss_of: Callable[..., PPOLoss],
    streams: dict[str, Stream],
    starts: torch.Tensor,
    part: slice,
    results: TokenResults,
) -> Sequence[Stream]:
    """The derivatives of the sum over a chunk's tokens by their log-probabilities and entropies."""
    own: dict[str, Any] = {name: None if x is None else x[part] for name, x in streams.items()}
    own["advantages"] = own["advantages"].unsqueeze(0)
    own["cu_seqlens"] = starts.clamp(part.start, part.stop) - part.start
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (results.log_probs, results.entropy) if x is not None]
        loss = loss_of(leaves[0], entropy=(*leaves, None)[1], **own).loss
    return (*get_gradients(loss), None)[:2]
