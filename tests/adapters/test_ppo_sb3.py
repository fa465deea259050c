"""examples/ppo_sb3.py: both of its arms train the same agent, and it learns."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("stable_baselines3")
pytest.importorskip("tensorboard")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import ppo_sb3 as example


def run(monkeypatch, tmp_path, *options):
    """The example's exit status."""
    logs = ["--log-dir", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["ppo_sb3.py", *options, *logs, "--quiet", "--seed", "3"])
    return example.main()


def test_both_arms_learn_and_end_up_the_same(tmp_path, monkeypatch, capsys):
    options = ["--compare", "--output", str(tmp_path), "--total-timesteps", "6144", "--num-envs", "4"]
    status = run(monkeypatch, tmp_path, *options, "--target-return", "60")
    record = json.loads((tmp_path / "ppo_sb3.json").read_text())
    stock, ours = record["runs"]["stock"], record["runs"]["triton"]
    assert record["result"]["bitwise_equal"] and stock["digest"] == ours["digest"]
    assert stock["curve"] == ours["curve"] and len(ours["curve"]) == 6
    assert ours["evaluation"] > 2 * ours["curve"][0][1] > 20
    assert status == 0 and "bitwise equal: yes" in capsys.readouterr().out
    assert (tmp_path / "ppo_sb3.png").stat().st_size > 0
    logs = list((tmp_path / "runs").iterdir())
    assert {path.name for path in logs} == {"CartPole-v1__ppo_sb3__stock__3", "CartPole-v1__ppo_sb3__triton__3"}
    assert all(list(path.glob("events.out.tfevents.*")) for path in logs)


@pytest.mark.parametrize("advantages", list(example.BUFFERS))
def test_one_arm_says_whether_it_reached_the_return(advantages, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example.TimedPPO, "train", lambda agent: agent.updating.append(0.0))
    options = ["--advantages", advantages, "--total-timesteps", "1", "--evaluation-episodes", "2"]
    assert run(monkeypatch, tmp_path, *options, "--target-return", "1") == 0
    assert run(monkeypatch, tmp_path, *options) == 1
    assert "over 2 episodes" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [f"CartPole-v1__ppo_sb3__{advantages}__3"]
