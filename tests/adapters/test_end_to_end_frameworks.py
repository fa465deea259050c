"""The frameworks' training loops run end to end, and their arms agree."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
pytest.importorskip("benchmarks.end_to_end.run", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks.end_to_end import run
from benchmarks.end_to_end.frameworks import REGISTRY
from benchmarks.providers import compiled_scan

PARTS = {"sb3": {"advantages"}, "torchrl": {"advantages"}}


@pytest.mark.parametrize("name", PARTS)
def test_a_quick_run(name, monkeypatch):
    if REGISTRY[name].unavailable():
        pytest.skip(REGISTRY[name].unavailable())
    monkeypatch.setattr(compiled_scan, "BACKEND", "eager")
    module = REGISTRY[name].load()
    for setting in module.SETTINGS["quick"]:
        entries = run.measure_setting(module, setting._replace(device="cpu"), run.QUICK)
        assert [entry.status for entry in entries] == ["ok"] * len(module.ARMS)
        for entry in entries:
            assert all(set(found) == {"total", "rest", *PARTS[name]} for found in entry.times)
            assert all(found["advantages"] > 0 for found in entry.times)
