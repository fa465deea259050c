"""Log-probabilities and entropies of tokens, from the logits of a language model."""

from __future__ import annotations

import math
from typing import Any

import torch

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.arguments.outputs import overlaps_itself
from rl_triton_core._internal.launch.fast_path import with_fast_path
from rl_triton_core._internal.tokens.linear import LinearFunction, LinearTokens
from rl_triton_core._internal.tokens.problem import TokenLogProbs, TokenProblem
from rl_triton_core._internal.tokens.solve import solve_tokens

LOWEST_TEMPERATURE = 1e-6


@with_fast_path
def token_log_probs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    mask: torch.Tensor | None = None,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> TokenLogProbs:
    r"""Log-probabilities of tokens, and entropies, in one pass over the logits; no second tensor of their size arises.

        x = logits / temperature,  z = log Σ exp(x),  p = exp(x − z)
        log_prob = x[token] − z
        entropy = z − Σ p·x

    The gradient takes one pass as well, and one tensor like the logits, or their own memory. It flows to the logits
    alone, once: a second derivative is refused. A logit of −∞ has p = 0 and the gradient 0.

    Args:
        logits: [..., V], of any vocabulary size V; float32, bfloat16, float16, or float64 (not on the triton backend).
            They are copied if the numbers of a token do not lie side by side, or the other dimensions do not fold into
            two.
        tokens: The index of each token in the vocabulary, [...], of any integer dtype. One that there is not is a
            ValueError, on a GPU an assertion of the kernel.
        temperature: What logits are divided by, finite and at least 1e-6.
        entropy: Whether to compute entropies.
        mask: Nonzero where a token counts, [...]. Elsewhere neither logits nor token are read; results and gradient are
            0 there. None: everywhere.
        inplace_backward: Write the gradient into the memory of the logits, which must not be read afterwards; an
            operation that kept them for its own backward pass then raises PyTorch's error. They must be the result of
            an operation, such as a linear layer. Under torch.compile this is not read: the compiler plans memory.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        TokenLogProbs(log_probs, entropy), [...] each, with a graph if `logits` requires grad. A token whose logits have
        NaN or +∞ among them gets NaN, as does one without any finite logit.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, such as a token that there is not.
        BackendUnavailableError: The backend asked for cannot run here.

    Example:
        >>> token_log_probs(torch.zeros(1, 4), torch.tensor([2]), entropy=True)
        TokenLogProbs(log_probs=tensor([-1.3863]), entropy=tensor([1.3863]))
    """
    check.check_tensor("logits", logits)
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(f"logits: got shape {tuple(logits.shape)}, expected a last dimension of size 1 or more")
    check_tokens(tokens, mask, logits.shape[:-1], "that of the logits without the last", logits.device)
    problem = TokenProblem(
        logits, tokens, mask, check.check_number("temperature", temperature, LOWEST_TEMPERATURE, math.inf)
    )
    check.check_bool("entropy", entropy)
    if check.check_bool("inplace_backward", inplace_backward) and not check.is_traced():
        check_own_memory(logits)
    return solve_tokens(problem, entropy, inplace_backward, backend)


def check_own_memory(logits: torch.Tensor) -> None:
    """Check that a gradient can take the memory of the logits, if they have any."""
    if not logits.numel():
        return
    owner = logits if logits._base is None else logits._base
    if logits.requires_grad and owner.is_leaf and owner.requires_grad:
        raise ValueError("logits: got a leaf together with inplace_backward, expected the result of an operation")
    if overlaps_itself(logits):
        raise ValueError(
            "logits: got elements that share memory together with inplace_backward, expected distinct ones"
        )


def check_tokens(
    tokens: torch.Tensor, mask: torch.Tensor | None, shape: torch.Size, which: str, device: torch.device
) -> None:
    """Check indices in a vocabulary, and what says which of them count."""
    check.check_tensor("tokens", tokens, check.INTEGER_DTYPES)
    check.check_shape("tokens", tokens, shape, which, device)
    if mask is not None:
        check.check_tensor("mask", mask, check.FLAG_DTYPES)
        check.check_shape("mask", mask, tokens.shape, "that of the tokens", device)


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
        chunk: Tokens of a chunk; None: those of about 1 GiB of logits on a GPU, 64 MiB elsewhere, at least 256.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        TokenLogProbs(log_probs, entropy), [...] each, float32, or float64 if the hidden states are.

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, such as a token that there is not.
        BackendUnavailableError: The backend asked for cannot run here.

    Example:
        >>> linear_token_log_probs(torch.zeros(1, 3), torch.ones(4, 3), torch.tensor([2])).log_probs
        tensor([-1.3863])
    """
    check.check_tensor("hidden", hidden)
    if not hidden.ndim or not hidden.shape[-1]:
        raise ValueError(f"hidden: got shape {tuple(hidden.shape)}, expected a last dimension of size 1 or more")
    check.check_tensor("weight", weight)
    if weight.ndim != 2 or not len(weight) or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected [V, {hidden.shape[-1]}], V at least 1")
    if bias is not None:
        check.check_tensor("bias", bias)
        check.check_shape("bias", bias, weight.shape[:1], "that of the weight without the last", hidden.device)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and (x.dtype, x.device) != (hidden.dtype, hidden.device):
            raise ValueError(f"{name}: got {x.dtype} on {x.device}, expected {hidden.dtype} on {hidden.device}")
    check_tokens(tokens, mask, hidden.shape[:-1], "that of the hidden states without the last", hidden.device)
    temperature = check.check_number("temperature", temperature, LOWEST_TEMPERATURE, math.inf)
    size = None if chunk is None else check.check_count("chunk", chunk)
    flat = tokens.reshape(-1), None if mask is None else mask.reshape(-1)
    rows = hidden.reshape(-1, hidden.shape[-1])
    call = LinearTokens(rows, weight, bias, *flat, temperature, size, backend)
    found = LinearFunction.apply(rows, weight, bias, call, check.check_bool("entropy", entropy))  # type: ignore[no-untyped-call]
    shaped: Any = (None if x is None else x.view(tokens.shape) for x in found)
    return TokenLogProbs(*shaped)
