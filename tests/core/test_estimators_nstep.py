"""n-step returns: known answers, a second oracle straight from the definition, and what all estimators have."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from cases import (
    FORMS,
    NSTEP,
    Call,
    Case,
    How,
    Sparse,
    assert_gradients,
    check_case,
    classify_case,
    random_case,
    run_case,
    skip_repeated_tracing,
    with_form,
)
from oracles import CUT
from test_estimators_packed import check_packed
from test_estimators_transforms import check_one_compilation
from torch.func import vmap

from rl_triton_core import compute_nstep_returns
from rl_triton_core.testing import assert_close, random_rollout

NAN, INF = np.nan, np.inf
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 13, 100)
MASKS = pytest.mark.parametrize(("valid", "mask_mode"), [(1.0, "skip"), (0.7, "skip"), (0.7, "reset")])


def make_case(*shape, n=3, **changes):
    """With both flags, steps that have both, and discounts of some steps that are 0."""
    gamma = np.random.default_rng(1).uniform(0.2, 1.2, shape)
    gamma[0, 1:2] = 0.0
    return random_case(NSTEP, *shape, **{"term": 0.12, "trunc": 0.12, "n": n, "gamma": gamma, **changes})


def sum_rewards(
    rewards, values, bootstrap, terminated=None, truncated=None, *, gamma, n, mask=None, mask_mode="skip", **_
):
    """Reward by reward, for every step of every row by itself: another formulation than that of the self-test."""
    flags = [np.zeros(rewards.shape, bool) if x is None else x for x in (terminated, truncated)]
    (terminated, truncated), gamma = flags, np.broadcast_to(gamma, rewards.shape)
    returns = np.zeros(rewards.shape)
    for row, valid in enumerate(np.ones(rewards.shape, bool) if mask is None else mask):
        steps = np.flatnonzero(valid)
        for start, first in enumerate(steps):
            total, discount = 0.0, 1.0
            for k, t in enumerate(steps[start : start + n]):
                total += discount * rewards[row, t]
                discount *= gamma[row, t]
                before_hole = mask_mode == "reset" and t + 1 < len(valid) and not valid[t + 1]
                if terminated[row, t] or discount == 0 or (before_hole and not truncated[row, t]):
                    break
                if truncated[row, t] or t == steps[-1]:
                    total += discount * bootstrap[row, t]
                    break
                if k == n - 1:
                    total += discount * values[row, steps[start + n]]
            returns[row, first] = total
    return (returns,)


@MASKS
def test_the_two_oracles(valid, mask_mode):
    for n in LENGTHS:
        case = make_case(4, 13, n=n, valid=valid, mask_mode=mask_mode)
        assert_close(case.expected(sum_rewards)[0], case.expected()[0])


# --- known answers ----------------------------------------------------------------------------------------------------

MIDDLE = np.arange(4)[None] == 1


@pytest.mark.parametrize(
    ("n", "changes", "expected"),
    [
        (1, {}, [21, 31, 41, 51]),
        (2, {}, [32, 42, 52, 51]),
        (3, {}, [43, 53, 52, 51]),
        (4, {}, [54, 53, 52, 51]),
        (9, {}, [54, 53, 52, 51]),
        (2, {"gamma": 0.5}, [9, 11.5, 14, 26]),
        (2, {"terminated": MIDDLE}, [2, 1, 52, 51]),
        (2, {"truncated": MIDDLE}, [52, 51, 52, 51]),
        (3, {"terminated": MIDDLE, "truncated": MIDDLE}, [2, 1, 52, 51]),
        (2, {"mask": ~MIDDLE}, [42, 0, 52, 51]),
        (2, {"mask": ~MIDDLE, "mask_mode": "reset"}, [1, 0, 52, 51]),
        (2, {"gamma": np.array([[1.0, 0.0, 1.0, 1.0]])}, [2, 1, 52, 51]),
    ],
)
def test_known_answers(target, n, changes, expected):
    """Rewards 1, values 10 to 40, 50 behind the rollout."""
    args = {"rewards": np.ones((1, 4)), "values": np.array([[10.0, 20.0, 30.0, 40.0]])}
    case = Case(NSTEP, {**args, "bootstrap_values": 50.0, "gamma": 1.0, "n": n, **changes})
    assert run_case(case, target)[0].tolist() == [expected]


# --- against the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("time_dim", [-1, 0])
@pytest.mark.parametrize("n", LENGTHS)
@MASKS
def test_equals_the_oracle(target, n, valid, mask_mode, time_dim):
    case = make_case(4, 13, n=n, valid=valid, mask_mode=mask_mode)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        check_case(case, target, How(dtype=dtype, time_dim=time_dim, out_layout="transposed"))


@pytest.mark.parametrize("n", [1, 3, 20])
@MASKS
def test_packed_rows(target, n, valid, mask_mode):
    check_packed(make_case(1, 23, n=n, valid=valid, mask_mode=mask_mode), (0, 7, 1, 0, 12, 3), target)


def test_forms_of_the_continuation(target):
    case = make_case(4, 13)
    for form in FORMS["nstep"]:
        if form != "sparse":
            check_case(with_form(case, form), target)
    env, time = np.nonzero(classify_case(case)[0] == CUT)
    value = case["bootstrap_values"][env, time].tolist()
    check_case(case.replace(bootstrap_values=Sparse(env.tolist(), time.tolist(), value, np.arange(4.0))), target)


def test_empty(target):
    for shape in ((0, 0), (0, 5), (5, 0)):
        run_case(random_case(NSTEP, *shape, n=2), target)


# --- containment ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_bad_reaches_its_episode_and_n_steps_only(target, n, bad):
    """A cell of each input in a row of its own: what changes reads the cell, by the oracle."""
    places = list(itertools.product(("rewards", "values", "bootstrap_values"), range(8)))
    args = {name: np.ones((len(places), 8)) for name in ("rewards", "values", "bootstrap_values")}
    for i, (name, t) in enumerate(places):
        args[name][i, t] = bad
    flags = {name: np.tile(np.arange(8) == t, (len(places), 1)) for name, t in (("terminated", 2), ("truncated", 4))}
    case = Case(NSTEP, {**args, **flags, "gamma": 1.0, "n": n})
    for given in (case, case.replace(mask=np.tile(np.arange(8) != 6, (len(places), 1)))):
        (want,), (got,) = given.expected(sum_rewards), run_case(given, target)
        assert np.array_equal(np.isfinite(want), got.isfinite().numpy())


@pytest.mark.parametrize(("n", "gamma"), [(64, 0.95), (255, 0.99), (1000, 0.997)])
def test_powers_of_the_discount_in_float32(target, n, gamma):
    """Are rounded a few times, and not in proportion to n."""
    rewards, values = torch.zeros(1, 2 * n, device=target.device), torch.ones(1, 2 * n, device=target.device)
    got = compute_nstep_returns(rewards, values, n=n, gamma=gamma, bootstrap_values=1.0, backend=target.backend)
    exact = torch.tensor(gamma).double() ** n if target.backend != "reference" else torch.tensor(gamma**n)
    assert_close(got[0, :n].cpu().double(), exact.double().expand(n), rtol=4 * 2**-24)


def test_products_that_overflow_behind_a_reset(target):
    step = np.arange(300)[None]
    args = {"rewards": (step == 299) * 1.0, "values": np.zeros((1, 300)), "terminated": step == 280}
    case = Case(NSTEP, {**args, "gamma": 50.0, "n": 299, "bootstrap_values": 0.0})
    assert not run_case(case, target)[0][0, :281].any()


# --- gradients, compilation -------------------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("n", [1, 3, 9])
@MASKS
def test_gradients(float64_target, n, valid, mask_mode):
    case = make_case(2, 6, n=n, valid=valid, mask_mode=mask_mode)
    call = Call(case.replace(gamma=case["gamma"] + 0.1), how=How(dtype=torch.float64))
    names = ("rewards", "values", "bootstrap_values", "gamma")
    leaves = [call.kwargs[name].requires_grad_() for name in names]

    def call_estimator(*tensors):
        return call(float64_target.backend, **dict(zip(names, tensors, strict=True)))

    assert_gradients(call_estimator, leaves, float64_target.backend)
    assert torch.autograd.gradcheck(call_estimator, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call_estimator, leaves)


def test_vmap(target):
    call = Call(make_case(4, 13), target.device)
    rewards = call.kwargs["rewards"]
    batch = torch.stack([rewards, 2 * rewards, -rewards])

    def call_estimator(rewards):
        return call(target.backend, rewards=rewards)[0]

    torch.testing.assert_close(vmap(call_estimator)(batch), torch.stack([call_estimator(x) for x in batch]))


def test_compiles_once(target):
    skip_repeated_tracing(target, False)
    calls = [
        {**random_rollout(*shape, seed=i, device=target.device)._asdict(), "gamma": 0.9 + 0.01 * i}
        for i, shape in enumerate(((3, 5), (4, 7), (6, 9)))
    ]
    check_one_compilation(partial(compute_nstep_returns, n=5, backend=target.backend), calls, dynamic=True)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"n": 0}, ValueError, "n: got 0, expected at least 1"),
        ({"n": 2.0}, TypeError, "n: got 2.0, expected an int"),
        ({"n": True}, TypeError, "n: got True, expected an int"),
        ({"bootstrap_values": None}, ValueError, "bootstrap_values: got None"),
        ({"values": None}, ValueError, "values: got None"),
        ({"next_values": torch.zeros(4, 13)}, ValueError, "values: got both"),
        ({"values": torch.zeros(2, 3)}, ValueError, "values: got shape"),
        ({"gamma": -1.0}, ValueError, "gamma: got -1.0"),
        ({"mask_mode": "drop"}, ValueError, "mask_mode: got"),
        ({"backend": "numpy"}, ValueError, "backend: got"),
        ({"out": torch.zeros(3)}, ValueError, "out"),
    ],
)
def test_errors_name_the_argument(changes, error, message):
    with pytest.raises(error, match=f"^{message}"):
        compute_nstep_returns(**{**random_rollout(4, 13)._asdict(), "n": 3, **changes})


def test_n_has_no_default():
    with pytest.raises(TypeError, match="'n'"):
        compute_nstep_returns(**random_rollout(4, 13)._asdict())
