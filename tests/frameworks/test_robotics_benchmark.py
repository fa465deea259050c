"""The benchmark of RSL-RL, RL-Games and skrl runs."""

import json

import pytest

pytest.importorskip("rl_games")
pytest.importorskip("rsl_rl")
pytest.importorskip("skrl")
from benchmarks import robotics


def test_every_package_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(robotics, "TURNS", 1)
    robotics.main([str(tmp_path), "--quick", "--commit", "test"])
    result = json.loads((tmp_path / "robotics.json").read_text())
    steps = [(row["package"], row["step"]) for row in result["rows"]]
    assert steps == [("rsl_rl", "advantages"), ("rsl_rl", "update"), ("rl_games", "advantages"), ("skrl", "advantages")]
    assert all(row["milliseconds"]["adapter"] > 0 for row in result["rows"])
