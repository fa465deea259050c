"""Log-probabilities and entropies of tokens from hidden states, and gradients by these and the last layer's weight.

*Bound* makes the logits, and the products of the layer and its gradients alone. *Eager* computes in float32 what the
others do; *in place* is the layer with `token_log_probs` in the memory of the logits; *TRL* is the function of TRL's
trainer. *GRPO* is `linear_grpo_loss` with entropies, beside that function with TRL's loss, and beside Liger's fused
linear loss, which has no entropies. Peaks are beyond the inputs.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from benchmarks import harness
from benchmarks.results import Row
from benchmarks.token_log_probs import CHECKED_TOKENS, LENGTH, Results, Way, compute_ours, compute_plain
from rl_triton_core.losses import linear_grpo_loss, linear_token_log_probs
from rl_triton_core.testing import assert_close

Loss = Callable[..., torch.Tensor]


class Setting(NamedTuple):
    """Number of tokens, size of a hidden state and of the vocabulary."""

    tokens: int
    width: int
    vocabulary: int
    dtype: str = "bfloat16"


SIZES = [(4096, 1536, 151936), (16384, 1536, 151936), (8192, 3584, 152064), (32768, 3584, 152064)]
SIZES.append((16384, 4096, 128256))
SETTINGS = {
    "cuda": [Setting(*x) for x in SIZES],
    "cpu": [Setting(512, 512, 32000, "float32")],
    "quick": [Setting(40, 8, 100, "float32")],
}
SECONDS = 1.0
COEFFICIENT = 0.01  # of the entropy


def measure(setting: Setting, options: Namespace) -> Iterator[Row]:
    make = partial(torch.randn, device=options.device)
    hidden, weight = make(setting.tokens, setting.width), 0.02 * make(setting.vocabulary, setting.width)
    tokens = torch.randint(setting.vocabulary, (setting.tokens,), device=options.device)
    leaves = [x.to(getattr(torch, setting.dtype)).requires_grad_() for x in (hidden, weight)]
    ways: dict[str, Way] = {"eager": compute_eagerly, "in place": compute_in_place, "ours": compute_linear}
    losses: dict[str, Loss] = {"GRPO": compute_loss}
    if all(map(importlib.util.find_spec, ("trl", "accelerate", "datasets"))):
        ways["TRL"], losses["TRL's GRPO"] = compute_as_trl, compute_loss_as_trl
    few, own = tokens[:CHECKED_TOKENS], (leaves[0][:CHECKED_TOKENS].detach(), leaves[1].detach())
    exact = compute_eagerly(*(x.double() for x in own), few)
    for got, want in (pair for way in ways.values() for pair in zip(way(*own, few), exact, strict=True)):
        assert_close(got.cpu(), want.cpu(), rtol=1e-4 if setting.dtype == "float32" else 2**-5)
    arms = {name: partial(run_both, way, *leaves, tokens) for name, way in ways.items()}
    advantages = make(setting.tokens)
    for name, loss in losses.items():
        check_loss(loss, *own, few, advantages[: len(few)])
        arms[name] = partial(run_both, loss, *leaves, tokens, advantages)
    if options.device == "cuda" and importlib.util.find_spec("liger_kernel"):
        arms["Liger's GRPO"] = make_liger(*leaves, tokens, advantages)
    arms["bound"] = partial(make_products, *(x.detach() for x in leaves))
    about = {"host_only": (*arms,), "peaks": options.device == "cuda", "reference": "bound"}
    yield from harness.measure_arms(arms, options.device, options.seconds or SECONDS, **about)


def compute_eagerly(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> Results:
    return compute_plain(linear(hidden, weight), tokens)


def compute_in_place(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> Results:
    return compute_ours(linear(hidden, weight), tokens, inplace_backward=True)


def compute_linear(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> Results:
    return linear_token_log_probs(hidden, weight, tokens, entropy=True)


def compute_as_trl(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> Results:
    """As TRL's trainer calls it, for both results."""
    utils: Any = importlib.import_module("trl.trainer.utils")
    about = None, tokens, 1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy")
    log_probs, entropy, *_ = utils._ChunkedLogProbFunction.apply(hidden, weight, *about)
    return log_probs, entropy


def run_both(way: Way | Loss, *given: torch.Tensor) -> None:
    """With the gradients by hidden states and weight of all that is found."""
    found = way(*given)
    torch.autograd.grad([x.sum() for x in (found if isinstance(found, tuple) else (found,))], given[:2])


def compute_loss(*given: torch.Tensor) -> torch.Tensor:
    """Of one response, with advantages per token."""
    hidden, weight, tokens, advantages = (x if i == 1 else x[None] for i, x in enumerate(given))
    return linear_grpo_loss(hidden, weight, tokens, None, advantages, entropy=True, entropy_coef=COEFFICIENT).loss


def compute_loss_as_trl(*given: torch.Tensor) -> torch.Tensor:
    """TRL's "bnpo" where the responses are of this policy, less the bonus for entropies."""
    *layer, tokens, advantages = given
    log_probs, entropy = compute_as_trl(*layer, tokens)
    ratio = (log_probs - log_probs.detach()).exp()
    losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return losses.mean() - COEFFICIENT * entropy.mean()


def check_loss(
    loss: Loss, hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, advantages: torch.Tensor
) -> None:
    """Compare the gradient by hidden states with that of float64, where the ratio is 1."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight) for dtype in (x.dtype, torch.float64)]
    log_probs, entropy = compute_eagerly(leaves[1], leaves[3], tokens)
    exact = -(advantages * log_probs + COEFFICIENT * entropy).mean()
    got = torch.autograd.grad(loss(leaves[0], leaves[2], tokens, advantages), (leaves[0], leaves[2]))
    for x, want in zip(got, torch.autograd.grad(exact, (leaves[1], leaves[3])), strict=True):
        bound = (1e-4 if x.dtype == torch.float32 else 2**-5) * want.abs().max().item()
        torch.testing.assert_close(x.double(), want, rtol=0, atol=bound)


def make_liger(hidden: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Of responses of so many tokens as TRL passes them, one at a time."""
    kinds = importlib.import_module("liger_kernel.chunked_loss")
    options = {"beta": 0.0, "use_ref_model": False, "loss_type": "bnpo", "chunk_size": 1}
    loss = kinds.LigerFusedLinearGRPOLoss(compiled=True, **options)
    states, tokens, advantages = (x.view(-1, LENGTH, *x.shape[1:]) for x in (hidden, *others))
    given = states, weight, tokens, torch.ones_like(tokens), advantages[:, 0]
    return lambda: torch.autograd.grad(loss(*given)[0], (hidden, weight))


def make_products(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    logits = linear(hidden, weight)
    torch.mm(logits, weight)
    torch.mm(logits.t(), hidden)
