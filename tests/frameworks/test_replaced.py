"""Agents where a function that an update runs is another one: they update as the framework's own do with it."""

from functools import partial

import pytest
import torch

pytest.importorskip("rsl_rl")
pytest.importorskip("rl_games")
pytest.importorskip("skrl")
import test_rl_games
import test_rsl_rl
import test_skrl_captured
from recorded_graphs import allow_captures
from replaced import list_state, update_with_changes
from rl_games.common.datasets import PPODataset
from test_rl_games_captured import CAPTURED, ZEROED, with_central_value
from test_rl_games_captured import train as train_rl_games

from rl_triton_adapters.skrl import TritonRunner


def update_rsl_rl(alg):
    alg.learning_rate = 1e-3
    torch.manual_seed(0)
    alg.update()


@pytest.mark.parametrize("network", [None, test_rsl_rl.RECURRENT], ids=["perceptron", "recurrent"])
def test_agents_of_rsl_rl(network, monkeypatch):
    allow_captures(monkeypatch)
    runners = [test_rsl_rl.make_runner(x, network=network, num_learning_epochs=1) for x in ("PPO", test_rsl_rl.OURS)]
    runners[1].alg._rl_triton.max_graphs = 1000
    for runner in runners:
        test_rsl_rl.train(runner, 1)
    hows = update_with_changes(
        ["rsl_rl"],
        [runner.alg for runner in runners],
        update_rsl_rl,
        lambda alg: [alg, alg.storage, *alg.actor.modules(), *alg.critic.modules()],
        lambda alg: list_state([alg.actor, alg.critic], [alg.optimizer]),
        lambda *_: test_rsl_rl.compare(*runners[::-1], rtol=1e-4, atol=2e-6),
    )
    assert ".clip_grad_norm_ is replaced." in hows["torch.nn.utils.clip_grad.clip_grad_norm_"]
    for name in ("a class with MLPModel.get_output_log_prob", "own GaussianDistribution.log_prob"):
        assert hows[name].startswith("updates are captured; losses are those of log-probabilities: ")
    assert hows["numbers"] == runners[1].alg.describe() == "updates are captured"


def update_rl_games(agent):
    """On the rollout of the last epoch."""
    torch.manual_seed(1)
    agent.train_central_value()
    agent._rl_triton.prepare() if hasattr(agent, "_rl_triton") else None
    for i in range(len(agent.dataset)):
        agent.train_actor_critic(agent.dataset[i])


def list_rl_games(agent):
    trainers = test_rl_games.list_trainers(agent)
    return list_state([x.model for x in trainers], [x.optimizer for x in trainers])


@pytest.mark.parametrize(("env", "changes"), [("cartpole", ZEROED), ("pendulum", {})])
def test_agents_of_rl_games(env, changes, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # whose GRU keeps nothing for a backward in a replay
    keep = lambda self, values: vars(self).update(values_dict=values or self.values_dict)  # noqa: E731
    monkeypatch.setattr(PPODataset, "update_values_dict", keep)
    agents = []
    for mode in ("stock", "triton"):
        options = with_central_value() | {"max_epochs": 1} | changes
        agents.append(train_rl_games(test_rl_games.make_agent(mode, env, tmp_path, options)))
        allow_captures(monkeypatch)
    ours = agents[1]
    ours.recapture()
    for x in (ours._rl_triton, ours._rl_triton.central_value):
        x.max_graphs = 1000
    hows = update_with_changes(
        ["rl_games"],
        agents,
        update_rl_games,
        lambda agent: [y for x in test_rl_games.list_trainers(agent) for y in (x, *x.model.modules())],
        list_rl_games,
        partial(test_rl_games.compare, rtol=1e-4, atol=2e-6),
    )
    own, other = hows["rl_games.algos_torch.torch_ext.apply_masks"].split("; of the central value network, ")
    assert "apply_masks is replaced." in other and ("apply_masks is replaced." in own)
    assert hows["numbers"] == hows["A2CBase.set_train"] == ours.describe() == CAPTURED[1]


def list_skrl_things(agent):
    scalers = agent._observation_preprocessor, agent._value_preprocessor
    return [agent.memory, agent.cfg, *scalers, *agent.policy.modules(), *agent.value.modules()]


def list_skrl(agent):
    modules = [x for x in agent.checkpoint_modules.values() if hasattr(x, "parameters")]
    return list_state(modules, [agent.optimizer])


@pytest.mark.parametrize("case", ["adaptive", "adaptive a2c"])
def test_agents_of_skrl(case, tmp_path, monkeypatch):
    allow_captures(monkeypatch)
    runners = test_skrl_captured.AdvantagesRunner, TritonRunner
    agents = [test_skrl_captured.train(runner, tmp_path, case, 1) for runner in runners]
    agents[1]._rl_triton.max_graphs = 1000
    test_skrl_captured.update(agents[1])  # as the framework's before it is known what runs
    hows = update_with_changes(
        ["skrl"],
        agents,
        test_skrl_captured.update,
        list_skrl_things,
        list_skrl,
        partial(test_skrl_captured.compare, rtol=0, atol=0),
        without=["update"],
    )
    mse = hows["torch.nn.functional.mse_loss"]
    assert mse.startswith("updates are those of skrl: torch.nn.functional.mse_loss is ")
    assert hows["a class with Memory.get_tensor_by_name"] == hows["numbers"] == "updates are captured"
