"""V-Trace of random rollouts is that of RLlib, and losses of one's own have theirs or ours."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ray.rllib")

from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.algorithms.impala.torch.vtrace_torch_v2 import make_time_major, vtrace_torch
from small import OFF, small_impala
from updates import assert_updates_of_rllib, build_learner, make_config

from rl_triton_adapters.rllib import TritonIMPALATorchLearner, enable_triton, learners, vtrace


def random_vtrace(steps, rows, rng):
    """Arguments as the learners pass them: transposed views, some of which have a graph."""

    def column(scale=1.0):
        return torch.from_numpy((scale * rng.standard_normal((rows * steps,))).astype(np.float32))

    arguments = {
        "target_action_log_probs": column(0.5).requires_grad_(),
        "behaviour_action_log_probs": column(0.5),
        "discounts": torch.from_numpy((rng.random(rows * steps) < 0.8).astype(np.float32)) * 0.9,
        "rewards": column(),
        "values": column().requires_grad_(),
    }
    arguments = {name: make_time_major(tensor, trajectory_len=steps) for name, tensor in arguments.items()}
    first = arguments["values"][0]
    return {**arguments, "bootstrap_values": torch.cat([first[1:], first[:1]])}


@settings(max_examples=60)
@given(
    steps=st.integers(1, 30),
    rows=st.integers(1, 9),
    rho=st.sampled_from([None, 0.5, 1.0, 2.0]),
    pg_rho=st.sampled_from([None, 0.5, 1.0, torch.tensor(2.0)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_vtrace_is_that_of_rllib(steps, rows, rho, pg_rho, seed):
    arguments = random_vtrace(steps, rows, np.random.default_rng(seed))
    clips = {"clip_rho_threshold": rho, "clip_pg_rho_threshold": pg_rho}
    want, got = vtrace_torch(**arguments, **clips), vtrace(**arguments, **clips)
    assert_same_vtrace(got, want)
    assert not any(tensor.requires_grad for tensor in got)


def assert_same_vtrace(got, want):
    """Within 1e-5 of their own scale: both sum in float32, in different orders."""
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5 * y.abs().max().clamp(min=1).item())


@pytest.mark.parametrize("name", ["values", "discounts", "target_action_log_probs", "behaviour_action_log_probs"])
def test_vtrace_refuses_another_shape(name):
    arguments = random_vtrace(5, 3, np.random.default_rng(0))
    arguments[name] = arguments[name][..., None]
    with pytest.raises(ValueError, match=rf"{name}: got shape \(5, 3, 1\), expected \(5, 3\), that of rewards"):
        vtrace(**arguments)


@pytest.mark.parametrize("in_front", [True, False])
def test_a_loss_of_ones_own_may_have_a_vtrace_of_its_own(in_front):
    """The learner says so, and updates as ours do."""

    class Mine(IMPALATorchLearner):
        def compute_loss_for_module(self, **kwargs):
            return IMPALATorchLearner.compute_loss_for_module(self, **kwargs)

    bases = (Mine, TritonIMPALATorchLearner)
    kinds = IMPALATorchLearner, type("Further", bases if in_front else bases[::-1], {})
    asked = "where it is asked for: Mine has its own compute_loss_for_module ("
    says = f"V-Trace with rl_triton_core, backend that of the device, {asked}"
    learner = assert_updates_of_rllib(make_config("categorical", "IMPALA"), "categorical", kinds, says)
    assert not learner._used_estimator


def test_a_loss_of_ones_own_may_call_our_vtrace(monkeypatch):
    class Mine(TritonIMPALATorchLearner):
        def compute_loss_for_module(self, **kwargs):
            return self.compute_vtrace(**random_vtrace(5, 3, np.random.default_rng(0)))

    backends = []
    monkeypatch.setattr(learners, "vtrace", lambda **kwargs: backends.append(kwargs["backend"]) or vtrace(**kwargs))
    want = vtrace_torch(**random_vtrace(5, 3, np.random.default_rng(0)))
    for flags, calls in ((OFF, []), ({"rl_triton": True}, ["reference"])):
        config = small_impala(IMPALAConfig).learners(learner_class=Mine, learner_config_dict=flags)
        learner = build_learner(enable_triton(config, backend="reference"))
        backends.clear()
        assert_same_vtrace(learner.compute_loss_for_module(), want)
        assert backends == calls
