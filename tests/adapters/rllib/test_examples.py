"""The examples of RLlib run from the command line, with its own estimates and with ours, in one process or several."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("tensorboard")
pytest.importorskip("tqdm")

ROOT = Path(__file__).resolve().parents[3]
BRIEF = ["--iterations", "3", "--evaluation-episodes", "4", "--quiet"]
SMALLER = {"ppo_rllib": [], "impala_rllib": ["--steps-per-iteration", "4000"]}
ARMS = {
    "stock": ["--advantages", "stock", "--target-return", "12"],
    "triton": ["--advantages", "triton", "--target-return", "12"],
    "processes": ["--num-env-runners", "1", "--num-learners", "1"],  # IMPALA's are too asynchronous to promise a return
}


@pytest.mark.parametrize("example", SMALLER)
@pytest.mark.parametrize("arm", ARMS)
def test_the_example(example, arm, tmp_path, private):
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py"), *BRIEF, *SMALLER[example], *ARMS[arm]]
    result = subprocess.run(
        [*command, "--log-dir", str(tmp_path)],
        env={**os.environ, **private},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert re.search(r"evaluation: mean return \d+\.\d over 4 episodes", result.stdout)
    advantages = "stock" if arm == "stock" else "triton"
    assert [x.name for x in tmp_path.iterdir()] == [f"CartPole-v1__{example}__{advantages}__1"]
