"""The frameworks' training loops run end to end, and their arms agree."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
pytest.importorskip("benchmarks.end_to_end.run", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks import files, learning, plots
from benchmarks.end_to_end import page, run
from benchmarks.end_to_end.frameworks import REGISTRY
from benchmarks.providers import compiled_scan

PARTS = {"sb3": {"acting", "advantages", "update"}, "torchrl": {"advantages"}}


@pytest.mark.parametrize("name", PARTS)
def test_a_quick_run(name, monkeypatch):
    if REGISTRY[name].unavailable():
        pytest.skip(REGISTRY[name].unavailable())
    monkeypatch.setattr(compiled_scan, "BACKEND", "eager")
    module = REGISTRY[name].load()
    for setting in module.SETTINGS["quick"]:
        entries = run.measure_setting(module, setting._replace(device="cpu"), run.QUICK)
        bad = {entry.name: entry.status for entry in entries if entry.status != "ok"}
        assert set(bad) == ({"device"} if "RecurrentPPO" in setting.env else set()), bad
        for entry in entries:
            assert all(set(found) == {"total", "rest", *PARTS[name]} for found in entry.times)
            assert all(found["advantages"] > 0 for found in entry.times)


def test_learning_curves(tmp_path):
    """Both arms learn the same from one seed, and page and figure show it."""
    task = learning.TASKS[0]._replace(total_steps=512, num_envs=2, num_steps=64, batch_size=64, target_return=1.0)
    rows = [learning.train((task, arm, 0, "cpu")) for arm in learning.ARMS]
    stock, ours = rows
    assert stock["steps"] == ours["steps"] and stock["steps"][-1] == 512
    assert ours["returns"] == pytest.approx(stock["returns"], rel=0.05)
    assert stock["seconds"] == sorted(stock["seconds"])
    options = files.make_parser("").parse_args([str(tmp_path / "cpu"), "--commit", "0" * 40])
    files.save_rows(options, "learning.json", rows, device="cpu", jobs=1)
    line = f"| CartPole-v1, target 1: stock | {stock['returns'][-1]:.1f} ± 0.0 | {stock['steps'][0]} |"
    results = files.read_results("*/learning.json", tmp_path)
    assert line in page.list_tasks(*results)
    figure = plots.draw_learning(results)
    assert [len(panel.lines) for panel in figure.axes] == [3, 3]
