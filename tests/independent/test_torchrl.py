"""Against TorchRL's estimators, loops and convolutions that others wrote: the same numbers, from the same records."""

import sys
from pathlib import Path

import pytest
import torch

functional = pytest.importorskip("torchrl.objectives.value.functional")
sys.path.insert(0, str(Path(__file__).parents[1]))

from rl_triton_core import (  # noqa: E402
    compute_discounted_returns,
    compute_gae,
    compute_lambda_returns,
    compute_vtrace,
)
from rl_triton_core.testing import assert_close, random_rollout  # noqa: E402

GAMMA, LAMBDA = 31 / 32, 7 / 8  # TorchRL holds them in float32
BACKENDS = ["reference", "cpu"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def rollout(num_envs=5, num_steps=64, **probs):
    """A rollout and V(s_{t+1}) of every step; TorchRL takes trailing singleton dimensions."""
    r = random_rollout(num_envs, num_steps, dtype=torch.float64, **probs)
    next_values = torch.cat([r.values[:, 1:], r.bootstrap_values[:, -1:]], dim=1)
    done = r.terminated | r.truncated
    next_values = torch.where(done, r.bootstrap_values, next_values)
    return r, next_values, done


def theirs(*tensors):
    return [x.unsqueeze(-1) for x in tensors]


@pytest.mark.parametrize("vectorized", [False, True])
def test_gae(backend, vectorized):
    r, next_values, done = rollout()
    function = (
        functional.vec_generalized_advantage_estimate if vectorized else functional.generalized_advantage_estimate
    )
    want = function(GAMMA, LAMBDA, *theirs(r.values, next_values, r.rewards, done, r.terminated))
    args = {"gamma": GAMMA, "lambda_": LAMBDA, "backend": backend}
    for form in ({"next_values": next_values}, {"bootstrap_values": r.bootstrap_values}):
        got = compute_gae(r.rewards, r.values, r.terminated, r.truncated, **form, **args)
        for x, y in zip(got, want, strict=True):
            assert_close(x, y.squeeze(-1), rtol=1e-10)


@pytest.mark.parametrize("vectorized", [False, True])
def test_lambda_returns(backend, vectorized):
    r, next_values, done = rollout()
    function = functional.vec_td_lambda_return_estimate if vectorized else functional.td_lambda_return_estimate
    want = function(GAMMA, LAMBDA, *theirs(next_values, r.rewards, done, r.terminated))
    args = {"gamma": GAMMA, "lambda_": LAMBDA, "backend": backend}
    got = compute_lambda_returns(r.rewards, None, r.terminated, r.truncated, next_values=next_values, **args)
    assert_close(got, want.squeeze(-1), rtol=1e-10)


@pytest.mark.parametrize("vectorized", [False, True])
def test_discounted_returns(backend, vectorized):
    r, next_values, done = rollout()
    function = functional.vec_td1_return_estimate if vectorized else functional.td1_return_estimate
    want = function(GAMMA, *theirs(next_values, r.rewards, done, r.terminated))
    args = {"gamma": GAMMA, "backend": backend}
    got = compute_discounted_returns(r.rewards, r.terminated, r.truncated, bootstrap_values=next_values, **args)
    assert_close(got, want.squeeze(-1), rtol=1e-10)


@pytest.mark.parametrize("truncated_prob", [0.0, 0.05])
@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.75)])
def test_vtrace(backend, rho_bar, c_bar, truncated_prob):
    r, next_values, done = rollout(truncated_prob=truncated_prob)
    generator = torch.Generator().manual_seed(0)
    target, behaviour = -torch.rand((2, *r.rewards.shape), generator=generator, dtype=torch.float64)
    want = functional.vtrace_advantage_estimate(
        GAMMA,
        *theirs(target, behaviour, r.values, next_values, r.rewards, done, r.terminated),
        rho_thresh=rho_bar,
        c_thresh=c_bar,
    )
    got = compute_vtrace(
        *(r.rewards, r.values, r.terminated, r.truncated),
        **{"target_log_probs": target, "behaviour_log_probs": behaviour, "gamma": GAMMA, "backend": backend},
        **{"rho_bar": rho_bar, "c_bar": c_bar, "rho_bar_pg": rho_bar, "next_values": next_values},
    )
    advantages, targets = want
    assert_close(got.targets, targets.squeeze(-1), rtol=1e-10)
    if truncated_prob == 0.0:  # at a truncation, older releases take the next episode's target
        assert_close(got.advantages, advantages.squeeze(-1), rtol=1e-10)
