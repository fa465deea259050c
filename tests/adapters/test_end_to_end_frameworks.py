"""The frameworks' training loops run end to end, and their arms agree."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
pytest.importorskip("benchmarks.end_to_end.run", reason="only the package is here", exc_type=ModuleNotFoundError)

from recorded_graphs import allow_captures

from benchmarks import files, learning, plots
from benchmarks.end_to_end import page, run
from benchmarks.end_to_end.frameworks import REGISTRY, list_arms
from benchmarks.end_to_end.stopwatch import Stopwatch
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


@pytest.mark.parametrize("env", ["CartPole-v1", "CartPole-v1, drawn", "CartPole-v1, A2C", "CartPole-v1, MaskablePPO"])
@pytest.mark.parametrize(("name", "captured"), {"loss": [0, 0], "update": [1, 0], "captured": [1, 1]}.items())
def test_what_variants_capture(name, captured, env, monkeypatch):
    """With recorded graphs, as on a GPU: nothing, updates, acting too; never are they stock's."""
    pytest.importorskip("sb3_contrib")
    sb3, watch, models = REGISTRY["sb3"].load(), Stopwatch("cpu"), []
    (setting,) = (x._replace(device="cpu") for x in sb3.SETTINGS["quick"] if x.env == env)
    allow_captures(monkeypatch)
    make_model = sb3.make_model
    monkeypatch.setattr(sb3, "make_model", lambda *about: models.append(make_model(*about)) or models[-1])
    arm = sb3.make_arm(name, setting, watch)
    for _ in range(2):
        assert set(run.time_iteration(arm, watch)) == {"total", "rest", *PARTS["sb3"]}
    (model,) = models
    assert [len(step.captured) for step in (model._update.step, model._acting)] == captured
    assert model.is_accelerated and not any(step.warned for step in (model._update.step, model._acting))
    for field, tensor in model._rollout.items() if model.is_captured else ():  # a copy, which is on the device there
        assert tensor.data_ptr() != torch.as_tensor(getattr(model.rollout_buffer, field)).data_ptr()


def test_variants_without_a_difference_are_left_out():
    sb3 = pytest.importorskip("benchmarks.end_to_end.sb3")
    for setting in sb3.SETTINGS["cuda"]:
        assert ("loss" in list_arms(sb3, setting)) == ("Recurrent" not in setting.env)
        assert list_arms(sb3, setting._replace(device="cpu")) == ["stock", "ours", "device", "captured"]


def test_learning_curves(tmp_path):
    """Both arms learn the same from one seed, and page and figure show it."""
    task = learning.TASKS[0]._replace(total_steps=512, num_envs=2, num_steps=64, batch_size=64, target_return=1.0)
    rows = [learning.train(learning.Run(task, arm, 0, "cpu")) for arm in learning.ARMS]
    stock, ours = rows
    assert stock["steps"] == ours["steps"] and stock["steps"][-1] == 512
    assert ours["returns"] == pytest.approx(stock["returns"], rel=0.05)
    assert stock["seconds"] == sorted(stock["seconds"])
    options = files.make_parser("").parse_args([str(tmp_path / "cpu"), "--commit", "0" * 40])
    files.save_rows(options, "learning.json", rows, device="cpu", jobs=1)
    last, first = f"{stock['returns'][-1]:.1f} ± 0.0", stock["steps"][0]
    line = f"| CartPole-v1, target 1: stock | {last} | {first} [{first}, {first}] |"
    results = files.read_results("*/learning.json", tmp_path)
    assert line in page.list_tasks(*results)
    figure = plots.draw_learning(results)
    assert [len(panel.lines) for panel in figure.axes] == [3, 3]
    stopped = learning.train(learning.Run(task, "ours", 0, "cpu", ends=0.0))
    assert stopped["stopped"] and stopped["steps"] == stopped["returns"] == [] and not stock["stopped"]


def test_other_tasks_stay_in_a_file(tmp_path):
    """A run of one task, in a folder that has another one's curves."""
    row = {"task": "CartPole-v1, drawn", "arm": "ours", "seed": 3}
    options = files.make_parser("").parse_args([str(tmp_path), "--commit", "abc"])
    files.save_rows(options, "learning.json", [row], device="cpu", jobs=16)
    arguments = ["--task", "CartPole-v1", "--steps", "64", "--seeds", "1", "--jobs", "2", "--budget", "300"]
    learning.main([str(tmp_path), "--device", "cpu", "--commit", "def", *arguments])
    result = files.read_result(tmp_path / "learning.json")
    assert result["system"]["commit"] == "abc, def"
    found = [(row["task"], row["arm"], row["jobs"]) for row in result["rows"]]
    assert found == [("CartPole-v1", "stock", 2), ("CartPole-v1", "ours", 2), ("CartPole-v1, drawn", "ours", 16)]
