"""Compiled updates of PPO's learner on the CPU: RLlib's weights, coefficients and metrics."""

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("ray.rllib")

from overrides import derive
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.examples.rl_modules.classes.action_masking_rlm import ActionMaskingTorchRLModule
from test_captured import assert_same_states, build_both, make_agents_config, update_agents
from updates import POLICY, assert_same_updates, build_learner, count_calls, make_config, update_learner

from rl_triton_adapters.common.optimizers import is_fused
from rl_triton_adapters.rllib import TritonPPOTorchLearner, enable_triton, loss, update

NUM_UPDATES = 15
GROWN = {"rtol": 2e-3, "atol": 2e-4}  # of float32 sums in another order, after many steps of Adam
SETTINGS = {
    "shared-tanh-schedules": (
        "categorical",
        {"fcnet_hiddens": [16, 16], "fcnet_activation": "tanh", "vf_share_layers": True},
        {
            "entropy_coeff": [[0, 0.1], [1500, 0.01]],
            "lr": [[0, 3e-3], [1500, 3e-4]],
            "kl_target": 1e-3,
            "grad_clip": 0.3,
        },
    ),
    "relu-norms": (
        "gaussian",
        {"fcnet_hiddens": [16], "fcnet_activation": "relu", "log_std_clip_param": 0.2, "vf_share_layers": False},
        {"entropy_coeff": 0.01, "grad_clip": 0.1, "grad_clip_by": "norm", "lr": 1e-3, "kl_target": 0.05},
    ),
    "free-deviations-values": (
        "gaussian",
        {"fcnet_hiddens": [16], "free_log_std": True, "fcnet_activation": "silu", "head_fcnet_hiddens": [8]},
        {"grad_clip": 0.02, "grad_clip_by": "value", "lr": 1e-3},
    ),
    "several-categoricals": (
        "several categorical",
        {"fcnet_hiddens": [8]},
        {"use_kl_loss": False, "grad_clip": None, "vf_clip_param": None, "minibatch_size": 7, "num_epochs": 1},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_many_updates_are_those_of_rllib(name, monkeypatch):
    """The last minibatch of each has the loss and the metrics of an update that is not compiled."""
    space, model, options = SETTINGS[name]
    config = make_config(space, model=DefaultModelConfig(**model), **options)
    stock = update_learner(config, space, NUM_UPDATES)
    learner = build_learner(enable_triton(config))
    assert learner.describe().endswith("updates are compiled")
    losses = count_calls(monkeypatch, loss, "ppo_loss")
    ours = update_learner(config, space, NUM_UPDATES, learner)
    assert len(losses) == NUM_UPDATES and not is_fused(learner.get_optimizer())
    assert_same_updates(stock, ours, **GROWN)
    if name == "relu-norms":
        states = torch.randn(99, 4)
        deviations = learner.module[POLICY].pi.net(learner.module[POLICY].encoder.actor_encoder.net(states))[:, 2:]
        assert 0 < (deviations.abs() > model["log_std_clip_param"]).float().mean() < 1
    if options.get("use_kl_loss", True):
        coefficients = {x[POLICY, "curr_kl_coeff"] for x in stock[0]}
        assert len(coefficients) > 1 or name != "shared-tanh-schedules"


def test_several_policies_have_their_own_minibatches_and_draws():
    """With one among them that is not compiled, none is; later they may be."""
    modules = dict.fromkeys(("a", "b"), DefaultPPOTorchRLModule)
    stock, ours = build_both(modules)
    for seed in range(5):
        if seed == 3:
            hook = ours.module["b"].vf.register_forward_hook(lambda *_: None)
        elif seed == 4:
            hook.remove()
        assert ours.describe().endswith("not compiled: b: a module has hooks" if seed == 3 else "updates are compiled")
        results = [(update_agents(learner, ["a", "b"], seed), np.random.random()) for learner in (stock, ours)]  # noqa: NPY002
        assert results[0] == results[1]
    for name in modules:
        assert_same_states(stock, ours, name)


OWN_LOGS = derive(TritonPPOTorchLearner, "_log_steps_trained_metrics")
OWN_FORWARD = derive(DefaultPPOTorchRLModule, "_forward_train")
REASONS = {
    "TritonPPOTorchLearner has its own _log_steps_trained_metrics (": lambda x: x.learners(learner_class=OWN_LOGS),
    "default_policy: DefaultPPOTorchRLModule has its own _forward_train": lambda config: config.rl_module(
        rl_module_spec=make_agents_config({"a": OWN_FORWARD})[1]["a"]
    ),
    "default_policy: the loss has no critic": lambda config: config.training(use_critic=False),
    "default_policy: LayerNorm is none": lambda config: config.rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=[8], head_fcnet_use_layernorm=True, head_fcnet_hiddens=[8])
    ),
    "torch_skip_nan_gradients is on": lambda config: setattr(config, "torch_skip_nan_gradients", True),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_not_compiled_is_said(reason, monkeypatch):
    config = make_config("gaussian")
    REASONS[reason](config)
    learner = build_learner(enable_triton(config))
    assert "updates are eager: " in learner.describe()
    assert f"; not compiled: {reason}" in learner.describe()
    fused = count_calls(monkeypatch, update, "fuse_optimizer")
    update_learner(config, "gaussian", 1, learner)
    assert fused and not is_fused(learner.get_optimizer())


def test_logits_that_are_masked_or_clipped_are_not_compiled():
    """By a module of RLlib's examples, and by a head that a catalog of one's own makes."""
    observations = {"action_mask": gym.spaces.Box(0, 1, (3,)), "observations": gym.spaces.Box(-1, 1, (4,))}
    spec = RLModuleSpec(ActionMaskingTorchRLModule, gym.spaces.Dict(observations), gym.spaces.Discrete(3))
    learner = build_learner(enable_triton(make_config("categorical").rl_module(rl_module_spec=spec)))
    assert ": ActionMaskingTorchRLModule has its own _" in learner.describe()
    learner = build_learner(enable_triton(make_config("categorical")))
    learner.module[POLICY].pi.clip_log_std = True
    assert ": DefaultPPOTorchRLModule clips logits" in learner.describe()
