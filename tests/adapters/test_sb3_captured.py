"""TritonPPO against PPO: on a CPU with a graph that calls the step again, on a GPU with CUDA's."""

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3")
from core.test_capture import AgainGraphs
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger

from rl_triton_adapters.sb3_captured import TritonPPO
from rl_triton_core import capture

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
OPTIONS = {"n_steps": 32, "batch_size": 24, "n_epochs": 3, "seed": 0}
"""A short last minibatch."""


class DictCartPole(gym.ObservationWrapper):
    """CartPole with its observation in two parts."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        box = spaces.Box(-np.inf, np.inf, (2,))
        self.observation_space = spaces.Dict({"cart": box, "pole": box})

    def observation(self, observation):
        return {"cart": observation[:2], "pole": observation[2:]}


TASKS = {
    "cartpole": ("MlpPolicy", "CartPole-v1", {}),
    "pendulum": ("MlpPolicy", "Pendulum-v1", {"clip_range_vf": 0.2, "ent_coef": 0.01}),
    "dict": ("MultiInputPolicy", DictCartPole, {"normalize_advantage": False}),
    "schedules": ("MlpPolicy", "CartPole-v1", {"learning_rate": lambda x: 1e-3 * x, "clip_range": lambda x: 0.2 * x}),
}


class Recorder(Logger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__(folder=None, output_formats=[])
        self.kept = []

    def dump(self, step=0):
        self.kept.append({k: v for k, v in self.name_to_value.items() if k.startswith("train/")})
        super().dump(step)


def make_model(kind, task, device, monkeypatch, **options):
    """A model on two environments, captured on a CPU too."""
    policy, env, more = TASKS[task]
    model = kind(policy, make_vec_env(env, 2, seed=0), device=device, **OPTIONS, **more, **options)
    model.set_logger(Recorder())
    if kind is TritonPPO and device == "cpu":
        monkeypatch.setattr(capture, "find_obstacle", lambda *_: "switched off" if _[2] is False else "")
        use_graphs(model)
    return model


def use_graphs(model):
    """Graphs that call the step again."""
    model._find_update()
    for step in (model._update, model._acting):
        step.graphs = AgainGraphs()


def compare(got, want, rtol, atol):
    for (name, x), y in zip(got.policy.state_dict().items(), want.policy.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("task", TASKS)
def test_the_same_agent_as_stock(task, device, monkeypatch):
    """Parameters within rounding after three updates, and the same logs."""
    stock, ours = (make_model(kind, task, device, monkeypatch).learn(3 * 64) for kind in (PPO, TritonPPO))
    assert ours.is_captured and len(ours._update.captured) == 2 and len(ours._acting.captured) == 1
    compare(ours, stock, rtol=1e-3, atol=1e-4)
    for got, want in zip(ours.logger.kept, stock.logger.kept, strict=True):
        assert list(got) == list(want)
        for name, value in want.items():
            assert got[name] == pytest.approx(float(value), rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_it_stops_at_the_same_minibatch(device, monkeypatch):
    options = {"target_kl": 1e-5}
    stock, ours = (make_model(x, "cartpole", device, monkeypatch, **options).learn(3 * 64) for x in (PPO, TritonPPO))
    assert stock._n_updates < 9, "some updates stop early"
    assert stock._n_updates == ours._n_updates
    compare(ours, stock, rtol=1e-3, atol=1e-4)
    for got, want in zip(ours.logger.kept, stock.logger.kept, strict=True):
        assert {k: pytest.approx(float(v), rel=1e-3, abs=1e-4) for k, v in want.items()} == got


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_checkpoints_both_ways(device, monkeypatch, tmp_path):
    ours = make_model(TritonPPO, "cartpole", device, monkeypatch)
    ours.learn(64).save(tmp_path / "ours")
    stock = PPO.load(tmp_path / "ours", device=device)
    assert stock.rollout_buffer_class is RolloutBuffer
    compare(stock, ours, 0, 0)
    stock.set_env(make_vec_env("CartPole-v1", 2, seed=0))
    stock.learn(64).save(tmp_path / "stock")
    again = TritonPPO.load(tmp_path / "stock", env=make_vec_env("CartPole-v1", 2, seed=0), device=device)
    compare(again, stock, 0, 0)
    if device == "cpu":
        use_graphs(again)
    again.learn(64)
    assert again.is_captured and again._update.captured


@pytest.mark.parametrize("task", TASKS)
def test_steps_on_a_cpu_are_those_of_stock(task):
    """Nothing is captured; parameters within rounding, the same logs, and checkpoints of plain optimizers."""
    policy, env, more = TASKS[task]
    models = []
    for kind in (PPO, TritonPPO):
        model = kind(policy, make_vec_env(env, 2, seed=0), device="cpu", target_kl=0.004, **OPTIONS, **more)
        model.set_logger(Recorder())
        models.append(model.learn(3 * 64))
    stock, ours = models
    compare(ours, stock, rtol=1e-3, atol=1e-4)
    assert ours._n_updates == stock._n_updates
    for got, want in zip(ours.logger.kept, stock.logger.kept, strict=True):
        assert {k: pytest.approx(float(v), rel=1e-3, abs=1e-4) for k, v in want.items()} == got
    assert not ours.is_captured and "forward" not in vars(ours.policy)
    assert ours.policy.optimizer.param_groups[0]["fused"]
    groups = [model.policy.optimizer.state_dict()["param_groups"] for model in models]
    assert groups[0] == groups[1]


def test_it_is_ppo_where_it_makes_no_steps_of_its_own():
    models = []
    for kind in (PPO, TritonPPO):
        model = kind("MlpPolicy", make_vec_env("Pendulum-v1", 2, seed=0), use_sde=True, device="cpu", **OPTIONS)
        models.append(model.learn(128))
    compare(*models, 0, 0)
    off = TritonPPO("MlpPolicy", "CartPole-v1", acceleration="off", device="cpu", n_steps=8, batch_size=8)
    assert off._find_update().reason == "switched off" and not off.makes_own_steps
    assert not off.policy.optimizer.param_groups[0]["fused"]
    with pytest.raises(ValueError, match="acceleration: got 'on', expected one of auto, off"):
        TritonPPO("MlpPolicy", "CartPole-v1", acceleration="on")
