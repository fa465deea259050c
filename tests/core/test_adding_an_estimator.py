"""The example of docs/adding-an-estimator.md: an estimator from outside the package has all that the others have."""

import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import Call, Case, Estimator, How, assert_gradients, check_case, random_case, run_case
from oracles import GOES_ON, cast, classify_steps, discount_value, iterate_backward
from test_estimators_containment import assert_contained, make_pattern_case

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "examples" / "upgo.py").exists():
    pytest.skip("only the package is here", allow_module_level=True)
upgo = importlib.import_module("upgo")

SHAPE = (3, 17)
MASKS = pytest.mark.parametrize(("valid", "mask_mode"), [(1.0, "skip"), (0.8, "skip"), (0.8, "reset")])


def upgo_table(rewards, values, *, gamma, bootstrap, dtype=np.float64, **ends):
    """(A, G) from the published equation, one row and one step at a time."""
    kind, after = classify_steps(rewards.shape, gamma=gamma, **ends)
    rewards, values, bootstrap, gamma = cast(dtype, rewards, values, bootstrap, gamma)
    gamma = np.broadcast_to(gamma, rewards.shape)
    advantages, returns, one_step = np.zeros((3, *rewards.shape), dtype)
    for n, t, leads_to, then in iterate_backward(kind, after):
        value = target = bootstrap[n, t]
        if leads_to == GOES_ON:
            value = values[n, then]
            target = returns[n, then] if one_step[n, then] >= value else value
        one_step[n, t] = rewards[n, t] + discount_value(gamma[n, t], value, leads_to)
        returns[n, t] = rewards[n, t] + discount_value(gamma[n, t], target, leads_to)
        advantages[n, t] = returns[n, t] - values[n, t]
    return advantages, returns


UPGO = Estimator("upgo", upgo.compute_upgo, upgo_table, ("rewards", "values"), ("advantages", "returns"))


def make_case(*shape, gamma=0.9, **changes):
    """With both flags, steps that have both, and a dense bootstrap."""
    case = random_case(UPGO, *shape, term=0.15, trunc=0.15, gamma=gamma, **changes)
    return case.replace(bootstrap_values=np.random.default_rng(1).standard_normal(shape))


def make_discounts(shape):
    gamma = np.random.default_rng(0).uniform(0.1, 1.1, shape)
    gamma[0, 2] = 0.0
    return gamma


MIDDLE = np.array([[False, True, False]])


@pytest.mark.parametrize(
    ("rewards", "changes", "expected"),
    [
        ([1, -2, 3], {}, [1, 1, 3]),
        ([1, 2, 3], {}, [6, 5, 3]),
        ([1, 0, 3], {}, [4, 3, 3]),  # exactly as expected: goes on
        ([1, 2, -3], {}, [3, 2, -3]),
        ([1, -2, 3], {"bootstrap_values": 10.0}, [1, 11, 13]),
        ([1, -2, 3], {"gamma": 0.5}, [1, -0.5, 3]),
        ([1, 2, 3], {"terminated": MIDDLE}, [3, 2, 3]),
        ([1, -2, 3], {"truncated": MIDDLE, "bootstrap_values": 10.0}, [9, 8, 13]),
        ([1, -2, 3], {"terminated": MIDDLE, "truncated": MIDDLE, "bootstrap_values": 10.0}, [1, -2, 13]),
        ([1, -2, 3], {"mask": ~MIDDLE}, [4, 0, 3]),
        ([1, -2, 3], {"mask": ~MIDDLE, "mask_mode": "reset"}, [1, 0, 3]),
    ],
)
def test_known_answers(target, rewards, changes, expected):
    args = {"rewards": np.array([rewards], float), "values": np.zeros((1, 3)), "bootstrap_values": 0.0, "gamma": 1.0}
    for result in run_case(Case(UPGO, {**args, **changes}), target):
        assert result.tolist() == [expected]


def test_docstring_example_runs():
    result = doctest.testmod(upgo)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("time_dim", [-1, 0])
@MASKS
def test_equals_the_oracle(target, valid, mask_mode, time_dim):
    for gamma, dtype in ((0.9, torch.float32), (make_discounts(SHAPE), torch.bfloat16), (0.9, torch.float16)):
        case = make_case(*SHAPE, gamma=gamma, valid=valid, mask_mode=mask_mode)
        check_case(case, target, How(time_dim=time_dim, dtype=dtype))


@MASKS
def test_gradients(float64_target, valid, mask_mode):
    case = make_case(3, 6, gamma=0.05 + make_discounts((3, 6)), valid=valid, mask_mode=mask_mode)
    call = Call(case, how=How(dtype=torch.float64))
    names = ("rewards", "values", "bootstrap_values", "gamma")

    def call_upgo(*tensors):
        return call(float64_target.backend, **dict(zip(names, tensors, strict=True)))

    assert_gradients(call_upgo, [call.kwargs[name].requires_grad_() for name in names], float64_target.backend)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("cells", [[0, 0, 1, 0, 0, 0], [0, 5, 2, 6, 0, 7]])
def test_nan_stays_in_its_episode(target, cells, mask_mode):
    """All steps do better than expected, so that nothing but the NaN itself could keep it from the steps before."""
    case = make_pattern_case(UPGO, [cells], mask_mode=mask_mode, gamma=np.ones((1, 6)))
    ones = np.ones((1, 6))
    case = case.replace(rewards=ones, values=0 * ones, bootstrap_values=ones)
    assert_contained(case, target, ("rewards", "values", "bootstrap_values", "gamma"), [np.nan])
