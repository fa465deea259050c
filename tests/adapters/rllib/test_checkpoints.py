"""Checkpoints: what was replaced is replaced again, and RLlib's algorithms and ours load each other's."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray.rllib")

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from small import SMALL, flags_of_piece, flags_of_vtrace, of_learners, small_ppo, stopping, the_piece

from rl_triton_adapters.rllib import TritonGeneralAdvantageEstimation, enable_triton


@pytest.mark.parametrize(("name", "num_learners"), [("PPO", 1), ("IMPALA", 0), ("APPO", 0)])
def test_a_restored_checkpoint_keeps_what_was_replaced(name, num_learners, small_ray, tmp_path):
    """Remote learners die first: others start in their place."""
    ask = flags_of_piece if name == "PPO" else flags_of_vtrace
    flags = {"backend": "reference"} | ({"masked_statistics": True} if name == "PPO" else {})
    with stopping(enable_triton(SMALL[name](num_learners=num_learners), **flags).build_algo()) as algorithm:
        algorithm.train()
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        weights = algorithm.learner_group.get_weights()["default_policy"]
        for learner in algorithm.learner_group._workers or ():
            ray.kill(learner)
    with stopping(Algorithm.from_checkpoint(path)) as restored:
        assert of_learners(restored, ask) == [flags]
        if name == "PPO":  # the others may have learned on after saving
            got = restored.learner_group.get_weights()["default_policy"]
            assert all((weight == got[key]).all() for key, weight in weights.items())
        restored.train()


@pytest.mark.parametrize("ours_first", [False, True], ids=["into-ours", "into-stock"])
def test_a_checkpoint_goes_from_one_to_the_other(ours_first, small_ray, tmp_path):
    """By both ways that RLlib has of loading one into another config."""

    def state(algorithm):
        return [algorithm.learner_group._learner.get_state()[name] for name in ("rl_module", "optimizer")]

    def configs():
        pair = (enable_triton(small_ppo()), small_ppo())
        return pair if ours_first else pair[::-1]

    with stopping(configs()[0].build_algo()) as first:
        first.train()
        path = first.save_to_path(str(tmp_path / "checkpoint"))
        with (
            stopping(PPO.from_checkpoint(path, config=configs()[1])) as loaded,
            stopping(configs()[1].build_algo()) as other,
        ):
            other.restore_from_path(path)
            for algorithm in (loaded, other):
                piece = GeneralAdvantageEstimation if ours_first else TritonGeneralAdvantageEstimation
                assert type(the_piece(algorithm.learner_group._learner)) is piece
                np.testing.assert_equal(state(algorithm), state(first))
                results = algorithm.train()
                assert results["training_iteration"] == 2
                assert ("rl_triton" in results["learners"]["__all_modules__"]) != ours_first
            learner, given = loaded.learner_group._learner, first.learner_group._learner.get_state()
            learner.set_state({**given, "weights_seq_no": 0})
            assert ("__all_modules__", "rl_triton") not in learner.metrics


WITHOUT_THE_PACKAGE = """
import sys

sys.modules["rl_triton_adapters"] = sys.modules["rl_triton_core"] = None
sys.path.insert(0, sys.argv[2])

import numpy as np
import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.core.rl_module.rl_module import RLModule
from small import small_ppo

path = sys.argv[1]
module = RLModule.from_checkpoint(path + "/learner_group/learner/rl_module/default_policy")
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
algorithm = PPO.from_checkpoint(path, config=small_ppo())
learner = algorithm.learner_group._learner
np.testing.assert_equal(learner.module["default_policy"].get_state(), module.get_state())
assert algorithm.train()["training_iteration"] == 2
try:
    Algorithm.from_checkpoint(path)
except AttributeError as error:
    print(error)
"""


def test_a_checkpoint_of_ours_without_the_package(private, small_ray, tmp_path):
    """As docs/rllib.md says: RLlib's own error, and none with a config."""
    with stopping(enable_triton(small_ppo()).build_algo()) as algorithm:
        algorithm.train()
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE, path, str(Path(__file__).parent)],
        env={**os.environ, **private},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "'NoneType' object has no attribute 'to_dict'" in result.stdout
    assert "Could not restore original class from checkpoint" in result.stdout + result.stderr
