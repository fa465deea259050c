"""What the variants of training loops capture, and that both learn the same."""

import pytest
import torch

pytest.importorskip("benchmarks.end_to_end.run", reason="only the package is here", exc_type=ModuleNotFoundError)

from recorded_graphs import allow_captures

from benchmarks import learning
from benchmarks.__main__ import BENCHMARKS
from benchmarks.end_to_end import run
from benchmarks.end_to_end.stopwatch import Stopwatch


@pytest.mark.parametrize("env", ["CartPole-v1", "CartPole-v1, drawn", "CartPole-v1, A2C", "CartPole-v1, MaskablePPO"])
def test_updates_and_acting_are_captured(env, monkeypatch):
    """With recorded graphs, as on a GPU; never are they stock's."""
    pytest.importorskip("sb3_contrib")
    sb3, watch, models = BENCHMARKS["sb3"].load(), Stopwatch("cpu"), []
    (setting,) = (x._replace(device="cpu") for x in sb3.SETTINGS["quick"] if x.env == env)
    allow_captures(monkeypatch)
    make_model = sb3.make_model
    monkeypatch.setattr(sb3, "make_model", lambda *about: models.append(make_model(*about)) or models[-1])
    arm = sb3.make_arm("captured", setting, watch)
    for _ in range(2):
        assert set(run.time_iteration(arm, watch)) == {"total", "rest", "acting", "advantages", "update"}
    (model,) = models
    assert [len(step.captured) for step in (model._update.step, model._acting)] == [1, 1]
    assert model.is_accelerated and not any(step.warned for step in (model._update.step, model._acting))
    for field, tensor in model._rollout.items() if model.is_captured else ():  # a copy, which is on the device there
        assert tensor.data_ptr() != torch.as_tensor(getattr(model.rollout_buffer, field)).data_ptr()


def test_both_arms_learn_the_same_from_one_seed():
    (setting,) = learning.SETTINGS["quick"]
    runs = [learning.Run(setting, arm, 0, "cpu", ends=float("inf")) for arm in learning.ARMS]
    stock, ours = (learning.train(run).points for run in runs)
    assert [point[0] for point in stock] == [point[0] for point in ours] and stock[-1][0] == setting.total_steps
    assert [point[2] for point in ours] == pytest.approx([point[2] for point in stock], rel=0.05)
    assert [point[1] for point in stock] == sorted(point[1] for point in stock)
    assert learning.train(runs[0]._replace(ends=0.0)).points == []
