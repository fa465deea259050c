"""examples/ppo_sb3.py: two of its agents are the same, and all three learn."""

import json
import sys
from pathlib import Path

import pytest
from compilations import run_with_paths

pytest.importorskip("matplotlib")
pytest.importorskip("stable_baselines3")
pytest.importorskip("tensorboard")

import ppo_sb3 as example
import ppo_sb3_report as report

ROOT = Path(__file__).resolve().parents[2]


def run(monkeypatch, tmp_path, *options):
    """The example's exit status."""
    logs = ["--log-dir", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["ppo_sb3.py", *options, *logs, "--quiet", "--seed", "3"])
    return example.main()


COUNT_COMPILATIONS = """
import json, sys
from compilations import counting
import ppo_sb3

with counting() as count:
    counts, train = [], ppo_sb3.train

    def counted_train(*arguments):
        counts.append(count())
        result = train(*arguments)
        counts.append(count())
        return result

    ppo_sb3.train = counted_train
    status = ppo_sb3.main()
print(json.dumps([status, counts]))
"""


def test_all_agents_learn_and_two_end_up_the_same(tmp_path):
    """And nothing is compiled while the clocks run."""
    options = ["--compare", "--output", str(tmp_path), "--total-timesteps", "6144", "--num-envs", "4", "--turns", "1"]
    options += ["--target-return", "60", "--evaluation-episodes", "5", "--quiet", "--seed", "3"]
    printed = run_with_paths(COUNT_COMPILATIONS, *options, "--log-dir", str(tmp_path / "runs"))
    status, compilations = json.loads(printed.splitlines()[-1])
    assert len(compilations) == 6 and set(compilations) == {compilations[0]} and compilations[0] > 0
    record = json.loads((tmp_path / "ppo_sb3.json").read_text())
    assert record["result"]["advantage_speedup"] >= 2
    (stock,), (ours,), (accelerated,) = (record["runs"][name] for name in example.AGENTS)
    assert record["result"]["bitwise_equal"] and stock["digest"] == ours["digest"]
    assert find_returns(stock) == find_returns(ours) and len(ours["curve"]) == 6
    assert ours["evaluation"] > 2 * ours["curve"][0][-1] > 20
    assert find_returns(accelerated)[:2] == find_returns(stock)[:2]
    assert status == 0 and "bitwise equal: yes" in printed
    gain, step = (printed.index(x) for x in ("\nTritonPPO trained the same task in ", "\nadvantage step: "))
    assert printed.rindex("evaluation: ") < gain < step, "what is gained comes first, then the step"
    assert (tmp_path / "ppo_sb3.png").stat().st_size > 0
    logs = list((tmp_path / "runs").iterdir())
    assert {path.name for path in logs} == {f"CartPole-v1__ppo_sb3__{name}__3" for name in example.AGENTS}
    assert all(list(path.glob("events.out.tfevents.*")) for path in logs)


def find_returns(run):
    """Steps and returns of a run, without the seconds."""
    return [(steps, mean) for steps, _, mean in run["curve"]]


def test_the_gain_is_the_median_of_the_turns():
    totals = {"stock": [30.0, 26.0, 40.0], "accelerated": [20.0, 20.0, 16.0]}
    result = {"total_seconds": totals, "accelerated_ratios": [1.5, 1.3, 2.5]}
    assert report.describe_gain(result) == (
        "TritonPPO trained the same task in 20.0 s (16.0 to 20.0) instead of 30.0 s (26.0 to 40.0): "
        "1.50x (1.30 to 2.50) as fast"
    )


@pytest.mark.parametrize("name", list(example.AGENTS))
def test_one_agent_says_whether_it_reached_the_return(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example.TimedPhases, "train", lambda agent: agent.updating.append(0.0))
    options = ["--accelerate"] if name == "accelerated" else ["--advantages", name]
    options += ["--total-timesteps", "1", "--evaluation-episodes", "2"]
    assert run(monkeypatch, tmp_path, *options, "--target-return", "1") == 0
    assert run(monkeypatch, tmp_path, *options) == 1
    assert "over 2 episodes" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [f"CartPole-v1__ppo_sb3__{name}__3"]
