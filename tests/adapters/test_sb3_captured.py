"""TritonPPO, TritonA2C and TritonMaskablePPO against the stock algorithms.

On a CPU as they are and with recorded graphs, on a GPU with CUDA's.
"""

import copy
import pickle
import warnings
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gpu_checks import GPU

pytest.importorskip("sb3_contrib")
import sb3_kinds
from compilations import count_compilations
from gymnasium import spaces
from overrides import derive, override
from recorded_graphs import allow_captures
from sb3_callbacks import At
from sb3_contrib.common.maskable.buffers import MaskableRolloutBuffer
from sb3_kinds import A2C, PPO, STOCK, MaskablePPO, TritonA2C, TritonMaskablePPO, TritonPPO, TritonRecurrentPPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import set_random_seed
from test_sb3 import DictCartPole
from torch.distributions import Distribution

from benchmarks.end_to_end import sb3
from rl_triton_adapters.common import optimizers
from rl_triton_adapters.common.optimizers import fuse_optimizer, is_fused

pytestmark = pytest.mark.covering

OPTIONS = {"n_steps": 32, "batch_size": 24, "n_epochs": 3, "seed": 0}  # a short last minibatch
A2C_OPTIONS = {"n_steps": 32, "seed": 0}


class OtherActions(gym.ActionWrapper):
    """CartPole with several actions at once, of which the first says where to go: 0, or else."""

    def __init__(self, space):
        super().__init__(gym.make("CartPole-v1"))
        self.action_space = space

    def action(self, action):
        return int(np.ravel(action)[0] > 0)


class MaskedActions(OtherActions):
    """Any actions, of which others are allowed at every step, and at least one of each kind."""

    def __init__(self, space, sizes):
        super().__init__(space)
        self.sizes, self.rng = sizes, np.random.default_rng(0)

    def action_masks(self):
        masks = [self.rng.random(size) < 0.5 for size in self.sizes]
        for mask in masks:
            mask[self.rng.integers(len(mask))] = True
        return np.concatenate(masks)


class NothingAllowed(MaskedActions):
    def action_masks(self):
        return super().action_masks() & (self.rng.random() < 0.9)


class OwnPolicy(ActorCriticPolicy):
    def forward(self, obs, deterministic=False):
        actions, values, log_prob = super().forward(obs, deterministic)
        return actions, 2 * values, log_prob

    def evaluate_actions(self, obs, actions):
        values, log_prob, entropy = super().evaluate_actions(obs, actions)
        return 2 * values, log_prob, 3 * entropy


class OneArgument(ActorCriticPolicy):
    """A policy that is only ever asked for drawn actions, and knows the mean entropy alone."""

    def forward(self, obs):
        return super().forward(obs)

    def evaluate_actions(self, obs, actions):
        values, log_prob, entropy = super().evaluate_actions(obs, actions)
        return values, log_prob, entropy.mean()


class OneStd(ActorCriticPolicy):
    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.log_std = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)


class NeverLeft(ActorCriticPolicy):
    """An action of probability 0."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.action_net.bias.data[0] = -torch.inf


APART = {"share_features_extractor": False, "net_arch": [8]}
LAST = {"learning_rate": lambda x: 1e-3 * x, "clip_range": lambda x: 0.2 * x - 0.01}
SQUASHED = {"squash_output": True, "use_expln": True}
MANY = {"clip_range_vf": 0.2, "ent_coef": 0.01}
TWO, SPLIT = spaces.MultiDiscrete([2, 3]), {"policy_kwargs": APART}
TASKS = {
    "cartpole": (TritonPPO, "MlpPolicy", "CartPole-v1", {}),
    "pendulum": (TritonPPO, "MlpPolicy", "Pendulum-v1", MANY),
    "dict": (TritonPPO, "MultiInputPolicy", DictCartPole, {"normalize_advantage": False}),
    "schedules": (TritonPPO, "MlpPolicy", "CartPole-v1", LAST),
    "several": (TritonPPO, "MlpPolicy", partial(OtherActions, TWO), SPLIT),
    "binary": (TritonPPO, "MlpPolicy", partial(OtherActions, spaces.MultiBinary(2)), {"ent_coef": 0.01}),
    "own": (TritonPPO, OwnPolicy, "CartPole-v1", {"ent_coef": 0.01}),
    "sde": (TritonPPO, "MlpPolicy", "Pendulum-v1", {"use_sde": True, "sde_sample_freq": 4, "ent_coef": 0.01}),
    "sde_squashed": (TritonPPO, "MlpPolicy", "Pendulum-v1", {"use_sde": True, "policy_kwargs": SQUASHED}),
    "a2c": (TritonA2C, "MlpPolicy", "CartPole-v1", {}),
    "a2c_sde": (TritonA2C, "MlpPolicy", "Pendulum-v1", {"use_sde": True}),
    "a2c_pendulum": (TritonA2C, "MlpPolicy", "Pendulum-v1", {"normalize_advantage": True, "ent_coef": 0.01}),
    "a2c_several": (TritonA2C, "MlpPolicy", partial(OtherActions, TWO), {"ent_coef": 0.01}),
    "a2c_binary": (TritonA2C, "MlpPolicy", partial(OtherActions, spaces.MultiBinary(2)), {"use_rms_prop": False}),
    "masks": (TritonMaskablePPO, "MlpPolicy", partial(MaskedActions, spaces.Discrete(5), [5]), MANY),
    "masks_several": (TritonMaskablePPO, "MlpPolicy", partial(MaskedActions, TWO, [2, 3]), MANY | SPLIT),
    "masks_binary": (TritonMaskablePPO, "MlpPolicy", partial(MaskedActions, spaces.MultiBinary(2), [2, 2]), {}),
}
NUM_TIMESTEPS = 3 * 64 - 8
"""Three rollouts, the last of which goes beyond the end of the schedules: learning rate and clip range are negative."""


class Recorder(Logger):
    def __init__(self):
        super().__init__(folder=None, output_formats=[])
        self.kept = []

    def dump(self, step=0):
        self.kept.append({k: v for k, v in self.name_to_value.items() if k.startswith("train/")})
        super().dump(step)


def make_model(task, device, monkeypatch=None, stock=False, **options):
    """A model on two environments; with a monkeypatch, captured on a CPU too."""
    kind, policy, env, more = TASKS[task]
    options = (A2C_OPTIONS if kind is TritonA2C else OPTIONS) | more | options
    if not stock and device == "cpu" and monkeypatch is not None:
        allow_captures(monkeypatch)
        monkeypatch.setattr(TritonA2C, "sde_devices", ("cpu",))
    model = (STOCK[kind] if stock else kind)(policy, make_vec_env(env, 2, seed=0), device=device, **options)
    model.set_logger(Recorder())
    return model


def make_models(task, device, monkeypatch=None, **options):
    """A stock one, and ours, which is made after the first has learned: both draw from the global random states."""
    for stock in (True, False):
        yield make_model(task, device, monkeypatch, stock, **options)


def compare(got, want, rtol=1e-3, atol=1e-4):
    torch.testing.assert_close(got.policy.state_dict(), want.policy.state_dict(), rtol=rtol, atol=atol)


def learn_both(task, *where, steps=64, change=lambda model: None, callback=None, **options):
    """A stock model and ours after a change, which train to the same parameters within rounding."""
    models = []
    for model in make_models(task, *where, **options):
        change(model)
        models.append(model.learn(steps, callback=callback))
    compare(*models[::-1])
    return models


def compare_logs(got, want):
    for ours, theirs in zip(got.logger.kept, want.logger.kept, strict=True):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(float(value), rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("task", TASKS)
def test_the_same_agent_as_stock(task, device, monkeypatch):
    """Parameters within rounding after four updates, the last beyond the end of schedules, and the same logs."""
    stock, ours = (model.learn(3 * 64) for model in make_models(task, device, monkeypatch))
    assert ours.is_captured and len(ours._acting.captured) == (not ours.use_sde)
    num_graphs = 0 if task == "schedules" else 1 if isinstance(ours, A2C) else 2
    assert len(ours._update.step.captured) == num_graphs, "the last update is stock's where schedules end"
    for model in (stock, ours):
        set_random_seed(0)
        model.learn(60)
    compare(ours, stock)
    compare_logs(ours, stock)


@pytest.mark.parametrize(
    ("env", "device", "updates"),
    [("CartPole-v1", "cpu", 3), *(pytest.param(x, "cuda", 50, marks=GPU.marks) for x in ("CartPole-v1", sb3.DRAWN))],
)
def test_every_update_of_a_training_is_that_of_stock(env, device, updates, monkeypatch):
    """Of the way that stock goes from the same parameters with the same minibatches, ours misses little, every time."""
    policy, envs = sb3.make_task(env, 8, seed=0)
    options = {"n_steps": 64, "batch_size": 128, "learning_rate": 5e-4, "seed": 0, "device": device}
    ours, stock = TritonPPO(policy, envs, **options), PPO(policy, envs, **options)
    stock.set_logger(Recorder())
    allow_captures(monkeypatch, device)
    apart = []

    def train_both():
        stock.policy.load_state_dict(ours.policy.state_dict())
        stock.policy.optimizer.load_state_dict(copy.deepcopy(ours.policy.optimizer.state_dict()))
        for name in ours.fields:
            setattr(stock.rollout_buffer, name, getattr(ours.rollout_buffer, name).copy())
        stock.rollout_buffer.full, stock.rollout_buffer.generator_ready = True, False
        before = join_parameters(ours)
        for train in (stock.train, partial(TritonPPO.train, ours)):
            set_random_seed(len(apart))
            train()
        want, got = map(join_parameters, (stock, ours))
        apart.append(((got - want).norm() / (want - before).norm()).item())

    ours.train = train_both
    ours.learn(updates * 8 * 64)
    assert ours.is_captured and len(apart) == updates and max(apart) < 0.05, apart


def join_parameters(model):
    return torch.cat([x.detach().flatten() for x in model.policy.parameters()])


def test_it_stops_at_the_same_minibatch(device, monkeypatch):
    stock, ours = learn_both("cartpole", device, monkeypatch, steps=NUM_TIMESTEPS, target_kl=1e-5)
    assert stock._n_updates < 9, "some updates stop early"
    assert stock._n_updates == ours._n_updates
    compare_logs(ours, stock)


@pytest.mark.parametrize("task", ["cartpole", "a2c", "masks"])
def test_checkpoints_both_ways(task, device, monkeypatch, tmp_path):
    ours = make_model(task, device, monkeypatch)
    kind, envs = type(ours), ours.get_env()
    ours.learn(64).save(tmp_path / "ours")
    stock = STOCK[kind].load(tmp_path / "ours", device=device)
    assert stock.rollout_buffer_class in (RolloutBuffer, MaskableRolloutBuffer)
    compare(stock, ours, 0, 0)
    stock.set_env(envs)
    stock.learn(64).save(tmp_path / "stock")
    again = kind.load(tmp_path / "stock", env=envs, device=device)
    compare(again, stock, 0, 0)
    again.learn(64)
    assert again.is_captured and again._update.step.captured


@pytest.mark.parametrize("task", TASKS)
def test_steps_on_a_cpu_are_those_of_stock(task, monkeypatch):
    """The first rollout bit for bit, then parameters within rounding; the same logs and the same checkpoints."""
    models, rollouts, fused = [], [], []
    monkeypatch.setattr(optimizers, "fuse_optimizer", lambda x: fused.append(x) or fuse_optimizer(x))
    for model in make_models(task, "cpu", **({} if task.startswith("a2c") else {"target_kl": 0.004})):
        model.acts_exactly = True
        model.learn(1, callback=lambda *_: True)
        rollouts.append([getattr(model.rollout_buffer, name) for name in ("actions", "values", "log_probs", "returns")])
        models.append(model.learn(NUM_TIMESTEPS, reset_num_timesteps=False))
    stock, ours = models
    assert all(np.array_equal(*pair) for pair in zip(*rollouts, strict=True))
    compare(ours, stock)
    assert ours._n_updates == stock._n_updates
    compare_logs(ours, stock)
    assert ours.is_accelerated == (task != "a2c_sde") and not ours.is_captured and "forward" not in vars(ours.policy)
    is_compiled = task != "own" and not ours.use_sde
    assert (ours.describe() == "updates are compiled, acting is exact") == is_compiled
    assert bool(fused) == (ours.is_accelerated and not is_compiled)
    assert not ours.policy.optimizer._optimizer_step_pre_hooks  # which a compiled update would refuse
    groups = [model.policy.optimizer.state_dict()["param_groups"] for model in models]
    assert groups[0] == groups[1]


@pytest.mark.parametrize("use_masking", [False, True])
def test_nothing_is_masked_or_nothing_is_allowed(use_masking):
    """Without masks all actions are allowed; where none is, updates are those of sb3-contrib. One minibatch."""
    env = partial(NothingAllowed, spaces.MultiDiscrete([2, 3]), [2, 3])
    models = []
    for kind in (MaskablePPO, TritonMaskablePPO):
        options = OPTIONS | {"batch_size": None, "ent_coef": 0.01}
        model = kind("MlpPolicy", make_vec_env(env, 2, seed=0), device="cpu", **options)
        model.set_logger(Recorder())
        models.append(model.learn(128, use_masking=use_masking))
    stock, ours = models
    compare(ours, stock)
    compare_logs(ours, stock)
    assert ours._can_update() != use_masking


def test_a_minibatch_of_one_sample_is_not_normalized():
    """As in PPO; MaskablePPO does it, and its parameters are NaN after that."""
    ours = make_model("masks_binary", "cpu", batch_size=63).learn(128)
    assert ours.is_accelerated and all(x.isfinite().all() for x in ours.policy.parameters())


@pytest.mark.parametrize("task", ["cartpole", "a2c", "masks"])
def test_frozen_parameters_are_left_alone(task, device, monkeypatch):
    """Those of the extractor, from the second rollout on; if none learns, the error is that of the stock algorithm."""
    models = []
    for model in make_models(task, device, monkeypatch):
        models.append(model.learn(64))
        model.policy.mlp_extractor.requires_grad_(False)
        model.learn(64)
    stock, ours = models
    compare(ours, stock)
    assert ours.is_captured
    for model in models:
        model.policy.requires_grad_(False)
        with pytest.raises(RuntimeError, match="does not require grad"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a step that cannot be captured
            model.learn(64)


@pytest.mark.parametrize("kind", [TritonPPO, TritonA2C])
def test_a_policy_that_diverges_is_an_error_without_checks(kind, monkeypatch):
    """Stock trains on NaN where torch.compile, say, has switched the checks of distributions off."""
    monkeypatch.setattr(Distribution, "_validate_args", False)
    options = A2C_OPTIONS if kind is TritonA2C else OPTIONS
    model = kind("MlpPolicy", "Pendulum-v1", device="cpu", **options)
    torch.nn.init.constant_(model.policy.action_net.weight, torch.nan)
    before = copy.deepcopy(model.policy.state_dict())
    with pytest.raises(ValueError, match="got NaN|got nan"):
        model.learn(64)
    for name, x in model.policy.state_dict().items():
        assert torch.equal(x, before[name]) or name == "action_net.weight"


def test_everything_is_compiled_when_the_model_is_made():
    setup = "import test_sb3_captured as tests; model = tests.make_model('several', 'cpu')"
    built, learned = count_compilations(setup, "model.learn(64)")
    assert built > 0 and learned == 0


def make_copy(ours):
    """A copy of a model, which learns what its original does."""
    again = copy.deepcopy(ours)
    for model in (ours, again):
        model.set_random_seed(0)
        model.learn(64)
    compare(again, ours, 0, 0)
    return again


def test_a_copy_of_a_captured_model_learns_what_its_original_does(device, monkeypatch):
    again = make_copy(make_model("cartpole", device, monkeypatch).learn(64))
    assert again.is_captured and again._update.step.captured


def test_copies_and_pickles_hide_how_the_optimizer_steps():
    ours = make_model("cartpole", "cpu")
    ours.policy.action_net.register_forward_hook(lambda *_: None)  # else it is compiled
    ours.learn(64)
    optimizer, again = pickle.loads(pickle.dumps(ours.policy.optimizer)), make_copy(ours)
    assert not any(x.policy.optimizer._optimizer_step_pre_hooks for x in (ours, again))
    for known in (ours.policy.optimizer, again.policy.optimizer, optimizer):
        (group,) = known.state_dict()["param_groups"]
        assert not group.get("fused") and not group["foreach"]


STOCK_STEPS = {
    "switched off": ({}, lambda model: setattr(model, "enabled", False)),
    "RolloutBuffer has its own _get_samples": (
        {"rollout_buffer_class": derive(RolloutBuffer, "_get_samples")},
        lambda model: None,
    ),
    "this MaskableActorCriticPolicy has its own evaluate_actions": (
        {},
        lambda model: override(model.policy, "evaluate_actions"),
    ),
}
TASKS_OF_STOCK = [(task, reason) for task in ("pendulum", "a2c_pendulum") for reason in [*STOCK_STEPS][:2]]


@pytest.mark.parametrize(("task", "reason"), [*TASKS_OF_STOCK, ("masks", [*STOCK_STEPS][2])])
def test_it_is_stock_where_it_makes_no_steps_of_its_own(task, reason, monkeypatch, recwarn):
    """Bit for bit, and it says so: a warning is for GPUs, where that takes much longer than asked for."""
    options, prepare = STOCK_STEPS[reason]
    models = learn_both(task, "cpu", monkeypatch, steps=128, change=prepare, **options)
    assert not [x for x in recwarn if x.category is RuntimeWarning]
    ours = models[1]
    compare(*models, 0, 0)
    assert not ours.is_accelerated and not ours.is_captured and not is_fused(ours.policy.optimizer)
    assert ours.describe().startswith(f"updates are those of the stock algorithm: {reason}")
    assert not ours._update.step.captured
    ours.device, ours._update.step = torch.device("cuda"), None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert not ours.is_accelerated and not ours.is_captured
    is_asked_for = reason == "switched off"
    text = f"{type(ours).__name__} trains as the stock algorithm: {reason}"
    assert len(told) == 1 - is_asked_for and all(str(x.message).startswith(text) for x in told)


def transpose_weights(model):
    """In memory alone, and back, while the optimizer's state stays as it is: loading a checkpoint does that."""
    layer = model.policy.mlp_extractor.policy_net[0]
    is_plain = layer.weight.is_contiguous()
    layer.weight.data = layer.weight.data.T.contiguous().T if is_plain else layer.weight.data.contiguous()


MOMENTUM = {"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {"momentum": 0.9}}
UNUSUAL = {
    "a forward without options": {"policy": OneArgument},
    "one standard deviation": {"policy": OneStd, "env": partial(OtherActions, spaces.Box(-1, 1, (2,)))},
    "an infinite logit": {"policy": NeverLeft},
    "sizes of NumPy": {"batch_size": np.int64(24), "normalize_advantage": 1},
    "weights of another layout": {"prepare": transpose_weights},
    "momentum that begins later": {
        "policy_kwargs": MOMENTUM,
        "prepare": lambda model: model.policy.value_net.requires_grad_(model.num_timesteps > 0),
    },
}


@pytest.mark.parametrize("kind", [TritonPPO, TritonA2C])
@pytest.mark.parametrize("case", UNUSUAL)
def test_what_few_do_gives_the_agent_of_stock(case, kind):
    options = {"policy": "MlpPolicy", "env": "CartPole-v1", "prepare": lambda model: None}
    options |= (A2C_OPTIONS if kind is TritonA2C else OPTIONS) | UNUSUAL[case]
    if kind is TritonA2C:
        options.pop("batch_size", None)
    envs, prepare, models = options.pop("env"), options.pop("prepare"), []
    for algorithm in (STOCK[kind], kind):
        models.append(algorithm(env=make_vec_env(envs, 2, seed=0), device="cpu", **options))
        for _ in range(2):
            prepare(models[-1])
            models[-1].learn(64, reset_num_timesteps=False)
    compare(*models[::-1])
    assert models[1].is_accelerated


@pytest.mark.parametrize("task", ["cartpole", "a2c"])
def test_an_incomplete_rollout_is_an_error(task):
    for model in make_models(task, "cpu"):
        with pytest.raises(AssertionError):
            model.train()


def test_minibatches_may_be_read_before():
    read = At(lambda model: list(model.rollout_buffer.get(8)), moment="rollout_end")
    _, ours = learn_both("cartpole", "cpu", steps=128, callback=read)
    assert ours.is_accelerated


def test_a_rollout_of_one_sample_has_clipped_gradients():
    stock, ours = (x("MlpPolicy", "Pendulum-v1", n_steps=1, seed=0, device="cpu").learn(20) for x in (A2C, TritonA2C))
    compare(ours, stock, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_backend_without_a_buffer_class_is_of_our_buffer_alone(enabled, tmp_path):
    options = {"rollout_buffer_kwargs": {"backend": "cpu"}, "enabled": enabled, "device": "cpu"}
    model = TritonPPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, **options).learn(8)
    assert getattr(model.rollout_buffer, "backend", None) == ("cpu" if enabled else None)
    model.save(tmp_path / "model")
    PPO.load(tmp_path / "model", env=model.get_env()).learn(8)


def test_a_model_can_be_switched_off(monkeypatch, tmp_path):
    captured = make_model("cartpole", "cpu", monkeypatch).learn(64)
    hooks = captured.policy.optimizer._optimizer_load_state_dict_post_hooks
    assert hooks  # of a step that has prepared the optimizer
    captured.enabled = False
    assert not captured.is_captured and not captured.is_accelerated
    captured.learn(64)
    assert not hooks and not captured._update.step.captured
    captured.save(tmp_path / "model")
    captured.enabled = True
    captured.learn(64)
    assert captured.is_captured and captured._update.step.captured
    with pytest.raises(TypeError, match="enabled: got str, expected a bool"):
        TritonPPO.load(tmp_path / "model", enabled="of")


MAKERS = {
    "ppo": partial(TritonPPO, "MlpPolicy", n_steps=8, batch_size=8),
    "a2c": partial(TritonA2C, "MlpPolicy", n_steps=8),
    "maskable": partial(TritonMaskablePPO, "MlpPolicy", n_steps=8, batch_size=8),
    "recurrent": partial(TritonRecurrentPPO, "MlpLstmPolicy", n_steps=8, batch_size=8),
    "off-policy": partial(sb3_kinds.TritonDQN, "MlpPolicy", buffer_size=8),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("enabled", [True, False])
def test_the_switch_is_a_bool(enabled, kind, tmp_path):
    """When a model is made, when it is loaded, and afterwards."""
    made = MAKERS[kind](env="CartPole-v1", device="cpu", enabled=enabled)
    other = MAKERS[kind](env="CartPole-v1", device="cpu", enabled=not enabled)
    assert made.is_accelerated is enabled and other.is_accelerated is not enabled
    other.save(tmp_path / "model")
    loaded = type(other).load(tmp_path / "model", device="cpu", enabled=enabled)
    other.enabled = enabled
    assert loaded.is_accelerated is other.is_accelerated is enabled
    for wrong in ("off", None, 0, 1):
        with pytest.raises(TypeError, match=f"enabled: got {type(wrong).__name__}, expected a bool"):
            MAKERS[kind](env="CartPole-v1", device="cpu", enabled=wrong)


@pytest.mark.parametrize("kind", ["ppo", "a2c"])
@pytest.mark.parametrize(("options", "is_told"), [({}, False), ({"enabled": False}, True), ({"use_sde": True}, False)])
def test_the_advice_to_use_a_cpu_is_for_stock(options, is_told, kind):
    """As in Stable-Baselines3's own test, the device is only said to be a GPU."""
    model = MAKERS[kind](env="Pendulum-v1", device="cpu", **options)
    model.device = torch.device("cuda")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model._maybe_recommend_cpu()
    assert len(told) == is_told
    assert all(str(x.message).startswith(f"You are trying to run {type(model).__name__} on the GPU") for x in told)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ppo", "a2c"])
def test_making_a_model_on_a_gpu_warns_of_nothing(kind, recwarn):
    assert MAKERS[kind](env="CartPole-v1", device="cuda").is_captured
    assert not [x for x in recwarn if x.category in (UserWarning, RuntimeWarning)]
