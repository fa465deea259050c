"""Log-probabilities and entropies of tokens from logits, forward and with gradients, in the memory of the logits too.

Beside eager PyTorch and torch.compile of it stand the ways in which TRL (`selective_log_softmax`, with
`entropy_from_logits`) and verl (`logprobs_from_logits_v2`, with `entropy_from_logits`) compute the same in PyTorch. On
a GPU they have kernels: TRL's own, and for verl flash-attn's cross entropy, beside which verl compiles its entropy.
A copy is the time in which the logits are read, and for gradients read again and written. Ours and the kernels are
compared with float64 first.
"""

import importlib
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Options, Rows, Setting, make_row
from benchmarks.losses import KINDS
from benchmarks.results import describe_failure
from rl_triton_core.losses import token_log_probs
from rl_triton_core.testing import assert_close

Results = tuple[torch.Tensor, torch.Tensor]
Way = Callable[..., Results]
CHECKED_TOKENS = 64
LENGTH = 1024  # of a response


def compute_plain(logits: torch.Tensor, tokens: torch.Tensor) -> Results:
    """In float32, as it is written down."""
    log_probs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    return log_probs.gather(-1, tokens[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)


def select_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """As both packages do it, response by response."""
    if logits.dtype == torch.float32:
        return logits.gather(-1, tokens[..., None])[..., 0] - torch.stack([x.logsumexp(-1) for x in logits])
    pairs = zip(logits, tokens, strict=True)
    return torch.stack([x.log_softmax(-1).gather(-1, own[:, None])[:, 0] for x, own in pairs])


def compute_as_trl(logits: torch.Tensor, tokens: torch.Tensor) -> Results:
    """The entropy in chunks of rows."""
    entropies = []
    for chunk in logits.flatten(0, -2).split(128):
        own = chunk.log_softmax(-1)
        entropies.append(-(own.exp() * own).sum(-1))
    return select_log_probs(logits, tokens), torch.cat(entropies).view(tokens.shape)


def compute_as_verl(logits: torch.Tensor, tokens: torch.Tensor) -> Results:
    """The entropy from probabilities in the dtype of the logits."""
    return select_log_probs(logits, tokens), compute_entropy(logits)


def compute_entropy(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def compute_with_flash_attn(module: Any) -> Way:
    """As verl does it where it finds flash-attn, whose gradient may not take the memory that the entropy's needs."""
    find_entropy = torch.compile(compute_entropy, dynamic=True)

    def way(logits: torch.Tensor, tokens: torch.Tensor) -> Results:
        losses, _ = module.cross_entropy_loss(logits.flatten(0, -2), tokens.flatten(), inplace_backward=False)
        return -losses.view(tokens.shape), find_entropy(logits)

    return way


def compute_ours(logits: torch.Tensor, tokens: torch.Tensor, inplace_backward: bool = False) -> Results:
    """In place, the next call finds the gradients where the logits were, which takes as long."""
    result = logits.view_as(logits) if inplace_backward and logits.is_leaf else logits
    return token_log_probs(result, tokens, entropy=True, inplace_backward=inplace_backward)


KERNELS: dict[str, tuple[str, Callable[[Any], Way]]] = {
    "TRL kernel": ("trl.kernels.logprob_entropy", attrgetter("selective_log_softmax_and_entropy")),
    "verl flash-attn": ("flash_attn.ops.triton.cross_entropy", compute_with_flash_attn),
}
"""Ways on a GPU, from a module that needs PyTorch and Triton alone: its file is enough."""


def find_kernels(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[dict[str, Way], dict[str, str]]:
    """The ways of `KERNELS` whose results are right, and why others are left out."""
    found: dict[str, Way] = {}
    notes = {}
    for name, (module, make_way) in KERNELS.items():
        try:
            way = make_way(importlib.import_module(module))
            check_results(way, logits, tokens)
            found[name] = way
        except ModuleNotFoundError as error:
            notes[name] = f"{error.name} not installed"
        except Exception as error:
            notes[name] = describe_failure(error)
    return found, notes


def measure(setting: Setting, options: Options) -> Rows:
    harness.set_threads(setting.threads)
    torch._dynamo.reset()
    device, dtype = options.device, getattr(torch, setting.dtype)
    shape = -1, min(setting.tokens, LENGTH)
    logits = torch.randn(setting.tokens, setting.vocabulary, device=device).mul_(3).to(dtype)
    tokens = torch.randint(setting.vocabulary, (setting.tokens,), device=device)
    checked = logits[:CHECKED_TOKENS], tokens[:CHECKED_TOKENS]
    check_results(compute_ours, *checked)
    kernels, notes = find_kernels(*checked) if device == "cuda" else ({}, {})
    ways: dict[str, Way] = {
        "eager": compute_plain,
        "compiled": torch.compile(compute_plain, dynamic=False),
        "TRL": compute_as_trl,
        "verl": compute_as_verl,
        **kernels,
        "ours": compute_ours,
    }
    leaf, tokens = logits.view(*shape, setting.vocabulary).requires_grad_(), tokens.view(shape)
    for kind, leaves in zip(KINDS, ((), (leaf,)), strict=True):
        if leaves:
            ways["ours in place"] = partial(compute_ours, inplace_backward=True)
        arms = {name: partial(harness.run_pass, way, leaves, leaf, tokens) for name, way in ways.items()}
        moved = (1 + 2 * len(leaves)) * leaf.nbytes
        about = {"host_only": ("TRL", "verl"), "moved": moved, "peaks": True, "kind": kind}
        yield from harness.measure_arms(arms, device, options.seconds, **about)
        yield from (make_row(name, "full", "µs", [], note, kind=kind) for name, note in notes.items())


def check_results(way: Way, logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """They are those of float64, as far as their own dtype tells: verl's entropy has that of the logits."""
    for got, want in zip(way(logits, tokens), compute_plain(logits.double(), tokens), strict=True):
        assert_close(got.cpu(), want.cpu(), rtol=1e-5 if got.dtype == torch.float32 else 2**-5)
