"""What a policy's distribution refuses: errors, steps and parameters are those of the stock algorithms.

And trainings change nothing that other threads of the process see, but for what a capture puts back: states of default
random generators, and a switch of PyTorch's for advice on streams of gradients.
"""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("sb3_contrib")
from gpu_checks import GPU
from gymnasium import spaces
from process_state import assert_same, read_from_another_thread, read_state
from sb3_callbacks import At
from sb3_kinds import STOCK, TritonA2C, TritonMaskablePPO, TritonPPO, TritonRecurrentPPO
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv
from test_sb3_captured import OwnPolicy, allow_captures
from torch.distributions import Bernoulli, Distribution

pytestmark = pytest.mark.covering

OPTIONS = {"n_steps": 16, "batch_size": 8, "n_epochs": 2}
BOX = spaces.Box(-1, 1, (2,))


@pytest.fixture(autouse=True)
def checked_distributions(monkeypatch):
    """As in a process that has not used torch.compile, which switches the checks of distributions off."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


class CarefulPolicy(ActorCriticPolicy):
    """It acts on observations whose mean is a probability, and has results for others."""

    def forward(self, obs, deterministic=False):
        Bernoulli(obs.mean())
        return super().forward(obs, deterministic)


class Breaking(gym.Env):
    """Observations or rewards are NaN from a step on, or another value. It remembers what was done."""

    def __init__(self, action_space, nan_from, nan_rewards=False, is_dict=False, value=np.nan):
        box = spaces.Box(-10, 10, (3,))
        self.observation_space = spaces.Dict({"a": box, "b": box}) if is_dict else box
        self.action_space, self.nan_from, self.nan_rewards = action_space, nan_from, nan_rewards
        self.actions, self.value = [], value

    def observe(self):
        is_broken = not self.nan_rewards and len(self.actions) >= self.nan_from
        found = np.full(3, self.value if is_broken else 0.1 * (len(self.actions) % 7), np.float32)
        return {"a": np.zeros(3, np.float32), "b": found} if isinstance(self.observation_space, spaces.Dict) else found

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        self.actions.append(action)
        is_broken = self.nan_rewards and len(self.actions) >= self.nan_from
        return self.observe(), np.nan if is_broken else float(np.sum(action)), False, False, {}

    def action_masks(self):
        """All actions but the last one of all, and one of the first two."""
        sizes = np.atleast_1d(getattr(self.action_space, "nvec", getattr(self.action_space, "n", 0)))
        places = np.arange(sizes.sum())
        return (places != len(self.actions) % 2) & (places != places[-1])


CASES = {
    "box": (TritonPPO, "MlpPolicy", BOX),
    "discrete": (TritonPPO, "MlpPolicy", spaces.Discrete(3)),
    "multidiscrete": (TritonPPO, "MlpPolicy", spaces.MultiDiscrete([2, 3])),
    "multibinary": (TritonPPO, "MlpPolicy", spaces.MultiBinary(3)),
    "dictionary": (TritonPPO, "MultiInputPolicy", spaces.Discrete(3)),
    "own policy": (TritonPPO, OwnPolicy, BOX),
    "careful policy": (TritonPPO, CarefulPolicy, BOX),
    "a2c box": (TritonA2C, "MlpPolicy", BOX),
    "a2c discrete": (TritonA2C, "MlpPolicy", spaces.Discrete(3)),
    "a2c multibinary": (TritonA2C, "MlpPolicy", spaces.MultiBinary(3)),
    "maskable": (TritonMaskablePPO, "MlpPolicy", spaces.Discrete(3)),
    "maskable multidiscrete": (TritonMaskablePPO, "MlpPolicy", spaces.MultiDiscrete([2, 3])),
    "recurrent box": (TritonRecurrentPPO, "MlpLstmPolicy", BOX),
    "recurrent discrete": (TritonRecurrentPPO, "MlpLstmPolicy", spaces.Discrete(3)),
}
HOW = ["cpu", "recorded graphs", GPU]


def make_model(case, how, monkeypatch, stock, **breaking):
    """A model of two environments, its device and what it is to learn."""
    kind, policy, action_space = CASES[case]
    make = partial(Breaking, action_space, is_dict=policy == "MultiInputPolicy", **breaking)
    options = {"n_steps": OPTIONS["n_steps"]} if kind is TritonA2C else dict(OPTIONS)
    if how == "recorded graphs" and not stock:
        allow_captures(monkeypatch)
    if kind is TritonRecurrentPPO:
        options |= {} if stock else {"enabled": True}
    kind = STOCK[kind] if stock else kind
    device = "cuda" if how == "cuda" else "cpu"
    return kind(policy, DummyVecEnv([make, make]), seed=0, device=device, **options)


def learn_to_the_error(model, callback=None, **options):
    """The error that ends the training, how many steps were made, and all parameters."""
    with pytest.raises(ValueError) as error:
        model.learn(4 * 2 * model.n_steps, callback=callback, **options)
    return str(error.value), [env.actions for env in model.get_env().envs], model.policy.state_dict()


def check_refusal(case, how, monkeypatch, learn=learn_to_the_error, is_exact=False, **breaking):
    """Training ends as that of stock does; with these actions and parameters."""
    found = (learn(make_model(case, how, monkeypatch, stock, **breaking)) for stock in (True, False))
    (wanted_message, wanted_actions, wanted_parameters), (message, actions, parameters) = found
    assert message.split("(")[0] == wanted_message.split("(")[0]
    assert message == wanted_message or not is_exact
    assert len(actions[0]) == len(wanted_actions[0])
    assert np.isfinite(np.array(actions, dtype=float)).all()
    torch.testing.assert_close(parameters, wanted_parameters, rtol=1e-3, atol=1e-4, equal_nan=True)
    return actions, parameters


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("nan_from", [0, 40])
@pytest.mark.parametrize("case", CASES)
def test_no_action_is_taken_on_an_observation_that_is_not_a_number(case, nan_from, how, monkeypatch):
    """At the first observation, and after an update."""
    is_exact = how == "cpu" and nan_from < OPTIONS["n_steps"]
    actions, parameters = check_refusal(case, how, monkeypatch, is_exact=is_exact, nan_from=nan_from)
    assert all(x.isfinite().all() for x in parameters.values()) and len(actions[0]) == nan_from


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_a_training_that_diverges_ends_where_that_of_stock_does(case, how, monkeypatch):
    """Rewards are NaN, and so are the parameters after the first minibatch: the second one is refused, or an action."""
    _, parameters = check_refusal(case, how, monkeypatch, nan_from=20, nan_rewards=True)
    assert any(x.isnan().any() for x in parameters.values())


OBSERVING = ["box", "discrete", "multidiscrete", "multibinary", "own policy", "maskable"]
OBSERVING += ["a2c box", "a2c discrete", "a2c multibinary"]
ROLLOUTS = [(case, "observations", np.nan) for case in OBSERVING]
ROLLOUTS += [(case, "actions", np.nan) for case in ("box", "own policy", "a2c box")]
ROLLOUTS += [("discrete", "actions", 3), ("discrete", "actions", -1), ("multibinary", "actions", 2)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("case", "field", "value"), ROLLOUTS)
def test_no_step_is_made_with_a_sample_that_is_refused(case, field, value, how, monkeypatch):
    """The minibatches before it count, the one that holds it does not."""
    updates = []

    def break_rollout(model):
        getattr(model.rollout_buffer, field)[3, 1] = value

    def learn(model):
        found = learn_to_the_error(model, At(break_rollout, 4 * model.n_steps, "rollout_end"))
        updates.append(model._n_updates)
        return found

    _, parameters = check_refusal(case, how, monkeypatch, learn, nan_from=1000)
    assert all(x.isfinite().all() for x in parameters.values())
    assert updates[0] == updates[1] == (1 if "a2c" in case else OPTIONS["n_epochs"])


def set_logit(policy):
    """The one that no mask allows is not a number."""
    policy.action_net.bias.data[-1] = torch.nan


def set_std(policy):
    """A float32 of it is 0."""
    policy.log_std.data.fill_(-200.0)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("case", "change"),
    [("box", set_std), ("a2c box", set_std), ("maskable", set_logit), ("maskable multidiscrete", set_logit)],
)
def test_what_no_result_shows_is_refused(case, change, after, how, monkeypatch):
    def learn(model):
        moment = "rollout_end" if after else "training_start"
        return learn_to_the_error(model, At(lambda model: change(model.policy), 2 * after * model.n_steps, moment))

    actions, _ = check_refusal(case, how, monkeypatch, learn, nan_from=1000)
    assert len(actions[0]) == after * OPTIONS["n_steps"]


@pytest.mark.parametrize("how", HOW)
def test_a_check_that_no_result_depends_on(how, monkeypatch):
    actions, _ = check_refusal("careful policy", how, monkeypatch, nan_from=40, value=-1.0)
    assert len(actions[0]) == 40


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("use_masking", [False, True])
def test_without_masks_or_with_none_that_allows_anything(use_masking, how, monkeypatch):
    monkeypatch.setattr(Breaking, "action_masks", lambda self: np.zeros(3, bool))
    learn = partial(learn_to_the_error, use_masking=use_masking)
    check_refusal("maskable", how, monkeypatch, learn, is_exact=how == "cpu", nan_from=9)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", ["box", "discrete", "multibinary", "maskable"])
def test_predictions_within_a_rollout_are_refused(case, how, monkeypatch):
    """Of a policy in evaluation, say, by a callback."""
    errors = []

    def predict(given, _):
        policy, observation = given["self"].policy, np.full((2, 3), np.nan, np.float32)
        calls = (
            lambda: policy.predict(observation),
            lambda: policy.predict(observation, deterministic=True),
            lambda: policy(torch.as_tensor(observation, device=policy.device), deterministic=True),
        )
        for call in calls:
            with pytest.raises(ValueError, match="Expected parameter") as error, torch.no_grad():
                call()
            errors.append(error.type)
        return True

    make_model(case, how, monkeypatch, False, nan_from=1000).learn(1, callback=predict)
    assert len(errors) == 3 * OPTIONS["n_steps"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", ["box", "multibinary", "own policy", "a2c multibinary", "maskable", "recurrent box"])
def test_nothing_of_the_process_changes(case, how, monkeypatch):
    """While a rollout is collected, within the policy's calls of acting and of updates, and after the training."""
    model = make_model(case, how, monkeypatch, False, nan_from=1000)
    found, before = [], read_state()
    model.policy.register_forward_hook(lambda *_: found.append(read_from_another_thread()))
    model.policy.action_net.register_forward_hook(lambda *_: found.append(read_from_another_thread()))
    model.learn(64, callback=lambda *_: found.append(read_from_another_thread()) or True)
    assert len(found) > 64
    for state in (*found, read_state()):
        assert_same(state, before)
