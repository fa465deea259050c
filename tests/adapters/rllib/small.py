"""Algorithms of little work, and what their training is compared by."""

import gc
from contextlib import contextmanager
from functools import partial

import numpy as np
import ray
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

OFF = {"rl_triton": False}
LOSSES = ("total_loss", "policy_loss", "vf_loss", "entropy", "mean_kl_loss")


@contextmanager
def running_ray(**resources):
    """A Ray of its own. Its actors have the names of those of another file's, whose handles must go before."""
    ray.shutdown()
    gc.collect()
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR", **resources)
    yield
    ray.shutdown()


def small(config, env="CartPole-v1", env_config=None, model=None, num_learners=0, **training):
    """A config that makes algorithms of little work, one like the other."""
    return (
        config.environment(env, env_config=env_config or {})
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
        .learners(num_learners=num_learners)
        .rl_module(model_config=model or DefaultModelConfig(fcnet_hiddens=[16]))
        .training(**training)
        .debugging(seed=7, log_level="ERROR")
    )


def small_ppo(**kwargs):
    return small(PPOConfig(), train_batch_size_per_learner=120, minibatch_size=60, num_epochs=2, lr=3e-3, **kwargs)


def small_impala(config_class, **kwargs):
    """Five updates per iteration."""
    return (
        small(config_class(), train_batch_size_per_learner=40, lr=3e-3, **kwargs)
        .env_runners(rollout_fragment_length=10)
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=200)
    )


SMALL = {"PPO": small_ppo, "IMPALA": partial(small_impala, IMPALAConfig), "APPO": partial(small_impala, APPOConfig)}


def the_piece(learner):
    """What computes a learner's advantages: the last of its connectors, or ours in its place."""
    return learner.find_estimator() if hasattr(learner, "find_estimator") else learner._learner_connector.connectors[-1]


def name_of_piece(learner):
    return type(the_piece(learner)).__qualname__


def flags_of_piece(learner):
    piece = the_piece(learner)
    return {"masked_statistics": piece.masked_statistics, "backend": piece.backend}


def flags_of_vtrace(learner):
    """What our V-Trace is told, if the learner's loss calls it."""
    assert learner._stock_loss.__func__.__globals__["vtrace_torch"] == learner.compute_vtrace
    return {"backend": learner._flags.rl_triton_backend}


def of_learners(algorithm, ask):
    return [answer.get() for answer in algorithm.learner_group.foreach_learner(ask)]


@contextmanager
def stopping(algorithm):
    """It stops at the end."""
    try:
        yield algorithm
    finally:
        algorithm.stop()


def train_algorithm(config, *asked, before=None, iterations=2):
    """Losses of each iteration, the last weights, and what functions of each learner return; `before` runs first."""
    with stopping(config.build_algo()) as algorithm:
        if before is not None:
            of_learners(algorithm, before)
        results = [train_once(algorithm) for _ in range(iterations)]
        return results, algorithm.learner_group.get_weights(), *(of_learners(algorithm, ask) for ask in asked)


def train_once(algorithm):
    """Losses of an iteration; a learner of its own has none while its first update is being compiled."""
    while "learners" not in (result := algorithm.train()):
        pass
    return result["learners"]


def assert_same_training(stock, ours, names=LOSSES):
    """Both have the same losses and the same weights, up to what rounding becomes after some updates."""
    for want, got in zip(stock[0], ours[0], strict=True):
        for module, losses in want.items():
            if module != "__all_modules__":
                for name in names:
                    np.testing.assert_allclose(got[module][name], losses[name], rtol=1e-3, atol=1e-4, err_msg=name)
    for module, want in stock[1].items():
        for name, weight in want.items():
            np.testing.assert_allclose(ours[1][module][name], weight, rtol=1e-3, atol=1e-4, err_msg=name)
