"""RL Zoo's own command line: with the flag it trains, continues and optimises ours, and plays without."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

pytest.importorskip("rl_zoo3")

FLAG = ["--gym-packages", "rl_triton_adapters.sb3_zoo"]
SETTINGS = {
    "ppo": ["n_envs:1", "n_steps:16", "batch_size:8", "n_epochs:1"],
    "a2c": ["n_envs:1", "n_steps:8"],
    "ppo_lstm": ["n_envs:1", "n_steps:16", "batch_size:16", "n_epochs:1", "policy:'MlpLstmPolicy'"],
}


def run(command, algorithm, folder, *flags):
    """Run one of the zoo's commands in a process, and return what it prints."""
    arguments = ["--algo", algorithm, "--env", "CartPole-v1", "-f", str(folder), *flags]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"rl_zoo3.{command}", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(algorithm, folder, *flags, packages=FLAG):
    settings = ["-n", "32", "--eval-freq", "-1", "--seed", "1", "--device", "cpu"]
    return run("train", algorithm, folder, *packages, *settings, "-params", *SETTINGS[algorithm], *flags)


def read_model(algorithm, folder, number):
    """What is saved of a run's model, beside its parameters."""
    path = folder / algorithm / f"CartPole-v1_{number}" / "CartPole-v1.zip"
    with zipfile.ZipFile(path) as file:
        return path, json.loads(file.read("data"))


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_a_model_is_trained_and_played(algorithm, tmp_path):
    """Of our class, whose parameters stock's class takes: `enjoy` has no flag."""
    trained = train(algorithm, tmp_path)
    _, saved = read_model(algorithm, tmp_path, 1)
    assert "acceleration" in saved or "Using TritonRecurrentRolloutBuffer" in trained
    played = run("enjoy", algorithm, tmp_path, "--no-render", "-n", "20", "--exp-id", "1", "--device", "cpu")
    assert "Loading" in played


def test_a_model_is_trained_on(tmp_path):
    """From stock's, with ours; the switch is a hyperparameter, which YAML reads as False."""
    train("ppo", tmp_path, packages=[])
    path, stock = read_model("ppo", tmp_path, 1)
    output = train("ppo", tmp_path, "acceleration:False", "-i", str(path))
    _, ours = read_model("ppo", tmp_path, 2)
    assert "Loading pretrained agent" in output
    assert "acceleration" not in stock and ours["acceleration"] == "off"


def test_hyperparameters_are_searched(tmp_path):
    search = ["-optimize", "--n-trials", "1", "--n-startup-trials", "0", "--n-evaluations", "1", "--n-jobs", "1"]
    output = run("train", "a2c", tmp_path, *FLAG, *search, "-n", "16", "--eval-episodes", "1", "--device", "cpu")
    assert "Number of finished trials:  1" in output
