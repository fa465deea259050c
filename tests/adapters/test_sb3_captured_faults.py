"""Captured algorithms of Stable-Baselines3: what changes while graphs are alive, and what callbacks take away."""

import copy
import io
from collections import Counter
from functools import partial

import pytest
import torch

pytest.importorskip("sb3_contrib")
from sb3_callbacks import At
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from test_sb3 import DictCartPole
from test_sb3_captured import OPTIONS, allow_captures, compare, make_model

from rl_triton_adapters.sb3.base import replace_methods
from rl_triton_adapters.sb3.captured import TritonPPO


def resize_rollout(n_steps, model):
    kind, model.n_steps = type(model.rollout_buffer), n_steps
    spaces = model.observation_space, model.action_space
    options = {"gamma": model.gamma, "gae_lambda": model.gae_lambda, "n_envs": model.n_envs}
    model.rollout_buffer = kind(n_steps, *spaces, device=model.device, **options)


def edit_parameters(in_place):
    """Changes all parameters now and then, in place or in new memory."""

    def edit(model):
        for parameter in model.policy.parameters() if model.num_timesteps % 14 == 0 else ():
            changed = 0.9 * parameter.data
            parameter.data = parameter.data.copy_(changed) if in_place else changed

    return {"callback": At(edit)}


def set_option(name, value):
    return {"change": lambda model: setattr(model, name, value)}


def set_slopes(model):
    for x in model.policy.modules():
        x.negative_slope = 0.9


CHANGES = {
    "larger rollout": {"change": partial(resize_rollout, 64)},
    "smaller rollout": {"change": partial(resize_rollout, 16)},
    "clip range of values": set_option("clip_range_vf", lambda progress: 0.01),
    "coefficient": set_option("ent_coef", 0.5),
    "bound of gradients": set_option("max_grad_norm", 0.1),
    "target_kl": set_option("target_kl", 1e-5),
    "target_kl that ends": {"target_kl": 1e-5, **set_option("target_kl", None)},
    "batch size": set_option("batch_size", 16),
    "parameters of the beginning": {"change": lambda model: model.set_parameters(copy.deepcopy(model.at_first))},
    "another environment": {"change": lambda model: model.set_env(make_vec_env("CartPole-v1", 2, seed=7))},
    "parameters in place": edit_parameters(in_place=True),
    "parameters in new memory": edit_parameters(in_place=False),
    "number of a layer": {"policy_kwargs": {"activation_fn": torch.nn.LeakyReLU}, "change": set_slopes},
    "running statistics": {"env": "Pendulum-v1", "wrap": VecNormalize},
    "dictionaries": {"env": DictCartPole, "wrap": VecNormalize, "policy": "MultiInputPolicy"},
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes_while_graphs_are_alive(case, device, monkeypatch):
    """Parameters are those of stock after two further updates."""
    options = {"policy": "MlpPolicy", "env": "CartPole-v1", "wrap": lambda envs: envs, "learning_rate": 3e-3}
    options |= OPTIONS | CHANGES[case]
    env, wrap, change = options.pop("env"), options.pop("wrap"), options.pop("change", lambda model: None)
    callback, models = options.pop("callback", None), []
    allow_captures(monkeypatch, device)
    for kind in (PPO, TritonPPO):
        model = kind(env=wrap(make_vec_env(env, 2, seed=0)), device=device, **options)
        model.at_first = copy.deepcopy(model.get_parameters())
        model.learn(64, callback=callback)
        change(model)
        models.append(model.learn(2 * 2 * model.n_steps, callback=callback))
    compare(models[1], models[0], rtol=1e-3, atol=1e-4)
    assert models[1].is_captured and models[1]._update.step.captured and models[1]._acting.captured


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("task", ["cartpole", "masks"])
def test_policies_that_a_callback_keeps_are_plain(task, is_captured, monkeypatch):
    model, stock = make_model(task, "cpu", monkeypatch if is_captured else None), make_model(task, "cpu", stock=True)
    kept, observations = [], torch.randn(5, 4)

    def keep_policy(model):
        file = io.BytesIO()
        torch.save(model.policy, file)
        kept.append((copy.deepcopy(model.policy), file))

    model.learn(64, callback=[At(keep_policy, 6), At(keep_policy, moment="rollout_end")])
    assert model.is_captured == is_captured and model.is_accelerated and len(kept) == 2
    for copied, file in kept:
        assert b"rl_triton" not in file.getvalue()
        file.seek(0)
        for policy in (copied, torch.load(file, weights_only=False)):
            assert vars(policy).keys() == vars(stock.policy).keys()
            groups = [x.optimizer.state_dict()["param_groups"] for x in (policy, stock.policy)]
            assert groups[0] == groups[1]
            stock.policy.load_state_dict(policy.state_dict())
            torch.manual_seed(0)
            want = stock.policy(observations)
            torch.manual_seed(0)
            assert all(map(torch.equal, policy(observations), want))


class OwnState(torch.nn.Module):
    """A policy that says itself what of it is copied."""

    forward, kept = len, 1

    def __getstate__(self):
        return {**vars(self), "kept": 2}


def test_copies_of_a_policy_with_a_state_of_its_own():
    policy = OwnState()
    with replace_methods(policy, forward=sum):
        again = copy.deepcopy(policy)
    assert again.kept == 2 and not {"forward", "__getstate__"} & {*vars(again), *vars(policy)}


@pytest.mark.gpu
def test_a_step_of_acting_copies_once_to_the_device_and_once_back():
    model = make_model("cartpole", "cuda").learn(64)
    callback, counts = model._init_callback(None), []
    for n_steps in (4, 20):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=n_steps)
        names = [event.name for event in profile.events()]
        counts.append(Counter(way for name in names for way in ("HtoD", "DtoH") if f"Memcpy {way}" in name))
    assert counts[1] - counts[0] == {"HtoD": 16, "DtoH": 16}, counts
