"""RL_TRITON=0 in the environment: what an adapter computes is its framework's, bit for bit, by no function of ours."""

import pytest
import torch

pytest.importorskip("rsl_rl")
pytest.importorskip("rl_games")
pytest.importorskip("skrl")
pytest.importorskip("verl")

import test_rl_games
import test_rsl_rl
import test_skrl
from verl.trainer.ppo import core_algos

from rl_triton_adapters import verl as verl_adapter

REASON = "RL_TRITON=0 in the environment"


def test_rsl_rl_is_stock(switched_off, recwarn):
    stock, ours = (test_rsl_rl.make_runner(name) for name in ("PPO", test_rsl_rl.OURS))
    assert test_rsl_rl.train(ours, 2) == test_rsl_rl.train(stock, 2)
    test_rsl_rl.compare(ours, stock, rtol=0, atol=0)
    assert ours.alg.obstacle == REASON and not [x for x in recwarn if "TritonPPO" in str(x.message)]


@pytest.mark.parametrize("env", test_rl_games.CLASSES)
def test_rl_games_is_stock(env, tmp_path, switched_off):
    stock, ours = (test_rl_games.make_agent(name, env, tmp_path) for name in ("stock", "triton"))
    for agent in (stock, ours):
        torch.manual_seed(1)
        agent.train()
    test_rl_games.compare(ours, stock, rtol=0, atol=0)


def test_skrl_is_stock(tmp_path, switched_off):
    stock, ours = (test_skrl.train_agent(test_skrl.parse(name, tmp_path)) for name in ("stock", "triton"))
    for name, x in ours.policy.state_dict().items():
        torch.testing.assert_close(x, stock.policy.state_dict()[name], rtol=0, atol=0)


def test_verl_is_stock(switched_off, caplog):
    """A policy loss that the command line asks for is verl's."""
    before = {**core_algos.ADV_ESTIMATOR_REGISTRY}
    verl_adapter.install()
    try:
        assert before == core_algos.ADV_ESTIMATOR_REGISTRY
        assert core_algos.get_policy_loss_fn("triton") is core_algos.get_policy_loss_fn("vanilla")
        assert caplog.records[-1].message.endswith(f"computes with its own functions: {REASON}")
    finally:
        verl_adapter.uninstall()
    assert "triton" not in core_algos.POLICY_LOSS_REGISTRY
    assert core_algos.get_policy_loss_fn("vanilla") is core_algos.compute_policy_loss_vanilla
