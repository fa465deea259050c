"""The two oracles of each estimator against each other, and against literal numbers."""

import itertools

import numpy as np
import oracles
import oracles_estimators as tables
import pytest
from estimator_cases import (
    BACKWARD,
    DISCOUNTED,
    FORMS,
    FORWARD,
    LAMBDA,
    LINEAR,
    RETRACE,
    TRACES,
    VTRACE,
    by_name,
    random_case,
    with_form,
    with_log_probs,
)

FLAG_PAIRS = [(0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.3, 0.3), (1.0, 1.0)]
LENGTHS = (0, 1, 2, 5, 17)


def agree(case):
    one, other = case.expected(), case.expected(case.estimator.by_trajectory)
    for x, y in zip(one, other, strict=False):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def cases_of(estimator, num_steps, **changes):
    """Every form of the continuation, discounts per step, ratios clipped in different places."""
    case = random_case(estimator, 5, num_steps, seed=num_steps, **changes)
    if estimator in (VTRACE, RETRACE):
        case = case.replace(rho_bar=1.5, c_bar=0.8, lambda_=0.9)
    for form in FORMS[estimator.name]:
        if form != "sparse":
            yield with_form(case, form)
    rng = np.random.default_rng(0)
    yield case.replace(gamma=np.where(rng.random(case.shape) < 0.2, 0.0, rng.uniform(0, 1.2, case.shape)))
    if estimator in (VTRACE, RETRACE):
        yield with_log_probs(case.replace(rho_bar_pg=0.5 if estimator is VTRACE else None))
    if estimator is not DISCOUNTED:
        yield from (case.replace(lambda_=lambda_) for lambda_ in (0, 0.5, 1))


@pytest.mark.parametrize("estimator", BACKWARD, ids=by_name)
@pytest.mark.parametrize(("term", "trunc"), FLAG_PAIRS)
@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_backward(estimator, term, trunc, mask_mode):
    for num_steps, valid in itertools.product(LENGTHS, [1.0, 0.7, 0.0]):
        for case in cases_of(estimator, num_steps, term=term, trunc=trunc, valid=valid, mask_mode=mask_mode):
            agree(case)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("estimator", BACKWARD, ids=by_name)
def test_every_pattern_of_three_steps(estimator, mask_mode):
    cells = np.array(list(itertools.product(range(8), repeat=3)))
    flags = {"terminated": cells & 1 > 0, "truncated": cells & 2 > 0, "mask": cells & 4 > 0}
    agree(random_case(estimator, len(cells), 3, mask_mode=mask_mode, **flags))


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("estimator", FORWARD, ids=by_name)
def test_forward(estimator, mask_mode, with_state):
    rng = np.random.default_rng(0)
    for num_steps, valid, term in itertools.product(LENGTHS, [1.0, 0.7, 0.0], [0.0, 0.3, 1.0]):
        for features in ((), (2,)):
            case = random_case(estimator, 5, num_steps, term=term, valid=valid, features=features, mask_mode=mask_mode)
            if with_state:
                case = case.replace(state=(rng.standard_normal((5, *features)), rng.random(5) < 0.5))
            if estimator is TRACES:
                agree(case.replace(decay=0.7))
                agree(case.replace(decay=np.where(rng.random(case["x"].shape) < 0.2, 0, rng.random(case["x"].shape))))
            else:
                agree(case)
                agree(case.replace(boundary="starts_at"))


def test_integers_stay_integers():
    x = np.array([[2**62, 1, -3, 2**60]])
    (sums, (value, _)) = tables.episodic_prefix_sum(x, np.array([[False, False, True, False]]))
    assert sums.tolist() == [[2**62, 2**62 + 1, 2**62 - 2, 2**60]] and value.tolist() == [2**60]


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("features", [(), (2,)])
def test_linear_recurrence(reverse, features):
    for num_steps in LENGTHS:
        case = random_case(LINEAR, 4, num_steps, features=features, reverse=reverse)
        agree(case)
        agree(case.replace(initial=np.ones((4, *features))))


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_boundaries_are_those_of_gae(mask_mode):
    """The lambda-return is GAE's advantage plus the value; GAE's oracles are other people's loops."""
    for term, trunc in FLAG_PAIRS:
        case = random_case(LAMBDA, 5, 17, term=term, trunc=trunc, valid=0.7, mask_mode=mask_mode)
        args = {**case.args, "bootstrap": case.dense}
        del args["bootstrap_values"]
        for oracle in (oracles.gae, oracles.gae_by_episode):
            np.testing.assert_allclose(case.expected()[0], oracle(**args)[1], rtol=1e-12, atol=1e-12)


def test_trajectory_ids():
    for mask_mode in ("skip", "reset"):
        case = random_case(DISCOUNTED, 9, 21, term=0.2, trunc=0.2, valid=0.7, mask_mode=mask_mode)
        args = {name: case[name] for name in ("terminated", "truncated", "mask", "mask_mode")}
        assert (tables.trajectory_ids(case.shape, **args) == oracles.episode_ids(**args)).all()


def test_what_follows():
    masked, terminal, cut, goes_on = range(4)
    flags = {"terminated": np.array([[0, 1, 0, 0, 0]]), "truncated": np.array([[0, 0, 1, 0, 0]])}
    kind, after = tables.what_follows((1, 5), **flags)
    assert kind.tolist() == [[goes_on, terminal, cut, goes_on, cut]] and after.tolist() == [[1, -1, -1, 4, -1]]
    mask = np.array([[1, 0, 1, 1, 0]])
    kind, after = tables.what_follows((1, 5), **flags, mask=mask)
    assert kind.tolist() == [[goes_on, masked, cut, cut, masked]] and after[0, 0] == 2
    kind, _ = tables.what_follows((1, 5), **flags, mask=mask, mask_mode="reset")
    assert kind.tolist() == [[terminal, masked, cut, terminal, masked]]
    kind, _ = tables.what_follows((1, 5), gamma=np.array([[1.0, 0.0, 1.0, 1.0, 0.0]]))
    assert kind.tolist() == [[goes_on, terminal, goes_on, goes_on, terminal]]
