"""The two oracles against each other, against literal numbers, and against the paper's own seeding of the carry."""

import itertools

import numpy as np
import oracles
import pytest
from cases import Case, Sparse, random_case

FLAG_PAIRS = [(0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.3, 0.3), (1.0, 1.0)]


def agree(case):
    for one, other in zip(case.expected(), case.expected(oracles.gae_by_episode), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("term", "trunc"), FLAG_PAIRS)
@pytest.mark.parametrize("valid", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_the_oracles_agree(term, trunc, valid, mask_mode):
    rng = np.random.default_rng(1)
    for num_steps in (0, 1, 2, 5, 33):
        changes = {"term": term, "trunc": trunc, "valid": valid, "mask_mode": mask_mode}
        agree(random_case(6, num_steps, seed=num_steps, **changes))
        agree(random_case(6, num_steps, next_values=rng.standard_normal((6, num_steps)), **changes))
        gamma = np.where(rng.random((6, num_steps)) < 0.2, 0, rng.uniform(0, 1.2, (6, num_steps)))
        agree(random_case(6, num_steps, gamma=gamma, lambda_=1.0, **changes))


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_the_oracles_agree_on_every_pattern_of_four_steps(mask_mode):
    cells = np.array(list(itertools.product(range(8), repeat=4)))
    case = random_case(len(cells), 4, terminated=cells & 1 > 0, truncated=cells & 2 > 0, mask=cells & 4 > 0)
    agree(Case(**{**vars(case), "mask_mode": mask_mode}))


def test_literal_numbers():
    ones, zeros = np.ones((1, 3)), np.zeros((1, 3))
    middle = np.array([[False, True, False]])
    for oracle in (oracles.gae, oracles.gae_by_episode):
        plain = {"gamma": 1.0, "lambda_": 1.0, "bootstrap": zeros}
        assert oracle(ones, zeros, **plain)[0].tolist() == [[3, 2, 1]]
        assert oracle(ones, zeros, middle, **plain)[0].tolist() == [[2, 1, 1]]
        cut = {**plain, "bootstrap": np.array([[np.nan, 10, 0]])}
        assert oracle(ones, zeros, None, middle, **cut)[0].tolist() == [[12, 11, 1]]
        assert oracle(ones, zeros, middle, middle, **cut)[0].tolist() == [[2, 1, 1]]


def test_the_window_bootstrap_enters_once():
    """The paper's table with V(s_T) in the last delta and carry 0: not V(s_T) as the carry as well."""
    case = random_case(1, 4, term=0, trunc=0, bootstrap_values=np.array([7.0]))
    r, v, g, d = case.rewards[0], np.append(case.values[0], 7.0), 0.99, 0.99 * 0.95
    deltas = r + g * v[1:] - v[:-1]
    assert case.expected()[0][0] == pytest.approx([deltas[t:] @ d ** np.arange(4 - t) for t in range(4)])


def test_dense_bootstrap():
    nan, mask = np.nan, np.array([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    edge = np.array([1.0, 2.0, 3.0])
    np.testing.assert_equal(
        oracles.dense_bootstrap(edge, (3, 3), mask), [[nan, 1, nan], [nan, nan, nan], [nan, nan, 3]]
    )
    np.testing.assert_equal(oracles.dense_bootstrap(edge, (3, 3), mask, "reset")[:, 2], edge)
    form = Sparse([0, 2], [0, 2], [8.0, 9.0], 5.0)
    dense = oracles.dense_bootstrap(form.edge, (3, 3), None, "skip", zip(form.env, form.time, form.value, strict=True))
    assert (dense[0, 0], dense[2, 2], dense[1, 1]) == (8, 9, 5)


def test_episode_ids():
    term, trunc = np.array([[0, 1, 0, 0, 0]]), np.array([[0, 0, 0, 1, 0]])
    mask = np.array([[1, 1, 1, 1, 0]])
    assert oracles.episode_ids(term, trunc).tolist() == [[0, 0, 1, 1, 2]]
    assert oracles.episode_ids(term, trunc, mask).tolist() == [[0, 0, 1, 1, -1]]
    assert oracles.episode_ids(term, trunc, np.array([[1, 1, 1, 0, 1]])).tolist() == [[0, 0, 1, -1, 1]]
    assert oracles.episode_ids(term, trunc, np.array([[1, 1, 1, 0, 1]]), "reset").tolist() == [[0, 0, 1, -1, 2]]
