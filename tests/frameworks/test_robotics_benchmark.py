"""The benchmarks of RSL-RL, RL-Games, skrl and verl run."""

from argparse import Namespace

import pytest

pytest.importorskip("rl_games")
pytest.importorskip("rsl_rl")
pytest.importorskip("skrl")
from benchmarks import robotics


def test_every_package_is_measured(monkeypatch):
    monkeypatch.setattr(robotics, "TURNS", 1)
    options = Namespace(device="cpu", quick=True, seconds=None)
    rows = {x: list(robotics.measure(x, options)) for x in robotics.SETTINGS["quick"]}
    for setting, found in rows.items():
        steps = list(dict.fromkeys(row.setting for row in found))
        assert steps == ["step=advantages"] * robotics.is_plain(setting) + ["step=update"], setting
    assert {x.variant for x in rows} == {robotics.PLAIN, robotics.LSTM, robotics.SYMMETRY, robotics.RND}
    assert all(row.median > 0 for found in rows.values() for row in found)
