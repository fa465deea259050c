"""`rl-triton estimate`: a command's first iterations twice, and what they say of the whole training."""

import json

import pytest
from processes import run_program

pytest.importorskip("stable_baselines3")
import gymnasium
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper

from rl_triton_adapters import estimate
from rl_triton_core.cli import main
from rl_triton_core.cli.doctor import Finding

PROGRAM = """
import sys
from stable_baselines3 import PPO
model = PPO("MlpPolicy", "CartPole-v1", n_steps=128, n_epochs=4, seed=0, device="cpu")
try:
    model.learn(int(sys.argv[1]))
    print("trained")
finally:
    print("left behind", model.num_timesteps)
sys.exit(int(sys.argv[2]))
"""


def test_a_program_is_estimated(tmp_path):
    """Both runs end after some iterations, as from the program itself."""
    text, _, status = run_program(tmp_path, "-c", PROGRAM, 10**7, 1, run=["--json"], command="estimate")
    assert status == 0 and text.count("left behind") == 2 and "trained" not in text, text
    document, _ = json.JSONDecoder().raw_decode(text[text.index('{\n  "stock"') :])
    stock, ours = document["stock"], document["ours"]
    assert (stock["how"], ours["how"]) == ("PPO, updates are stock", "TritonPPO, updates are compiled")
    for found in (stock, ours):
        assert found["iterations"] >= 3 and found["steps"] == 128 * found["iterations"] and found["whole"] >= 3
        assert min(found[x] for x in estimate.PARTS) > 0
        assert sum(found[x] for x in estimate.PARTS[:3]) == pytest.approx(found["whole"])


EARLY = [(1, 0, "0, before two updates of Stable-Baselines3, which alone is timed\n"), (1, 3, "3, before")]
EARLY += [(500, 3, "3\n")]


@pytest.mark.parametrize(("steps", "status", "end"), EARLY)
def test_commands_that_fail_or_end_too_early(steps, status, end, tmp_path):
    text, _, got = run_program(tmp_path, "-c", PROGRAM, steps, status, run=[], command="estimate")
    assert got == 1 and text.startswith(f"stock: the command ended with status {end}"), text


@pytest.mark.parametrize("words", [("--off", "sb4", "--", "true"), ("--off", "sb3", "--", "true"), ()])
def test_arguments_that_are_refused(words, capsys):
    with pytest.raises(SystemExit) as error:
        main(["estimate", *words])
    assert error.value.code == 2 and "--off" in capsys.readouterr().err


def test_the_sentence():
    """Environments take 850 of 1000 seconds, and 820 of 900 with ours, in which there were fewer steps."""
    found = {"how": "PPO", "iterations": 3, "first": 2.0, "acting": 50.0, "updates": 100.0}
    stock = found | {"environments": 850.0, "whole": 1000.0, "steps": 1000}
    ours = found | {"environments": 820.0, "whole": 900.0, "steps": 950}
    report = estimate.compare({"stock": stock, "ours": ours}, Finding("ok", "free"))
    assert report.parts[-1] == "\n1.06 times as fast; environments take 85% of the time: at most 1.18x"
    assert report.data["bound"] == pytest.approx(1 / 0.85) and ("updates", "100", "105") in report.parts[2].rows
    assert "stock: 3 iterations of PPO, after a first one of 2 s" in report.parts
    report = estimate.compare({"stock": stock | {"environments": 0}, "ours": ours}, Finding("warning", "busy", "wait"))
    assert report.data["bound"] is None and report.parts[-1].endswith("`step`: acting has their time\nbusy: wait")


class Slow(gymnasium.Wrapper):
    """Each step takes a second of the clock."""

    now = 0.0

    def step(self, action):
        Slow.now += 1
        return super().step(action)


class Stepping(VecEnvWrapper):
    """Its steps step what it wraps."""

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        return self.venv.step(actions=self.venv.actions)


class Counting(BaseCallback):
    """A quarter of a second for each step of acting."""

    def _on_step(self):
        Slow.now += 0.25
        return True


@pytest.mark.parametrize("kind", [PPO, DQN])
def test_what_counts(kind, monkeypatch, capsys, tmp_path):
    """Iterations with an update after the first one, the last one too; nothing between trainings, or after enough."""
    monkeypatch.setattr(estimate, "perf_counter", lambda: Slow.now)
    clock, before = estimate.Clock(), [{**vars(x)} for x in (VecEnv, BaseCallback)]
    env = Stepping(DummyVecEnv([lambda: Slow(gymnasium.make("CartPole-v1"))]))
    own = {"n_steps": 8, "batch_size": 4, "n_epochs": 1}
    own = own if kind is PPO else {"train_freq": 8, "learning_starts": 20, "batch_size": 4}
    model, train = kind("MlpPolicy", env, seed=0, device="cpu", **own), kind.train

    def update(self, *args, **kwargs):
        Slow.now += 10 if self._n_updates else 1000  # seconds
        train(self, *args, **kwargs)

    monkeypatch.setattr(kind, "train", update)
    with clock.watch():
        for reset in (True, False):
            callbacks = CallbackList([Counting(), CallbackList([Counting()])])
            model.learn(40, callback=callbacks, reset_num_timesteps=reset)
            Slow.now += 500
            evaluate_policy(model, env, n_eval_episodes=1, warn=False)
    iterations = {PPO: 9, DQN: 7}[kind]
    wanted = {"acting": 4 * iterations, "environments": 8 * iterations, "updates": 10 * iterations}
    assert clock.first == 1000 + 8 * 1.5
    assert clock.totals == wanted | {"whole": 22 * iterations, "iterations": iterations, "steps": 8 * iterations}
    assert [{**vars(x)} for x in (VecEnv, BaseCallback)] == before
    assert f" {iterations} iterations, without the first: acting {4 * iterations} s," in capsys.readouterr().err
    monkeypatch.setenv("RL_TRITON_ESTIMATE", str(tmp_path / "found"))
    with clock.watch():
        with pytest.raises(SystemExit):
            model.learn(40)
        assert json.loads((tmp_path / "found").read_text())["steps"] > 8 * iterations


def test_models_that_take_turns():
    """The first iteration of each does not count, all others do."""
    clock = estimate.Clock()
    models = [PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=4, n_epochs=1, device="cpu") for _ in range(2)]
    with clock.watch():
        for model in models * 3:
            model.learn(8, reset_num_timesteps=False)
    assert clock.totals["iterations"] == 4 and clock.totals["steps"] == 4 * 8


def test_ctrl_c_leaves_time_to_save(tmp_path):
    """The command gets it, too; the second run does not begin."""
    program = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(1); print('saved')"
    text, _, status = run_program(tmp_path, "-c", program, run=[], command="estimate")
    assert status == 130 and text == "saved\n"
