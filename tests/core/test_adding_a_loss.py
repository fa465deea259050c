"""A form of the surrogate from outside the package, entered where CONTRIBUTING.md says, runs on every backend."""

import pytest
import torch

from rl_triton_core._internal.equations.primitives import multiply_or_zero, select
from rl_triton_core._internal.loss import equations
from rl_triton_core.losses import grpo_loss
from rl_triton_core.testing import assert_close


def penalize_ratio(log_prob, ratio, advantage, low, high, coefficients):
    """The loss of SPO: −r·A + |A|·(r − 1)²/(2·clip)."""
    weight = select(advantage < 0.0, -advantage, advantage) / coefficients.clip
    loss = 0.5 * weight * (ratio - 1.0) * (ratio - 1.0) - multiply_or_zero(advantage, ratio)
    return loss, ratio * (weight * (ratio - 1.0) - advantage), 0.0


def compute_spo(log_probs, old_log_probs, advantages, clip):
    """The same by PyTorch, in float64 (https://arxiv.org/abs/2401.16025, equation 9)."""
    ratio = (log_probs - old_log_probs).exp()
    return (advantages.abs() * (ratio - 1) ** 2 / (2 * clip) - ratio * advantages).mean()


def test_a_surrogate_from_outside(target, monkeypatch):
    monkeypatch.setitem(equations.SURROGATES, "spo", penalize_ratio)
    torch.manual_seed(0)
    exact, old, advantages = (torch.randn(4, 6, dtype=torch.float64) for _ in range(3))
    ours, exact = exact.float().to(target.device).requires_grad_(), exact.float().double().requires_grad_()
    given = [x.float().to(target.device) for x in (old, advantages)]
    want = compute_spo(exact, given[0].double().cpu(), given[1].double().cpu(), 0.2)
    got = grpo_loss(ours, *given, surrogate="spo", clip=0.2, aggregation="token-mean", backend=target.backend).loss
    want.backward()
    got.backward()
    assert_close(got.cpu(), want, rtol=4e-6)
    assert_close(ours.grad.cpu(), exact.grad, rtol=4e-6)


def test_an_unknown_one_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="surrogate: got 'spo', expected one of clip, cispo"):
        grpo_loss(*torch.zeros(3, 2, 4), surrogate="spo")
