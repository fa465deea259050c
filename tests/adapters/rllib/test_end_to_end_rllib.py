"""RLlib's learner runs end to end, with its connector and with ours, and they agree."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
pytest.importorskip("ray.rllib")

from benchmarks.end_to_end import rllib, run


def test_a_quick_run():
    (setting,) = rllib.SETTINGS["quick"]
    entries = run.measure(rllib, setting._replace(device="cpu"), run.QUICK)
    assert [entry.status for entry in entries] == ["ok", "ok"]
    for entry in entries:
        assert all(set(found) == {"total", "rest", "connector", "advantages"} for found in entry.times)
