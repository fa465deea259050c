"""Compiled gradient steps and acting of Stable-Baselines3's off-policy algorithms against the stock ones."""

import copy
import re
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("sb3_contrib")
import sb3_kinds
import test_sb3_off_policy as off_policy
from overrides import derive, override
from sb3_callbacks import At
from sb3_kinds import TritonDDPG, TritonDQN, TritonQRDQN, TritonSAC, TritonTD3, TritonTQC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import FlattenExtractor
from test_sb3_off_policy import FLIPPING, FORMS, SAC, compare_models, draw_newest, is_discrete, normalize

from rl_triton_adapters.sb3 import compiled_off_policy

COMPILED, LEFT = "updates are compiled", "updates are those of the stock algorithm: not compiled: "
KINDS = [TritonDQN, TritonQRDQN, TritonSAC, TritonTD3, TritonDDPG, TritonTQC]
TANH = {"net_arch": [9, 5], "activation_fn": torch.nn.Tanh}
ADAMW = {"optimizer_class": torch.optim.AdamW, "optimizer_kwargs": {"weight_decay": 0.1, "eps": 1e-5}}
RATE = {"learning_rate": lambda left: 1e-4 + 1e-3 * left}
MEMORY = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}
OPTIONS = {
    "defaults": {},
    "every eighth": {"train_freq": 8, "gradient_steps": -1, **RATE, "policy_kwargs": TANH, "batch_size": 33},
    "many": {"train_freq": 40, "gradient_steps": 64, "batch_size": 150, "policy_kwargs": ADAMW},
    "n-step returns": {"n_steps": 3, "gradient_steps": 2},
    "memory": MEMORY | {"buffer_size": 60},
    "normalized": {"env": normalize, "gradient_steps": -1},
    "several environments": {"env": lambda name: make_vec_env(name, 3, seed=0), "gradient_steps": 2},
    "rare targets": {"target_update_interval": 6, "tau": 0.3, "gradient_steps": 4, "train_freq": 4},
    "smooth": {"policy_kwargs": TANH},  # where rounding decides about no unit
    "fixed": {"ent_coef": 0.1},
    "few": {"policy_kwargs": {"n_quantiles": 1}, "max_grad_norm": 0.1},
    "drops": {"top_quantiles_to_drop_per_net": 5, "policy_kwargs": TANH, "ent_coef": 0.1},
    "delay": {"policy_delay": 3, "tau": 0.1, "target_policy_noise": 0.5, "action_noise": off_policy.make_noise},
}
OWN = {TritonDQN: ["rare targets"], TritonSAC: ["rare targets", "fixed"], TritonTD3: ["delay"], TritonDDPG: ["delay"]}
CASES = [(TritonDQN, name) for name in [*OPTIONS][:7]] + [(TritonSAC, name) for name in [*OPTIONS][:7]]
CASES += [(kind, name) for kind in (TritonTD3, TritonDDPG) for name in ("smooth", "every eighth")]
CASES += [(TritonQRDQN, name) for name in ("defaults", "every eighth", "n-step returns", "rare targets", "few")]
CASES += [(TritonTQC, name) for name in ("smooth", "every eighth", "drops")]
CASES += [(kind, name) for kind, names in OWN.items() for name in names if kind is not TritonDDPG]


def make_model(kind, env=None, action_noise=None, policy_kwargs=None, **options):
    """A model that learns from its 20th step on."""
    name = "CartPole-v1" if is_discrete(kind) else "Pendulum-v1"
    own = {"buffer_size": 500, "learning_starts": 20, "batch_size": 32, "train_freq": 1, "device": "cpu", "seed": 0}
    own |= {"action_noise": action_noise()} if action_noise else {}
    networks = {"net_arch": [16, 8]} | (policy_kwargs or {})
    return kind(options.pop("policy", "MlpPolicy"), env(name) if env else name, policy_kwargs=networks, **own | options)


train_both = partial(off_policy.train_both, make=make_model)


@pytest.mark.parametrize("kind, name", CASES)
def test_three_hundred_updates_are_those_of_stock(kind, name):
    steps = 330 if "gradient_steps" not in OPTIONS[name] else 200
    ours, stock = train_both(kind, steps, **OPTIONS[name])
    assert ours.describe() == COMPILED and ours._n_updates >= 100
    compare_models(ours, stock, 2e-5)
    for part in ("actor", "critic", "policy"):
        states = [getattr(getattr(x, part, None), "optimizer", None) for x in (ours, stock)]
        torch.testing.assert_close(*(x and x.state_dict()["state"] for x in states), rtol=1e-3, atol=1e-4)
    if is_discrete(kind):
        assert ours.exploration_rate == stock.exploration_rate and ours._n_calls == stock._n_calls


@pytest.mark.parametrize("form, step", [*((x, None) for x in FORMS), (FORMS[0], 40)])
def test_a_replay_buffer_may_draw_as_it_likes(form, step):
    """More samples than it is asked for, too; or it changes a network meanwhile, from one step on."""

    class Uneven(draw_newest(form)):
        calls, network = 0, None

        def sample(self, batch_size, env=None):
            self.calls += 1
            if self.network is not None and self.calls % 3 == 2:
                hook(self.network)
            return super().sample(batch_size + self.calls // 3 % 3 * (self.calls % 4), env)

    change = At(lambda model: setattr(model.replay_buffer, "network", model.actor.mu), step or 99)
    ours, stock = train_both(TritonTD3, 60, callback=lambda: change, gradient_steps=3, replay_buffer_class=Uneven)
    assert ours.describe() == (COMPILED if step is None else LEFT + "a module, parameter or optimizer has hooks")
    compare_models(ours, stock, 2e-5)


def change_things(model):
    policy, step = model.policy, model.num_timesteps
    network = next(getattr(model, x) for x in ("q_net", "quantile_net", "actor") if hasattr(model, x))
    optimizer = policy.optimizer if is_discrete(type(model)) else model.critic.optimizer
    if step == 30:
        policy.load_state_dict({name: 0.9 * x for name, x in policy.state_dict().items()})
    if step == 40:
        optimizer.load_state_dict(optimizer.state_dict())
        model.gamma, optimizer.param_groups[0]["weight_decay"] = 0.5, 0.1
    if step == 50:
        next(network.parameters()).requires_grad_(False)
    if step == 60:
        weight = [*network.parameters()][-2]
        weight.data = 2 * weight.data
    if step == 70:
        model.tau, model.max_grad_norm = 0.4, 0.01
        if hasattr(model, "log_ent_coef"):
            model.log_ent_coef = (model.log_ent_coef.detach() - 1).requires_grad_()
            model.ent_coef_optimizer = torch.optim.Adam([model.log_ent_coef], lr=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_callbacks_may_change_anything(kind):
    ours, stock = train_both(kind, 120, callback=lambda: At(change_things))
    assert ours.describe() == COMPILED
    compare_models(ours, stock, 2e-5)


def test_a_number_of_quantiles_that_networks_have_not_is_left_to_stock():
    ours, stock = train_both(TritonQRDQN, 60, callback=lambda: At(lambda x: setattr(x, "n_quantiles", 100), 30))
    assert ours.describe() == LEFT + "TritonQRDQN has no compiled steps for its networks"
    compare_models(ours, stock, 2e-5)


@pytest.mark.parametrize("kind", [TritonDQN, TritonTD3])
def test_nan_goes_where_it_goes_in_stock(kind):
    ours, stock = train_both(kind, 120, lambda model: setattr(model.replay_buffer, "rewards", NotANumber(500)))
    got, want = ([*x.policy.parameters()] for x in (ours, stock))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert any(x.isnan().any() for x in ours.policy.parameters())


class NotANumber(np.ndarray):
    """Rewards, one of which is NaN whatever is written."""

    def __new__(cls, count):
        return np.zeros((count, 1), np.float32).view(cls)

    def __setitem__(self, key, x):
        super().__setitem__(key, np.nan if key == 50 else x)


def test_a_gaussian_refuses_nan_at_the_same_step(monkeypatch):
    # torch.compile and TorchRL turn these checks off in their process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    models, states = [], []
    for kind in (TritonSAC, SAC):
        models.append(make_model(kind, gradient_steps=5, train_freq=5))
        with pytest.raises(ValueError, match="Expected parameter loc"):
            models[-1].learn(200, callback=At(lambda model: model.replay_buffer.observations[40].fill(np.nan), 60))
        states.append(torch.get_rng_state())
    assert models[0].num_timesteps == models[1].num_timesteps and torch.equal(*states)
    torch.testing.assert_close(*map(list, (model.policy.parameters() for model in models)), rtol=1e-4, atol=1e-5)


def hook(module):
    return module.register_forward_hook(lambda *_: None)


OWN_EXTRACTOR, OWN_FLATTEN = type("Own", (FlattenExtractor,), {}), derive(torch.nn.Flatten, "forward")
OWN_STEP = derive(TritonDQN, "_step_optimizer")
ADAM = {"optimizer_class": torch.optim.Adam, "optimizer_kwargs": {"amsgrad": True}}
REASONS = {
    "Softplus is none": (lambda model: None, {"policy_kwargs": {"activation_fn": torch.nn.Softplus}}),
    "a module, parameter or optimizer has hooks": (lambda model: hook(model.q_net.q_net[0]), {}),
    "a module has hooks": (lambda model: hook(model.q_net), {}),
    "compiled: a module has hooks": (lambda model: hook(model.q_net_target.features_extractor.flatten), {}),
    "this QNetwork has its own forward": (lambda x: override(x.q_net, "forward"), {}),
    "this FlattenExtractor has its own forward": (lambda x: override(x.q_net.features_extractor, "forward"), {}),
    "this Flatten has its own forward": (lambda x: override(x.q_net_target.features_extractor.flatten, "forward"), {}),
    "this Linear has its own forward": (lambda x: override(x.q_net_target.q_net[0], "forward"), {}),
    "has its own _learn": (lambda model: setattr(model, "_learn", lambda *_: {}), {}),
    "a Own for": (lambda model: setattr(model.q_net.features_extractor, "__class__", OWN_EXTRACTOR), {}),
    "module, or has a FlattenExtractor": (lambda x: setattr(x.q_net.features_extractor, "flatten", OWN_FLATTEN()), {}),
    "TritonDQN has its own _step_optimizer": (lambda model: setattr(model, "__class__", OWN_STEP), {}),
    "weights; with more": (lambda model: None, {"policy_kwargs": {"net_arch": [500, 500]}}),
    "Adam with amsgrad": (lambda model: None, {"policy_kwargs": ADAM}),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("reason", REASONS)
def test_reasons_why_steps_are_not_compiled(reason, learns):
    """Before learning, and while it does, of a model whose steps were compiled."""
    change, options = REASONS[reason]
    model = make_model(TritonDQN, **options)
    if learns:
        assert model.learn(30, callback=At(change, 30))._compiled is None  # in the very next update
    else:
        change(model.learn(1))
    sentence, is_own = model.describe(), "own _" in reason  # and as our eager steps call it
    assert sentence.startswith("updates are eager: " if is_own else LEFT) and reason in sentence
    assert model.is_accelerated == is_own


LARGE = "with .* threads, PyTorch is faster: a layer has"


@pytest.mark.parametrize(
    "kind, options, threads, reason",
    [
        (TritonTD3, {}, 1, ""),
        (TritonTD3, {}, 2, ""),
        (TritonTD3, {}, 3, f"{LARGE} 120000 weights, minibatches are of 256"),
        (TritonTD3, {"batch_size": 128}, 4, LARGE),
        (TritonDQN, {"batch_size": 2100}, 4, f"{LARGE} 4096 weights"),  # which only one of ours would learn
        (TritonSAC, {}, 8, ""),
        (TritonSAC, {"batch_size": 257}, 4, f"{LARGE} 65536 weights"),
    ],
)
def test_large_minibatches_of_large_networks_are_left_to_several_threads(kind, options, threads, reason):
    torch.set_num_threads(threads)
    sentence = kind("MlpPolicy", "CartPole-v1" if is_discrete(kind) else "Pendulum-v1", **options).describe()
    assert re.fullmatch(f"{LEFT}{reason}.*" if reason else COMPILED, sentence)


def test_methods_that_a_class_gets_later_are_called():
    kind = type("Later", (TritonDQN,), {"__module__": __name__})
    model = make_model(kind).learn(30)
    assert copy.deepcopy(model).learn(10, reset_num_timesteps=False).describe() == COMPILED
    assert model._compiled is not None
    change = At(lambda _: setattr(kind, "_step_optimizer", TritonSAC._step_optimizer), 35)
    model.learn(10, callback=change, reset_num_timesteps=False)
    assert model._compiled is None and "Later has its own _step_optimizer" in model.describe()


@pytest.mark.parametrize("name", ["predict", "_predict", "obs_to_tensor", "forward", "q_net.forward"])
def test_acting_of_users_is_theirs(name):
    model, calls = make_model(TritonDQN).learn(40), []
    owner, name = (model.policy.q_net, "forward") if "." in name else (model.policy, name)
    own = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
    model.exploration_rate, model.exploration_schedule = 0.0, lambda _: 0.0
    model.learn(30, reset_num_timesteps=False)
    assert len(calls) >= 10 or (name == "forward" and owner is model.policy)


def test_a_class_may_act_in_its_own_way_in_each_rollout():
    class Own(TritonDQN):
        def collect_rollouts(self, *args, **kwargs):
            self.policy.predict = lambda *_: calls.append(1) or (np.array([1]), None)
            results = super().collect_rollouts(*args, **kwargs)
            del self.policy.predict
            return results

    calls = []
    assert make_model(Own).learn(40).describe() == COMPILED and len(calls) >= 10


STOCK = {sb3_kinds.TritonCrossQ: {}, TritonTQC: {"top_quantiles_to_drop_per_net": -1}}
STOCK[TritonSAC] = {"env": lambda _: FLIPPING(), "policy": "MultiInputPolicy"}
STOCK[TritonTD3] = {"policy_kwargs": {"activation_fn": torch.nn.Softplus}}


@pytest.mark.parametrize("kind", STOCK)
def test_what_is_not_compiled_is_stock_bit_for_bit(kind):
    """With optimizers that were told nothing, and that of the entropy coefficient."""
    ours, stock = train_both(kind, 80, gradient_steps=2, **STOCK[kind])
    assert ours.describe().startswith(LEFT)
    compare_models(ours, stock, 0)


def test_what_was_not_compiled_is_asked_again_at_times(monkeypatch):
    asked, find = [], compiled_off_policy.find_unknown
    monkeypatch.setattr(compiled_off_policy, "find_unknown", lambda *args: asked.append(1) or find(*args))
    model = make_model(TritonDQN)
    handle = hook(model.q_net)
    model.learn(500, callback=At(lambda model: handle.remove(), 200))
    assert model._compiled is not None and len(asked) == 2  # at first, and where replaced functions are
    handle = hook(model.q_net)
    assert model.learn(30, reset_num_timesteps=False).describe().startswith(LEFT)
    handle.remove()
    assert model.describe() == COMPILED
    model.learn(30, callback=At(lambda model: setattr(model, "enabled", False), 550), reset_num_timesteps=False)
    assert model._update.stock == "switched off"


def watch(model):
    """Compares actions with those of the policy itself, and changes its parameters between."""
    policy, obs = model.policy, model.get_env().reset()
    with torch.no_grad():
        for x in policy.parameters():
            x.mul_(1.01)
    state = torch.get_rng_state()
    given = [policy.predict(obs, deterministic=True)[0], policy.predict(obs)[0], policy.predict(obs[0])[0]]
    torch.set_rng_state(state)
    own = partial(type(policy).predict, policy)
    for x, y in zip(given, [own(obs, deterministic=True)[0], own(obs)[0], own(obs[0])[0]], strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    assert "predict" in vars(policy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 200])
def test_acting_is_that_of_the_policy(kind, count):
    model = make_model(kind, env=lambda name: make_vec_env(name, count, seed=0)).learn(30 + 2 * count)
    model.learn(3 * count, callback=At(watch), reset_num_timesteps=False)
    assert "predict" not in vars(model.policy)
