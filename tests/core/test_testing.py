"""The tools that other tests lean on must themselves be able to fail."""

import numpy as np
import pytest
import torch

from rl_triton_core import compute_gae
from rl_triton_core.testing import Rollout, assert_close, random_rollout, relative_error


def test_a_rollout_is_ready_for_use():
    rollout = random_rollout(3, 5, dtype=torch.bfloat16, time_dim=0)
    assert isinstance(rollout, Rollout)
    assert all(x.shape == (5, 3) and x.is_contiguous() for x in rollout)
    assert [x.dtype for x in rollout] == [torch.bfloat16] * 2 + [torch.bool] * 2 + [torch.bfloat16]
    assert compute_gae(**rollout._asdict(), time_dim=0).advantages.shape == (5, 3)


def test_a_seed_is_a_rollout_whatever_its_layout():
    state = torch.get_rng_state()
    one, other = random_rollout(4, 6, seed=3), random_rollout(4, 6, seed=3, time_dim=-2)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(x, y.t()) for x, y in zip(one, other, strict=True))
    assert not torch.equal(one.rewards, random_rollout(4, 6, seed=4).rewards)
    assert len({x.double().sum().item() for x in (one.rewards, one.values, one.bootstrap_values)}) == 3


def test_the_probabilities_of_the_flags():
    never = random_rollout(20, 50, terminated_prob=0, truncated_prob=1)
    assert not never.terminated.any() and never.truncated.all()
    assert 0.4 < random_rollout(20, 500, terminated_prob=0.5).terminated.double().mean() < 0.6


def test_an_unknown_time_dim():
    with pytest.raises(ValueError, match="time_dim: got 2"):
        random_rollout(1, 1, time_dim=2)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_never_passes(number):
    x = torch.ones(2, 3)
    bad = x.clone()
    bad[1, 2] = number
    for actual, expected in ((bad, x), (x, bad), (bad, bad)):
        with pytest.raises(AssertionError, match="not finite"):
            assert_close(actual, expected, rtol=1e9)


def test_the_error_is_relative_to_the_norm():
    expected = np.array([[3.0, 4.0]])
    assert relative_error(torch.tensor([[3.0, 4.5]]), expected) == pytest.approx(0.1)
    assert_close(torch.tensor([[3.0, 4.5]]), expected, rtol=0.101)
    with pytest.raises(AssertionError, match=r"adv: relative error 1\.000e-01.*cell \(0, 1\): got 4\.5, expected 4"):
        assert_close(torch.tensor([[3.0, 4.5]]), expected, rtol=0.099, name="adv")


@pytest.mark.parametrize(("dtype", "step"), [(torch.float64, 1e-11), (torch.float32, 2e-6), (torch.bfloat16, 0.02)])
def test_the_default_tolerance_follows_the_dtype(dtype, step):
    x = torch.ones(5, dtype=dtype)
    assert_close(x, np.ones(5))
    with pytest.raises(AssertionError):
        assert_close(x * (1 + step), np.ones(5))


def test_zero_and_empty():
    assert_close(torch.zeros(3), torch.zeros(3))
    assert_close(torch.zeros(0, 3), np.zeros((0, 3)))
    assert relative_error(torch.full((3,), 1e-30), torch.zeros(3)) == np.inf
    with pytest.raises(AssertionError):
        assert_close(torch.full((3,), 1e-30), torch.zeros(3))


def test_shapes_must_be_equal():
    with pytest.raises(AssertionError, match=r"got shape \(1, 3\), expected \(3,\)"):
        assert_close(torch.zeros(1, 3), torch.zeros(3))
    with pytest.raises(ValueError, match="actual"):
        relative_error(torch.zeros(1, 3), torch.zeros(3))
