"""Log-probabilities and entropies of tokens from hidden states, and gradients by these and the last layer's weight.

*Bound* makes the logits, and the products of the layer and its gradients alone. *Eager* computes in float32 what the
others do; *in place* is the layer with `token_log_probs` in the memory of the logits; *TRL* is the function of TRL's
trainer, *verl* its fused kernels. *GRPO* is `linear_grpo_loss` with entropies, beside that function with TRL's loss,
and beside Liger's fused linear loss, which has none. *Split* is with half of the vocabulary on each of two GPUs. Peaks
are beyond the inputs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.nn.functional import linear

from benchmarks import harness
from benchmarks.harness import Options, Rows, Setting, make_row
from benchmarks.token_log_probs import CHECKED_TOKENS, LENGTH, Results, Way, compute_ours, compute_plain
from rl_triton_core.losses import linear_grpo_loss, linear_token_log_probs
from rl_triton_core.testing import assert_close

Loss = Callable[..., torch.Tensor]
BURST, PARTS = 5, 2
COEFFICIENT = 0.01  # of the entropy
compute_linear = partial(linear_token_log_probs, entropy=True)


def measure(setting: Setting, options: Options) -> Rows:
    given = draw(setting, options.device)
    in_place = partial(compute_eagerly, of_logits=partial(compute_ours, inplace_backward=True))
    ways: dict[str, Way] = {"eager": compute_eagerly, "in place": in_place, "ours": compute_linear}
    losses: dict[str, Loss] = {"GRPO": compute_loss}
    if all(map(importlib.util.find_spec, ("trl", "accelerate", "datasets"))):
        ways["TRL"], losses["TRL's GRPO"] = compute_as_trl, compute_loss_as_trl
    if options.device == "cuda" and setting.dtype != "float32" and importlib.util.find_spec("verl"):
        ways["verl"] = compute_as_verl
    for way in ways.values():
        check_way(way, *given[:3])
    for loss in losses.values():
        check_loss(loss, *given)
    leaves = given[:2]
    arms = {name: partial(harness.run_pass, way, leaves, *given[:3]) for name, way in ways.items()}
    arms |= {name: partial(harness.run_pass, loss, leaves, *given) for name, loss in losses.items()}
    if options.device == "cuda" and importlib.util.find_spec("liger_kernel"):
        arms["Liger's GRPO"] = make_liger(*given)
    arms["bound"] = partial(make_products, *(x.detach() for x in leaves))
    about = {"host_only": (*arms,), "peaks": options.device == "cuda", "reference": "bound"}
    yield from harness.measure_arms(arms, options.device, options.seconds, **about)
    if options.device == "cuda" and torch.cuda.device_count() < PARTS:
        yield make_row("split", "full", "µs", [], "needs two GPUs")
    elif options.device == "cuda" or options.quick:
        times, peaks = harness.run_in_group(measure_part, PARTS, options.device, setting)
        yield from harness.list_times(times)
        yield from (make_row(name, "peak", "MiB", peak) for name, peak in peaks.items())


def draw(setting: Setting, device: str) -> list[torch.Tensor]:
    """Hidden states and weight, which ask for gradients, tokens, and an advantage for each."""
    about = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    make = partial(torch.randn, **about)
    hidden, weight = make(setting.tokens, setting.width), 0.02 * make(setting.vocabulary, setting.width)
    tokens = torch.randint(setting.vocabulary, (setting.tokens,), **about)
    leaves = [x.to(getattr(torch, setting.dtype)).requires_grad_() for x in (hidden, weight)]
    return [*leaves, tokens, make(setting.tokens)]


def measure_part(device: str, setting: Setting) -> tuple[harness.Times, dict[str, float]]:
    """Microseconds and peaks of one process, which has some of the vocabulary, once the results are right."""
    given, size = draw(setting, device), -(-setting.vocabulary // PARTS)
    own = slice(size * distributed.get_rank(), size * (1 + distributed.get_rank()))
    way, loss = (partial(x, group="world", first=own.start) for x in (compute_linear, compute_loss))
    check_way(way, *given[:3], own=own)
    check_loss(loss, *given, own=own)
    given[1] = given[1][own].detach().requires_grad_()
    calls = {"split": partial(harness.run_pass, way, given[:2], *given[:3])}
    calls["GRPO split"] = partial(harness.run_pass, loss, given[:2], *given)
    times = harness.time_in_turns(calls, device, burst=BURST)  # as many on each, which wait for each other
    return times, {} if device == "cpu" else {name: harness.measure_memory(call) for name, call in calls.items()}


def compute_eagerly(
    hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, of_logits: Way = compute_plain
) -> Results:
    return of_logits(linear(hidden, weight), tokens)


def compute_as_trl(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> Results:
    """As TRL's trainer calls it, for both results."""
    utils: Any = importlib.import_module("trl.trainer.utils")
    about = None, tokens, 1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy")
    log_probs, entropy, *_ = utils._ChunkedLogProbFunction.apply(hidden, weight, *about)
    return log_probs, entropy


def compute_as_verl(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> Results:
    """Its fused kernels, as its models call them."""
    module: Any = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    log_probs, entropy = module.linear_cross_entropy(hidden, weight, tokens, 1.0, "none")
    return log_probs * 1, entropy * 1  # whose gradients lie in order, as the kernels want them


def compute_loss(*given: torch.Tensor, **part: Any) -> torch.Tensor:
    """Of one response, with advantages per token."""
    hidden, weight, tokens, advantages = (x if i == 1 else x[None] for i, x in enumerate(given))
    options = {"entropy": True, "entropy_coef": COEFFICIENT, **part}
    return linear_grpo_loss(hidden, weight, tokens, None, advantages, **options).loss


def compute_loss_as_trl(*given: torch.Tensor) -> torch.Tensor:
    """TRL's "bnpo" where the responses are of this policy, less the bonus for entropies."""
    *layer, tokens, advantages = given
    log_probs, entropy = compute_as_trl(*layer, tokens)
    ratio = (log_probs - log_probs.detach()).exp()
    losses = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return losses.mean() - COEFFICIENT * entropy.mean()


def take_few(hidden: torch.Tensor, weight: torch.Tensor, *of_tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    return (x.detach() if i == 1 else x[:CHECKED_TOKENS].detach() for i, x in enumerate((hidden, weight, *of_tokens)))


def check_way(way: Way, *given: torch.Tensor, own: slice = slice(None)) -> None:
    """Compare results, from this part of the weight, with those of float64."""
    hidden, weight, tokens = take_few(*given)
    exact = compute_eagerly(hidden.double(), weight.double(), tokens)
    for got, want in zip(way(hidden, weight[own], tokens), exact, strict=True):
        assert_close(got.cpu(), want.cpu(), rtol=1e-4 if hidden.dtype == torch.float32 else 2**-5)


def check_loss(loss: Loss, *given: torch.Tensor, own: slice = slice(None)) -> None:
    """Compare gradients with those of float64, where the ratio is 1; of the weight, those of this part."""
    hidden, weight, tokens, advantages = take_few(*given)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight[own])]
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    log_probs, entropy = compute_eagerly(*exact, tokens)
    wanted = torch.autograd.grad(-(advantages * log_probs + COEFFICIENT * entropy).mean(), exact)
    got = torch.autograd.grad(loss(*leaves, tokens, advantages), leaves)
    for x, want in zip(got, (wanted[0], wanted[1][own]), strict=True):
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
