"""TritonPPO and TritonA2C with environments that take and give tensors, against Stable-Baselines3 on the same."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from gpu_checks import GPU
from gymnasium import spaces
from overrides import override
from ppo_sb3_gpu_envs import GpuVecEnv, TensorVecEnv, main, make_agent, parse_arguments
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, StopTrainingOnMaxEpisodes
from stable_baselines3.common.vec_env import VecMonitor

from rl_triton_adapters.sb3 import TritonA2C, TritonPPO
from rl_triton_core import capture

pytestmark = [pytest.mark.usefixtures("captured"), pytest.mark.parametrize("captured", [True], indirect=True)]
SIZES = {"n_steps": 16, "batch_size": 32, "n_epochs": 2, "gamma": 0.9}
FIELDS = "observations", "actions", "rewards", "values", "log_probs", "episode_starts", "advantages", "returns"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


class ShortEpisodes(GpuVecEnv):
    """Time limits cut most of them; those in which poles fall are both, truncated and terminated."""

    fails_at = None

    def __init__(self, *args):
        super().__init__(*args)
        if self.action_space.shape:
            self.action_space = spaces.Box(-0.3, 0.3, (1,))

    def reset_tensors(self):
        observations = super().reset_tensors()
        self.envs.time_limit, self.envs.elapsed = 9, torch.arange(self.num_envs, device=self.device) % 9.0
        return observations

    def step_tensors(self, actions):
        self.fails_at = None if self.fails_at is None else self.fails_at - 1
        if self.fails_at == 0:
            raise KeyboardInterrupt
        observations, rewards, terminated, truncated, final = super().step_tensors(actions)
        return observations, rewards, terminated, truncated | terminated, final


class InPlace(ShortEpisodes):
    """What it returns is in the same memory in each step."""

    kept = None

    def step_tensors(self, actions):
        found = super().step_tensors(actions)
        self.kept = self.kept or [x.clone() for x in found]
        return [kept.copy_(x) for kept, x in zip(self.kept, found, strict=True)]


class Watch(BaseCallback):
    """Keeps what it finds, may change rewards, and may stop."""

    def __init__(self, most=None, bonus=0.0):
        super().__init__()
        self.most, self.bonus, self.steps, self.rollouts, self.begun = most, bonus, [], [], 0

    def _on_rollout_start(self):
        self.begun += 1

    def _on_step(self):
        assert self.locals["self"] is self.model and self.locals["env"] is self.training_env
        assert "dones" in self.locals and self.locals.get("nothing", 5) == 5
        names = "actions", "clipped_actions", "new_obs", "rewards", "dones", "values", "log_probs"
        self.steps.append([deepcopy(self.locals[name]) for name in names])
        self.locals["rewards"] += np.float32(self.bonus)
        return self.most is None or len(self.steps) < self.most

    def _on_rollout_end(self):
        self.rollouts.append(
            {name: torch.as_tensor(getattr(self.model.rollout_buffer, name)).clone() for name in FIELDS}
        )


def train(kind, env, rollouts=4, callback=None, device="cpu", **settings):
    model = kind("MlpPolicy", env, seed=1, device=device, **settings)
    model.learn(rollouts * model.n_steps * env.num_envs, callback)
    return model


def compare(got, want, **tolerance):
    torch.testing.assert_close(*(dict(x.policy.named_parameters()) for x in (got, want)), **tolerance)


@pytest.fixture
def steps(monkeypatch):
    """How often environments gave NumPy arrays."""
    found, step_wait = [], TensorVecEnv.step_wait
    monkeypatch.setattr(TensorVecEnv, "step_wait", lambda self: found.append(self) or step_wait(self))
    return found


CASES = {
    "PPO": (PPO, TritonPPO, SIZES),
    "A2C": (A2C, TritonA2C, {"n_steps": 8}),
    "a schedule that ends": (PPO, TritonPPO, SIZES | {"clip_range": lambda progress: 0.2 * progress}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("task", ["cartpole", "pendulum"])
def test_training(task, case, steps):
    """Parameters, what callbacks see and change, episodes, and the state from which the next rollout goes on."""
    stock, ours, settings = CASES[case]
    watches = Watch(bonus=0.5), Watch(bonus=0.5)
    want = train(stock, ShortEpisodes(task, 6, "cpu"), 4, watches[0], **settings)
    assert steps
    steps.clear()
    got = train(ours, InPlace(task, 6, "cpu"), 4, watches[1], **settings)
    assert not steps
    assert got._rollouts.finishing.graphs.replays > 8 and got.is_captured
    compare(got, want, **TOLERANCE)
    assert watches[1].begun == watches[0].begun == len(watches[1].rollouts)
    assert len(watches[1].steps) == len(watches[0].steps) == 4 * got.n_steps
    for found in zip(*(x.steps for x in watches), strict=True):
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    episodes = [(x["l"], pytest.approx(x["r"], rel=1e-4)) for x in want.ep_info_buffer]
    assert len(episodes) >= 20
    assert episodes == [(x["l"], x["r"]) for x in got.ep_info_buffer]
    assert got.num_timesteps == want.num_timesteps
    np.testing.assert_allclose(got._last_obs, want._last_obs, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(got._last_episode_starts, want._last_episode_starts)


@pytest.mark.parametrize("task", ["cartpole", "pendulum"])
def test_the_rollout(task):
    """Every array of the buffer, where time limits cut episodes and where poles fell."""
    watches = Watch(), Watch()
    for kind, env, watch in zip((PPO, TritonPPO), (ShortEpisodes, InPlace), watches, strict=True):
        model = train(kind, env(task, 6, "cpu"), 2, watch, **SIZES)
        assert model.rollout_buffer.full and model.rollout_buffer.pos == 16
    assert model._rollouts is not None
    for want, got in zip(*(x.rollouts for x in watches), strict=True):
        assert len(want["rewards"].unique()) > 1  # values of final observations are in them
        for name, x in want.items():
            torch.testing.assert_close(got[name].view_as(x), x, rtol=1e-4, atol=1e-5, check_dtype=False)


class OwnEpisodes(TritonPPO):
    def _update_info_buffer(self, infos, dones=None):
        self.seen = len(infos)
        super()._update_info_buffer(infos, dones)


class OwnRewards(ShortEpisodes):
    def step_wait(self):
        observations, rewards, *rest = super().step_wait()
        return observations, rewards / 8, *rest


class Integers(ShortEpisodes):
    def __init__(self, *args):
        super().__init__(*args)
        self.action_space = spaces.Box(-3, 3, (1,), dtype=np.int64)


OTHERS = "wrapped", "exploring", "not captured", "own add", "own step_wait", "own episodes", "integers", "stock buffer"


@pytest.mark.parametrize("case", OTHERS)
def test_what_collects_rollouts_otherwise(case, steps, monkeypatch):
    """NumPy arrays go where something else may see them, and parameters are those of PPO."""
    if case == "not captured":
        monkeypatch.setattr(capture, "find_obstacle", lambda *_: "it is not")
    settings = {"exploring": {"use_sde": True}, "stock buffer": {"rollout_buffer_class": RolloutBuffer}}.get(case, {})
    make = {"own step_wait": OwnRewards, "integers": Integers}.get(case, ShortEpisodes)
    models = []
    for kind in (PPO, OwnEpisodes if case == "own episodes" else TritonPPO):
        env = make("pendulum", 6, "cpu")
        env = VecMonitor(env) if case == "wrapped" else env
        models.append(kind("MlpPolicy", env, seed=1, device="cpu", **SIZES | settings))
        if case == "own add":
            override(models[-1].rollout_buffer, "add")
        models[-1].learn(2 * 16 * 6)
    assert len(steps) == 4 * 16
    compare(*models, **TOLERANCE)


@pytest.mark.parametrize("case", ["a callback", "the environment"])
def test_a_rollout_ends_early(case):
    """What learns on goes on from there as PPO does; episodes that a reset has ended count no more."""
    models = []
    for kind, make in ((PPO, ShortEpisodes), (TritonPPO, InPlace)):
        env, watch = make("cartpole", 6, "cpu"), Watch(5)
        model = kind("MlpPolicy", env, seed=1, device="cpu", **SIZES)
        if case == "a callback":
            model.learn(16 * 6, watch)
        else:
            env.fails_at = 6
            with pytest.raises(KeyboardInterrupt):
                model.learn(16 * 6)
        assert model.num_timesteps == 30 and not model.rollout_buffer.full
        models.append(model.learn(2 * 16 * 6, reset_num_timesteps=False))
        last = model._last_obs.copy(), model._last_episode_starts.copy(), [x["l"] for x in model.ep_info_buffer]
        models.append((*last, [x["l"] for x in model.learn(16 * 6).ep_info_buffer]))
    stock, want, ours, got = models
    compare(ours, stock, **TOLERANCE)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("wrapper", [VecMonitor, lambda env: env], ids=["arrays", "tensors"])
def test_updates_are_checked(wrapper, monkeypatch, capsys):
    """Against PPO's, of the same rollout."""
    monkeypatch.setenv("RL_TRITON_CHECK", "3")
    train(TritonPPO, wrapper(ShortEpisodes("cartpole", 6, "cpu")), 3, **SIZES)
    apart = [float(x.split("differ by ")[1].split()[0]) for x in capsys.readouterr().out.splitlines() if "differ" in x]
    assert len(apart) == 3 and max(apart) < 1e-6


def test_training_stops_after_so_many_episodes():
    """By a callback of Stable-Baselines3."""
    found = [
        train(kind, ShortEpisodes("cartpole", 6, "cpu"), 9, StopTrainingOnMaxEpisodes(7), **SIZES).num_timesteps
        for kind in (PPO, TritonPPO)
    ]
    assert found[0] == found[1] < 9 * 16 * 6


def test_infos_are_those_of_the_environment():
    env, seen = ShortEpisodes("cartpole", 6, "cpu"), []
    env.infos = [{"is_success": True}] * 6
    train(TritonPPO, env, 1, lambda found, _: seen.append(found["infos"]) or True, **SIZES)
    assert seen == [env.infos] * 16


def test_networks_that_give_nan():
    """The policy's own error, or that of the update where distributions check nothing; nothing is learned."""
    model = TritonPPO("MlpPolicy", ShortEpisodes("pendulum", 6, "cpu"), device="cpu", **SIZES)
    with torch.no_grad():
        model.policy.action_net.bias.fill_(torch.nan)
    with pytest.raises(ValueError, match="loc|approx_kl"):
        model.learn(16 * 6)
    assert model._n_updates == 0


def test_a_model_is_saved_and_goes_on(tmp_path):
    """In other environments, and after a capture anew, which forgets no episode."""
    model = train(TritonPPO, ShortEpisodes("cartpole", 6, "cpu"), **SIZES)
    model.save(tmp_path / "model")
    again = TritonPPO.load(tmp_path / "model", ShortEpisodes("cartpole", 6, "cpu"), device="cpu")
    compare(again, model, rtol=0, atol=0)
    assert again.learn(16 * 6)._rollouts.env is again.env
    again.set_env(ShortEpisodes("cartpole", 6, "cpu"))
    before = again.learn(16 * 6)._rollouts
    assert before.env is again.env
    again.recapture()
    again._acting = None
    assert again.learn(16 * 6, reset_num_timesteps=False)._rollouts is not before
    assert {x["l"] for x in again.ep_info_buffer} <= {*range(1, 10)}
    PPO.load(tmp_path / "model", ShortEpisodes("cartpole", 6, "cpu"), device="cpu").learn(16 * 6)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_the_example_trains(device, monkeypatch, capsys):
    """Poles stand longer after some updates, also on a GPU, where nothing comes to the host."""
    if device == "cpu":
        monkeypatch.setattr(capture, "find_obstacle", lambda *_: "it is not")
    flags = ["--num-envs", "256", "--num-steps", "16", "--device", device]
    models = [make_agent(parse_arguments(flags)) for _ in range(2)]
    for model, rollouts in zip(models, (1, 30), strict=True):
        model.learn(rollouts * 256 * 16)
    before, after = (np.mean([x["l"] for x in model.ep_info_buffer]) for model in models)
    assert after > 2 * before
    assert (models[0]._rollouts is not None) == (device == "cuda")
    monkeypatch.setattr("sys.argv", ["ppo_sb3_gpu_envs.py", *flags, "--iterations", "1", "--advantages", "stock"])
    assert main() == 0
    assert "4,096 steps in" in capsys.readouterr().out
