"""Compiled updates of Stable-Baselines3's algorithms against the stock ones."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sb3_contrib")
from overrides import derive, override
from sb3_callbacks import At
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import FlattenExtractor
from test_sb3_captured import compare_logs, learn_both, make_model

from rl_triton_adapters.sb3.captured import TritonPPO

COMPILED = "updates are compiled"
OPTIMIZERS = {
    "rmsprop_tf": {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"alpha": 0.9, "centered": True}},
    "adamw": {"optimizer_class": torch.optim.AdamW, "optimizer_kwargs": {"weight_decay": 0.1}},
    "sgd": {"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {"momentum": 0.9, "nesterov": True}},
}
SCHEDULES = {
    "learning_rate": lambda x: 3e-3 * x,
    "clip_range": lambda x: 0.1 + 0.1 * x,
    "clip_range_vf": lambda x: 0.2 + x,
    "target_kl": 0.0003,
    "ent_coef": 0.01,
    "policy_kwargs": {"net_arch": {"pi": [9, 5], "vf": [7]}, "activation_fn": torch.nn.ELU},
}


def test_three_hundred_updates_are_those_of_stock():
    """With schedules of all there are, updates that stop early, and a last minibatch that is shorter."""
    options = SCHEDULES | {"n_steps": 8, "batch_size": 6, "n_epochs": 3}
    stock, ours = learn_both("cartpole", "cpu", steps=300 * 16, **options)
    assert ours.describe() == COMPILED
    assert ours._n_updates == stock._n_updates and 300 < ours._n_updates < 900, "some stop early"
    compare_logs(ours, stock)


@pytest.mark.parametrize("task", ["cartpole", "a2c_pendulum"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_and_their_states(optimizer, task):
    models = learn_both(task, "cpu", steps=128, policy_kwargs=OPTIMIZERS[optimizer])
    assert models[1].describe() == COMPILED
    states = [model.policy.optimizer.state_dict()["state"] for model in models]
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)


def change_things(model):
    """What an update depends on, while a rollout is collected and between rollouts."""
    policy, step = model.policy, model.num_timesteps
    if step == 20:
        policy.optimizer.param_groups[0]["weight_decay"] = 0.1
    if step == 80:
        policy.mlp_extractor.value_net[0].requires_grad_(False)
        model.ent_coef, model.n_epochs = 0.1, 1
    if step == 140:
        policy.value_net = torch.nn.Linear(policy.value_net.in_features, 1)
        torch.nn.init.ones_(policy.value_net.weight)
        torch.nn.init.zeros_(policy.value_net.bias)
        policy.optimizer.add_param_group({"params": [*policy.value_net.parameters()], "lr": 1e-2})


def test_callbacks_may_change_anything():
    _, ours = learn_both("cartpole", "cpu", steps=200, callback=At(change_things))
    assert ours.describe() == COMPILED


def shrink_for(policy, name):
    """Let one of the networks see smaller observations."""
    policy.share_features_extractor = False
    policy.pi_features_extractor = policy.vf_features_extractor = policy.features_extractor
    setattr(policy, name, derive(FlattenExtractor, "forward")(policy.observation_space))


REASONS = {
    "has its own _make_step": lambda model: isinstance(model, TritonPPO) and override(model, "_make_step"),
    "a module has hooks": lambda model: model.policy.value_net.register_full_backward_hook(lambda *_: None),
    "or optimizer has hooks": lambda model: model.policy.optimizer.register_step_post_hook(lambda *_: None),
    "has further parameters": lambda model: model.policy.register_parameter("own", torch.nn.Parameter(torch.ones(1))),
    "extracts features": lambda model: setattr(model.policy, "features_extractor", torch.nn.Flatten()),
    "FlattenExtractor extracts features": lambda model: shrink_for(model.policy, "pi_features_extractor"),
    "FlattenExtractor extracts": lambda model: shrink_for(model.policy, "vf_features_extractor"),
    "has its own forward_critic": lambda model: override(model.policy.mlp_extractor, "forward_critic"),
    "this MlpExtractor has its own forward ": lambda model: override(model.policy.mlp_extractor, "forward"),
    "has its own extract_features": lambda model: override(model.policy, "extract_features"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_why_an_update_is_not_compiled(reason):
    """Then it is the one without a graph, and the agent is stock's."""
    _, ours = learn_both("cartpole", "cpu", change=REASONS[reason])
    sentence = ours.describe()
    assert sentence.startswith("updates are eager") and reason in sentence


def derive_kind(thing, **methods):
    thing.__class__ = type(f"Own{type(thing).__name__}", (type(thing),), methods)


def leave_old_gradients(model):
    model.lr_schedule, policy = lambda _: 1.0, model.policy
    policy.mlp_extractor.requires_grad_(False)
    policy.optimizer = torch.optim.SGD([x for x in policy.parameters() if x.requires_grad], lr=1.0)
    for x in policy.mlp_extractor.parameters():
        x.grad = torch.ones_like(x)


def shape_log_std(policy):
    """As a row, of a policy that is not compiled."""
    policy.log_std = torch.nn.Parameter(torch.zeros(1, *policy.log_std.shape))
    policy.optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    policy.value_net.register_forward_hook(lambda *_: None)


def replace_optimizer(model, _):
    model.policy.optimizer = torch.optim.SGD(model.policy.parameters(), lr=0.1)


def take_plain_optimizer(policy):
    names = ("param_groups", "step", "zero_grad")
    policy.optimizer = SimpleNamespace(**{name: getattr(policy.optimizer, name) for name in names})


CHANGES = {
    "frozen while acting": lambda model: derive_kind(
        model.policy, set_training_mode=lambda policy, mode: policy.mlp_extractor.requires_grad_(mode)
    ),
    "optimizer replaced": lambda model: derive_kind(model, _update_learning_rate=replace_optimizer),
    "parameters": lambda model: derive_kind(model.policy, parameters=lambda policy: policy.value_net.parameters()),
    "bound": lambda model: derive_kind(model, max_grad_norm=property(lambda self: 0.5**self._n_updates)),
    "old gradients": leave_old_gradients,
    "log_std": lambda model: shape_log_std(model.policy),
    "plain optimizer": lambda model: take_plain_optimizer(model.policy),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_user_changes_counts(name):
    learn_both("pendulum", "cpu", change=CHANGES[name], max_grad_norm=0.01)


def test_a_policy_takes_its_own_third_argument():
    def forward(policy, obs, deterministic=False, scale=1.0):
        actions, values, log_probs = ActorCriticPolicy.forward(policy, obs, deterministic)
        return actions, scale * values, log_probs

    def act(given, _):
        return seen.append(given["self"].policy(given["obs_tensor"], True, 2.0)[1]) is None

    seen = []
    learn_both("cartpole", "cpu", change=lambda model: derive_kind(model.policy, forward=forward), callback=act)
    torch.testing.assert_close(seen[:32], seen[32:], rtol=1e-3, atol=1e-4)


def test_an_update_that_was_not_compiled_leaves_the_next_ones_compiled():
    model = make_model("cartpole", "cpu").learn(64)
    handle = model.policy.value_net.register_forward_hook(lambda *_: None)
    assert "not compiled: a module has hooks" in model.learn(64).describe()
    handle.remove()
    assert model.learn(64).describe() == COMPILED


@pytest.mark.parametrize("name", ["ent_coef", "vf_coef"])
@pytest.mark.parametrize("make", [torch.nn.Parameter, torch.atleast_1d, torch.clone])
def test_coefficients_that_are_no_numbers(name, make):
    _, ours = learn_both("cartpole", "cpu", change=lambda model: setattr(model, name, make(torch.tensor(0.5))))
    assert f"{name} is a {type(make(torch.tensor(0.5))).__name__}" in ours.describe()
