"""The oracles against each other, and the paper's own seeding of the carry."""

import itertools

import cases
import numpy as np
import oracles
import pytest
from cases import get_name, random_case, with_form, with_log_probs

TWICE = pytest.mark.parametrize("estimator", [x for x in cases.BACKWARD if x.by_trajectory], ids=get_name)
FLAG_PAIRS = [(0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.3, 0.3), (1.0, 1.0)]
LENGTHS = (0, 1, 2, 5, 17)


def assert_oracles_agree(case):
    one, other = case.expected(), case.expected(case.estimator.by_trajectory)
    for x, y in zip(one, other, strict=False):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def draw_cases(estimator, num_steps, **changes):
    """Every form of the continuation, discounts per step, ratios clipped in different places."""
    case = random_case(estimator, 5, num_steps, seed=num_steps, **changes)
    if estimator in cases.OFF_POLICY:
        case = case.replace(rho_bar=1.5, c_bar=0.8, lambda_=0.9)
    for form in cases.FORMS[estimator.name]:
        if form != "sparse":
            yield with_form(case, form)
    rng = np.random.default_rng(0)
    yield case.replace(gamma=np.where(rng.random(case.shape) < 0.2, 0.0, rng.uniform(0, 1.2, case.shape)))
    if estimator in cases.OFF_POLICY:
        yield with_log_probs(case.replace(rho_bar_pg=0.5 if estimator is cases.VTRACE else None))
    yield from (case.replace(lambda_=lambda_) for lambda_ in (0, 0.5, 1))


@TWICE
@pytest.mark.parametrize(("term", "trunc"), FLAG_PAIRS)
@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_backward(estimator, term, trunc, mask_mode):
    for num_steps, valid in itertools.product(LENGTHS, [1.0, 0.7, 0.0]):
        for case in draw_cases(estimator, num_steps, term=term, trunc=trunc, valid=valid, mask_mode=mask_mode):
            assert_oracles_agree(case)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@TWICE
def test_every_pattern_of_a_few_steps(estimator, mask_mode):
    """Four steps of GAE, whose table finds the boundaries itself; three of the others, which share that."""
    cells = np.array(list(itertools.product(range(8), repeat=4 if estimator is cases.GAE else 3)))
    flags = {"terminated": cells & 1 > 0, "truncated": cells & 2 > 0, "mask": cells & 4 > 0}
    assert_oracles_agree(random_case(estimator, *cells.shape, mask_mode=mask_mode, **flags))


def test_integers_stay_integers():
    x = np.array([[2**62, 1, -3, 2**60]])
    (sums, (value, _)) = oracles.episodic_prefix_sum(x, np.array([[False, False, True, False]]))
    assert sums.tolist() == [[2**62, 2**62 + 1, 2**62 - 2, 2**60]] and value.tolist() == [2**60]


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("lambda_", [0.0, 0.9, 1.0])
def test_identities(lambda_, mask_mode):
    """On-policy V-Trace, and Retrace where Q is V, are the lambda-return: GAE's advantage plus the value.

    GAE's table finds the boundaries in a way of its own. With lambda = 0 it is the one-step return, with lambda = 1 the
    discounted return.
    """
    rng = np.random.default_rng(0)
    per_step = np.where(rng.random((5, 17)) < 0.2, 0.0, rng.uniform(0, 1.2, (5, 17)))
    for (term, trunc), gamma in itertools.product(FLAG_PAIRS, (0.97, per_step)):
        ends = {"term": term, "trunc": trunc, "valid": 0.7, "mask_mode": mask_mode}
        case = random_case(cases.LAMBDA, 5, 17, lambda_=lambda_, gamma=gamma, **ends)
        returns, args = case.expected()[0], {**case.args, "bootstrap": case.dense}
        del args["bootstrap_values"]
        ratios = {"log_ratios": np.zeros(case.shape)}
        same = [oracles.gae(**args)[1], oracles.gae_by_trajectory(**args)[1], oracles.vtrace(**args, **ratios)[0]]
        if lambda_ == 1:
            plain = {name: x for name, x in args.items() if name not in ("values", "lambda_")}
            same.append(oracles.discounted_returns(**plain)[0])
        for other in same:
            np.testing.assert_allclose(returns, other, rtol=1e-12, atol=1e-12)
        values = with_form(random_case(cases.LAMBDA, 5, 17, term=term, trunc=trunc, lambda_=lambda_), "next_values")
        q_values, chain = np.roll(values["next_values"], 1, axis=1), {**values.args, **ratios}
        chain["expected_next_q"] = chain.pop("next_values")
        retrace = oracles.retrace(q_values=q_values, **chain)[0]
        np.testing.assert_allclose(values.expected()[0], retrace, rtol=1e-12, atol=1e-12)


def test_the_bootstrap_value_enters_once():
    """The paper's table with V(s_T) in the last delta and carry 0: not V(s_T) as the carry as well."""
    case = random_case(cases.GAE, 1, 4, term=0, trunc=0, bootstrap_values=np.array([7.0]))
    r, v, g, d = case["rewards"][0], np.append(case["values"][0], 7.0), 0.99, 0.99 * 0.95
    deltas = r + g * v[1:] - v[:-1]
    assert case.expected()[0][0] == pytest.approx([deltas[t:] @ d ** np.arange(4 - t) for t in range(4)])


def test_number_trajectories():
    flags = {"terminated": np.array([[0, 1, 0, 0, 0]]), "truncated": np.array([[0, 0, 0, 1, 0]])}
    end, hole = np.array([[1, 1, 1, 1, 0]]), np.array([[1, 1, 1, 0, 1]])
    assert oracles.number_trajectories((1, 5), **flags).tolist() == [[0, 0, 1, 1, 2]]
    assert oracles.number_trajectories((1, 5), **flags, mask=end).tolist() == [[0, 0, 1, 1, -1]]
    assert oracles.number_trajectories((1, 5), **flags, mask=hole).tolist() == [[0, 0, 1, -1, 1]]
    assert oracles.number_trajectories((1, 5), **flags, mask=hole, mask_mode="reset").tolist() == [[0, 0, 1, -1, 2]]
