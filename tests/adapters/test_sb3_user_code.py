"""What users bring to Stable-Baselines3 is called in the stock order and as often, also where it ends the work."""

import copy
import math
from collections import Counter
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("sb3_contrib")
import sb3_kinds
from overrides import list_methods
from process_state import assert_same as assert_unchanged
from process_state import interrupted, read_state
from recorded_graphs import allow_captures
from sb3_kinds import OFF_POLICY, ON_POLICY, STOCK, TD3, CrossQ, RecurrentPPO, TritonCrossQ, TritonPPO, TritonSAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from test_sb3_captured import compare
from test_sb3_off_policy import DEVICES, TOLD, OffPolicyMixin, is_discrete

NUM_STEPS = 40
WAYS = {how: f"updates are {how}" for how in ("compiled", "captured")}


class Callback(BaseCallback):
    def _on_step(self):
        return True


class User:
    """Hears every call of what a user has brought, with how things are then; may end the work at one of them."""

    def __init__(self, kind, fades=False, **options):
        self.heard, self.model, self.ends_at, self.error = [], None, None, None
        self.fades = fades  # whether clip ranges and learning rates get to 0 and below
        self.model = self.make_model(kind, **options)
        self.heard = []

    def hear(self, name, *details):
        if self.ends_at is not None and len(self.heard) == self.ends_at:
            self.ends_at = None
            raise self.error(name)
        self.heard.append((name, *details, *(describe(self.model) if self.model else ())))

    def make_schedule(self, name, value):
        def schedule(left):
            self.hear(name, left)
            return value * (left - 0.2 if self.fades else left + 0.1)

        return schedule

    def listen(self, kind, names):
        """A class with methods that are heard, and do what they did."""
        own = type(kind.__name__, (kind,), {})
        for name in names:
            setattr(own, name, self.make_method(own, name))
        return own

    def make_method(self, own, name):
        def method(instance, *args, **kwargs):
            self.hear(name, *(type(x).__name__.removeprefix("Triton") for x in args))
            return getattr(super(own, instance), name)(*args, **kwargs)

        return method

    def make_model(self, kind, **options):
        stock = STOCK.get(kind, kind)
        is_on_policy = stock not in OFF_POLICY.values()
        policy = kind.policy_aliases["MlpLstmPolicy" if stock is RecurrentPPO else "MlpPolicy"]
        rate = self.make_schedule("learning rate", 1e-3)
        own = {"learning_rate": rate, "seed": 0, "device": "cpu", "policy_kwargs": {"net_arch": [8]}}
        if is_on_policy:
            own |= {"n_steps": 8}
            if stock.__name__ != "A2C":
                clips = {x: self.make_schedule(x, 0.3) for x in ("clip_range", "clip_range_vf")}
                own |= {"n_epochs": 2, "batch_size": 8, **clips}
            if stock is RecurrentPPO:
                own["policy_kwargs"] |= {"lstm_hidden_size": 8}
                own |= {} if kind is stock else {"enabled": True}
        else:
            own["policy_kwargs"] |= TOLD
            own |= {"buffer_size": 100, "learning_starts": 8, "batch_size": 4, "train_freq": 2, "gradient_steps": 2}
            draws = [] if stock in (TD3, CrossQ) else ["sample"]  # not heard, it is called ahead of a graph
            own |= {"replay_buffer_class": self.listen(ReplayBuffer, ["add", *draws])}
            own |= {} if is_discrete(kind) else {"action_noise": self.listen(Noise, ["__call__", "reset"])()}
        names = [x for x in list_methods(stock) if callable(getattr(stock, x)) and x not in NOT_HEARD]
        make = partial(self.listen(Task, ["reset", "step", "action_masks"]), is_on_policy or is_discrete(kind))
        env = DummyVecEnv([make])
        if not is_on_policy:
            env = self.listen(VecNormalize, ["normalize_obs", "normalize_reward"])(env)
        model = self.listen(kind, names)(self.listen(policy, ["set_training_mode"]), env, **own | options)
        model.set_logger(self.listen(Logger, ["record", "dump"])(None, [self.listen(Writer, ["write"])()]))
        if is_discrete(kind):
            model.exploration_schedule = self.make_schedule("exploration", 0.5)
        return model

    def add_hooks(self):
        for name, module in self.model.policy.named_modules():
            if name:
                module.register_forward_hook(lambda *_, name=name: self.hear(name, torch.is_grad_enabled()))
        for i, optimizer in enumerate(list_optimizers(self.model)):
            optimizer.register_step_pre_hook(lambda *_, i=i: self.hear(f"before step {i}"))
            optimizer.register_step_post_hook(lambda *_, i=i: self.hear(f"after step {i}"))

    def learn(self, steps=NUM_STEPS, callback=Callback, **options):
        """Train, with global random numbers that are the same each time."""
        set_random_seed(0)
        names = [x for x in list_methods(BaseCallback) if x not in ("logger", "training_env")]
        self.model.learn(steps, callback=self.listen(callback, names)(), **options)
        return self.heard


NOT_HEARD = {"_excluded_save_params", "_get_policy_from_name", "set_logger"}
"""What ours asks at other times, and nobody else does."""


def describe(model):
    """What a user may look at in the middle of training."""
    settings = [(group["lr"], group.get("fused")) for x in list_optimizers(model) for group in x.param_groups]
    return model.num_timesteps, model._n_updates, model.policy.training, *settings


def list_optimizers(model):
    parts = [model.policy, *(getattr(model, name, None) for name in ("actor", "critic"))]
    found = [getattr(x, "optimizer", None) for x in parts] + [getattr(model, "ent_coef_optimizer", None)]
    return [x for x in found if x is not None]


def find_difference(ours, stock):
    """The first calls that are others, with those before them."""
    pairs = [*zip(ours, stock, strict=False), (len(ours), len(stock))]
    first = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
    return pairs[max(0, first - 3) : first + 1] if first < len(pairs) else []


class Task(gym.Env):
    """Short episodes, of which some are cut off."""

    def __init__(self, is_discrete):
        self.observation_space = gym.spaces.Box(-1, 1, (3,))
        self.action_space = gym.spaces.Discrete(2) if is_discrete else gym.spaces.Box(-1, 1, (2,))
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def step(self, action):
        self.steps += 1
        reward = float(self.np_random.uniform() + np.sum(action))
        return self.observe(), reward, self.steps == 7, self.steps == 5 and reward > 1, {}

    def action_masks(self):
        return np.array([True, self.steps % 2 == 0])


class Noise(ActionNoise):
    def __call__(self):
        return np.full(2, 0.1)


class Writer(KVWriter):
    kept = ()

    def write(self, key_values, key_excluded, step=0):
        self.kept = [*self.kept, [*key_values]]

    def close(self):
        pass


HOWS = {kind: ["hooks", "captured"] for kind in STOCK} | {sb3_kinds.TritonRecurrentPPO: ["plain"]}
HOWS |= {kind: ["compiled", "hooks", "captured"] for kind in ON_POLICY}
"""In which ways ours makes updates: in compiled code, eagerly where modules and optimizers have hooks, in graphs."""
CASES = pytest.mark.parametrize(("kind", "how"), [(kind, how) for kind, hows in HOWS.items() for how in hows])


def make_users(kind, how, monkeypatch, **options):
    users = User(STOCK[kind], **options), User(kind, **options)
    for user in users if how == "hooks" else ():
        user.add_hooks()
        monkeypatch.setattr(OffPolicyMixin, "eager_devices", DEVICES)  # on a CPU, too
    if how == "captured":
        allow_captures(monkeypatch)
    return users


@CASES
def test_user_code_is_called_as_by_stock(kind, how, monkeypatch):
    stock, ours = make_users(kind, how, monkeypatch)
    assert find_difference(ours.learn(), stock.learn()) == [] and len(stock.heard) > 100
    assert WAYS.get(how, "eager") in ours.model.describe()


@pytest.mark.parametrize("kind", STOCK)
def test_gradients_arrive_as_often_as_in_stock(kind, monkeypatch):
    """All that a loss has, wherever an optimizer may have them; and what is left of them is the same."""
    stock, ours = make_users(kind, "hooks", monkeypatch)
    for user in (stock, ours):
        for name, x in user.model.policy.named_parameters():
            x.register_post_accumulate_grad_hook(lambda x, user=user, name=name: user.hear(f"gradient of {name}"))
        user.learn()
    assert Counter(ours.heard) == Counter(stock.heard)
    assert_same(stock.model, ours.model, "hooks")


@pytest.mark.parametrize("options", [{"fades": True}, *({"target_kl": x} for x in (0.0, -1.0, math.nan))])
@pytest.mark.parametrize("how", ["compiled", "captured"])
@pytest.mark.parametrize("kind", [TritonPPO, sb3_kinds.TritonMaskablePPO])
def test_user_code_is_called_as_by_stock_where_that_updates(kind, how, options, monkeypatch):
    """Clip ranges that end, and what rounding decides."""
    stock, ours = make_users(kind, how, monkeypatch, **options)
    assert find_difference(ours.learn(), stock.learn()) == []
    compare(ours.model, stock.model, rtol=1e-3, atol=1e-5)


@CASES
def test_user_code_that_ends_the_work_leaves_all_as_in_stock(kind, how, monkeypatch):
    """At one of the last calls of everything, others in every test; the work goes on from there as that of stock."""
    names, process = [x[0] for x in make_users(kind, how, monkeypatch)[0].learn()], read_state()
    places = sorted({len(names) - 1 - names[::-1].index(x) for x in names})
    for place in places[(2 * [*STOCK].index(kind) + len(how)) % 9 :: 9]:
        error = ArithmeticError if place % 2 else KeyboardInterrupt
        users, states = make_users(kind, how, monkeypatch), []
        for user in users:
            user.ends_at, user.error = place, error
            with pytest.raises(error, match=names[place]):
                user.learn()
            states.append((torch.get_rng_state(), np.random.get_state()[1:]))  # noqa: NPY002
        assert find_difference(*(x.heard for x in users)) == []
        assert_same(*(x.model for x in users), how)
        assert_unchanged(read_state(), process)
        if how != "captured":  # recorded graphs draw other random numbers
            torch.testing.assert_close(*states, rtol=0, atol=0)
        if place > names.index("on_step"):
            for user in users:
                user.learn(20, reset_num_timesteps=False)
            compare(users[1].model, users[0].model, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("how", ["compiled", "hooks", "captured"])
def test_epochs_before_an_interruption_count(how, monkeypatch):
    """Those that are over; Ctrl-C comes where the next one is drawn."""
    users = make_users(TritonPPO, how, monkeypatch)
    for user in users:
        drawing = type(user.model.rollout_buffer).get, TritonPPO._draw_permutation
        with pytest.raises(KeyboardInterrupt), interrupted(4, *drawing):
            user.learn()
    assert users[0].model._n_updates == 3 and WAYS.get(how, "eager") in users[1].model.describe()
    assert_same(*(x.model for x in users), how)


@CASES
def test_nothing_is_learned_where_stock_refuses_to(kind, how, monkeypatch):
    """Where there are no gradients. Recorded graphs do not know views of inference mode."""
    context = torch.no_grad if how == "captured" else torch.inference_mode
    users, errors = make_users(kind, how, monkeypatch), []
    for user in users:
        with pytest.raises(RuntimeError) as error, context():
            user.learn()
        errors.append(str(error.value))
    assert errors[0] == errors[1] and find_difference(*(x.heard for x in users)) == []
    assert_same(*(x.model for x in users), how)


class AskAndCopy(Callback):
    """Asks the policy for something with gradients, and copies it when it has acted: it has none of them any more."""

    def _on_rollout_start(self):
        observation, _ = self.model.policy.obs_to_tensor(self.model._last_obs)
        asked = getattr(self.model.policy, "get_distribution", self.model.policy)
        assert getattr(asked(observation), "requires_grad", True)

    def _on_rollout_end(self):
        self.kept = copy.deepcopy(self.model.policy)


@pytest.mark.parametrize("kind", [*ON_POLICY, TritonSAC, sb3_kinds.TritonTQC, TritonCrossQ])
@pytest.mark.parametrize("how", ["hooks", "captured"])
def test_a_policy_that_was_asked_for_a_distribution_can_be_copied(kind, how, monkeypatch):
    users = make_users(kind, how, monkeypatch, **({} if kind in ON_POLICY else {"learning_starts": 0}))
    for user in users:
        user.learn(callback=AskAndCopy)
    compare(*(x.model for x in users), rtol=1e-3, atol=1e-5)


def assert_same(stock, ours, how):
    """What a user may look at: numbers, parameters with gradients and modes, optimizers, buffers, logs."""
    plain = {name: x for name, x in vars(stock).items() if isinstance(x, int | float | str | None)}
    plain.pop("start_time", None)
    assert {name: vars(ours)[name] for name in plain} == plain
    compare(ours, stock, rtol=1e-3, atol=1e-5)
    assert [x.training for x in ours.policy.modules()] == [x.training for x in stock.policy.modules()]
    assert vars(ours.policy).keys() == vars(stock.policy).keys()
    for x, y in zip(ours.policy.parameters(), stock.policy.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-2, atol=1e-5)
    for x, y in zip(list_optimizers(ours), list_optimizers(stock), strict=True):
        if how != "captured":
            torch.testing.assert_close(x.state_dict(), y.state_dict(), rtol=1e-2, atol=1e-5)
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        assert [len(getattr(x, name)) for name in hooks] == [len(getattr(y, name)) for name in hooks]
    for name in ("rollout_buffer", "replay_buffer"):
        arrays = {key: x for key, x in vars(getattr(stock, name, ours)).items() if isinstance(x, np.ndarray | int)}
        for key in arrays if hasattr(stock, name) else ():
            np.testing.assert_allclose(vars(getattr(ours, name))[key], arrays[key], rtol=1e-3, atol=1e-4, err_msg=key)
    logs = [[(key, isinstance(value, float)) for key, value in x.logger.name_to_value.items()] for x in (ours, stock)]
    assert logs[0] == logs[1]  # np.float32 is no float, and tables show all its digits
