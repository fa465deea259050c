"""TritonPPO of RSL-RL where a function that PPO's update runs is another one: it updates as PPO does with it."""

import pytest
import torch

pytest.importorskip("rsl_rl")
from replaced import copy_state, list_changes, list_run, list_state
from test_rsl_rl import OURS, RECURRENT, compare, make_runner, train, use_graphs


def list_things(runner):
    alg = runner.alg
    return [alg, alg.storage, *alg.actor.modules(), *alg.critic.modules()]


def list_tensors(runner):
    return list_state([runner.alg.actor, runner.alg.critic], [runner.alg.optimizer])


@pytest.mark.parametrize("network", [None, RECURRENT], ids=["perceptron", "recurrent"])
def test_every_function_of_an_update(network, monkeypatch):
    runners = [make_runner(name, network=network, num_learning_epochs=1) for name in ("PPO", OURS)]
    stock, ours = runners
    use_graphs(monkeypatch, ours)
    ours.alg._rl_triton.max_graphs = 1000
    train(stock, 1), train(ours, 1)
    start = [x.clone() for x in list_tensors(stock)]
    ran = list_run(["rsl_rl"], stock.alg.update)
    assert len(ran) > 50
    hows = {}
    for name, change in list_changes(ran, runners, list_things):
        for runner in runners:
            copy_state(start, list_tensors(runner))
            runner.alg.learning_rate = 1e-3
        with change():
            hows[name] = ours.alg.describe()
            for runner in runners:
                torch.manual_seed(0)
                runner.alg.update()
            compare(ours, stock, rtol=1e-4, atol=2e-6)
    assert ".clip_grad_norm_ is replaced." in hows["torch.nn.utils.clip_grad.clip_grad_norm_"]
    for name in ("a class with MLPModel.get_output_log_prob", "own GaussianDistribution.log_prob"):
        assert hows[name].startswith("updates are captured; losses are those of log-probabilities: ")
    assert hows["numbers"] == ours.alg.describe() == "updates are captured"
