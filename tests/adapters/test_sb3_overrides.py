"""Algorithms of Stable-Baselines3 with users' own methods, in classes and on objects: the agents are those of stock."""

import re

import pytest

pytest.importorskip("sb3_contrib")
from overrides import alter, derive, list_methods, override
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3 import PPO
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticPolicy
from test_sb3_captured import STOCK, TASKS, compare

from rl_triton_adapters.sb3.captured import TritonPPO
from rl_triton_adapters.sb3.contrib import TritonRecurrentPPO

pytestmark = pytest.mark.covering

STOCK_OF = STOCK | {TritonRecurrentPPO: RecurrentPPO}
SMALL = {"batch_size": 8, "policy_kwargs": {"lstm_hidden_size": 8}}
RECURRENT = (TritonRecurrentPPO, "MlpLstmPolicy", "CartPole-v1", SMALL)
ALGORITHMS = {
    "ppo": (TASKS["pendulum"], ActorCriticPolicy),
    "a2c": (TASKS["a2c"], ActorCriticPolicy),
    "maskable": (TASKS["masks"], MaskableActorCriticPolicy),
    "recurrent": (RECURRENT, RecurrentActorCriticPolicy),
}
NOT_IN_TRAINING = (
    "_build|init|load|save|make_|device|squash|is_|reset|_dummy|_update|_get_cons|predict$|.*_vector|.*scale_"
)
NAMES = {task: list_methods(kind) for task, (_, kind) in ALGORITHMS.items()}
METHODS = [(task, x) for task, names in NAMES.items() for x in names if not re.match(NOT_IN_TRAINING, x)]
DISTRIBUTION = [x for x in list_methods(CategoricalDistribution) if not x.endswith(("_params", "_net"))]


def make_model(task, kind, policy, **more):
    _, known, env, options = ALGORITHMS[task][0]
    options = {"n_steps": 16, "seed": 0, **options, **more}
    if task != "a2c":
        options = {"n_epochs": 2, "batch_size": 16, **options}
    return kind(policy or known, make_vec_env(env, 2, seed=0), device="cpu", **options)


def assert_same_agent(task, change=lambda model: None, policy=None, classes=None):
    """Two rollouts, before which something is changed in both models; returns ours."""
    kind = ALGORITHMS[task][0][0]
    stock, ours = classes or (STOCK_OF[kind], kind)
    models = make_model(task, stock, policy), make_model(task, ours, policy, enabled=True)
    for model in models:
        change(model)
        model.set_random_seed(0)
        model.learn(64)
    compare(*models[::-1], rtol=2e-3, atol=2e-5)
    return models[1]


@pytest.mark.parametrize("of", ["class", "object"])
@pytest.mark.parametrize(("task", "name"), METHODS)
def test_methods_of_policies(task, name, of):
    if of == "class":
        assert_same_agent(task, policy=derive(ALGORITHMS[task][1], name))
    else:
        assert_same_agent(task, lambda model: override(model.policy, name))


@pytest.mark.parametrize("of", ["class", "object"])
@pytest.mark.parametrize("name", DISTRIBUTION)
@pytest.mark.parametrize("task", ["ppo", "a2c", "maskable"])
def test_methods_of_distributions(task, name, of):
    def change(model):
        distribution = model.policy.action_dist
        if of == "class":
            distribution.__class__ = derive(type(distribution), name)
        else:
            override(distribution, name)

    assert_same_agent(task, change)


@pytest.mark.parametrize("part", ["features_extractor", "mlp_extractor", "action_net", "value_net"])
@pytest.mark.parametrize("task", ALGORITHMS)
def test_parts_and_their_hooks(task, part):
    def change(model):
        module = getattr(model.policy, part)
        override(module, "forward")
        module.register_forward_hook(lambda module, inputs, result: alter(result))

    assert_same_agent(task, change)


@pytest.mark.parametrize("task", ALGORITHMS)
def test_hooks_of_policies(task):
    def change(model):
        model.policy.register_forward_pre_hook(lambda policy, inputs: alter(inputs))
        model.policy.register_forward_hook(lambda policy, inputs, result: (result[0], 0.9 * result[1], *result[2:]))

    assert_same_agent(task, change)


def test_a_distribution_of_a_module_that_is_not_registered():
    own = type("Own", (DiagGaussianDistribution,), {"__module__": "nowhere"})
    assert_same_agent("ppo", lambda model: setattr(model.policy.action_dist, "__class__", own))


def test_algorithms_behind_ours():
    """A class in front of stock's, and ours in front of that."""

    class Own(PPO):
        def train(self):
            buffer = self.rollout_buffer
            buffer.advantages = 0.5 * buffer.advantages
            self.ent_coef = 0.1
            super().train()
            self.ent_coef = 0.0

    ours = type("Ours", (TritonPPO, Own), {})
    assert "Own has its own train" in assert_same_agent("ppo", classes=(Own, ours)).describe()
