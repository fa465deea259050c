"""Every function of Stable-Baselines3 and PyTorch that a stock algorithm runs, another one: the agents are stock's."""

import sys
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

pytest.importorskip("sb3_contrib")
import sb3_kinds
from overrides import alter
from replaced import list_run, list_state, update_with_changes
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from sb3_kinds import DQN, PPO, STOCK, MaskablePPO, RecurrentPPO, TritonA2C, TritonDQN, TritonMaskablePPO, TritonPPO
from stable_baselines3.common.distributions import DiagGaussianDistribution
from test_sb3_captured import compare

ON_POLICY = [TritonPPO, TritonA2C, TritonMaskablePPO, sb3_kinds.TritonRecurrentPPO]
OURS = [*ON_POLICY[:3], sb3_kinds.TritonSAC, sb3_kinds.TritonTD3, TritonDQN, sb3_kinds.TritonTQC]
PACKAGES = ("stable_baselines3", "sb3_contrib")
ALIASES = ("_wrapped_call_impl", "_predict", "get_distribution")  # what nothing looks up by this name while it learns
UNSEEN = ["_Real.check"]  # of a constraint in a constraint
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")


def make_model(kind):
    if issubclass(kind, MaskablePPO):
        return kind("MlpPolicy", InvalidActionEnvDiscrete(), seed=0, device="cpu", n_steps=8)
    if issubclass(kind, RecurrentPPO):
        options = {"policy_kwargs": {"lstm_hidden_size": 8}} | ({"enabled": True} if kind in ON_POLICY else {})
        return kind("MlpLstmPolicy", "Pendulum-v1", seed=0, device="cpu", n_steps=8, batch_size=8, **options)
    discrete = issubclass(kind, DQN)
    sizes = {"learning_starts": 20, "buffer_size": 100} if hasattr(kind, "_store_transition") else {"n_steps": 8}
    return kind("MlpPolicy", "CartPole-v1" if discrete else "Pendulum-v1", seed=0, device="cpu", **sizes)


def update_and_act(model):
    model.train(*[1, 16] * hasattr(model, "replay_buffer"))
    model.policy._predict(torch.as_tensor(model._last_obs))


@pytest.mark.parametrize("kind", OURS)
def test_every_function_that_a_stock_update_runs(kind):
    ours, stock = make_model(kind), make_model(STOCK[kind])
    stock.learn(64)
    ours.learn(64)
    found = list_run(PACKAGES, update_and_act, stock)
    ran = [(owners, name) for (_, name), owners in found.items() if name not in ALIASES]
    assert len(ran) > 30 and not ours.find_obstacle()
    missed = []
    for owners, name in ran:
        with ExitStack() as stack:
            for owner in owners:
                stack.enter_context(mock.patch.object(owner, name, lambda *args, **kwargs: None))
            ours._asked = (), ""
            missed += [f"{owners[0].__name__}.{name}"] * (not ours.find_obstacle())
    assert missed in ([], UNSEEN)
    ours._asked = (), ""
    assert not ours.find_obstacle()


def make_agents(kind):
    """Stock's and ours, whose optimizers know the size of gradients."""
    agents = make_model(STOCK[kind]), make_model(kind)
    for agent in agents:
        agent.set_random_seed(0)
        agent.learn(64)
    return agents


def learn(model):
    model.set_random_seed(0)
    model._last_obs = None
    model.learn(8)


def compare_agents(ours, stock):
    compare(ours, stock, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("kind", ON_POLICY)
def test_agents_with_every_function(kind):
    """Of one of the algorithms, unless all combinations are asked for; those of users' classes and objects too."""
    hows = update_with_changes(
        PACKAGES,
        make_agents(kind),
        learn,
        lambda model: [*model.policy.modules(), model.policy.action_dist],
        lambda model: list_state([model.policy], [model.policy.optimizer]),
        compare_agents,
        part=(ON_POLICY.index(kind), len(ON_POLICY)),
    )
    assert len(hows) > 30


@pytest.mark.parametrize("part", ["", "features_extractor", "mlp_extractor", "action_net", "value_net"])
@pytest.mark.parametrize("kind", ON_POLICY)
def test_hooks(kind, part):
    stock, ours = make_agents(kind)
    for agent in (stock, ours):
        module = agent.policy.get_submodule(part)
        module.register_forward_pre_hook(lambda module, inputs: alter(inputs))
        module.register_forward_hook(lambda module, inputs, result: alter(result))
        learn(agent)
    compare_agents(ours, stock)


def test_a_distribution_of_a_module_that_is_not_registered():
    stock, ours = make_agents(TritonPPO)
    own = type("Own", (DiagGaussianDistribution,), {"__module__": "nowhere"})
    for agent in (stock, ours):
        agent.policy.action_dist.__class__ = own
        learn(agent)
    compare_agents(ours, stock)


def test_algorithms_behind_ours():
    """A class in front of stock's, and ours in front of that."""

    class Own(PPO):
        def train(self):
            self.rollout_buffer.advantages *= 0.5
            super().train()

    agents = [make_model(kind) for kind in (Own, type("Ours", (TritonPPO, Own), {}))]
    for agent in agents:
        learn(agent)
    compare_agents(*agents[::-1])
    assert "Own has its own train" in agents[1].describe()
