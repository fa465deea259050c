"""The oracles against each other."""

import itertools

import cases
import numpy as np
import oracles
import pytest
from cases import random_case, with_form

FLAG_PAIRS = [(0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.3, 0.3), (1.0, 1.0)]


def test_integers_stay_integers():
    x = np.array([[2**62, 1, -3, 2**60]])
    (sums, (value, _)) = oracles.episodic_prefix_sum(x, np.array([[False, False, True, False]]))
    assert sums.tolist() == [[2**62, 2**62 + 1, 2**62 - 2, 2**60]] and value.tolist() == [2**60]


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("lambda_", [0.0, 0.9, 1.0])
def test_identities(lambda_, mask_mode):
    """On-policy V-Trace, and Retrace where Q is V, are the lambda-return: GAE's advantage plus the value.

    GAE's table finds the boundaries in a way of its own.
    """
    rng = np.random.default_rng(0)
    per_step = np.where(rng.random((5, 17)) < 0.2, 0.0, rng.uniform(0, 1.2, (5, 17)))
    for (term, trunc), gamma in itertools.product(FLAG_PAIRS, (0.97, per_step)):
        ends = {"term": term, "trunc": trunc, "valid": 0.7, "mask_mode": mask_mode}
        case = random_case(cases.LAMBDA, 5, 17, lambda_=lambda_, gamma=gamma, **ends)
        returns, args = case.expected()[0], {**case.args, "bootstrap": case.dense}
        del args["bootstrap_values"]
        ratios = {"log_ratios": np.zeros(case.shape)}
        for other in (oracles.gae(**args)[1], oracles.vtrace(**args, **ratios)[0]):
            np.testing.assert_allclose(returns, other, rtol=1e-12, atol=1e-12)
        values = with_form(random_case(cases.LAMBDA, 5, 17, term=term, trunc=trunc, lambda_=lambda_), "next_values")
        q_values, chain = np.roll(values["next_values"], 1, axis=1), {**values.args, **ratios}
        chain["expected_next_q"] = chain.pop("next_values")
        retrace = oracles.retrace(q_values=q_values, **chain)[0]
        np.testing.assert_allclose(values.expected()[0], retrace, rtol=1e-12, atol=1e-12)


def test_number_trajectories():
    flags = {"terminated": np.array([[0, 1, 0, 0, 0]]), "truncated": np.array([[0, 0, 0, 1, 0]])}
    end, hole = np.array([[1, 1, 1, 1, 0]]), np.array([[1, 1, 1, 0, 1]])
    assert oracles.number_trajectories((1, 5), **flags).tolist() == [[0, 0, 1, 1, 2]]
    assert oracles.number_trajectories((1, 5), **flags, mask=end).tolist() == [[0, 0, 1, 1, -1]]
    assert oracles.number_trajectories((1, 5), **flags, mask=hole).tolist() == [[0, 0, 1, -1, 1]]
    assert oracles.number_trajectories((1, 5), **flags, mask=hole, mask_mode="reset").tolist() == [[0, 0, 1, -1, 2]]
