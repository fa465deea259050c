"""RLlib's learners run end to end, with its advantages and with ours, and they agree."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
pytest.importorskip("ray.rllib")

from benchmarks.end_to_end import impala, rllib, run


@pytest.mark.parametrize(
    ("module", "setting"),
    [(module, setting) for module in (rllib, impala) for setting in module.SETTINGS["quick"]],
    ids=lambda x: getattr(x, "TITLE", str(x)),
)
def test_a_quick_run(module, setting):
    entries = run.measure_setting(module, setting._replace(device="cpu"), run.QUICK)
    assert [entry.note for entry in entries] == [""] * len(module.ARMS)
    for entry in entries:
        parts = {"total", "rest", *(["advantages", "connector"] if module is rllib else ["advantages"])}
        if module is impala and entry.name == "captured":
            parts.remove("advantages")  # they are in the graph
        assert all(set(found) == parts for found in entry.times)
