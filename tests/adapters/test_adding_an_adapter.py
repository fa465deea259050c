"""A framework and its adapter, entered as CONTRIBUTING.md says."""

import pytest
import torch
from overrides import derive
from recorded_graphs import allow_captures
from replaced import list_state, update_with_changes
from toyrl import Agent
from toyrl_adapter import TritonAgent


def assert_same(ours, stock):
    torch.testing.assert_close([*list_tensors(ours)], [*list_tensors(stock)], rtol=1e-4, atol=1e-6)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-4, abs=1e-6)


def list_tensors(agent):
    return list_state([agent.policy], [agent.optimizer])


def update(agent):
    torch.manual_seed(1)
    agent.losses = agent.update()


@pytest.mark.parametrize("env", ["CartPole-v1", "MountainCar-v0"])
def test_updates_are_captured_and_those_of_the_framework(env, monkeypatch):
    """Numbers that are annealed ask for no other graph."""
    allow_captures(monkeypatch)
    agents = Agent(env), TritonAgent(env)
    for agent in agents:
        for clip in (0.2, 0.1, 0.05):
            agent.clip = clip
            torch.manual_seed(2)
            agent.learn(2)
    assert agents[1].describe() == "updates are captured" and len(agents[1]._rl_triton.step.captured) == 1
    assert_same(*reversed(agents))


def test_every_function_of_an_update(monkeypatch):
    """Where it is another one, the agent learns as the framework's own does with it."""
    allow_captures(monkeypatch)
    agents = Agent("CartPole-v1"), TritonAgent("CartPole-v1")
    for agent in agents:
        torch.manual_seed(2)
        agent.learn(1)
    agents[1]._rl_triton.max_graphs = 1000
    hows = update_with_changes(
        ["toyrl"], agents, update, lambda agent: [agent, *agent.policy.modules()], list_tensors, assert_same
    )
    assert (
        "compute_loss is replaced" in hows["Agent.compute_loss"]
        and "own compute_loss" in hows["own Agent.compute_loss"]
    )
    assert hows["numbers"] == agents[1].describe() == "updates are captured"


def test_what_users_switch(monkeypatch, capsys):
    with pytest.raises(TypeError, match="enabled: got int, expected a bool"):
        TritonAgent("CartPole-v1", enabled=1)
    assert TritonAgent("CartPole-v1", enabled=False).describe() == "updates are those of toyrl: switched off"
    assert derive(TritonAgent, "compute_loss")("CartPole-v1").describe().startswith("updates are those of toyrl: ")
    monkeypatch.setenv("RL_TRITON_CHECK", "1")
    TritonAgent("CartPole-v1").learn(2)
    assert capsys.readouterr().out.count("RL_TRITON_CHECK: TritonAgent.update 1: parameters moved by") == 1
