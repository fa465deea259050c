"""Whole algorithms with our learners: the losses and weights of RLlib's own, and nothing compiled while they train."""

import numpy as np
import pytest

pytest.importorskip("ray.rllib")

import small
from compilations import count_compilations
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole
from small import SMALL, assert_same_training, flags_of_vtrace, name_of_piece, small_impala, small_ppo, train_algorithm

from rl_triton_adapters.rllib import enable_triton

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
    stock, ours = train_algorithm(make(), name_of_piece), train_algorithm(enable_triton(make()), name_of_piece)
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
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.ppo import PPOConfig
from rl_triton_adapters.rllib import enable_triton
from small import small

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
config = small({config}(), train_batch_size_per_learner=240).env_runners(rollout_fragment_length=20)
algorithm = enable_triton(config).build_algo()
"""
TRAIN = """
for _ in range(2):
    algorithm.train()
algorithm.stop()
"""


@pytest.mark.parametrize("config", ["PPOConfig", "APPOConfig"])
def test_everything_is_compiled_when_the_learner_is_built(config, private):
    """Of IMPALA it is a part of what APPO has."""
    built, trained = count_compilations(BUILD.format(config=config), TRAIN, **private)
    assert built > 0
    assert trained == 0
