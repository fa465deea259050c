"""Whole algorithms with our learners, and their checkpoints: the losses and weights of RLlib's own.

Updates are compiled before they train; RLlib's algorithms and ours load each other's checkpoints.
"""

import re

import numpy as np
import pytest

pytest.importorskip("ray.rllib")

from pathlib import Path

import ray
import small
from compilations import run_with_paths
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPO
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole
from small import SMALL, assert_same_training, flags_of_vtrace, small_impala, small_ppo, stopping, train_algorithm

from rl_triton_adapters.rllib import TritonGeneralAdvantageEstimation, enable_triton

LSTM = DefaultModelConfig(fcnet_hiddens=[8], use_lstm=True, lstm_cell_size=8, max_seq_len=8)
MODULES = {"flat": DefaultModelConfig(fcnet_hiddens=[8]), "stateful": LSTM}


def two_policies(config):
    """One policy without a state, one with."""
    specs = {name: RLModuleSpec(model_config=model) for name, model in MODULES.items()}
    return config.multi_agent(
        policies=set(MODULES), policy_mapping_fn=lambda agent, episode, **kwargs: ["flat", "stateful"][agent % 2]
    ).rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))


@pytest.mark.parametrize(
    "make",
    [
        lambda: small_ppo(env_config={"max_episode_steps": 15}),
        lambda: small_ppo(env="Pendulum-v1", env_config={"max_episode_steps": 37}),
        lambda: small_ppo(env_config={"max_episode_steps": 15}, model=LSTM),
        lambda: two_policies(small_ppo(env=MultiAgentCartPole, env_config={"num_agents": 2})),
    ],
    ids=["time-limit", "pendulum", "lstm", "two-policies"],
)
def test_training_is_that_of_rllib(make, small_ray):
    """Of several learners, see test_cluster.py."""
    stock, ours = (train_algorithm(x, small.name_of_piece) for x in (make(), enable_triton(make())))
    assert stock[2] == ["GeneralAdvantageEstimation"]
    assert ours[2] == ["TritonGeneralAdvantageEstimation"]
    assert_same_training(stock, ours)
    assert read_metric(ours[0]) == {1.0}


def read_metric(results):
    """What each iteration says it was computed with."""
    return {float(result["__all_modules__"]["rl_triton"]) for result in results}


@pytest.mark.parametrize("small_config", SMALL.values(), ids=SMALL)
def test_a_metric_says_that_it_is_off(small_config, small_ray):
    results, _ = train_algorithm(enable_triton(small_config()).learners(learner_config_dict=small.OFF))
    assert read_metric(results) == {0.0}


ONCE = {"circular_buffer_num_batches": 1, "circular_buffer_iterations_per_batch": 1}
"""Otherwise APPO draws from its last batches, and its draws have no seed."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: small_impala(IMPALAConfig),
        lambda: small_impala(IMPALAConfig, model=LSTM),
        lambda: two_policies(small_impala(IMPALAConfig, env=MultiAgentCartPole, env_config={"num_agents": 2})),
        lambda: small_impala(APPOConfig, **ONCE),
        lambda: small_impala(APPOConfig, model=LSTM, **ONCE),
    ],
    ids=["IMPALA", "IMPALA-lstm", "IMPALA-two-policies", "APPO", "APPO-lstm"],
)
def test_vtrace_training_is_that_of_rllib(make, small_ray):
    stock, ours = train_algorithm(make()), train_algorithm(enable_triton(make()), flags_of_vtrace)
    assert ours[2] == [{"backend": None}] and read_metric(ours[0]) == {1.0}
    impala = ("total_loss", "mean_pi_loss", "mean_vf_loss", "entropy")
    assert_same_training(stock, ours, names=small.LOSSES if isinstance(make(), APPOConfig) else impala)


@pytest.mark.parametrize(("config_class", "num_learners"), [(IMPALAConfig, 2), (APPOConfig, 1)])
def test_vtrace_training_runs(config_class, num_learners, small_ray):
    """Where RLlib's own runs differ from each other."""
    config = enable_triton(small_impala(config_class, num_learners=num_learners), backend="cpu")
    with small.stopping(config.build_algo()) as algorithm:
        assert small.of_learners(algorithm, flags_of_vtrace) == [{"backend": "cpu"}] * num_learners
        before = algorithm.learner_group.get_weights()["default_policy"]
        for _ in range(2):
            algorithm.train()
        after = algorithm.learner_group.get_weights()["default_policy"]
        assert all(np.isfinite(weight).all() for weight in after.values())
        assert any((weight != before[name]).any() for name, weight in after.items())


@pytest.mark.parametrize("config_class", [IMPALAConfig, APPOConfig])
def test_results_of_iterations_without_an_update_have_no_metric(config_class, small_ray):
    """RLlib would call it NaN, as it does its own."""
    config = small_impala(config_class).reporting(min_sample_timesteps_per_iteration=0)
    with small.stopping(enable_triton(config.training(train_batch_size_per_learner=100)).build_algo()) as algorithm:
        results = [algorithm.train().get("learners", {}) for _ in range(12)]
    assert {result.get("__all_modules__", {}).get("rl_triton") for result in results} == {None, 1.0}
    assert any("rl_triton" not in result.get("__all_modules__", {"rl_triton": 1}) for result in results)


BUILD = """
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from rl_triton_adapters.rllib import enable_triton
from small import small

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
config = small(PPOConfig(), train_batch_size_per_learner=240).env_runners(rollout_fragment_length=20)
config.debugging(log_level="WARN")
algorithm = enable_triton(config).build_algo()
"""
TRAIN = """
for _ in range(2):
    algorithm.train()
algorithm.stop()
"""


def test_updates_are_compiled_when_the_learner_is_built(private, tmp_path):
    """And a line says so. What is small, estimators and losses, is compiled when it is first called."""
    count = "print('misses', compile.compile_callback.cache_info().misses)\n"
    program = "import sys\nsys.stderr = sys.stdout\nfrom rl_triton_core._internal.mlp import compile\n"
    program += BUILD + count + TRAIN + count
    text = run_with_paths(program, **private, NUMBA_CACHE_DIR=str(tmp_path))
    built, trained = re.findall(r"^misses (.*)$", text, re.MULTILINE)
    assert trained == built > "1"
    assert len(re.findall(r"Compiled the updates in [\d.]+ s; other processes load them from disk", text)) == 1


@pytest.mark.parametrize(("name", "num_learners"), [("PPO", 1), ("IMPALA", 0), ("APPO", 0)])
def test_a_restored_checkpoint_keeps_what_was_replaced(name, num_learners, small_ray, tmp_path):
    """Remote learners die first: others start in their place."""
    ask = small.flags_of_piece if name == "PPO" else flags_of_vtrace
    flags = {"backend": "reference"} | ({"masked_statistics": True} if name == "PPO" else {})
    with stopping(enable_triton(SMALL[name](num_learners=num_learners), **flags).build_algo()) as algorithm:
        algorithm.train()
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        weights = algorithm.learner_group.get_weights()["default_policy"]
        for learner in algorithm.learner_group._workers or ():
            ray.kill(learner)
    with stopping(Algorithm.from_checkpoint(path)) as restored:
        assert small.of_learners(restored, ask) == [flags]
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
                assert type(small.the_piece(algorithm.learner_group._learner)) is piece
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
    printed = run_with_paths(WITHOUT_THE_PACKAGE, path, str(Path(__file__).parent), **private)
    assert "'NoneType' object has no attribute 'to_dict'" in printed
