"""Acting of Stable-Baselines3's on-policy algorithms in one compiled call against the stock ones."""

import numpy as np
import pytest
import torch

pytest.importorskip("sb3_contrib")
from overrides import override
from sb3_callbacks import At
from test_sb3_captured import compare, make_model, make_models

COMPILED = "updates are compiled"
TASKS = ["cartpole", "pendulum", "dict", "several", "binary", "a2c", "masks", "masks_several", "masks_binary"]
FIELDS = ("observations", "actions", "values", "log_probs", "advantages")


def keep_rollouts(change=lambda model, step: None):
    """Random states at the ends of rollouts, the rollouts, and callbacks that keep them and let something happen."""
    states, rollouts = [], []

    def keep(model):
        states.append(torch.get_rng_state())
        for name in FIELDS:
            found = getattr(model.rollout_buffer, name)
            rollouts.extend(x.copy() for x in (found.values() if isinstance(found, dict) else [found]))

    change_at_steps = At(lambda model: change(model, model.num_timesteps // 2))
    return states, rollouts, [change_at_steps, At(keep, moment="rollout_end")]


def compare_rollouts(ours, stock):
    for x, y in zip(ours, stock, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def learn_both(task, change=lambda model, step: None, before=lambda model: None, count=5 * 64, **options):
    """Rollouts of stock and ours are compared: random states are equal, and all else is up to rounding."""
    models, states, rollouts = [], [], []
    for model in make_models(task, "cpu", **options):
        before(model)
        *kept, callbacks = keep_rollouts(change)
        for found, all_found in zip(kept, (states, rollouts), strict=True):
            all_found.append(found)
        models.append(model.learn(count, callback=callbacks))
    assert len(states[0]) == len(states[1]) > 1 and all(map(torch.equal, *states))
    compare_rollouts(*rollouts[::-1])
    compare(*models[::-1])
    of_the_first = len(rollouts[0]) // len(states[0])
    return models[1], all(np.array_equal(x, y) for x, y in zip(*(x[:of_the_first] for x in rollouts), strict=True))


@pytest.mark.parametrize("task", TASKS)
def test_a_training_goes_the_way_of_stock(task):
    """Seed for seed, within rounding; bit for bit it is not, or it were not compiled."""
    model, is_equal = learn_both(task)
    assert model.describe() == COMPILED and not is_equal


@pytest.mark.parametrize("task", ["cartpole", "pendulum", "masks_several"])
def test_exact_acting_is_that_of_stock_bit_for_bit(task):
    model, is_equal = learn_both(task, before=lambda model: setattr(model, "acts_exactly", True), count=2 * 64)
    assert model.describe() == f"{COMPILED}, acting is exact" and is_equal


@pytest.mark.parametrize("count", [1, 200])
@pytest.mark.parametrize("task", ["cartpole", "pendulum", "several", "binary", "masks", "masks_several"])
def test_likeliest_actions_values_and_gradients(task, count):
    """What callbacks ask of a policy in a rollout."""
    seen = []

    def ask(model, _):
        policy, obs = model.policy, 3 * torch.randn(count, *model.observation_space.shape)
        rows = [model.get_env().env_method("action_masks")[0]] * count if task.startswith("masks") else []
        masks = {"action_masks": np.stack(rows)} if rows else {}
        assert policy(obs, **masks)[1].requires_grad and policy.predict_values(obs).requires_grad
        with torch.no_grad():
            seen.append([*policy(obs, True, *masks.values()), *policy(obs, **masks), policy.predict_values(obs)])

    learn_both(task, ask, lambda model: [torch.nn.init.normal_(x) for x in model.policy.action_net.parameters()])
    half = len(seen) // 2
    for x, y in zip(seen[half:], seen[:half], strict=True):
        assert [z.dtype for z in x] == [z.dtype for z in y] and [z.shape for z in x] == [z.shape for z in y]
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def change_parameters(model, step):
    policy = model.policy
    if step == 5:
        policy.mlp_extractor.value_net[0].weight.mul_(1.5)
    if step == 10:
        policy.action_net.weight.data = 30 * policy.action_net.weight.data
    if step == 15:
        policy.value_net = torch.nn.Linear(policy.value_net.in_features, 1)
        torch.nn.init.ones_(policy.value_net.weight)
        torch.nn.init.ones_(policy.value_net.bias)
    if step == 20:
        policy.mlp_extractor.policy_net[2].weight = torch.nn.Parameter(-policy.mlp_extractor.policy_net[2].weight)
    if step == 25:
        policy.load_state_dict({name: 0.9 * x for name, x in policy.state_dict().items()})
    if step == 30 and hasattr(policy, "log_std"):
        policy.log_std = torch.nn.Parameter(policy.log_std - 1)


@pytest.mark.parametrize("task", ["cartpole", "pendulum", "a2c"])
def test_parameters_that_a_callback_changes_count_at_once(task):
    learn_both(task, change_parameters, count=2 * 64)


def halve(module, inputs, output):
    return 0.5 * output


CHANGES = {
    "a hook": lambda policy: policy.value_net.register_forward_hook(halve),
    "a hook of the policy": lambda policy: policy.register_forward_hook(lambda *x: (x[2][0], 2 * x[2][1], x[2][2])),
    "a hook of the extractor": lambda policy: policy.features_extractor.register_forward_hook(halve),
    "forward": lambda policy: override(policy, "forward"),
    "predict_values": lambda policy: override(policy, "predict_values"),
    "extract_features": lambda policy: override(policy, "extract_features"),
    "an activation": lambda policy: setattr(policy.mlp_extractor.policy_net, "3", torch.nn.Softplus()),
}


@pytest.mark.parametrize("when", ["before", "as a rollout begins"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_user_replaced_acts(name, when):
    rollouts, moment = [], (0, "training_start") if when == "before" else (64, "rollout_start")
    for model in make_models("pendulum", "cpu"):
        _, kept, callbacks = keep_rollouts()
        rollouts.append(kept)
        model.learn(3 * 64, callback=[At(lambda model: CHANGES[name](model.policy), *moment), *callbacks])
    compare_rollouts(*rollouts[::-1])
    assert ("not compiled: " in model.describe()) == (name != "predict_values")


def test_large_networks_are_left_to_pytorch():
    model = make_model("cartpole", "cpu", policy_kwargs={"net_arch": [500, 500]}).learn(64)
    assert "with more than" in model.describe()
