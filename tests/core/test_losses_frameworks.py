"""The losses of the frameworks: their own code where it is installed, else transcribed from their sources."""

import pytest
import torch
from losses_cases import make
from torch.nn import functional

from rl_triton_core.losses import (
    categorical_ppo_loss,
    grpo_loss,
    kl_divergence,
    value_loss,
)
from rl_triton_core.testing import assert_close


def gradients(loss, *inputs):
    return [loss.detach(), *torch.autograd.grad(loss, inputs, retain_graph=True)]


def assert_same(ours, theirs, *inputs, rtol=2e-6):
    for got, want in zip(gradients(ours, *inputs), gradients(theirs, *inputs), strict=True):
        assert_close(got.double(), want.double(), rtol=rtol)


@pytest.fixture
def batch():
    case = make("categorical", n=64, size=4)
    network = {name: x.requires_grad_() for name, x in case.network.items()}
    return {**network, **case.data, "old_logits": case.old["old_logits"]}


def test_stable_baselines3(batch):
    """The distribution is SB3's own; the loss is transcribed from PPO.train."""
    distributions = pytest.importorskip("stable_baselines3.common.distributions")
    logits, values, adv = batch["logits"], batch["values"], batch["advantages"]
    head = distributions.CategoricalDistribution(4).proba_distribution(logits)
    log_prob, entropy = head.log_prob(batch["actions"]), head.entropy()
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    ratio = torch.exp(log_prob - batch["old_log_probs"])
    policy = -torch.min(adv * ratio, adv * torch.clamp(ratio, 0.9, 1.1)).mean()
    predicted = batch["old_values"] + torch.clamp(values - batch["old_values"], -0.3, 0.3)
    theirs = policy - 0.01 * entropy.mean() + 0.5 * functional.mse_loss(batch["returns"], predicted)
    ours = categorical_ppo_loss(
        logits, batch["actions"], batch["old_log_probs"], batch["advantages"], values=values,
        returns=batch["returns"], old_values=batch["old_values"], clip=0.1, value_clip=0.3, entropy_coef=0.01,
        normalize_advantages=True,
    )  # fmt: skip
    assert_same(ours.loss, theirs, logits, values)
    assert float(ours.clip_fraction) == pytest.approx(float((torch.abs(ratio - 1) > 0.1).float().mean()))


def test_sb3_contrib_masks(batch):
    """Logits of actions that are not allowed are −∞ here and −1e8 there."""
    maskable = pytest.importorskip("sb3_contrib.common.maskable.distributions")
    logits, actions = batch["logits"], batch["actions"]
    allowed = (torch.rand(64, 4, generator=torch.Generator().manual_seed(0)) < 0.5).scatter(1, actions[:, None], True)
    head = maskable.MaskableCategorical(logits=logits, masks=allowed)
    adv, old = batch["advantages"], batch["old_log_probs"]
    ratio = torch.exp(head.log_prob(actions) - old)
    theirs = -torch.min(adv * ratio, adv * ratio.clamp(0.8, 1.2)).mean() - 0.1 * head.entropy().mean()
    ours = categorical_ppo_loss(logits.masked_fill(~allowed, -torch.inf), actions, old, adv, entropy_coef=0.1)
    assert_same(ours.loss, theirs, logits)


def test_torchrl(batch):
    """TorchRL's own clipping of values, and its ClipPPOLoss as transcribed."""
    utils = pytest.importorskip("torchrl.objectives.utils")
    values, old, returns = batch["values"], batch["old_values"], batch["returns"]
    for kind, ours in (("l2", {}), ("smooth_l1", {"value_loss": "huber"})):
        loss = utils.distance_loss(returns, values, loss_function=kind)
        clip = torch.tensor(0.2)
        theirs, _ = utils._clip_value_loss(old, values, clip, returns, loss, kind)
        options = {"old_values": old, "value_clip": 0.2, "value_clip_mode": "cleanrl", **ours}
        assert_same(value_loss(values, returns, **options), theirs.mean(), values)


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
        return categorical_ppo_loss(
            2 * logits, actions, old, advantages, values=values, returns=returns, mask=mask, entropy_coef=0.01,
            normalize_advantages=True, backend=backend,
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
