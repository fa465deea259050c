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
    rows = {x.package: list(robotics.measure(x, options)) for x in robotics.SETTINGS["quick"]}
    steps = {package: list(dict.fromkeys(row.setting for row in found)) for package, found in rows.items()}
    assert steps == {
        "rsl_rl": ["step=advantages", "step=update"],
        "rl_games": ["step=advantages", "step=update"],
        "skrl": ["step=advantages", "step=update"],
    }
    assert all(row.median > 0 for found in rows.values() for row in found)
