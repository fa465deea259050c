"""TritonPPO and TritonA2C with environments that take and give tensors, against Stable-Baselines3 on the same."""

import numpy as np
import pytest
import torch
from gpu_checks import GPU
from ppo_sb3_gpu_envs import GpuVecEnv, TensorVecEnv, main, make_agent, parse_arguments
from recorded_graphs import allow_captures
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecMonitor

from rl_triton_adapters.sb3 import TritonA2C, TritonPPO

SIZES = {"n_steps": 16, "batch_size": 32, "n_epochs": 2}


class ShortEpisodes(GpuVecEnv):
    """Time limits cut most of them, in the step in which some fall."""

    def reset_tensors(self):
        observations = super().reset_tensors()
        self.envs.time_limit, self.envs.elapsed = 9, torch.arange(self.num_envs, device=self.device) % 9.0
        return observations


class Watch(BaseCallback):
    def __init__(self):
        super().__init__()
        self.seen, self.most = [], None

    def _on_step(self):
        self.seen.append([torch.as_tensor(self.locals[name]).clone() for name in ("actions", "dones")])
        return self.most is None or len(self.seen) < self.most


def train(kind, env, rollouts=4, callback=None, device="cpu", **settings):
    model = kind("MlpPolicy", env, seed=1, device=device, **settings)
    model.learn(rollouts * model.n_steps * env.num_envs, callback)
    return model


def compare(got, want, **tolerance):
    for (name, x), y in zip(got.policy.named_parameters(), want.policy.parameters(), strict=True):
        torch.testing.assert_close(x, y, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.fixture
def steps(monkeypatch):
    """How often environments gave NumPy arrays."""
    found, step_wait = [], TensorVecEnv.step_wait
    monkeypatch.setattr(TensorVecEnv, "step_wait", lambda self: found.append(self) or step_wait(self))
    return found


@pytest.mark.parametrize(("stock", "ours", "settings"), [(PPO, TritonPPO, SIZES), (A2C, TritonA2C, {"n_steps": 8})])
@pytest.mark.parametrize("task", ["cartpole", "pendulum"])
def test_training(task, stock, ours, settings, steps, monkeypatch):
    """Parameters, what callbacks see, episodes and the state from which the next rollout goes on."""
    allow_captures(monkeypatch)
    watches = Watch(), Watch()
    want = train(stock, ShortEpisodes(task, 6, "cpu"), callback=watches[0], **settings)
    assert steps
    steps.clear()
    got = train(ours, ShortEpisodes(task, 6, "cpu"), callback=watches[1], **settings)
    assert not steps
    assert got._rollouts.finishing.graphs.replays > 8 and got.is_captured
    compare(got, want, rtol=1e-4, atol=1e-6)
    assert len(watches[1].seen) == len(watches[0].seen) == 4 * got.n_steps
    for (actions, dones), (expected, ended) in zip(watches[1].seen, watches[0].seen, strict=True):
        torch.testing.assert_close(actions, expected, rtol=1e-4, atol=1e-5)
        assert dones.equal(ended)
    episodes = [[(x["l"], pytest.approx(x["r"], rel=1e-4)) for x in model.ep_info_buffer] for model in (want, got)]
    assert len(episodes[0]) >= 20
    assert episodes[0] == [(x["l"], x["r"]) for x in got.ep_info_buffer]
    assert got.num_timesteps == want.num_timesteps
    np.testing.assert_allclose(got._last_obs, want._last_obs, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(got._last_episode_starts, want._last_episode_starts)


def test_the_rollout(monkeypatch):
    """Every array of the buffer, where time limits cut episodes and where poles fell: one float32 rounding apart."""
    allow_captures(monkeypatch)
    found = []
    for kind in (PPO, TritonPPO):
        monkeypatch.setattr(kind, "train", lambda self: None)
        buffer = train(kind, ShortEpisodes("cartpole", 6, "cpu"), 1, **SIZES).rollout_buffer
        assert buffer.full and buffer.pos == 16
        names = "observations", "actions", "rewards", "values", "log_probs", "episode_starts", "advantages", "returns"
        found.append({name: torch.as_tensor(getattr(buffer, name)) for name in names})
    want, got = found
    assert {x.item() for x in want["rewards"].unique()} > {1.0}  # values of final observations are in them
    for name, x in want.items():
        torch.testing.assert_close(got[name].view_as(x), x, rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("case", ["wrapped", "exploring", "not captured", "own add"])
def test_what_collects_rollouts_otherwise(case, steps, monkeypatch):
    """NumPy arrays go where something else may see them, and parameters are those of PPO."""
    if case != "not captured":
        allow_captures(monkeypatch)
    settings = SIZES | ({"use_sde": True} if case == "exploring" else {})
    models = []
    for kind in (PPO, TritonPPO):
        env = ShortEpisodes("pendulum", 6, "cpu")
        model = kind("MlpPolicy", VecMonitor(env) if case == "wrapped" else env, seed=1, device="cpu", **settings)
        if case == "own add":
            add = model.rollout_buffer.add
            model.rollout_buffer.add = lambda obs, action, reward, *rest, add=add: add(obs, action, reward / 8, *rest)
        models.append(model.learn(2 * 16 * 6))
    assert len(steps) == 4 * 16
    compare(*models, rtol=1e-4, atol=1e-6)


def test_a_callback_ends_a_rollout(monkeypatch):
    allow_captures(monkeypatch)
    watch = Watch()
    watch.most = 5
    model = train(TritonPPO, ShortEpisodes("cartpole", 6, "cpu"), callback=watch, **SIZES)
    assert len(watch.seen) == 5 and model.num_timesteps == 30 and not model.rollout_buffer.full


def test_networks_that_give_nan(monkeypatch):
    """The policy's own error, before the update."""
    allow_captures(monkeypatch)
    model = TritonPPO("MlpPolicy", ShortEpisodes("pendulum", 6, "cpu"), device="cpu", **SIZES)
    with torch.no_grad():
        model.policy.action_net.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="loc"):
        model.learn(16 * 6)
    assert model._n_updates == 0


def test_a_model_is_saved_and_goes_on(monkeypatch, tmp_path):
    allow_captures(monkeypatch)
    model = train(TritonPPO, ShortEpisodes("cartpole", 6, "cpu"), **SIZES)
    model.save(tmp_path / "model")
    again = TritonPPO.load(tmp_path / "model", ShortEpisodes("cartpole", 6, "cpu"), device="cpu")
    compare(again, model, rtol=0, atol=0)
    assert again.learn(16 * 6)._rollouts is not None
    PPO.load(tmp_path / "model", ShortEpisodes("cartpole", 6, "cpu"), device="cpu").learn(16 * 6)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_the_example_trains(device, monkeypatch, capsys):
    """Poles stand longer after some updates, also on a GPU, where nothing comes to the host."""
    flags = ["--num-envs", "256", "--num-steps", "16", "--device", device]
    models = [make_agent(parse_arguments(flags)) for _ in range(2)]
    for model, rollouts in zip(models, (1, 30), strict=True):
        model.learn(rollouts * 256 * 16)
    before, after = (np.mean([x["l"] for x in model.ep_info_buffer]) for model in models)
    assert after > 2 * before
    assert (models[0]._rollouts is not None) == (device == "cuda")
    monkeypatch.setattr("sys.argv", ["ppo_sb3_gpu_envs.py", *flags, "--iterations", "1", "--stock"])
    assert main() == 0
    assert "4,096 steps in" in capsys.readouterr().out
