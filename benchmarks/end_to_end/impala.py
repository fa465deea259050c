"""RLlib: updates of IMPALA and APPO on a batch, with its V-Trace, with ours, and with our whole update."""

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from benchmarks.end_to_end import Arm, Setting
from benchmarks.end_to_end.rllib import draw_episodes, prepare_config
from benchmarks.end_to_end.stopwatch import ADVANTAGES, Stopwatch
from benchmarks.workloads import GAMMA

OPTIONS: dict[str, dict[str, Any]] = {"IMPALA": {}, "APPO": {"use_kl_loss": True}}


def make_arm(name: str, setting: Setting, watch: Stopwatch) -> Arm:
    from ray.rllib.core.learner.learner import Learner
    from ray.rllib.core.learner.training_data import TrainingData

    torch.manual_seed(0)
    found: list[Tensor] = []
    time_vtrace = partial(watch.around, ADVANTAGES) if name != "captured" else lambda function: function
    learner = build_learner(setting, name, lambda function: keep_results(time_vtrace(function), found))
    batch = learner._make_batch_if_necessary(TrainingData(episodes=draw_episodes(setting)))
    steps = dict.fromkeys(("num_env_steps_sampled_lifetime", "num_env_steps_trained_lifetime"), 0)

    def update_once() -> None:
        Learner.update(learner, training_data=TrainingData(batch=batch), timesteps=steps, _no_metrics_reduce=True)

    def compute_results() -> list[Tensor]:
        update_once()
        return [x.cpu() for x in found]

    return Arm(iteration=update_once, results=compute_results)


def build_learner(setting: Setting, name: str, make_vtrace: Callable[..., Any]) -> Any:
    """A learner in this process, its V-Trace as one makes it of RLlib's or ours."""
    from rl_triton_adapters import rllib
    from rl_triton_adapters.common.overrides import copy_function

    module = import_module(f"ray.rllib.algorithms.{setting.env.lower()}")
    config = prepare_config(getattr(module, f"{setting.env}Config")(), setting)
    config.env_runners(rollout_fragment_length=setting.num_steps)
    config.training(gamma=GAMMA, train_batch_size_per_learner=setting.batch_size, **OPTIONS[setting.env])
    if name == "stock":
        learner = config.build_learner(env=None)
        loss = type(learner).compute_loss_for_module
        names = {"vtrace_torch": make_vtrace(loss.__globals__["vtrace_torch"])}
        learner.compute_loss_for_module = MethodType(copy_function(loss, names), learner)
        return learner
    ours = getattr(rllib, f"Triton{setting.env}TorchLearner")
    timed = type(ours.__name__, (ours,), {"compute_vtrace": make_vtrace(ours.compute_vtrace)})
    config.learners(learner_class=timed, learner_config_dict={"rl_triton_update": name != "ours"})
    return rllib.enable_triton(config).build_learner(env=None)


def keep_results(function: Callable[..., Any], found: list[Tensor]) -> Callable[..., Any]:
    """V-Trace; what it found last stays."""

    @wraps(function)
    def call_vtrace(*args: Any, **kwargs: Any) -> Any:
        found[:] = function(*args, **kwargs)
        return found[0], found[1]

    return call_vtrace
