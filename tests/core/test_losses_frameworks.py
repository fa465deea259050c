"""Losses of frameworks without an adapter of ours for them, transcribed; the adapters' tests have the others."""

import pytest
import torch
from losses_cases import make
from torch._dynamo.testing import CompileCounter

from rl_triton_core.losses import Categorical, LogProbs, grpo_loss, kl_divergence, ppo_loss, value_loss
from rl_triton_core.testing import assert_close


def gradients(loss, *inputs):
    return [loss.detach(), *torch.autograd.grad(loss, inputs, retain_graph=True)]


def assert_same(ours, theirs, *inputs, rtol=2e-6):
    for got, want in zip(gradients(ours, *inputs), gradients(theirs, *inputs), strict=True):
        assert_close(got.double(), want.double(), rtol=rtol)


@pytest.fixture
def tokens():
    g = torch.Generator().manual_seed(2)
    log_probs = -torch.rand(6, 9, generator=g)
    old, ref = (log_probs + 0.5 * torch.randn(6, 9, generator=g) for _ in range(2))
    mask = (torch.arange(9) < torch.tensor([9, 3, 1, 5, 7, 2])[:, None]).float()
    return log_probs.requires_grad_(), old, torch.randn(6, generator=g), ref, mask


def test_verl(tokens):
    """Transcribed from core_algos: k3 within ±10 of log-ratios within ±20. tests/frameworks has the loss itself."""
    log_probs, _, _, ref, mask = tokens
    kl = torch.clamp(ref - log_probs, min=-20, max=20)
    k3 = torch.clamp(torch.exp(kl) - kl - 1, min=-10, max=10)
    score = 0.5 * (log_probs - ref).square()
    for estimator, values in (("k3", k3), ("k3+", score - score.detach() + k3.detach())):
        ours = kl_divergence(log_probs, ref, estimator, mask, log_ratio_clamp=20, kl_clip=10)
        assert_same(ours, (values * mask).sum() / mask.sum(), log_probs)


def test_trl(tokens):
    """Transcribed from GRPOTrainer._compute_loss: grpo, bnpo, dapo and dr_grpo."""
    log_probs, old, adv, ref, mask = tokens
    ratio = torch.exp(log_probs - old)
    losses = -torch.min(ratio * adv[:, None], torch.clamp(ratio, 0.8, 1.2) * adv[:, None])
    losses = losses + 0.04 * (torch.exp(ref - log_probs) - (ref - log_probs) - 1)
    total = (losses * mask).sum()
    for theirs, options in (
        (((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(), {"aggregation": "sequence-mean"}),
        (total / mask.sum().clamp(min=1.0), {}),
        (total / 40, {"normalizer": torch.tensor(40.0)}),
        (total / (6 * 9), {"aggregation": "sequence-sum", "normalizer": 6 * 9}),
    ):
        ours = grpo_loss(log_probs, old, adv, ref_log_probs=ref, mask=mask, kl_coef=0.04, **options)
        assert_same(ours.loss, theirs, log_probs)


def test_openrlhf(tokens):
    """Transcribed from models/loss.py: ValueLoss has the factor 1/2 and the larger of two errors."""
    values, old, _, returns, mask = tokens
    clipped = old + (values - old).clamp(-0.2, 0.2)
    theirs = 0.5 * (torch.max((clipped - returns) ** 2, (values - returns) ** 2) * mask).sum() / mask.sum()
    options = {"old_values": old, "value_clip": 0.2, "value_clip_mode": "cleanrl", "value_factor": 0.5}
    assert_same(value_loss(values, returns, mask=mask, **options), theirs, values)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_full_graph_with_dynamic_shapes(backend):
    def loss(logits, values, actions, old, advantages, returns, mask):
        return ppo_loss(
            Categorical(2 * logits), actions, old, advantages, values=values, returns=returns, mask=mask,
            entropy_coef=0.01, normalize_advantages=True, backend=backend,
        )  # fmt: skip

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for n in (12, 31):
        case = make("categorical", n=n)
        inputs = [case.network[name].requires_grad_() for name in ("logits", "values")]
        data = [case.data[name] for name in ("actions", "old_log_probs", "advantages", "returns")]
        mask = torch.arange(n) % 3 != 0
        got, want = (function(*inputs, *data, mask) for function in (compiled, loss))
        assert_close(torch.stack(got[:9]).detach(), torch.stack(want[:9]).detach(), rtol=1e-7)
        for mine, exact in zip(*(torch.autograd.grad(3 * x.loss, inputs) for x in (got, want)), strict=True):
            assert_close(mine, exact, rtol=1e-6)


def test_annealed_coefficients_compile_at_most_twice():
    """Once with numbers as constants, once with symbols; and once more with a tensor."""
    x, old, advantages = torch.randn(3, 12)
    x.requires_grad_()

    def loss(clip, entropy_coef):
        return ppo_loss(LogProbs(x), None, old, advantages, clip=clip, entropy_coef=entropy_coef).loss

    counter = CompileCounter()
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    coefficients = [0.01, 0.02, 0.03, torch.tensor(0.04), torch.tensor(0.05)]
    for i, coefficient in enumerate(coefficients):
        given = 0.2 - 0.01 * i, coefficient
        got, want = (torch.autograd.grad(function(*given), x) for function in (compiled, loss))
        assert torch.equal(*got, *want)
    assert counter.frame_count == 3
