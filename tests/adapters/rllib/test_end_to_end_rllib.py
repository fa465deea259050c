"""RLlib's learner runs end to end, with its connector and with ours, and they agree."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
pytest.importorskip("ray.rllib")

from benchmarks.end_to_end import rllib, run
from benchmarks.providers import compiled_scan


def test_a_quick_run(monkeypatch):
    monkeypatch.setattr(compiled_scan, "BACKEND", "eager")
    (setting,) = rllib.SETTINGS["quick"]
    entries = run.measure_setting(rllib, setting._replace(device="cpu"), run.QUICK)
    assert [entry.status for entry in entries] == ["ok"] * len(rllib.ARMS)
    for entry in entries:
        assert all(set(found) == {"total", "rest", "connector", "advantages"} for found in entry.times)
