"""Against TorchRL's estimators, loops and convolutions that others wrote: the same numbers, from the same records."""

import pytest
import torch

pytest.importorskip("torchrl")

from torchrl.objectives.value import functional

from rl_triton_core import (
    compute_discounted_returns,
    compute_gae,
    compute_lambda_returns,
    compute_vtrace,
)
from rl_triton_core.testing import assert_close

GAMMA, RTOL = 31 / 32, 1e-10
LAMBDA = 7 / 8  # TorchRL holds it and GAMMA in float32
VECTORIZED = pytest.mark.parametrize("vectorized", [False, True])
LAMBDAS = pytest.mark.parametrize(  # not vectorized with λ = 0, which TorchRL cannot
    ("vectorized", "lambda_"), [(False, 0.0), (False, LAMBDA), (False, 1.0), (True, LAMBDA), (True, 1.0)]
)


def next_values_of(r):
    """V(s_{t+1}) of every step."""
    next_values = torch.cat([r.values[:, 1:], r.bootstrap_values[:, -1:]], dim=1)
    return torch.where(r.terminated | r.truncated, r.bootstrap_values, next_values)


def add_feature_dimension(*tensors):
    """TorchRL takes a trailing dimension of features."""
    return [x.unsqueeze(-1) for x in tensors]


def make_arguments(r, backend):
    """The arguments that every estimator takes, with the values after steps in each of two forms."""
    common = {"terminated": r.terminated, "truncated": r.truncated, "gamma": GAMMA, "backend": backend}
    yield {**common, "values": r.values, "bootstrap_values": r.bootstrap_values}
    yield {**common, "values": r.values, "next_values": next_values_of(r)}


def assert_same(got, want):
    assert_close(got, want.squeeze(-1), rtol=RTOL)


@LAMBDAS
def test_gae(rollout, backend, vectorized, lambda_):
    r, done = rollout, rollout.terminated | rollout.truncated
    function = (
        functional.vec_generalized_advantage_estimate if vectorized else functional.generalized_advantage_estimate
    )
    want = function(GAMMA, lambda_, *add_feature_dimension(r.values, next_values_of(r), r.rewards, done, r.terminated))
    for arguments in make_arguments(r, backend):
        got = compute_gae(r.rewards, lambda_=lambda_, **arguments)
        assert_same(got.advantages, want[0])
        assert_same(got.returns, want[1])


@LAMBDAS
def test_lambda_returns(rollout, backend, vectorized, lambda_):
    r, done = rollout, rollout.terminated | rollout.truncated
    function = functional.vec_td_lambda_return_estimate if vectorized else functional.td_lambda_return_estimate
    want = function(GAMMA, lambda_, *add_feature_dimension(next_values_of(r), r.rewards, done, r.terminated))
    for arguments in make_arguments(r, backend):
        if "next_values" in arguments:
            del arguments["values"]
        assert_same(compute_lambda_returns(r.rewards, lambda_=lambda_, **arguments), want)


@VECTORIZED
def test_discounted_returns(rollout, backend, vectorized):
    r, done = rollout, rollout.terminated | rollout.truncated
    function = functional.vec_td1_return_estimate if vectorized else functional.td1_return_estimate
    want = function(GAMMA, *add_feature_dimension(next_values_of(r), r.rewards, done, r.terminated))
    arguments = next(make_arguments(r, backend))
    del arguments["values"]
    assert_same(compute_discounted_returns(r.rewards, **arguments), want)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.75)])
def test_vtrace(rollout, backend, rho_bar, c_bar):
    r, done = rollout, rollout.terminated | rollout.truncated
    generator = torch.Generator().manual_seed(0)
    target, behaviour = -torch.rand((2, *r.rewards.shape), generator=generator, dtype=torch.float64)
    ratios = (target - behaviour).exp()
    assert all((ratios < bound).any() and (ratios > bound).any() for bound in (rho_bar, c_bar))
    advantages, targets = functional.vtrace_advantage_estimate(
        GAMMA,
        *add_feature_dimension(target, behaviour, r.values, next_values_of(r), r.rewards, done, r.terminated),
        rho_thresh=rho_bar,
        c_thresh=c_bar,
    )
    off_policy = {"target_log_probs": target, "behaviour_log_probs": behaviour, "rho_bar": rho_bar, "c_bar": c_bar}
    for arguments in make_arguments(r, backend):
        got = compute_vtrace(r.rewards, **off_policy, **arguments)
        assert_same(got.targets, targets)
        assert_same(got.advantages, advantages)
