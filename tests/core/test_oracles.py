"""The oracles against each other, literal numbers and the paper's own seeding of the carry."""

import numpy as np
import oracles
import pytest
from cases import (
    GAE,
    LAMBDA,
    random_case,
    with_form,
)

FLAG_PAIRS = [(0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.3, 0.3), (1.0, 1.0)]


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
    for term, trunc in FLAG_PAIRS:
        case = random_case(
            LAMBDA, 5, 17, term=term, trunc=trunc, valid=0.7, mask_mode=mask_mode, lambda_=lambda_, gamma=0.97
        )
        returns, args = case.expected()[0], {**case.args, "bootstrap": case.dense}
        del args["bootstrap_values"]
        ratios = {"log_ratios": np.zeros(case.shape)}
        same = [oracles.gae(**args)[1], oracles.vtrace(**args, **ratios)[0]]
        if lambda_ == 0:
            same.append(oracles.nstep_returns(**{x: y for x, y in args.items() if x != "lambda_"}, n=1)[0])
        if lambda_ == 1:
            plain = {name: x for name, x in args.items() if name not in ("values", "lambda_")}
            same.append(oracles.discounted_returns(**plain)[0])
        for other in same:
            np.testing.assert_allclose(returns, other, rtol=1e-12, atol=1e-12)
        values = with_form(random_case(LAMBDA, 5, 17, term=term, trunc=trunc, lambda_=lambda_), "next_values")
        q_values, chain = np.roll(values["next_values"], 1, axis=1), {**values.args, **ratios}
        chain["expected_next_q"] = chain.pop("next_values")
        retrace = oracles.retrace(q_values=q_values, **chain)[0]
        np.testing.assert_allclose(values.expected()[0], retrace, rtol=1e-12, atol=1e-12)


def test_the_bootstrap_value_enters_once():
    """The paper's table with V(s_T) in the last delta and carry 0: not V(s_T) as the carry as well."""
    case = random_case(GAE, 1, 4, term=0, trunc=0, bootstrap_values=np.array([7.0]))
    r, v, g, d = case["rewards"][0], np.append(case["values"][0], 7.0), 0.99, 0.99 * 0.95
    deltas = r + g * v[1:] - v[:-1]
    assert case.expected()[0][0] == pytest.approx([deltas[t:] @ d ** np.arange(4 - t) for t in range(4)])


def test_dense_bootstrap():
    nan, mask = np.nan, np.array([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    edge = np.array([1.0, 2.0, 3.0])
    np.testing.assert_equal(
        oracles.dense_bootstrap(edge, (3, 3), mask), [[nan, 1, nan], [nan, nan, nan], [nan, nan, 3]]
    )
    np.testing.assert_equal(oracles.dense_bootstrap(edge, (3, 3), mask, "reset")[:, 2], edge)
    dense = oracles.dense_bootstrap(5.0, (3, 3), entries=[(0, 0, 8.0), (2, 2, 9.0)])
    assert (dense[0, 0], dense[2, 2], dense[1, 1]) == (8, 9, 5)


def test_number_trajectories():
    flags = {"terminated": np.array([[0, 1, 0, 0, 0]]), "truncated": np.array([[0, 0, 0, 1, 0]])}
    end, hole = np.array([[1, 1, 1, 1, 0]]), np.array([[1, 1, 1, 0, 1]])
    assert oracles.number_trajectories((1, 5), **flags).tolist() == [[0, 0, 1, 1, 2]]
    assert oracles.number_trajectories((1, 5), **flags, mask=end).tolist() == [[0, 0, 1, 1, -1]]
    assert oracles.number_trajectories((1, 5), **flags, mask=hole).tolist() == [[0, 0, 1, -1, 1]]
    assert oracles.number_trajectories((1, 5), **flags, mask=hole, mask_mode="reset").tolist() == [[0, 0, 1, -1, 2]]


def test_classify_steps():
    masked, terminal, cut, goes_on = range(4)
    flags = {"terminated": np.array([[0, 1, 0, 0, 0]]), "truncated": np.array([[0, 0, 1, 0, 0]])}
    kind, after = oracles.classify_steps((1, 5), **flags)
    assert kind.tolist() == [[goes_on, terminal, cut, goes_on, cut]] and after.tolist() == [[1, -1, -1, 4, -1]]
    mask = np.array([[1, 0, 1, 1, 0]])
    kind, after = oracles.classify_steps((1, 5), **flags, mask=mask)
    assert kind.tolist() == [[goes_on, masked, cut, cut, masked]] and after[0, 0] == 2
    kind, _ = oracles.classify_steps((1, 5), **flags, mask=mask, mask_mode="reset")
    assert kind.tolist() == [[terminal, masked, cut, terminal, masked]]
    kind, _ = oracles.classify_steps((1, 5), gamma=np.array([[1.0, 0.0, 1.0, 1.0, 0.0]]))
    assert kind.tolist() == [[goes_on, terminal, goes_on, goes_on, terminal]]
