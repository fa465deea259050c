"""Agents of skrl where a function that its update runs is another one: they update as skrl's does with it."""

import pytest

pytest.importorskip("skrl")
from recorded_graphs import allow_captures
from replaced import copy_state, list_changes, list_run, list_state
from test_skrl_captured import AdvantagesRunner, compare, train, update

from rl_triton_adapters.skrl import TritonRunner


def list_things(agent):
    scalers = agent._observation_preprocessor, agent._value_preprocessor
    return [agent.memory, agent.cfg, *scalers, *agent.policy.modules(), *agent.value.modules()]


def list_tensors(agent):
    modules = [x for x in agent.checkpoint_modules.values() if hasattr(x, "parameters")]
    return list_state(modules, [agent.optimizer])


@pytest.mark.parametrize("case", ["adaptive", "adaptive a2c"])
def test_every_function_of_an_update(case, tmp_path, monkeypatch):
    allow_captures(monkeypatch)
    agents = [train(runner_class, tmp_path, case, 1) for runner_class in (AdvantagesRunner, TritonRunner)]
    stock, ours = agents
    ours._rl_triton.max_graphs = 1000
    update(ours)
    ran, hows = list_run(["skrl"], update, stock), {}
    ran = {place: owners for place, owners in ran.items() if place[1] != "update"}
    assert len(ran) > 50
    for name, change in list_changes(ran, agents, list_things):
        copy_state(list_tensors(stock), list_tensors(ours))
        with change():
            hows[name] = ours.describe()
            update(stock), update(ours)
            compare(ours, stock, rtol=0, atol=0)
    assert hows["torch.nn.functional.mse_loss"].startswith(
        "updates are those of skrl: torch.nn.functional.mse_loss is "
    )
    assert hows["a class with Memory.get_tensor_by_name"] == hows["numbers"] == ours.describe()
    assert ours.describe() == "updates are captured"
