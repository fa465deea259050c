"""Agents of RL-Games where a function that a step runs is another one: they learn as RL-Games' own do with it."""

import pytest
import torch

pytest.importorskip("rl_games")
from recorded_graphs import allow_captures
from replaced import copy_state, list_changes, list_run, list_state
from rl_games.common.datasets import PPODataset
from test_rl_games import compare, list_trainers, make_agent
from test_rl_games_captured import CAPTURED, train, with_central_value


def list_things(agent):
    return [y for x in list_trainers(agent) for y in (x, *x.model.modules())]


def list_tensors(agent):
    trainers = list_trainers(agent)
    return list_state([x.model for x in trainers], [x.optimizer for x in trainers])


def update(agent):
    """On the rollout of the last epoch."""
    torch.manual_seed(1)
    agent.train_central_value()
    agent._rl_triton.prepare() if hasattr(agent, "_rl_triton") else None
    for i in range(len(agent.dataset)):
        agent.train_actor_critic(agent.dataset[i])


@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_every_function_of_an_update(env, tmp_path, monkeypatch):
    keep = lambda self, values: vars(self).update(values_dict=values or self.values_dict)  # noqa: E731
    monkeypatch.setattr(PPODataset, "update_values_dict", keep)
    agents = []
    for mode in ("stock", "triton"):
        agents.append(train(make_agent(mode, env, tmp_path, with_central_value() | {"max_epochs": 1})))
        allow_captures(monkeypatch)
    stock, ours = agents
    ours.recapture()
    for x in (ours._rl_triton, ours._rl_triton.central_value):
        x.max_graphs = 1000
    start = [x.clone() for x in list_tensors(stock)]
    ran, hows = list_run(["rl_games"], update, stock), {}
    assert len(ran) > 50
    for name, change in list_changes(ran, agents, list_things):
        for agent in agents:
            copy_state(start, list_tensors(agent))
        with change():
            hows[name] = ours.describe()
            update(stock), update(ours)
            compare(ours, stock, rtol=1e-4, atol=2e-6)
    own, other = hows["rl_games.algos_torch.torch_ext.apply_masks"].split("; of the central value network, ")
    assert "apply_masks is replaced." in other and ("apply_masks is replaced." in own)
    assert hows["numbers"] == hows["A2CBase.set_train"] == ours.describe() == CAPTURED[1]
