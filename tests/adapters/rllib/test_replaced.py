"""Learners of RLlib where a function that their update runs is another one: they update as RLlib's do with it."""

import os
from collections import Counter
from itertools import islice

import overrides
import pytest
import replaced

pytest.importorskip("ray.rllib")
from ray.rllib.core.learner.learner import Learner
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from recorded_graphs import allow_captures
from updates import POLICY, assert_same_updates, build_learner, draw_episodes, flatten_metrics, make_config

from rl_triton_adapters.rllib import enable_triton

SIZES = {"minibatch_size": 60, "num_epochs": 1}
ALL = os.environ.get("RL_TRITON_TEST_COMBINATIONS") == "all"  # otherwise each change is tried in one of the cases
CASES = {"compiled": ("PPO", SIZES), "captured": ("PPO", SIZES), "captured appo": ("APPO", {})}


def list_things(learner):
    return [learner, learner.module, learner.metrics, *learner.module[POLICY].modules()]


def list_tensors(learner):
    coefficients = learner.curr_kl_coeffs_per_module[POLICY]
    return [*replaced.list_state([learner.module[POLICY]], learner._named_optimizers.values()), coefficients]


def update(learner, columns, sizes):
    """An update on these columns, with metrics of its own: these and the weights."""
    batch = MultiAgentBatch({POLICY: SampleBatch(dict(columns))}, env_steps=len(columns["obs"]))
    results = Learner.update(learner, batch=batch, timesteps={}, **sizes)
    return [flatten_metrics(results)], learner.module[POLICY].get_state(), None


@pytest.mark.parametrize("case", CASES)
def test_every_function_of_an_update(case, monkeypatch):
    """What it does is effected, and if it is a learner's, it is not called less often."""
    name, sizes = CASES[case]
    if case != "compiled":
        allow_captures(monkeypatch)
    config, calls, alter_call = make_config("categorical", name), Counter(), overrides.alter_call

    def alter_and_count(*args, **kwargs):
        calls[learner] += 1
        return alter_call(*args, **kwargs)

    for module in (overrides, replaced):
        monkeypatch.setattr(module, "alter_call", alter_and_count)
    learners = stock, ours = build_learner(config), build_learner(enable_triton(config.copy(copy_frozen=False)))
    given = {"rl_module": stock.module, "batch": {}, "episodes": draw_episodes("categorical"), "shared_data": {}}
    columns = stock._learner_connector(**given)[POLICY]
    update(ours, columns, sizes)
    ran = replaced.list_run(["ray"], update, stock, columns, sizes)
    how, hows, start = f"updates are {case.split()[0]}", {}, [x.clone() for x in list_tensors(stock)]
    changes = replaced.list_changes(ran, learners, list_things)
    for name, change in islice(changes, 0 if ALL else [*CASES].index(case), None, 1 if ALL else len(CASES)):
        results = []
        for learner in learners:
            replaced.copy_state(start, list_tensors(learner))
            learner._weights_seq_no = 1
            learner.metrics = MetricsLogger(stats_cls_lookup=config.stats_cls_lookup, root=False)
        calls.clear()
        with change():
            for learner in learners:
                results.append(update(learner, columns, sizes))
            hows[name] = ours.describe()
        assert_same_updates(*results)
        assert "Learner." not in name or calls[stock] <= calls[ours], name
    assert len(hows) > 70 and ours.describe().endswith(how)
