"""SAC, TD3, DDPG, DQN, TQC, QR-DQN and CrossQ against the stock algorithms: eager, and captured."""

import copy
import dataclasses
import re
from collections import namedtuple
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gpu_checks import GPU

pytest.importorskip("sb3_contrib")
import sb3_kinds
from gymnasium import spaces
from overrides import derive
from process_state import interrupted
from recorded_graphs import allow_captures
from sb3_callbacks import At
from sb3_kinds import DQN, QRDQN, SAC, TD3, TritonCrossQ, TritonDDPG, TritonDQN, TritonSAC, TritonTD3, TritonTQC
from sb3_kinds import OFF_POLICY as STOCK
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.her import HerReplayBuffer
from torch.distributions import Distribution

from rl_triton_adapters.common import branches
from rl_triton_adapters.common.modes import TrainingModes
from rl_triton_adapters.sb3 import minibatches
from rl_triton_adapters.sb3.base import DEVICES
from rl_triton_adapters.sb3.contrib_off_policy import list_renorms
from rl_triton_adapters.sb3.off_policy import OffPolicyMixin

TOLD = {
    **{"net_arch": [16, 16], "activation_fn": torch.nn.Softplus, "optimizer_class": torch.optim.Adam},
    "optimizer_kwargs": {"foreach": True, "eps": 1e-3},
}
"""Layers that are not compiled, and an optimizer that was told how to step: rounding is the stock algorithm's.

A bias before a normalisation has rounding for a gradient where its unit is never off, of which Adam makes a whole step
unless `eps` is larger.
"""


class Screen(gym.ObservationWrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = spaces.Box(0, 255, (1, 36, 36), np.uint8)

    def observation(self, observation):
        return np.full((1, 36, 36), np.clip(128 + 40 * observation[2], 0, 255), np.uint8)


def normalize(name, **options):
    return VecNormalize(make_vec_env(name, 2, seed=0), **options)


def make_noise():
    return NormalActionNoise(np.zeros(1), 0.2 * np.ones(1))


FLIPPING = partial(BitFlippingEnv, 4, continuous=True, max_steps=10)
CONTINUOUS = {
    "defaults": {},
    "several steps": {"gradient_steps": 3, "train_freq": 2, "learning_rate": lambda left: 1e-3 * left},
    "by episodes": {"train_freq": (1, "episode"), "gradient_steps": -1, "env": FLIPPING, "policy": "MultiInputPolicy"},
    "n-step returns, noise": {"n_steps": 3, "action_noise": make_noise},
    "memory": {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}},
    "normalized": {"env": lambda: normalize("Pendulum-v1"), "gradient_steps": -1},
    "hindsight": {"env": FLIPPING, "policy": "MultiInputPolicy", "replay_buffer_class": HerReplayBuffer},
}
OWN = {
    TritonSAC: {
        "fixed coefficient": {"ent_coef": 0.1},
        "rare targets": {"target_update_interval": 2, "gradient_steps": 3},
        "target entropy": {"target_entropy": -0.3, "ent_coef": "auto_0.2"},
    },
    TritonTD3: {"delay": {"policy_delay": 3, "tau": 0.1, "target_policy_noise": 0.5, "target_noise_clip": 0.2}},
    TritonDDPG: {"noise": {"action_noise": lambda: OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.3 * np.ones(1))}},
    TritonTQC: {"drops": {"top_quantiles_to_drop_per_net": 5, "target_update_interval": 2, "gradient_steps": 2}},
    TritonCrossQ: {
        "warm-up ends": {
            "policy_kwargs": {"renorm_warmup_steps": 20},
            "gradient_steps": 4,
            "train_freq": 2,
            "policy_delay": 2,
            "learning_rate": 1e-4,
        }
    },
}
DISCRETE = {
    "defaults": {},
    "several steps": {"gradient_steps": 3, "train_freq": 2, "target_update_interval": 20, "tau": 0.5},
    "n-step returns": {"n_steps": 3, "max_grad_norm": 0.1},
    "images": {"env": Screen, "policy": "CnnPolicy", "policy_kwargs": {"net_arch": []}},
}
CASES = [(TritonTD3, name, x) for name, x in CONTINUOUS.items()]
CASES += [(kind, "defaults", {}) for kind in (TritonSAC, TritonDDPG, TritonTQC, TritonCrossQ)]
CASES += [(kind, name, x) for kind, options in OWN.items() for name, x in options.items()]
CASES += [(TritonDQN, name, x) for name, x in DISCRETE.items()]
CASES += [(sb3_kinds.TritonQRDQN, name, DISCRETE[name]) for name in ("defaults", "several steps")]
IDS = [f"{STOCK[kind].__name__}-{name}" for kind, name, _ in CASES]


def is_discrete(kind):
    return issubclass(kind, DQN | QRDQN)


def make_model(kind, policy="MlpPolicy", env=None, action_noise=None, policy_kwargs=None, **options):
    """A model that learns from its 20th step on."""
    own = {"action_noise": action_noise()} if action_noise else {}
    if is_discrete(kind) and "train_freq" not in options:
        own["train_freq"] = 1
    env = env() if env else "CartPole-v1" if is_discrete(kind) else "Pendulum-v1"
    sizes = {"buffer_size": 500, "learning_starts": 20, "batch_size": 16}
    return kind(policy, env, seed=0, policy_kwargs=TOLD | (policy_kwargs or {}), **sizes, **own, **options)


def train(kind, steps=48, callback=None, device="cpu", **options):
    model = make_model(kind, device=device, **options)
    return model.learn(steps, callback=callback)


def train_both(kind, steps=48, change=lambda model: None, callback=None, make=make_model, **options):
    """Ours and stock's, after a change, with a callback each."""
    models = []
    for each in (kind, STOCK[kind]):
        models.append(make(each, **options))
        change(models[-1])
        models[-1].learn(steps, callback=callback and callback())
    return models


def compare_models(ours, stock, tolerance):
    """Parameters, targets and running statistics, and what was logged last."""
    states = (x.policy.state_dict() for x in (ours, stock))
    torch.testing.assert_close(*states, rtol=0, atol=tolerance, check_device=False)
    assert ours._n_updates == stock._n_updates >= 20
    logs, other = (x.logger.name_to_value for x in (ours, stock))
    assert {*logs} == {*other}
    for name in logs:
        if name.startswith("train/"):
            np.testing.assert_allclose(logs[name], other[name], 1e3 * tolerance, 1e3 * tolerance, err_msg=name)


def check_captured(kind, monkeypatch, *args, **options):
    """Ours, which is captured and ends where stock does."""
    allow_captures(monkeypatch)
    ours, stock = train_both(kind, *args, **options)
    assert ours.describe() == "updates are captured"
    compare_models(ours, stock, 2e-5)
    return ours


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """On a CPU, too, steps are ours that are not captured, as on a GPU."""
    monkeypatch.setattr(OffPolicyMixin, "eager_devices", DEVICES)


@pytest.mark.parametrize("kind, name, options", CASES, ids=IDS)
def test_gradient_steps_are_those_of_the_stock_algorithm(kind, name, options, monkeypatch):
    steps = 216 if name == "defaults" and kind is TritonSAC else 48  # an episode of Pendulum has 200
    ours, stock = train(kind, steps, **options), train(STOCK[kind], steps, **options)
    assert "eager" in ours.describe()
    learns_coefficient = getattr(ours, "ent_coef_optimizer", None) is not None  # by an optimizer that was not told
    compare_models(ours, stock, 2e-6 if learns_coefficient else 0)
    allow_captures(monkeypatch)
    monkeypatch.setattr(minibatches, "COPIED_BYTES", 2000)  # not even two minibatches of most
    captured = train(kind, steps, **options)
    assert captured.describe() == "updates are captured"
    compare_models(captured, stock, 2e-5)


@pytest.mark.parametrize("kind", STOCK)
def test_with_default_optimizers_parameters_are_equal_up_to_rounding(kind, device):
    models = train_both(kind, policy_kwargs={"optimizer_kwargs": {}}, device=device)
    compare_models(*models, 1e-5 if device == "cpu" else 1e-3)


class Places(BaseFeaturesExtractor):
    def __init__(self, space):
        super().__init__(space, 4)
        self.table = torch.nn.Embedding(8, 4, sparse=True)

    def forward(self, observations):
        return self.table((observations[:, 0] * 3 + 4).long())


def fix_coefficient_at_first(model):
    model.log_ent_coef, model.ent_coef_tensor = None, torch.tensor(0.2)


@pytest.mark.parametrize("kind", [TritonSAC, TritonTQC, TritonTD3])
def test_a_fixed_coefficient_and_sparse_gradients(kind):
    sparse = {"features_extractor_class": Places, "optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}}
    compare_models(*train_both(kind, change=fix_coefficient_at_first, policy_kwargs=sparse), 1e-5)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("kind", [x for x in STOCK if not is_discrete(x)])
def test_branches_of_a_graph_change_no_bit(kind, device, monkeypatch):
    branched = train(kind, device=device)
    forks, is_capturing = [], branches.is_capturing
    monkeypatch.setattr(branches, "is_capturing", lambda: forks.append(is_capturing()))
    monkeypatch.setattr(branches.Writes, "watch", lambda *_: nullcontext())  # which would look in a capture, too
    compare_models(train(kind, device=device), branched, 0)
    assert any(forks)


@torch.no_grad()
def replace_actor(model):
    """By another one, whose optimizer is that of the one before."""
    before = model.actor
    model.actor = model.policy.actor = copy.deepcopy(before)
    model.actor.optimizer = before.optimizer
    for x in model.actor.requires_grad_(False).parameters():  # else its gradients add up for ever
        x.mul_(2)


def bend_layers(model):
    for layer in model.policy.modules():
        layer.__dict__.update({"negative_slope": -9.0} if isinstance(layer, torch.nn.LeakyReLU) else {})


def explore_at_times(model):
    """Before and after the 30th step, actions are random ones."""
    if is_discrete(type(model)):
        model.exploration_schedule = lambda left: float(29 <= model.num_timesteps <= 32)


ACTORS = [(TritonTD3, replace_actor, "step"), (TritonTD3, replace_actor, "rollout_start")]
ACTORS += [(kind, bend_layers, moment) for kind in (TritonTD3, TritonDQN) for moment in ("step", "rollout_start")]


@pytest.mark.parametrize("kind, change, moment", ACTORS)
def test_an_actor_that_is_replaced_acts(kind, change, moment, monkeypatch):
    layers = {"activation_fn": torch.nn.LeakyReLU}
    at = {"change": explore_at_times, "callback": lambda: At(change, 30, moment)}
    check_captured(kind, monkeypatch, 120, **at, policy_kwargs=layers)


def replace_target(model):
    name = "q_net" if is_discrete(type(model)) else "critic"
    setattr(model, f"{name}_target", copy.deepcopy(getattr(model, name)))


def change_settings(model):
    model.tau, model.gamma, model.max_grad_norm = 0.3, 0.5, 0.01
    if hasattr(model, "target_policy_noise"):
        model.target_policy_noise = 0.7


def change_coefficient(model):
    model.ent_coef_tensor = torch.tensor(0.7)


def fix_coefficient(model):
    model.ent_coef_optimizer, model.ent_coef_tensor = None, torch.tensor(0.01)


FOLLOWED = [(x, change) for change in (replace_target, change_settings) for x in (TritonSAC, TritonTD3, TritonDQN)]
FOLLOWED += [(TritonSAC, change_coefficient), *((x, fix_coefficient) for x in (TritonSAC, TritonTQC, TritonCrossQ))]


@pytest.mark.parametrize("kind, change", FOLLOWED)
def test_what_changes_is_followed(kind, change, captured):
    options = {"ent_coef": 0.2} if kind is TritonSAC and change is not fix_coefficient else {}
    ours, stock, unchanged = (
        train(x, callback=callback and At(callback, 30), **options)
        for x, callback in ((kind, change), (STOCK[kind], change), (STOCK[kind], None))
    )
    compare_models(ours, stock, 2e-5 if captured or change is fix_coefficient else 0)
    assert not torch.equal(*(torch.cat([*map(torch.ravel, x.policy.parameters())]) for x in (stock, unchanged)))


def restart_warm_ups(model):
    """Of the last layer of each critic that normalises batches."""
    for critic in model.critic.q_networks:
        list_renorms(critic)[-1].steps.zero_()


def test_layers_that_normalise_may_have_warm_ups_of_their_own(captured):
    options = {"callback": lambda: At(restart_warm_ups, 40), "policy_kwargs": {"renorm_warmup_steps": 12}}
    compare_models(*train_both(TritonCrossQ, 60, **options), 2e-5 if captured else 0)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("kind", [TritonSAC, TritonDQN, TritonCrossQ])
def test_a_copy_goes_on_as_its_original(kind):
    model = train(kind, 40, policy_kwargs={"activation_fn": Dropped})
    models = copy.deepcopy(model), model
    copy.deepcopy(model.policy)
    for each in models:
        each.set_random_seed(1)
        torch.manual_seed(1)
        each.learn(8, reset_num_timesteps=False)
    compare_models(*models, 0)
    assert Dropped.modes == [True]


class Dropped(torch.nn.Dropout):
    """Notes the modes in which gradients go through."""

    modes: ClassVar = []

    def forward(self, x):
        if torch.is_grad_enabled():
            Dropped.modes = sorted({*Dropped.modes, self.training})
        return super().forward(x)


@pytest.mark.parametrize("kind", [TritonSAC, TritonDQN])
def test_a_policy_that_torch_compiles_is_left_alone(kind):
    models = train_both(kind, change=lambda model: setattr(model, "policy", torch.compile(model.policy)))
    compare_models(*models, 0)
    assert models[0].describe().endswith("the policy is wrapped in OptimizedModule")


@pytest.mark.parametrize("kind", STOCK)
def test_checkpoints_are_those_of_the_stock_algorithm(kind, tmp_path):
    ours = train(kind, 40)
    ours.save(tmp_path / "ours")
    ours.save_replay_buffer(tmp_path / "buffer")
    results = []
    for loading in (kind, STOCK[kind]):
        model = loading.load(tmp_path / "ours", env=ours.get_env())
        model.load_replay_buffer(tmp_path / "buffer")
        model.set_random_seed(1)
        results.append(model.learn(20, reset_num_timesteps=False))
    assert type(results[0]) is kind and results[0].is_accelerated
    compare_models(*results, 2e-6)
    results[1].save(tmp_path / "stock")
    assert kind.load(tmp_path / "stock", env=ours.get_env()).enabled is True


OWN_TRAIN = derive(TD3, "train")


@pytest.mark.parametrize(
    "kind, options, reason",
    [
        (TritonSAC, {"enabled": False}, "switched off"),
        (TritonSAC, {"use_sde": True}, "use_sde"),
        (type("Ours", (TritonTD3, OWN_TRAIN), {}), {}, "TD3 has its own train"),
    ],
)
def test_what_is_not_served_is_the_stock_algorithm(kind, options, reason):
    ours = train(kind, 60, **options)
    assert re.match(f"updates are those of the stock algorithm: {reason}", ours.describe())
    options = {name: x for name, x in options.items() if name != "enabled"}
    stock = train(SAC if kind is TritonSAC else OWN_TRAIN, 60, **options)
    for x, y in zip(ours.policy.parameters(), stock.policy.parameters(), strict=True):
        assert torch.equal(x, y)


FIELDS = (*ReplayBufferSamples._fields, "indices")
FORMS = [namedtuple("WithIndices", FIELDS), dataclasses.make_dataclass("AsDataclass", FIELDS)]


def draw_newest(form):
    """A buffer that draws the newest samples alone, in this form, with their indices, as priorities have them."""

    class Newest(ReplayBuffer):
        def sample(self, batch_size, env=None):
            last = np.arange(self.pos - batch_size, self.pos) % self.buffer_size
            samples = self._get_samples(last, env=env)
            return form(*samples[:5], None, last)

    return Newest


@pytest.mark.parametrize("form", FORMS)
def test_a_replay_buffer_may_draw_as_it_likes(form, monkeypatch):
    """No graph takes an array."""
    own = {"replay_buffer_class": draw_newest(form)}
    compare_models(*train_both(TritonTD3, **own), 0)
    check_captured(TritonTD3, monkeypatch, **own)


def make_owner(kind):
    """A model whose first layer has an optimizer of its own, which steps after each update."""

    class Owner(kind):
        def train(self, *args, **kwargs):
            super().train(*args, **kwargs)
            self.own.step()
            self.own.zero_grad()

    model = make_model(Owner)
    network = model.policy if is_discrete(kind) else model.critic
    layer = next(x for x in network.modules() if isinstance(x, torch.nn.Linear))
    taken = {*map(id, layer.parameters())}
    for group in network.optimizer.param_groups:
        group["params"] = [x for x in group["params"] if id(x) not in taken]
    model.own = torch.optim.SGD(layer.parameters(), lr=0.1)
    return model


@pytest.mark.parametrize("kind", STOCK)
def test_parameters_of_other_optimizers_get_all_their_gradients(kind, captured):
    """A critic's those of the actor's loss, too."""
    models = train_both(kind, 40, lambda model: model.set_random_seed(0), make=make_owner)
    compare_models(*models, 2e-5 if captured else 1e-6)


class BrokenSensor(gym.ObservationWrapper):
    """Pendulum whose observation is NaN for ten steps."""

    def __init__(self, step):
        super().__init__(gym.make("Pendulum-v1"))
        self.broken, self.steps = step, 0

    def observation(self, observation):
        self.steps += 1
        return observation * np.nan if 0 < self.steps - self.broken <= 10 else observation


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("starts", [20, 200], ids=["when it acts", "when it learns"])
def test_an_observation_that_is_nan_is_an_error_at_the_same_step(starts, monkeypatch):
    monkeypatch.setattr(Distribution, "_validate_args", True)  # which torch.compile switches off
    models, errors = [], []
    for kind in (TritonSAC, SAC):
        model = make_model(kind, env=lambda: BrokenSensor(60), ent_coef=0.1)
        model.learning_starts = starts
        models.append(model)
        with pytest.raises(ValueError, match="Expected parameter loc") as caught:
            model.learn(300)
        errors.append((model.num_timesteps, str(caught.value)[:60]))
    assert errors[0] == errors[1] and (errors[0][0] > 200) == (starts == 200)
    torch.testing.assert_close(*map(list, (model.actor.parameters() for model in models)), rtol=0, atol=2e-5)


OF_THE_PROCESS = {"scale": 1.0}


class Global(BaseFeaturesExtractor):
    def __init__(self, space):
        super().__init__(space, 4)

    def forward(self, observations):
        return observations * OF_THE_PROCESS["scale"]


def change_scale(model):
    OF_THE_PROCESS["scale"] = 0.5
    getattr(model, "recapture", int)()


def test_what_no_graph_sees_is_captured_again_when_asked(monkeypatch):
    """Updates and acting."""
    allow_captures(monkeypatch)
    models = []
    for kind in (TritonDQN, DQN):
        monkeypatch.setitem(OF_THE_PROCESS, "scale", 1.0)
        models.append(train(kind, 40, At(change_scale, 30), policy_kwargs={"features_extractor_class": Global}))
    assert models[0].describe() == "updates are captured"
    compare_models(*models, 2e-5)


class Normalised(BaseFeaturesExtractor):
    """Features with running statistics, which every call writes."""

    def __init__(self, space):
        super().__init__(space, 8)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8, bias=False), torch.nn.BatchNorm1d(8))

    def forward(self, observations):
        return self.layers(observations)


@pytest.mark.parametrize("share_features_extractor", [False, True])
@pytest.mark.parametrize("kind", [TritonSAC, TritonTD3, TritonTQC])
def test_no_two_branches_write_the_same_statistics(kind, share_features_extractor, monkeypatch):
    """Recorded graphs refuse it; without statistics there are branches."""
    told = {"features_extractor_class": Normalised, "share_features_extractor": share_features_extractor}
    ours = check_captured(kind, monkeypatch, 40, policy_kwargs=told)
    assert ours._writes.are_there and not train(kind, 40)._writes.are_there


@pytest.mark.parametrize("kind", [TritonSAC, TritonTD3])
def test_networks_of_a_critic_may_share_statistics(kind, monkeypatch):
    class Policy(kind.policy_aliases["MlpPolicy"]):
        def make_critic(self, features_extractor=None):
            critic = super().make_critic(features_extractor)
            shared = torch.nn.BatchNorm1d(critic.q_networks[0][0].in_features)
            for network in critic.q_networks:
                network.insert(0, shared)
            return critic

    check_captured(kind, monkeypatch, 40, policy=Policy)


def test_acting_is_captured_and_draws_from_the_policy(monkeypatch):
    allow_captures(monkeypatch)
    model = train(TritonSAC, 60)
    assert len(model._acting.captured) == 1 and "_predict" not in vars(model.policy)
    observation = np.ones((1, 3), np.float32)
    assert not np.array_equal(model.predict(observation)[0], model.predict(observation)[0])


@pytest.mark.parametrize("size", [1, 3])
def test_a_minibatch_is_what_was_drawn_wherever_its_tensors_lie(size):
    image, dones = torch.randint(255, (3 * size, 5), dtype=torch.uint8), torch.rand(3 * size, 1)
    drawn = {"image": image.numpy(), "dones": dones.numpy(), "discounts": None}
    form, rows = minibatches.pack_minibatches(drawn, 3, torch.device("cpu"))
    for row, *expected in zip(rows, image.split(size), dones.split(size), strict=True):
        found = form.unpack(row)
        assert found.keys() == drawn.keys() and found["discounts"] is None
        assert torch.equal(found["image"], expected[0]) and torch.equal(found["dones"], expected[1])


BUFFERS = {"plain": {}, "several environments": {"n_envs": 3}, "dictionaries": {"n_envs": 2}}
BUFFERS["memory"] = {"n_envs": 2, "optimize_memory_usage": True, "handle_timeout_termination": False}


def fill_buffer(name, steps, device="cpu"):
    """A replay buffer with random transitions, of an algorithm without a normaliser."""
    space, action = spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2,))
    space = spaces.Dict({"a": space, "image": spaces.Box(0, 255, (2, 4), np.uint8)}) if name[0] == "d" else space
    buffer = (DictReplayBuffer if name[0] == "d" else ReplayBuffer)(20, space, action, device, **BUFFERS[name])
    space.seed(0)
    for i in range(steps):
        one, two = ([space.sample() for _ in range(buffer.n_envs)] for _ in "ab")
        if name[0] == "d":
            one, two = ({key: np.stack([x[key] for x in y]) for key in y[0]} for y in (one, two))
        number = buffer.n_envs
        about, ends = [{"TimeLimit.truncated": i % 4 == 0}] * number, np.full(number, i % 2 == 0)
        buffer.add(one, two, np.ones((number, 2)) * i, np.arange(number) + i, ends, about)
    return SimpleNamespace(replay_buffer=buffer, _vec_normalize_env=None, _stored=None, device=torch.device(device))


@pytest.mark.parametrize("steps", [7, 33])
@pytest.mark.parametrize("name", BUFFERS)
def test_a_graph_gathers_what_stock_buffers_draw(name, steps, device):
    owner = fill_buffer(name, steps, device)
    for _ in range(2):
        set_random_seed(3)
        form, batches = next(minibatches.draw_minibatches(owner, 2, 16))
        found = [form.unpack(x) for x in batches]
        set_random_seed(3)
        expected = [owner.replay_buffer.sample(16) for _ in batches]
        assert type(form) is minibatches.Stored
        torch.testing.assert_close(found, [minibatches.keep_fields(x) for x in expected], rtol=0, atol=0)
        owner.replay_buffer.rewards *= 2  # which the next minibatch has
        assert copy.deepcopy(form) is None and form.is_of(owner.replay_buffer)


HELD = np.zeros((20, 2), np.float32)
REFUSED = [("observations", np.asfortranarray), ("observations", lambda x: x.astype(np.uint16))]  # not gathered
REFUSED += [("timeouts", lambda x: x.astype(bool)), ("rewards", lambda x: x[::-1]), ("_get_samples", lambda x: x)]
REFUSED += [("rewards", lambda x: HELD[:, :1]), ("rewards", lambda x: torch.zeros(20, 1).numpy())]  # held elsewhere


@pytest.mark.parametrize("name, change", REFUSED)
def test_no_graph_gathers_from_arrays_of_other_kinds(name, change):
    owner = fill_buffer("plain", 7)
    setattr(owner.replay_buffer, name, change(getattr(owner.replay_buffer, name)))
    assert minibatches.find_stored(owner) is None


def test_which_buffers_graphs_gather_from():
    kept, large, loaded, last = (fill_buffer("plain", 7) for _ in range(4))
    rewards, form = kept.replay_buffer.rewards, minibatches.find_stored(loaded)
    loaded.replay_buffer.more = np.array([None])  # which is no field
    assert minibatches.find_stored(kept) is None is not form and rewards[0] == 0
    with mock.patch.object(minibatches, "pin_array", side_effect=RuntimeError("out of memory")):
        assert minibatches.find_stored(last) is None
    with mock.patch.object(minibatches, "PINNED_BYTES", 800):
        assert minibatches.find_stored(large) is None is not minibatches.find_stored(loaded) is form
    loaded.replay_buffer = fill_buffer("plain", 9).replay_buffer
    assert form is not minibatches.find_stored(loaded) is not None


OWN_SAMPLING = derive(TritonTD3, "_sample_action")


@pytest.mark.parametrize(
    "kind, callback", [(TritonTD3, At), (TritonTD3, lambda *args: [At(*args)]), (OWN_SAMPLING, None)]
)
def test_an_update_is_over_where_others_may_write_to_its_buffer(kind, callback, monkeypatch):
    allow_captures(monkeypatch)
    begun, collect, stepped = [], OffPolicyMixin.collect_rollouts, []
    note = lambda self, *args, **kwargs: (begun.append(self._unfinished), collect(self, *args, **kwargs))[1]  # noqa: E731
    monkeypatch.setattr(OffPolicyMixin, "collect_rollouts", note)
    train(TritonTD3, 40)
    assert sum(x is not None for x in begun) > 10
    begun.clear()
    train(kind, 40, callback and callback(lambda model: None, None, "rollout_start"))
    assert len(begun) == 40 and not any(begun)
    note = At(lambda model: stepped.append(model._unfinished))  # the first of two actions may be a random one
    train(TritonDQN, 60, note, exploration_fraction=1.0, train_freq=2)
    assert len(stepped) == 60 and not any(stepped)


class Counting(torch.nn.ReLU):
    calls = 0

    def train(self, mode=True):
        self.calls += 1
        return super().train(mode)


def test_modes_that_the_user_keeps_are_kept():
    """A layer with modes of its own is told each time."""
    policy = make_model(TritonTD3).policy
    policy.actor.scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Dropout(0.3)))
    modes, policy.actor.counting = TrainingModes(policy, ("stable_baselines3", "sb3_contrib")), Counting()
    for mode in (True, False, True):
        modes.set_mode(mode)
        assert policy.actor.scripted.training == policy.actor.counting.training == policy.actor.training == mode
    assert policy.actor.counting.calls == 3
    policy.critic.train = lambda mode=True: policy.critic
    modes.set_mode(False)
    assert policy.critic.training and not policy.actor.training
    policy.set_training_mode = lambda mode: None
    modes.set_mode(True)
    assert not policy.actor.training


def test_modes_are_put_back_where_setting_them_is_interrupted():
    policy = make_model(TritonTD3).policy
    with pytest.raises(KeyboardInterrupt), interrupted(5, torch.nn.Module.train):
        TrainingModes(policy, ("stable_baselines3", "sb3_contrib")).set_mode(False)
    assert None not in [x["training"] for x in map(vars, policy.modules())]


@pytest.mark.parametrize("kind", STOCK)
def test_minibatches_of_a_train_by_hand_are_as_large_as_stock_ones(kind):
    sizes = []
    for model in (make_model(kind), make_model(STOCK[kind])):
        model.learn(30)
        with mock.patch.object(model.replay_buffer, "sample", wraps=model.replay_buffer.sample) as sample:
            model.train(gradient_steps=1)
        sizes.append([call.args[0] for call in sample.call_args_list])
    assert sizes[0] == sizes[1] != []
    with pytest.raises(ValueError, match="batch_size: got 0"):
        make_model(kind).learn(30).train(2, batch_size=0)
