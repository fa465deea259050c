"""RL Zoo's own command line: with the flag it trains, continues and optimises ours, and plays without."""

import json
import os
import sys
import zipfile
from importlib.util import find_spec

import pytest
from processes import run_command

if find_spec("rl_zoo3") is None:  # which changes Gymnasium where it is imported
    pytest.skip("rl_zoo3 is not installed", allow_module_level=True)

FLAG = ["--gym-packages", "rl_triton_adapters.sb3_zoo"]
SETTINGS = {
    "ppo": ["n_envs:1", "n_steps:16", "batch_size:8", "n_epochs:1"],
    "a2c": ["n_envs:1", "n_steps:8"],
    "dqn": ["learning_starts:8", "batch_size:8"],
    "ppo_lstm": ["n_envs:1", "n_steps:16", "batch_size:16", "n_epochs:1", "policy:'MlpLstmPolicy'"],
}
RUN_IN_TURN = """
import json, os, runpy, sys
import rl_triton_adapters.sb3.contrib, rl_zoo3.enjoy, rl_zoo3.train, torch._dynamo  # once, for all commands
for number, (command, *flags) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        os.dup2(os.open(f"output{number}", os.O_WRONLY | os.O_CREAT), 1)
        sys.argv = ["", *flags]
        runpy.run_module(f"rl_zoo3.{command}", run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"failed: {command} {flags}")
"""


def make_training(algorithm, *flags, packages=FLAG):
    settings = ["-n", "32", "--eval-freq", "-1", "--seed", "1", "--device", "cpu"]
    settings += ["--algo", algorithm, "--env", "CartPole-v1", "-f", "."]
    return ["train", *packages, *settings, "-params", *SETTINGS[algorithm], *flags]


def run_commands(folder, *commands):
    """Run commands of the zoo, one after the other, and return what each prints."""
    words = [sys.executable, "-W", "ignore", "-c", RUN_IN_TURN, json.dumps(commands)]
    run_command(*words, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=900)
    return [(folder / f"output{number}").read_text() for number in range(len(commands))]


def read_model(algorithm, folder, number):
    """What is saved of a run's model, beside its parameters."""
    with zipfile.ZipFile(folder / algorithm / f"CartPole-v1_{number}" / "CartPole-v1.zip") as file:
        return json.loads(file.read("data"))


PLAY = ["enjoy", "--env", "CartPole-v1", "-f", ".", "--no-render", "-n", "20", "--device", "cpu", "--exp-id", "1"]
SEARCH = ["-optimize", "--n-trials", "1", "--n-startup-trials", "0", "--n-evaluations", "1", "--n-jobs", "1"]
COMMANDS = {
    **{f"train {algorithm}": make_training(algorithm) for algorithm in SETTINGS},
    **{f"play {algorithm}": [*PLAY, "--algo", algorithm] for algorithm in SETTINGS},
    "train stock": make_training("ppo", packages=[]),
    "continue": make_training("ppo", "enabled:False", "-i", "ppo/CartPole-v1_2/CartPole-v1.zip"),
    "search": [*make_training("a2c"), *SEARCH, "--eval-episodes", "1"],
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """The folder that the zoo has written to, and what each command has printed."""
    folder = tmp_path_factory.mktemp("zoo")
    return folder, dict(zip(COMMANDS, run_commands(folder, *COMMANDS.values()), strict=True))


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_a_model_is_trained_and_played(algorithm, zoo):
    """Of our class, whose parameters stock's class takes: `enjoy` has no flag."""
    folder, outputs = zoo
    assert "enabled" in read_model(algorithm, folder, 1) and "Loading" in outputs[f"play {algorithm}"]


def test_a_model_is_trained_on(zoo):
    """From stock's, with ours; the switch is a hyperparameter, which YAML reads as False."""
    folder, outputs = zoo
    assert "Loading pretrained agent" in outputs["continue"]
    assert "enabled" not in read_model("ppo", folder, 2)
    assert read_model("ppo", folder, 3)["enabled"] is False


def test_hyperparameters_are_searched(zoo):
    assert "Number of finished trials:  1" in zoo[1]["search"]
