"""RLlib: a learner's `update` of PPO on episodes, and of IMPALA and APPO on a batch.

With RLlib's connector or V-Trace, with ours, and with our whole update.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial, wraps
from importlib import import_module
from types import MethodType
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from torch import Tensor

from benchmarks.end_to_end import Arm, Setting
from benchmarks.end_to_end.stopwatch import ADVANTAGES, REST, Stopwatch
from benchmarks.settings import TABLE
from benchmarks.workloads import GAMMA
from rl_triton_adapters.rllib import enable_triton
from rl_triton_core.reach import copy_function

OBSERVATIONS, ACTIONS = 17, 6  # as of HalfCheetah
LENGTH = 200  # of an episode, on average
RECURRENCE = "compute_value_targets"  # the function that RLlib's piece calls


def make_arm(name: str, setting: Setting, watch: Stopwatch) -> Arm:
    torch.manual_seed(0)
    if setting.env:
        return make_vtrace_arm(name, setting, watch)
    learner, found = build_learner(setting, name), draw_episodes(setting)
    time_parts(learner, watch, is_captured=name == "captured")
    options = {"num_epochs": setting.epochs, "minibatch_size": setting.batch_size, "shuffle_batch_per_epoch": True}
    return Arm(
        iteration=lambda drawn: learner.update(episodes=drawn, **options),
        results=lambda: compute_results(learner, deepcopy(found)),
        fresh=lambda: [deepcopy(found)],
    )


def make_vtrace_arm(name: str, setting: Setting, watch: Stopwatch) -> Arm:
    learner, found = build_learner(setting, name), list[Tensor]()
    time_vtrace = partial(watch.around, ADVANTAGES) if name != "captured" else lambda function: function
    if name == "stock":
        loss = type(learner).compute_loss_for_module
        names = {"vtrace_torch": keep_results(time_vtrace(loss.__globals__["vtrace_torch"]), found)}
        learner.compute_loss_for_module = MethodType(copy_function(loss, names), learner)
    else:
        learner.compute_vtrace = keep_results(time_vtrace(learner.compute_vtrace), found)
    batch = learner._make_batch_if_necessary(TrainingData(episodes=draw_episodes(setting)))
    steps = dict.fromkeys(("num_env_steps_sampled_lifetime", "num_env_steps_trained_lifetime"), 0)

    def update_once() -> None:
        Learner.update(learner, training_data=TrainingData(batch=batch), timesteps=steps, _no_metrics_reduce=True)

    def compute_results() -> list[Tensor]:
        update_once()
        return [x.cpu() for x in found]

    return Arm(iteration=update_once, results=compute_results)


def keep_results(function: Callable[..., Any], found: list[Tensor]) -> Callable[..., Any]:
    """V-Trace; what it found last stays."""

    @wraps(function)
    def call_vtrace(*args: Any, **kwargs: Any) -> Any:
        found[:] = function(*args, **kwargs)
        return found[0], found[1]

    return call_vtrace


def build_learner(setting: Setting, name: str) -> Any:
    """A learner in this process, of a config with spaces and a network."""
    algorithm = setting.env or "PPO"
    config = getattr(import_module(f"ray.rllib.algorithms.{algorithm.lower()}"), f"{algorithm}Config")()
    config.environment(
        observation_space=spaces.Box(-np.inf, np.inf, (OBSERVATIONS,)), action_space=spaces.Box(-1, 1, (ACTIONS,))
    )
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[setting.hidden] * 2))
    config.learners(num_learners=0, num_gpus_per_learner=int(setting.device == "cuda")).debugging(seed=0)
    config.training(gamma=GAMMA, **TABLE["rllib"]["options"][algorithm])
    if setting.env:
        config.env_runners(rollout_fragment_length=setting.num_steps)
        config.training(train_batch_size_per_learner=setting.batch_size)
    if name != "stock":
        config.learners(learner_config_dict={"rl_triton_update": name != "ours"})
        enable_triton(config)
    return config.build_learner(env=None)


def draw_episodes(setting: Setting) -> list[Any]:
    """Random experience of every environment, in episodes as env runners send them. A learner lengthens them."""
    rng, found = np.random.default_rng(0), []
    for _ in range(setting.num_envs):
        left = setting.num_steps
        while left:
            length = min(left, int(rng.geometric(1 / LENGTH)))
            left -= length
            found.append(
                SingleAgentEpisode(
                    observations=list(rng.normal(size=(length + 1, OBSERVATIONS)).astype(np.float32)),
                    actions=list(rng.normal(size=(length, ACTIONS)).astype(np.float32)),
                    rewards=list(rng.normal(size=length)),
                    terminated=left > 0,
                    len_lookback_buffer=0,
                    extra_model_outputs={
                        "action_logp": list(rng.normal(-8, 0.1, size=length).astype(np.float32)),
                        "action_dist_inputs": list(rng.normal(size=(length, 2 * ACTIONS)).astype(np.float32)),
                    },
                ).to_numpy()
            )
    return found


def time_parts(learner: Any, watch: Stopwatch, is_captured: bool) -> None:
    """Let the watch see the parts of a learner's connector; the value network belongs to none of them.

    If updates are captured, it belongs to the connector: a graph cannot hold the watch's events.
    """
    for module_id in () if is_captured else learner.module.keys():
        module = learner.module[module_id]
        module.compute_values = watch.around(REST, module.compute_values)
    pieces = learner._learner_connector.connectors
    if hasattr(learner, "find_estimator"):
        pieces[-1] = learner.find_estimator()  # as it is while the pipeline runs
    piece, kind = pieces[-1], type(pieces[-1])
    is_ours = "_compute_columns" in vars(kind)
    method, name = ("_compute_columns", "compute_gae_of_slots") if is_ours else ("__call__", RECURRENCE)
    copy = vars(kind)[method]
    copies = {method: copy_function(copy, {name: watch.around(ADVANTAGES, copy.__globals__[name])})}
    copies["__call__"] = watch.around("connector", copies.get("__call__", kind.__call__))
    piece.__class__ = type(kind.__name__, (kind,), copies)


def compute_results(learner: Any, found: list[Any]) -> list[Tensor]:
    """Those of the learner's pipeline, before any training."""
    batch = learner._learner_connector(rl_module=learner.module, batch={}, episodes=found, shared_data={})
    (columns,) = batch.values()
    return [columns["advantages"], columns["value_targets"]]
