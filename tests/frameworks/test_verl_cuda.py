"""The verl adapter on a GPU: verl's numbers, and the host waits for the device once in a loss."""

import pytest
import torch

pytest.importorskip("verl")

import test_verl as cases

from rl_triton_adapters import verl as adapter

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["prefix", "holes"])
def test_advantages_are_those_of_verl(kind):
    rewards, values, mask = (x.cuda() for x in cases.make_rollout(kind, dtype=torch.float32))
    computed = (x(rewards, values, mask, 0.97, 0.9) for x in (adapter.compute_gae_advantage_return, cases.STOCK_GAE))
    for got, expected in zip(*computed, strict=True):
        assert got.is_cuda
        torch.testing.assert_close(got * mask, expected * mask, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("info", [cases.ALONE, cases.OF_FOUR], ids=["alone", "of four"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_loss_is_that_of_verl(aggregation, info):
    old, log_prob, advantages, mask = (x.cuda() for x in cases.make_minibatch(torch.float32))
    minibatch, config = (old.nan_to_num(posinf=0), log_prob, advantages, mask), cases.make_actor_config(info)
    ours = cases.compute_loss(adapter.LOSSES["triton"], minibatch, aggregation, config)
    stock = cases.compute_loss(cases.STOCK_LOSS, minibatch, aggregation, config)
    torch.testing.assert_close(ours[0], stock[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], stock[1], rtol=1e-5, atol=1e-7)
    assert ours[2] == pytest.approx(stock[2], rel=1e-5)


@pytest.mark.parametrize("name", adapter.TOKENS)
def test_functions_of_logits_are_those_of_verl(name):
    logits, _, labels = (x.cuda().detach() for x in cases.make_logits(torch.float32))
    results = []
    for function in (adapter.TOKENS[name], cases.STOCK_TOKENS[name]):
        leaf = logits.clone().requires_grad_()
        result = function(leaf * 1, labels) if "prob" in name else function(leaf * 1)
        (gradient,) = torch.autograd.grad(result.square().sum(), leaf)
        results.append((result.detach(), gradient))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_the_host_waits_once_for_a_loss():
    old, log_prob, advantages, mask = (x.cuda() for x in cases.make_minibatch(torch.float32))
    call = (old.nan_to_num(posinf=0), log_prob, advantages, mask, "token-mean", cases.make_actor_config(cases.OF_FOUR))
    for _ in range(3):
        adapter.LOSSES["triton"](*call)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation") as waits:
            adapter.LOSSES["triton"](*call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1
