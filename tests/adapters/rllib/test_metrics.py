"""Metrics that are logged once: the results of those that are logged one by one."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray.rllib")

from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from updates import flatten_metrics

from rl_triton_adapters.rllib.metrics import LateMetrics

KINDS = {
    "last": {"window": 1},
    "sum": {"reduce": "sum", "with_throughput": True},
    "lifetime": {"reduce": "lifetime_sum"},
    "mean": {"reduce": "mean"},
    "ema": {},
    "max": {"reduce": "max"},
    "window": {"window": 2},
}
NUMBERS = st.integers(0, 2) | st.sampled_from([0.5, 1.5])
CALLS = st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from("ab"), NUMBERS), max_size=25)


@given(updates=st.lists(CALLS, min_size=1, max_size=2), as_dict=st.booleans())
def test_results_are_those_of_rllib(updates, as_dict):
    """Over several updates, after which RLlib reduces them, and on the way, for whoever looks."""
    stock, ours = MetricsLogger(), MetricsLogger()
    for calls in updates:
        late = LateMetrics(ours)
        for kind, name, value in calls:
            for metrics in (stock, late):
                if as_dict:
                    metrics.log_dict({name: {"x": value}}, key=kind, **KINDS[kind])
                else:
                    metrics.log_value((kind, name, "x"), value, **KINDS[kind])
        if calls:
            assert calls[0][:2] in late
            assert late.peek(calls[0][:2])["x"] == pytest.approx(stock.peek(calls[0][:2])["x"])
        late.flush()
    want, got = flatten_metrics(stock.reduce()), flatten_metrics(ours.reduce())
    assert set(got) == set(want)
    np.testing.assert_allclose([got[name] for name in want], list(want.values()))


@pytest.mark.parametrize(
    ("log", "seen"),
    [
        (lambda metrics: metrics.log_dict(value_dict={"y": 2}, key=["a", "x"], window=1), ("a", "x", "y")),
        (lambda metrics: metrics.log_value(key=["a", "x"], value=torch.tensor(2.0), window=1), ("a", "x")),
        (lambda metrics: metrics.log_value(["a", "x"], 2, reduce="sum"), ("a", "x")),
        (lambda metrics: metrics.log_value("x", 2, reduce="percentiles", percentiles=[50], window=5), "x"),
    ],
    ids=["dict by name", "list", "list summed up", "options that are lists"],
)
def test_arguments_are_those_of_rllib(log, seen):
    found = []
    for metrics in (MetricsLogger(), LateMetrics(MetricsLogger())):
        log(metrics)
        log(metrics)
        found.append(metrics.peek(seen))
    assert found[1] == found[0]


def test_what_is_logged_many_times_reaches_rllib_once():
    metrics = MetricsLogger()
    calls, log_value = [], metrics.log_value
    metrics.log_value = lambda *args, **kwargs: calls.append(args) or log_value(*args, **kwargs)
    late = LateMetrics(metrics)
    for i in range(9):
        for kind in ("last", "sum", "lifetime", "mean"):
            late.log_value(kind, 3 if kind == "mean" else i, **KINDS[kind])
    late.flush()
    assert calls == [(("last",), 8), ("sum", 36), ("lifetime", 36), ("mean", 3)]


def test_a_value_does_not_change_once_it_is_logged():
    """Replays overwrite the memory of a graph."""
    metrics, value = MetricsLogger(), torch.tensor(1.0)
    late = LateMetrics(metrics)
    late.log_value("x", value, window=1)
    late.flush()
    value.fill_(2.0)
    assert metrics.peek("x") == 1


def test_other_threads_log_as_before():
    """RLlib's main thread does, while the learner's thread makes the updates."""
    metrics = MetricsLogger()
    late = LateMetrics(metrics, is_captured=True)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: late.log_value("other", 3, window=1)).result()
        pool.submit(lambda: late.log_dict({"both": 5}, key="other two", window=1)).result()
    assert metrics.peek("other") == 3 and metrics.peek(("other two", "both")) == 5


@pytest.mark.parametrize(("value", "options"), [(4, {"window": 1}), (torch.tensor(1.0), {"reduce": "sum"}), (0.5, {})])
def test_a_captured_step_logs_last_tensors_alone(value, options):
    with pytest.raises(RuntimeError, match="metric 'x': got .*, expected a last tensor"):
        LateMetrics(MetricsLogger(), is_captured=True).log_value("x", value, **options)
