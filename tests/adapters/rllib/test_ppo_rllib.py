"""examples/ppo_rllib.py runs from the command line, with RLlib's advantages and with ours."""

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
BRIEF = ["--iterations", "3", "--evaluation-episodes", "4", "--quiet", "--target-return", "12"]


@pytest.mark.parametrize("advantages", ["stock", "triton"])
def test_the_example(advantages, tmp_path, private):
    command = [sys.executable, str(ROOT / "examples" / "ppo_rllib.py"), "--advantages", advantages, *BRIEF]
    result = subprocess.run(
        [*command, "--log-dir", str(tmp_path)],
        env={**os.environ, **private},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert re.search(r"evaluation: mean return \d+\.\d over 4 episodes", result.stdout)
    assert [x.name for x in tmp_path.iterdir()] == [f"CartPole-v1__ppo_rllib__{advantages}__1"]
