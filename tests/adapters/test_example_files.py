"""The examples are short, have the same flags, and run by the commands of adapters/README.md."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PARTS = ("upgo.py", "gpu_envs.py", "ppo_sb3_report.py", "ppo_multi_gpu.py", "advantages_verl.py", "cleanrl_diff.py")
"""An estimator, environments, a report, what takes the flags of ppo_gpu_envs.py, advantages alone, and diffs."""
TRAINING = [path.name for path in EXAMPLES if path.name not in PARTS]
FLAGS = ("--advantages", "--seed", "--evaluation-episodes", "--target-return", "--log-dir", "--quiet")
VERBS = {
    "ppo_rllib.py": "example-rllib",
    "impala_rllib.py": "example-rllib",
    "ppo_rsl_rl.py": "example-frameworks",
    "ppo_rl_games.py": "example-frameworks",
    "ppo_skrl.py": "example-frameworks",
}
NEEDED = {"example": "stable_baselines3", "example-rllib": "ray.rllib", "example-frameworks": "rsl_rl"}
"""A package that a verb's environment has and the others lack."""


def commands():
    """Verb, file and options of each."""
    table = (ROOT / "adapters" / "README.md").read_text()
    for verb, run in re.findall(r"^\| `make (example\S*) RUN=\"?(.+?)\"?` \|", table, re.MULTILINE):
        name, *options = shlex.split(run)
        yield verb, name, options


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_less_than_300_lines(path):
    assert len(path.read_text().splitlines()) < 300


@pytest.mark.parametrize("name", TRAINING)
def test_the_flags_of_an_example(name):
    source = (ROOT / "examples" / name).read_text()
    assert [flag for flag in FLAGS if f'add_argument("{flag}"' not in source] == []


def test_every_example_has_a_command():
    found = list(commands())
    assert {name for _, name, _ in found} == set(TRAINING)
    assert all(verb == VERBS.get(name, "example") for verb, name, _ in found)


@pytest.mark.parametrize(("verb", "name", "options"), list(commands()))
def test_an_example_takes_its_command(verb, name, options):
    pytest.importorskip(NEEDED[verb])
    pytest.importorskip("tensorboard")
    args = importlib.import_module(name.removesuffix(".py")).parse_arguments(options)
    assert args.advantages == "triton" and args.target_return is not None
