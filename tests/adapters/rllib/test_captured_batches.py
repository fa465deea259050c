"""Updates of IMPALA and APPO, captured with a graph for each shape of a batch: RLlib's weights and metrics."""

import re
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch

pytest.importorskip("ray.rllib")

import updates
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from recorded_graphs import allow_captures
from small import running_ray, small, train_algorithm
from updates import KINDS, POLICY, WITH_VTRACE, assert_updates_of_rllib, build_learner, make_config, update_learner

from rl_triton_adapters.rllib import enable_triton

LENGTHS = (30, 40, 29), (30, 40, 20), (30, 40, 29)  # of the episodes of several updates, and again those of the first
SCHEDULES = {"entropy_coeff": [[0, 0.1], [300, 0.01]], "lr": [[0, 1e-2], [300, 1e-3]]}


def update_often(config, space, count, learner):
    """The metrics of each update, the last weights and a number, of batches of several sizes."""
    found = [update_learner(config, space, count, learner, lengths=lengths, spread=1.0) for lengths in LENGTHS]
    return [metrics for each, *_ in found for metrics in each], *found[-1][1:]


@pytest.mark.parametrize(
    ("name", "space", "options"),
    [
        ("IMPALA", "categorical", SCHEDULES),
        ("IMPALA", "gaussian", {"grad_clip_by": "norm"}),
        ("APPO", "categorical", SCHEDULES),
        ("APPO", "gaussian", {"use_kl_loss": True, "kl_coeff": 1.0, "kl_target": 1e-4, "tau": 0.5}),
    ],
    ids=["impala-schedules", "impala-gaussian", "appo-schedules", "appo-kl"],
)
def test_updates_are_those_of_rllib(name, space, options, device, monkeypatch):
    allow_captures(monkeypatch, device)
    config = make_config(space, name, **options).learners(num_gpus_per_learner=int(device == "cuda"))
    tolerance = {} if device == "cpu" else {"rtol": 1e-2}
    learner = assert_updates_of_rllib(config, space, says="; updates are captured", update=update_often, **tolerance)
    step = learner.triton_update.find_step()
    assert len(step.captured) == 2 and step.reason == ""
    assert learner._used_estimator


@pytest.mark.parametrize("name", KINDS)
def test_a_learner_that_reads_metrics_finds_them(name, monkeypatch):
    """Where RLlib logs them: before the learner's own `after_gradient_based_update`."""
    allow_captures(monkeypatch)
    kinds, update = map(updates.own_metrics, KINDS[name]), update_often if name in WITH_VTRACE else update_learner
    learner = assert_updates_of_rllib(make_config("categorical", name), "categorical", kinds, update=update)
    assert learner.triton_update.find_step().captured


@pytest.mark.parametrize("name", WITH_VTRACE)
def test_several_learners_are_not_captured(name, monkeypatch):
    """A capture is several steps, in which a learner that has a graph for its batch takes no part."""
    allow_captures(monkeypatch)
    learner = build_learner(enable_triton(make_config("categorical", name)))
    assert learner.triton_update.find_obstacles() == ("", "")
    learner.config = learner.config.copy(copy_frozen=False).learners(num_learners=2)
    assert learner.triton_update.find_obstacles()[0] == "several learners have batches of different shapes"


@pytest.mark.parametrize("name", WITH_VTRACE)
def test_a_vtrace_in_the_place_of_rllibs_counts(name, monkeypatch):
    module = sys.modules[KINDS[name][0].__module__]
    stock = module.vtrace_torch
    monkeypatch.setattr(module, "vtrace_torch", lambda **kwargs: tuple(2 * x for x in stock(**kwargs)))
    says = f"computes V-Trace with {module.__name__}.vtrace_torch is "
    learner = assert_updates_of_rllib(make_config("categorical", name), "categorical", says=says)
    assert not learner._used_estimator


class NeverActs(DefaultPPOTorchRLModule):
    """RLlib's learner does not ask it either."""

    def get_exploration_action_dist_cls(self):
        raise AttributeError("asked in a learner")


def test_a_module_may_have_no_distribution_for_acting():
    spec = RLModuleSpec(module_class=NeverActs)
    assert_updates_of_rllib(make_config("categorical", "IMPALA").rl_module(rl_module_spec=spec), "categorical")


@pytest.mark.parametrize("name", WITH_VTRACE)
def test_columns_that_are_no_tensors(name, monkeypatch):
    """RLlib leaves objects and text as they are; a step with them is made without a graph, and a warning says so."""
    allow_captures(monkeypatch)
    weights = []
    for config in (make_config("categorical", name), enable_triton(make_config("categorical", name))):
        learner = build_learner(config)
        episodes = updates.draw_episodes("categorical")
        batch = learner._learner_connector(rl_module=learner.module, batch={}, episodes=episodes, shared_data={})
        columns = dict(batch[POLICY])
        named = columns | {"infos": np.array([{}] * len(columns["rewards"]), dtype=object)}
        warning = pytest.warns(RuntimeWarning, match="columns that are no tensors: infos")
        with warning if isinstance(learner, KINDS[name][1]) else nullcontext():
            for x in (columns, named, columns):
                Learner.update(learner, batch=MultiAgentBatch({POLICY: SampleBatch(dict(x))}, 99), timesteps={})
        weights.append(([], learner.module[POLICY].get_state(), None))
    updates.assert_same_updates(*weights)
    assert len(learner.triton_update.find_step().captured) == 1


def test_losses_outlast_the_next_update(device, monkeypatch):
    """RLlib keeps them until it reduces its metrics, after other updates, whose graphs share the memory."""
    allow_captures(monkeypatch, device)
    config = make_config("categorical", "IMPALA").learners(num_gpus_per_learner=int(device == "cuda"))
    learner, losses, numbers = build_learner(enable_triton(config)), [], []
    for seed in range(3):
        given = {"rl_module": learner.module, "batch": {}, "episodes": updates.draw_episodes("categorical", seed=seed)}
        columns = learner._learner_connector(**given, shared_data={})[POLICY]
        batch = {POLICY: {name: torch.as_tensor(x, device=device) for name, x in columns.items()}}
        losses.append(learner._update(batch)[1][POLICY])
        numbers.append(losses[-1].item())
    assert learner.triton_update.find_step().captured
    assert [loss.item() for loss in losses] == numbers and len(set(numbers)) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("num_learners", [0, 1])
@pytest.mark.parametrize("name", WITH_VTRACE)
def test_training_on_a_gpu_replays_graphs(name, num_learners, private_ray):
    """In the learner's thread, while others load batches onto the device and log."""
    config = small(updates.CONFIGS[name](), train_batch_size_per_learner=200, lr=1e-3, num_learners=num_learners)
    config.learners(num_gpus_per_learner=1).env_runners(rollout_fragment_length=20)
    config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=4_000)
    with running_ray(num_cpus=4, num_gpus=1):
        results, weights, (learner,) = train_algorithm(enable_triton(config), updates.describe_captures)
    assert learner["reason"] == "" and 0 < learner["graphs"] <= 32, learner
    assert results[-1]["__all_modules__"]["rl_triton"] == 1
    assert all(np.isfinite(x).all() for x in weights[POLICY].values())


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("name", ["PPO", "APPO"])
def test_updates_are_compared_and_training_is_the_same(name, monkeypatch, capsys):
    config = enable_triton(make_config("categorical", name))
    plain = update_learner(config, "categorical", 3)
    monkeypatch.setenv("RL_TRITON_CHECK", "2")
    updates.assert_same_updates(plain, update_learner(config, "categorical", 3), rtol=0, atol=0)
    lines = re.findall(r"update (\d): parameters moved by (\S+) and differ by (\S+)", capsys.readouterr().out)
    assert [number for number, *_ in lines] == ["1", "2"]
    assert all(float(far) > 0 and float(off) < 1e-3 * float(far) for _, far, off in lines)
