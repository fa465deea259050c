"""TritonPPO against PPO of RSL-RL: recurrent models, extensions, mixed precision, and users' own methods."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

pytest.importorskip("rsl_rl")
from overrides import alter, alter_call, list_names_in_front, override
from recorded_graphs import allow_captures
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel
from test_rsl_rl import HAS_EXTENSIONS, OURS, RECURRENT, compare, make_runner, train

from rl_triton_adapters.rsl_rl import TritonPPO

if not HAS_EXTENSIONS:
    pytest.skip("this RSL-RL has no mixed precision, and extensions in its update", allow_module_level=True)


def test_a_symmetry_that_changes_is_followed(monkeypatch):
    allow_captures(monkeypatch)
    stock, ours = make_runner("PPO", "mirror loss"), make_runner(OURS, "mirror loss")
    for runner in (stock, ours):
        train(runner, 2)
        runner.alg.symmetry.mirror_loss_coeff = 5.0
        train(runner, 2)
    compare(ours, stock, rtol=1e-3, atol=1e-5)


def test_recurrent_minibatches_of_one_environment(monkeypatch):
    """RSL-RL's `squeeze` drops their dimension too, and pairs all steps with all: ours is RSL-RL's with another."""
    options = {"network": RECURRENT, "num_mini_batches": 12, "num_learning_epochs": 1}
    stock, ours, other = (make_runner(name, **options) for name in ("PPO", OURS, "PPO"))
    train(stock, 1), train(ours, 1)
    monkeypatch.setattr(torch, "squeeze", lambda x, dim=-1: x.squeeze(dim))
    train(other, 1)
    compare(ours, other, rtol=1e-4, atol=2e-6)
    with pytest.raises(AssertionError, match="not close"):
        compare(stock, other, rtol=1e-2, atol=1e-4)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_parameters_that_an_optimizer_has_twice(monkeypatch):
    """As with `share_cnn_encoders`: each is stepped alone, as PyTorch does it on a CPU."""
    allow_captures(monkeypatch)
    stock, ours = make_runner("PPO"), make_runner(OURS)
    for runner in (stock, ours):
        parameters = [*runner.alg.optimizer.param_groups[0]["params"], *runner.alg.actor.parameters()]
        runner.alg.optimizer = torch.optim.Adam(parameters, lr=1e-3)
    train(stock, 2), train(ours, 2)
    compare(ours, stock, rtol=1e-4, atol=2e-6)
    assert "Adam has a parameter twice" in ours.alg.describe()


def test_minibatches_without_samples_are_left_to_the_package():
    runner = make_runner(OURS, num_mini_batches=1000)
    train(runner, 1)
    assert "there are more minibatches than samples" in runner.alg.describe()


@torch._dynamo.config.patch(disable=True)  # so that nothing is compiled here
def test_compiled_models_are_captured_uncompiled(monkeypatch):
    """`torch_compile_mode` compiles what acts; of it, the update takes the modules themselves."""
    allow_captures(monkeypatch)
    stock, ours = make_runner("PPO"), make_runner(OURS)
    graphs = ours.alg._rl_triton.step.graphs
    for runner in (stock, ours):
        runner.alg.compile("default")
        assert runner.alg.actor is not runner.alg._raw_actor
        train(runner, 2)
    compare(ours, stock, rtol=1e-4, atol=2e-6)
    assert graphs.captures == 1 and graphs.replays > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda alg: override(alg.actor.rnn, "forward"), "this RNN has its own forward ("),
        (lambda alg: override(alg.critic.rnn.rnn, "forward"), "this GRU has its own forward ("),
        (lambda alg: alg.critic.rnn.register_forward_hook(lambda *_: None), "a recurrent model has hooks"),
        (lambda alg: setattr(alg, "symmetry", object()), "extensions are given padded episodes"),
    ],
)
def test_what_is_not_served_updates_as_stock(change, reason):
    runner = make_runner(OURS, "gru")
    assert not runner.alg.obstacle
    change(runner.alg)
    runner.alg.describe()
    assert runner.alg.obstacle.startswith(reason)


def assert_same_training(change=lambda alg: None, classes=("PPO", TritonPPO), **network):
    """Two iterations, before which something is changed in both algorithms; returns ours."""
    runners = []
    for class_name in classes:
        runner = make_runner(class_name, network=network)
        change(runner.alg)
        train(runner, 2)
        runners.append(runner)
    compare(runners[1], runners[0], rtol=1e-4, atol=2e-6)
    return runners[1].alg


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_before_a_call(everywhere):
    """Of the actor, whose call is gone around; parts that are called have theirs anyway."""

    def hook(module, inputs):
        return ({name: alter(x) for name, x in inputs[0].items()},) if isinstance(module, MLPModel) else None

    handles = []

    def change(alg):
        register = register_module_forward_pre_hook if everywhere else alg.actor.register_forward_pre_hook
        handles.append(register(hook))
        if len(handles) == 2 and everywhere:
            handles.pop(0).remove()

    assert_same_training(change)
    handles[-1].remove()


def test_hooks_after_a_call():
    calls = Counter()

    def change(alg):
        alg.actor.register_forward_hook(lambda *_: calls.update([type(alg)]))

    assert_same_training(change)
    assert calls[PPO] == calls[TritonPPO] > 0


def test_numbers_that_are_computed():
    """In a class of the user's, perhaps anew for each minibatch."""

    class Own(PPO):
        entropy_coef = property(lambda self: 0.05, lambda *_: None)

    alg = assert_same_training(classes=(Own, type("Ours", (TritonPPO, Own), {})))
    assert alg.obstacle == "Ours computes entropy_coef"


def test_names_of_users_are_free():
    names = list_names_in_front(TritonPPO, PPO, lambda kind: make_runner(kind).alg, 1, 2)
    assert names == {"compute_returns", "process_env_step", "update"}


class Around(nn.Module):
    """A model around another one, of which all other attributes are."""

    hidden: tuple[str, ...] = ()

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return alter_call(self.model, *args, **kwargs)

    def __getattr__(self, name):
        own = name == "model" or name in self.hidden
        return super().__getattr__(name) if own else getattr(self.model, name)


class Narrow(Around):
    """Without what `PPO` does not ask for."""

    hidden = ("distribution",)


class NoModule:
    """The same of a class that is no module."""

    def __init__(self, model):
        self.model = model

    def __call__(self, *args, **kwargs):
        return alter_call(self.model, *args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.model, name)


def replace(model):
    """Another one, with other parameters."""
    alg = make_runner("PPO", seed=3).alg
    return alg.actor if model.distribution else alg.critic


@pytest.mark.parametrize("name", ["actor", "critic"])
@pytest.mark.parametrize("change", [Around, Narrow, NoModule, replace])
def test_models_that_take_the_place_of_others(change, name, captured):
    """Between updates, around them or with an optimizer of their own; a graph of the former ones is given up."""
    runners = [make_runner(class_name) for class_name in ("PPO", TritonPPO)]
    for runner in runners:
        train(runner, 1)
        alg = runner.alg
        setattr(alg, name, change(getattr(alg, name)))
        if change is replace:
            alg.optimizer = torch.optim.Adam([*alg.actor.parameters(), *alg.critic.parameters()], lr=1e-3)
        train(runner, 2)
    compare(*runners[::-1], rtol=1e-4, atol=2e-6)
    update = runners[1].alg._rl_triton
    assert update.stock == ("a model is no module of PyTorch" if change is NoModule else "")
    assert update.step.graphs.captures == 1 if captured and not update.stock else update.step.reason


@pytest.mark.parametrize("name", ["update", "compute_returns"])
def test_algorithms_behind_ours(name):
    """A class in front of RSL-RL's, and ours in front of that."""

    class Own(PPO):
        def update(self):
            self.storage.advantages = 0.5 * self.storage.advantages
            return super().update()

        def compute_returns(self, obs):
            super().compute_returns(obs)
            self.storage.returns *= 0.5

    delattr(Own, "compute_returns" if name == "update" else "update")
    ours = type("Ours", (TritonPPO, Own), {})
    alg = assert_same_training(classes=(Own, ours))
    assert alg.obstacle.partition(" (")[0] == ("Own has its own update" if name == "update" else "")
