"""Benchmarks run where their packages are, and measure what result files have; what training loops capture."""

import pytest
import torch

pytest.importorskip("benchmarks", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks import __main__ as runner
from benchmarks import learning, results
from benchmarks.settings import TABLE, read_settings

NAMES = ("losses", "packed", "trl_step", "cleanrl", "sb3", "off_policy", "perceptrons", "torchrl")
NAMES += ("same_learning", "same_learning_rllib", "rllib", "rllib_training", "impala", "robotics", "gpu_envs")
"""Other tests run the others."""


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run(name, tmp_path, monkeypatch):
    """The arms agree, which each benchmark checks before it times them. Nothing is compiled by PyTorch."""
    needs = TABLE[name].get("needs") or ("stable_baselines3",)
    for package in needs:
        pytest.importorskip({"ray": "ray.rllib"}.get(package, package))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    quick = "--quick --device cpu --jobs 1 --seconds 0.001 --commit abc"
    assert runner.main([str(tmp_path), name, *quick.split()]) == 0
    read = results.read_result(tmp_path / f"{name}.csv"), [*results.read_machines(name).values()][-1]
    found, known = ({(row.arm, row.metric) for row in x.rows} for x in read)
    assert found == known


def test_both_arms_learn_the_same_from_one_seed():
    pytest.importorskip("stable_baselines3")
    (setting,) = read_settings("learning", "quick")
    runs = [learning.Run(setting, arm, 0, "cpu", ends=float("inf")) for arm in ("stock", "ours")]
    stock, ours = map(learning.train, runs)
    assert [point[0] for point in stock] == [point[0] for point in ours] and stock[-1][0] == setting.total_steps
    assert [point[2] for point in ours] == pytest.approx([point[2] for point in stock], rel=0.05)
    assert [point[1] for point in stock] == sorted(point[1] for point in stock)
    assert learning.train(runs[0]._replace(ends=0.0)) == []


def test_controls_are_stock():
    pytest.importorskip("sb3_contrib")
    setting, *_ = read_settings("same_learning", "quick")
    arms = ("stock", learning.CONTROL, learning.FUSED, "ours")
    runs = [learning.Run(setting, arm, 0, "cpu", ends=float("inf")) for arm in arms]
    models = [type(learning.make_model(run)) for run in runs]
    assert [model.__name__ for model in models] == [setting.algorithm] * 3 + [f"Triton{setting.algorithm}"]
