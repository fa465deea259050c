"""Against rlax, DeepMind's functions in JAX: one trajectory each, every done step as a discount of 0.

rlax has no truncations: what a truncated step continues with is part of its reward.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("jax")
pytest.importorskip("rlax")

import jax
import rlax

from rl_triton_core import (
    compute_discounted_returns,
    compute_gae,
    compute_lambda_returns,
    compute_retrace,
    compute_vtrace,
)
from rl_triton_core.testing import assert_close, random_rollout

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)

GAMMA, RTOL = 0.97, 1e-10
LAMBDAS = pytest.mark.parametrize("lambda_", [0.0, 0.9, 1.0])


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    return request.param


@pytest.fixture
def rollout():
    """With every kind of ending, inside and at the end."""
    r = random_rollout(5, 64, truncated_prob=0.1, terminated_prob=0.1, dtype=torch.float64)
    r.terminated[:, -1] = r.truncated[:, -1] = False
    r.terminated[0, -1] = r.truncated[1, -1] = True
    for flags in (r.terminated & ~r.truncated, r.truncated & ~r.terminated, r.terminated & r.truncated):
        assert flags[:, :-1].any()
    return r


def make_arguments(rollout, backend):
    """The arguments that every estimator takes."""
    names = ("terminated", "truncated", "bootstrap_values")
    return {**{name: getattr(rollout, name) for name in names}, "gamma": GAMMA, "backend": backend}


def convert_rollout(rollout):
    """Rewards, discounts, V(s_t) and V(s_{t+1}) in NumPy."""
    rewards, values, terminated, truncated, bootstrap = (x.numpy() for x in rollout)
    rewards = np.where(truncated & ~terminated, rewards + GAMMA * bootstrap, rewards)
    values = np.append(values, bootstrap[:, -1:], axis=1)
    return rewards, np.where(terminated | truncated, 0.0, GAMMA), values[:, :-1], values[:, 1:]


def per_row(function, *arrays):
    return jax.tree.map(np.array, jax.vmap(function)(*arrays))


def log_ratios(rollout, seed=0):
    return torch.randn(rollout.rewards.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@LAMBDAS
def test_gae(rollout, backend, lambda_):
    rewards, discounts, values, next_values = convert_rollout(rollout)
    stacked = np.append(values, next_values[:, -1:], axis=1)
    want = per_row(
        lambda r, d, v: rlax.truncated_generalized_advantage_estimation(r, d, lambda_, v), rewards, discounts, stacked
    )
    got = compute_gae(rollout.rewards, rollout.values, lambda_=lambda_, **make_arguments(rollout, backend))
    assert_close(got.advantages, want, rtol=RTOL)


@LAMBDAS
def test_lambda_returns(rollout, backend, lambda_):
    rewards, discounts, _, next_values = convert_rollout(rollout)
    want = per_row(lambda r, d, v: rlax.lambda_returns(r, d, v, lambda_), rewards, discounts, next_values)
    got = compute_lambda_returns(rollout.rewards, rollout.values, lambda_=lambda_, **make_arguments(rollout, backend))
    assert_close(got, want, rtol=RTOL)


def test_discounted_returns(rollout, backend):
    rewards, discounts, _, next_values = convert_rollout(rollout)
    want = per_row(rlax.discounted_returns, rewards, discounts, next_values)
    assert_close(compute_discounted_returns(rollout.rewards, **make_arguments(rollout, backend)), want, rtol=RTOL)


@LAMBDAS
@pytest.mark.parametrize("rho_bar", [1.0, 2.5])
def test_vtrace_targets(rollout, backend, lambda_, rho_bar):
    rewards, discounts, values, next_values = convert_rollout(rollout)
    ratios = log_ratios(rollout)

    def compute_errors(v, v_next, r, d, rho):
        return rlax.vtrace(v, v_next, r, d, rho, lambda_, rho_bar)

    want = per_row(compute_errors, values, next_values, rewards, discounts, ratios.exp().numpy())
    got = compute_vtrace(
        *(rollout.rewards, rollout.values),
        **{"log_ratios": ratios, "lambda_": lambda_, "rho_bar": rho_bar, **make_arguments(rollout, backend)},
    )
    assert_close(got.targets - rollout.values, want, rtol=RTOL)


@pytest.mark.parametrize("rho_bar_pg", [1.0, 0.5])
def test_vtrace_advantages(rollout, backend, rho_bar_pg):
    """With lambda = 1: rlax mixes targets and values by lambda before it takes the difference."""
    rewards, discounts, values, next_values = convert_rollout(rollout)
    ratios = log_ratios(rollout)

    def compute_advantages(v, v_next, r, d, rho):
        return rlax.vtrace_td_error_and_advantage(v, v_next, r, d, rho, 1.0, 1.0, rho_bar_pg).pg_advantage

    want = per_row(compute_advantages, values, next_values, rewards, discounts, ratios.exp().numpy())
    arguments = {"log_ratios": ratios, "rho_bar_pg": rho_bar_pg, **make_arguments(rollout, backend)}
    got = compute_vtrace(rollout.rewards, rollout.values, **arguments)
    assert_close(got.advantages, want, rtol=RTOL)


@LAMBDAS
@pytest.mark.parametrize("c_bar", [1.0, 0.4])
def test_retrace(rollout, backend, lambda_, c_bar):
    rewards, discounts, q_values, _ = convert_rollout(rollout)
    expected, ratios = rollout.bootstrap_values, log_ratios(rollout)
    traces = lambda_ * np.minimum(c_bar, ratios.exp().numpy())
    want = per_row(
        rlax.general_off_policy_returns_from_q_and_v,
        *(q_values[:, 1:], expected.numpy(), rewards, discounts, traces[:, 1:]),
    )
    arguments = {**make_arguments(rollout, backend), "lambda_": lambda_, "c_bar": c_bar, "log_ratios": ratios}
    del arguments["bootstrap_values"]
    got = compute_retrace(rollout.rewards, rollout.values, expected_next_q=expected, **arguments)
    assert_close(got.targets, want, rtol=RTOL)


def test_retrace_of_action_values(rollout, backend):
    """rlax's own retrace takes what was recorded: action values, probabilities, actions. Without truncations."""
    rollout = rollout._replace(truncated=torch.zeros_like(rollout.truncated))
    shape, rng = (5, 64), np.random.default_rng(0)
    q_values = rng.standard_normal((5, 65, 4))
    policy, behaviour = rng.dirichlet(np.ones(4), (2, 5, 65))
    actions = rng.integers(0, 4, (5, 65))
    rewards, discounts, *_ = convert_rollout(rollout)
    taken = np.take_along_axis
    mu = taken(behaviour, actions[..., None], 2)[..., 0]

    def compute_errors(q, a, r, d, pi, mu):
        return rlax.retrace(q[:-1], q[1:], a[:-1], a[1:], r, d, pi[1:], mu[1:], 0.9, eps=0.0)

    want = per_row(compute_errors, q_values, actions, rewards, discounts, policy, mu)
    q_taken, pi_taken = (taken(x, actions[..., None], 2)[:, :-1, 0] for x in (q_values, policy))
    got = compute_retrace(
        *(rollout.rewards, torch.as_tensor(q_taken), rollout.terminated),
        log_ratios=torch.as_tensor(np.log(pi_taken / mu[:, :-1])),
        next_action_probs=torch.as_tensor(policy[:, 1:]),
        next_q_values=torch.as_tensor(q_values[:, 1:]),
        **{"gamma": GAMMA, "lambda_": 0.9, "backend": backend},
    )
    assert got.targets.shape == shape
    assert_close(got.targets - torch.as_tensor(q_taken), want, rtol=RTOL)
