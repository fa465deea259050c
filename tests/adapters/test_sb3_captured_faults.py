"""Captured algorithms of Stable-Baselines3: what changes while graphs are alive."""

import copy
from functools import partial

import pytest

pytest.importorskip("sb3_contrib")
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from test_sb3_captured import GPU, OPTIONS, DictCartPole, allow_captures, compare

from rl_triton_adapters.sb3_captured import TritonPPO


def resize_rollout(n_steps, model):
    """As one does it who wants rollouts of another length."""
    kind, model.n_steps = type(model.rollout_buffer), n_steps
    spaces = model.observation_space, model.action_space
    options = {"gamma": model.gamma, "gae_lambda": model.gae_lambda, "n_envs": model.n_envs}
    model.rollout_buffer = kind(n_steps, *spaces, device=model.device, **options)


def set_constant_clip_range(model):
    model.clip_range_vf = lambda progress: 0.01


def go_back(model):
    """To the parameters and the optimizer of the beginning."""
    model.set_parameters(copy.deepcopy(model.at_first))


def set_other_env(model):
    model.set_env(make_vec_env("CartPole-v1", 2, seed=7))


class EditParameters(BaseCallback):
    """Changes all parameters now and then, in place or in new memory."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def _on_step(self):
        for parameter in self.model.policy.parameters() if self.n_calls % 7 == 0 else ():
            changed = 0.9 * parameter.data
            parameter.data = parameter.data.copy_(changed) if self.in_place else changed
        return True


def set_option(name, value):
    return {"change": lambda model: setattr(model, name, value)}


CHANGES = {
    "larger rollout": {"change": partial(resize_rollout, 64)},
    "smaller rollout": {"change": partial(resize_rollout, 16)},
    "clip range of values": {"change": set_constant_clip_range},
    "target_kl": set_option("target_kl", 1e-5),
    "target_kl that ends": {"target_kl": 1e-5, **set_option("target_kl", None)},
    "batch size": set_option("batch_size", 16),
    "entropy coefficient": set_option("ent_coef", 0.5),
    "parameters of the beginning": {"change": go_back},
    "another environment": {"change": set_other_env},
    "parameters in place": {"callback": partial(EditParameters, True)},
    "parameters in new memory": {"callback": partial(EditParameters, False)},
    "running statistics": {"env": "Pendulum-v1", "wrap": VecNormalize},
    "dictionaries": {"env": DictCartPole, "wrap": VecNormalize, "policy": "MultiInputPolicy"},
}


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("case", CHANGES)
def test_changes_while_graphs_are_alive(case, device, monkeypatch):
    """Parameters are those of stock after two further updates."""
    options = {"policy": "MlpPolicy", "env": "CartPole-v1", "wrap": lambda envs: envs, "learning_rate": 3e-3}
    options |= OPTIONS | CHANGES[case]
    env, wrap, change = options.pop("env"), options.pop("wrap"), options.pop("change", lambda model: None)
    make_callback, models = options.pop("callback", lambda: None), []
    if device == "cpu":
        allow_captures(monkeypatch)
    for kind in (PPO, TritonPPO):
        model = kind(env=wrap(make_vec_env(env, 2, seed=0)), device=device, **options)
        model.at_first = copy.deepcopy(model.get_parameters())
        model.learn(64, callback=make_callback())
        change(model)
        models.append(model.learn(2 * 2 * model.n_steps, callback=make_callback()))
    compare(models[1], models[0], rtol=1e-3, atol=1e-4)
    assert models[1].is_captured and models[1]._update.captured and models[1]._acting.captured
