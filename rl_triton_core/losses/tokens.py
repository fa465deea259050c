"""Log-probabilities and entropies of tokens, from the logits of a language model."""

from __future__ import annotations

import math

import torch
from torch import distributed

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.arguments.outputs import overlaps_itself
from rl_triton_core._internal.launch.fast_path import with_fast_path
from rl_triton_core._internal.tokens.problem import TokenLogProbs, TokenProblem
from rl_triton_core._internal.tokens.solve import solve_tokens
from rl_triton_core._internal.tokens.split import check_part

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
    group: distributed.ProcessGroup | str | None = None,
    first: int = 0,
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
        group: Where a vocabulary is split, the process group whose ranks have its parts, of one token or more each;
            ``"world"`` for the default one. All call with the same tokens and mask, and get the same results, for which
            three numbers per token are exchanged, four with entropies. A loss of these, the same on all, gives each the
            gradient of its logits; no further exchange. Not under torch.compile.
        first: The token of the first of a part's logits; `tokens` are those of the whole vocabulary.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device.

    Returns:
        TokenLogProbs(log_probs, entropy), [...] each, with a graph if `logits` requires grad. A token whose logits have
        NaN or +∞ among them gets NaN, as does one without any finite logit.

    Raises:
        ValueError: A shape, device or value is wrong, as a token that there is not; other errors as of `ppo_loss`.

    Example:
        >>> token_log_probs(torch.zeros(1, 4), torch.tensor([2]), entropy=True)
        TokenLogProbs(log_probs=tensor([-1.3863]), entropy=tensor([1.3863]))
    """
    check.check_tensor("logits", logits)
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(f"logits: got shape {tuple(logits.shape)}, expected a last dimension of size 1 or more")
    check_tokens(tokens, mask, logits.shape[:-1], "that of the logits without the last", logits.device)
    temperature = check.check_number("temperature", temperature, LOWEST_TEMPERATURE, math.inf)
    part = check_part(group, first)
    own = tokens if part is None else part.find_own(tokens, logits.shape[-1])
    problem = TokenProblem(logits, own, mask, temperature, part)
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
