"""GAE by hand: literal numbers, every pattern of a few steps, and the identities of the estimators."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import Call, Case, How, Sparse, check, random_case, run, same_bits

from rl_triton_core import FinalValues, GAEOutput, compute_gae
from rl_triton_core.testing import assert_close

ONES, ZEROS = np.ones((1, 3)), np.zeros((1, 3))
MIDDLE = np.array([[False, True, False]])
LAST = np.array([[False, False, True]])
FIRST_MASKED = np.array([[False, True, True]])
MIDDLE_MASKED, LAST_MASKED = ~MIDDLE, ~LAST
NAN = np.nan


def literal(expected, **changes):
    return pytest.param({"gamma": 1.0, "lambda_": 1.0, **changes}, expected, id=str(expected))


@pytest.mark.parametrize("time_dim", [-1, 0])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        literal([3, 2, 1]),
        literal([2, 1, 1], terminated=MIDDLE),
        literal([12, 11, 1], truncated=MIDDLE, bootstrap_values=Sparse([0], [1], [10.0], 0.0)),
        literal([12, 11, 1], truncated=MIDDLE, bootstrap_values=np.array([[NAN, 10.0, 0.0]])),
        literal([2, 1, 1], terminated=MIDDLE, truncated=MIDDLE, bootstrap_values=np.array([[NAN, NAN, 0.0]])),
        literal([1, 1, 1], terminated=np.ones((1, 3), bool), bootstrap_values=np.array([NAN])),
        literal([6, 6, 6], truncated=np.ones((1, 3), bool), bootstrap_values=5.0),
        literal([13, 12, 11], bootstrap_values=10.0),
        literal([13, 12, 11], bootstrap_values=np.array([10.0])),
        literal([13, 12, 11], bootstrap_values=Sparse([0], [2], [10.0])),
        literal([3, 2, 1], terminated=LAST, bootstrap_values=10.0),
        literal([13, 12, 11], truncated=LAST, bootstrap_values=10.0),
        literal([NAN, NAN, NAN], bootstrap_values=Sparse([], [], [])),
        literal([NAN, NAN, 1], truncated=MIDDLE, bootstrap_values=Sparse([], [], [], 0.0)),
        literal([2, 1, NAN], truncated=MIDDLE, bootstrap_values=Sparse([0], [1], [0.0])),
        literal([2.25, 2.5, 3], bootstrap_values=4.0, gamma=0.5),
        literal([1, 1, 5], bootstrap_values=4.0, lambda_=0.0),
        literal([1, 3.5, 5], bootstrap_values=4.0, gamma=np.array([[0.0, 0.5, 1.0]])),
        literal(
            [1, 3, NAN],
            bootstrap_values=np.array([[2.0, 2.0, NAN]]),
            gamma=np.array([[0.0, 1.0, 1.0]]),
            truncated=MIDDLE,
        ),
        literal([2, 1, 1], bootstrap_values=np.array([[NAN, NAN, NAN]]), gamma=np.array([[1.0, 0.0, 0.0]])),
        literal([1, 3, 2], next_values=np.array([[0.0, 2.0, 1.0]]), bootstrap_values=None, lambda_=0.0),
        literal([6, 5, 2], next_values=np.array([[0.0, 2.0, 1.0]]), bootstrap_values=None),
        literal([2, 1, 2], truncated=MIDDLE, terminated=MIDDLE, bootstrap_values=1.0),
        literal([0, 12, 11], mask=FIRST_MASKED, bootstrap_values=10.0),
        literal([12, 0, 11], mask=MIDDLE_MASKED, bootstrap_values=10.0),
        literal([12, 11, 0], mask=LAST_MASKED, bootstrap_values=10.0),
        literal([12, 11, 0], mask=LAST_MASKED, bootstrap_values=np.array([10.0])),
        literal([12, 11, 0], mask=LAST_MASKED, bootstrap_values=np.array([[NAN, 10.0, NAN]])),
        literal([12, 11, 0], mask=LAST_MASKED, bootstrap_values=Sparse([0, 0], [1, 2], [10.0, NAN], 3.0)),
        literal([5, 4, 0], mask=LAST_MASKED, bootstrap_values=Sparse([0], [2], [NAN], 3.0)),
        literal([5, 4, 0], mask=LAST_MASKED, bootstrap_values=Sparse([0], [2], [NAN], np.array([3.0]))),
        literal([2, 1, 0], mask=LAST_MASKED, mask_mode="reset", bootstrap_values=np.array([NAN])),
        literal([1, 0, 11], mask=MIDDLE_MASKED, mask_mode="reset", bootstrap_values=10.0),
        literal([0, 12, 11], mask=FIRST_MASKED, mask_mode="reset", bootstrap_values=10.0),
        literal([7, 6, 0], mask=LAST_MASKED, mask_mode="reset", truncated=MIDDLE, bootstrap_values=5.0),
        literal([12, 0, 11], mask=MIDDLE_MASKED, terminated=MIDDLE, truncated=MIDDLE, bootstrap_values=10.0),
        literal([0, 0, 0], mask=np.zeros((1, 3), bool), bootstrap_values=np.array([NAN])),
    ],
)
def test_literal_numbers(target, changes, expected, time_dim):
    advantages, returns = run(Case(ONES, ZEROS, **changes), target, How(time_dim=time_dim))
    np.testing.assert_array_equal(advantages, [expected])
    np.testing.assert_array_equal(returns, [expected])


def test_a_window_with_values(target):
    """Every symbol of the equation once, in numbers that no float rounds."""
    case = Case(
        rewards=np.array([[1.0, -2.0, 4.0, 8.0]]),
        values=np.array([[0.5, 1.0, -3.0, 2.0]]),
        terminated=np.array([[False, False, True, False]]),
        gamma=0.5,
        lambda_=0.5,
        bootstrap_values=np.array([16.0]),
    )
    # deltas: 1 + 1/2 - 1/2 = 1;  -2 - 3/2 - 1 = -4.5;  4 + 3 = 7 (terminal);  8 + 16/2 - 2 = 14
    advantages, returns = run(case, target)
    assert advantages.tolist() == [[1 + (-4.5 + 7 / 4) / 4, -4.5 + 7 / 4, 7, 14]]
    assert returns.tolist() == [[0.8125, -1.75, 4, 16]]


FLAG_FORMS = {"scalar": 3.0, "dense": None, "edge": np.arange(8.0**3) - 7, "next_values": None}


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("form", FLAG_FORMS)
def test_every_pattern_of_three_steps(target, mask_mode, form):
    """All 512 windows of three steps: terminated, truncated and masked in every combination."""
    cells = np.array(list(itertools.product(range(8), repeat=3)))
    case = random_case(len(cells), 3, terminated=cells & 1 > 0, truncated=cells & 2 > 0, mask=cells & 4 > 0)
    case = replace(case, mask_mode=mask_mode, gamma=0.9)
    if form == "next_values":
        case = replace(case, next_values=case.bootstrap_values, bootstrap_values=None)
    elif form != "dense":
        case = replace(case, bootstrap_values=FLAG_FORMS[form])
    if form == "edge":
        case = replace(case, truncated=None)
    check(case, target)


@pytest.mark.parametrize("num_steps", [4, 5])
def test_every_boundary_of_a_longer_window(target, num_steps):
    cells = np.array(list(itertools.product(range(4), repeat=num_steps)))
    check(random_case(len(cells), num_steps, terminated=cells & 1 > 0, truncated=cells & 2 > 0), target)


def results(target, case):
    return run(case, target)[0]


def test_lambda_0_is_the_one_step_error(target):
    case = random_case(5, 33, term=0.2, truncated=None, lambda_=0.0, bootstrap_values=np.arange(5.0))
    following = np.append(case.values[:, 1:], np.arange(5.0)[:, None], axis=1)
    expected = case.rewards + 0.99 * np.where(case.terminated, 0, following) - case.values
    assert_close(results(target, case), expected)


def test_lambda_1_telescopes_to_monte_carlo(target):
    """The values inside an episode cancel: A = G - V, G the discounted return."""
    case = random_case(5, 33, term=0.1, trunc=0.1, lambda_=1.0)
    returns, g = np.zeros((5, 34)), np.zeros((5, 33))
    for t in reversed(range(33)):
        cut = case.truncated[:, t] | (t == 32)
        g[:, t] = np.where(case.terminated[:, t], 0, np.where(cut, case.bootstrap_values[:, t], returns[:, t + 1]))
        returns[:, t] = case.rewards[:, t] + 0.99 * g[:, t]
    advantages, targets = run(case, target)
    assert_close(advantages, returns[:, :-1] - case.values)
    assert_close(targets, returns[:, :-1])


def test_returns_are_advantages_plus_values(target):
    case = random_case(7, 31)
    advantages, returns = run(case, target)
    assert_close(returns, advantages.double() + torch.as_tensor(case.values))


def parts(case, at):
    """The two windows that a split at step `at` makes, the first bootstrapped with V at the split."""
    names = ("rewards", "values", "terminated", "truncated", "bootstrap_values")
    first = replace(case, **{name: getattr(case, name)[:, :at].copy() for name in names})
    second = replace(case, **{name: getattr(case, name)[:, at:] for name in names})
    interior = ~(first.truncated[:, -1])
    first.bootstrap_values[interior, -1] = case.values[interior, at]
    return first, second


@pytest.mark.parametrize("at", [1, 10, 32])
def test_splitting_a_window_changes_nothing_for_lambda_0(target, at):
    case = random_case(5, 33, lambda_=0.0)
    whole, pieces = run(case, target), [run(part, target) for part in parts(case, at)]
    for name in (0, 1):
        assert same_bits(whole[name], torch.cat([piece[name] for piece in pieces], dim=1))


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_splitting_a_window_at_a_done_step_changes_nothing(target, flag):
    case = random_case(5, 33)
    getattr(case, flag)[:, 9] = True
    whole, pieces = results(target, case), [results(target, part) for part in parts(case, 10)]
    assert_close(whole, torch.cat(pieces, dim=1))


def test_permuting_rows_permutes_results(target):
    case, order = random_case(9, 33, valid=0.9), np.random.default_rng(0).permutation(9)
    names = ("rewards", "values", "terminated", "truncated", "bootstrap_values", "mask")
    permuted = replace(case, **{name: getattr(case, name)[order] for name in names})
    for one, other in zip(run(case, target), run(permuted, target), strict=True):
        assert same_bits(one[torch.as_tensor(order)], other)


def assert_layouts_agree(case, target):
    """Environments side by side in memory, and apart; to the bit on the cpu backend, which has a walk for either."""
    for one, other in zip(run(case, target), run(case, target, How(time_dim=0)), strict=True):
        assert_close(other, one)
        assert target.backend != "cpu" or same_bits(other.contiguous(), one)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_layouts_agree(target, mask_mode):
    for num_envs, valid in (33, 1.0), (6, 0.9):
        assert_layouts_agree(random_case(num_envs, 32, valid=valid, mask_mode=mask_mode), target)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_wide_layouts_agree(target, mask_mode):
    """Wider than what the cpu backend walks together."""
    if target.interpreted:
        pytest.skip("too wide for the interpreter")
    assert_layouts_agree(random_case(1037, 32, valid=0.7, mask_mode=mask_mode), target)


def test_skipping_a_step_is_deleting_it(target):
    case = random_case(4, 33)
    keep = np.random.default_rng(0).random(33) < 0.6
    names = ("rewards", "values", "terminated", "truncated", "bootstrap_values")
    short = replace(case, **{name: getattr(case, name)[:, keep] for name in names})
    masked = replace(case, mask=np.tile(keep, (4, 1)))
    for one, other in zip(run(masked, target), run(short, target), strict=True):
        assert_close(one[:, torch.as_tensor(keep)], other)


def test_a_zero_discount_severs_like_a_termination(target):
    case = random_case(6, 17, term=0.2, trunc=0.1)
    as_discount = replace(case, terminated=None, gamma=np.where(case.terminated, 0.0, 0.99))
    for one, other in zip(run(case, target), run(as_discount, target), strict=True):
        assert_close(one, other)


def test_a_tensor_of_one_discount_is_that_discount(target):
    case = random_case(6, 17)
    for one, other in zip(run(case, target), run(replace(case, gamma=np.full((6, 17), 0.99)), target), strict=True):
        assert_close(one, other)


# --- the forms of the arguments ---------------------------------------------------------------------------------------


def test_forms_of_a_scalar_bootstrap(target):
    case = random_case(4, 9, truncated=None)
    call = Call(case, target.device)
    expected = call(target.backend, bootstrap_values=2.5)
    zero_dim = torch.tensor(2.5, device=target.device)
    dense = torch.full((4, 9), 2.5, device=target.device)
    for same in (zero_dim, dense, FinalValues([], [], [], 2.5)):
        result = call(target.backend, bootstrap_values=same)
        assert_close(result.advantages, expected.advantages)
        assert_close(result.returns, expected.returns)


def test_forms_of_final_values(target):
    """Lists, arrays and tensors are alike; an explicit entry wins over the edge."""
    case = random_case(4, 9, term=0)
    call, device = Call(case, target.device), target.device
    env, time = np.nonzero(case.truncated)
    env, time = np.append(env, 1), np.append(time, 8)
    value = np.arange(len(env), dtype=np.float32)
    edge = torch.arange(4.0, device=device)
    sparse = Sparse(env.tolist(), time.tolist(), value.tolist(), np.arange(4.0))
    want = replace(case, bootstrap_values=sparse).expected()
    for form in (
        FinalValues(env.tolist(), time.tolist(), value.tolist(), edge),
        FinalValues(env, time, value, edge),
        FinalValues(*(torch.as_tensor(x, device=device) for x in (env, time, value)), edge),
        FinalValues(*(torch.as_tensor(x, device=device) for x in (env.astype(np.int32), time, value)), edge),
    ):
        for got, expected in zip(call(target.backend, bootstrap_values=form), want, strict=True):
            assert_close(got, expected)


def test_defaults():
    case = random_case(3, 5, term=0, trunc=0, bootstrap_values=0.0)
    rewards, values = torch.as_tensor(case.rewards).float(), torch.as_tensor(case.values).float()
    result = compute_gae(rewards, values, bootstrap_values=0.0)
    assert isinstance(result, GAEOutput) and result._fields == ("advantages", "returns")
    assert_close(result.advantages, case.expected()[0])
    assert_close(result.returns, case.expected()[1])
    positional = compute_gae(rewards, values, rewards > 0, None, bootstrap_values=0)
    assert_close(positional.advantages, replace(case, terminated=case.rewards > 0).expected()[0])


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("form", [0.0, "edge", "dense"])
def test_empty_in_empty_out(target, shape, form):
    empty = np.zeros(shape)
    bootstrap = {"edge": np.zeros(shape[0]), "dense": empty}.get(form, form)
    flags = None if form == "edge" else empty > 0
    for how in (How(), How(time_dim=0), How(returns=False), How(out_layout=None)):
        run(Case(empty, empty, flags, flags, bootstrap_values=bootstrap, mask=flags), target, how)
