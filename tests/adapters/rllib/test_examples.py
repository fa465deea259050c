"""The examples of RLlib run from the command line, with its own estimates and with ours, in one process or several."""

import os
import re
import sys
from pathlib import Path

import pytest
from processes import run_command

pytest.importorskip("ray")
pytest.importorskip("tensorboard")
pytest.importorskip("tqdm")

ROOT = Path(__file__).resolve().parents[3]
LEARNED = ["--iterations", "3", "--target-return", "60"]  # an untrained policy's evaluation is about 10
SIZES = {
    "ppo_rllib": ["--batch-size", "1024", "--minibatch-size", "128"],
    "impala_rllib": ["--steps-per-iteration", "6000"],
}
ARMS = {
    "stock": ["--advantages", "stock", *LEARNED],
    "triton": ["--advantages", "triton", *LEARNED],
    "processes": ["--num-env-runners", "1", "--num-learners", "1", "--iterations", "1"],
}


@pytest.mark.parametrize(
    ("example", "arm"), [("ppo_rllib", "stock"), ("ppo_rllib", "processes"), ("impala_rllib", "triton")]
)
def test_the_example(example, arm, tmp_path, private):
    words = [sys.executable, str(ROOT / "examples" / f"{example}.py"), *SIZES[example], *ARMS[arm], "--quiet"]
    words += ["--evaluation-episodes", "4", "--log-dir", str(tmp_path)]
    printed = run_command(*words, env={**os.environ, **private})
    assert re.search(r"evaluation: mean return \d+\.\d over 4 episodes", printed)
    advantages = "stock" if arm == "stock" else "triton"
    assert [x.name for x in tmp_path.iterdir()] == [f"CartPole-v1__{example}__{advantages}__1"]
