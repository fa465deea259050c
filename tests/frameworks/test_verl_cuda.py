"""The verl adapter on a GPU: verl's numbers, and the host waits for the device once in a loss."""

import pytest
import torch

pytest.importorskip("verl")

from test_verl import (
    ALONE,
    OF_FOUR,
    STOCK_GAE,
    STOCK_LOSS,
    STOCK_TOKENS,
    compute_loss,
    make_actor_config,
    make_logits,
    make_minibatch,
    make_rollout,
)

from rl_triton_adapters import verl as adapter

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["prefix", "holes"])
def test_advantages_are_those_of_verl(kind):
    rewards, values, mask = (x.cuda() for x in make_rollout(kind, dtype=torch.float32))
    arguments = rewards, values, mask, 0.97, 0.9
    for got, expected in zip(adapter.compute_gae_advantage_return(*arguments), STOCK_GAE(*arguments), strict=True):
        assert got.is_cuda
        torch.testing.assert_close(got * mask, expected * mask, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("info", [ALONE, OF_FOUR], ids=["alone", "of four"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_loss_is_that_of_verl(aggregation, info):
    old, log_prob, advantages, mask = (x.cuda() for x in make_minibatch(torch.float32))
    minibatch, config = (old.nan_to_num(posinf=0), log_prob, advantages, mask), make_actor_config(info)
    ours = compute_loss(adapter.LOSSES["triton"], minibatch, aggregation, config)
    stock = compute_loss(STOCK_LOSS, minibatch, aggregation, config)
    torch.testing.assert_close(ours[0], stock[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], stock[1], rtol=1e-5, atol=1e-7)
    assert ours[2] == pytest.approx(stock[2], rel=1e-5)


@pytest.mark.parametrize("name", adapter.TOKENS)
def test_functions_of_logits_are_those_of_verl(name):
    logits, _, labels = (x.cuda().detach() for x in make_logits(torch.float32))
    results = []
    for function in (adapter.TOKENS[name], STOCK_TOKENS[name]):
        leaf = logits.clone().requires_grad_()
        result = function(leaf * 1, labels) if "prob" in name else function(leaf * 1)
        (gradient,) = torch.autograd.grad(result.square().sum(), leaf)
        results.append((result.detach(), gradient))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_the_host_waits_once_for_a_loss():
    old, log_prob, advantages, mask = (x.cuda() for x in make_minibatch(torch.float32))
    call = (old.nan_to_num(posinf=0), log_prob, advantages, mask, "token-mean", make_actor_config(OF_FOUR))
    for _ in range(3):
        adapter.LOSSES["triton"](*call)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation") as waits:
            adapter.LOSSES["triton"](*call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1
