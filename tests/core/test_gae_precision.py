"""How exact the results are, what overflows, and that the same input gives the same bits."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import Case, How, check, random_case, run, same_bits

from rl_triton_core.testing import assert_close

pytestmark = pytest.mark.covering


def big(target):
    """A window large enough for its error to be typical."""
    return (64, 3000) if target.device == "cuda" else (8, 130) if target.interpreted else (64, 257)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("gamma", "lambda_"), [(0.99, 0.95), (1.0, 1.0), (0.999, 1.0), ("per step", 0.9)])
def test_the_error_is_at_most_twice_that_of_a_serial_float32_loop(target, gamma, lambda_, dtype):
    """Half-precision inputs are rounded once, by the caller: the error counts from the rounded inputs."""
    shape = big(target)
    gamma = np.random.default_rng(0).uniform(0.8, 1.0, shape) if gamma == "per step" else gamma
    case = random_case(*shape, term=0.01, trunc=0.01, gamma=gamma, lambda_=lambda_)
    got, case = run(case, target, How(dtype=dtype)), case.rounded(dtype)
    exact, serial = case.expected(), case.expected(dtype=np.float32)
    for result, want, loop in zip(got, exact, serial, strict=True):
        assert result.dtype == torch.float32
        error, limit = np.linalg.norm(result.double().numpy() - want), 2 * np.linalg.norm(loop - want)
        assert error <= limit, (error, limit)


def test_float64_is_computed_in_float64(float64_target):
    case = random_case(64, 257, term=0.01, trunc=0.01, valid=0.95)
    for got, want in zip(run(case, float64_target, How(dtype=torch.float64)), case.expected(), strict=True):
        assert got.dtype == torch.float64
        assert_close(got, want, rtol=1e-14)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("changes", [{}, {"next_values": np.full((7, 129), 0.3), "bootstrap_values": None}])
def test_the_cpu_backend_is_the_serial_loop_to_the_bit(target, changes, mask_mode):
    if target.backend != "cpu":
        pytest.skip("only the cpu backend is a serial float32 loop")
    for dtype in (torch.float32, torch.bfloat16):
        for valid in (1.0, 0.8):
            case = random_case(7, 129, valid=valid, mask_mode=mask_mode, **changes).rounded(dtype)
            for time_dim in (-1, 0):
                got = run(case, target, How(dtype=dtype, time_dim=time_dim))
                for result, loop in zip(got, case.expected(dtype=np.float32), strict=True):
                    assert same_bits(result.contiguous(), torch.as_tensor(loop))


def test_a_very_long_window(target):
    if target.interpreted or target.backend == "reference":
        pytest.skip("too long for this backend here")
    check(random_case(2, 100_003, term=1e-4, trunc=1e-4), target)


def test_values_near_the_largest_float(target):
    """No step of the sum leaves the range, in whatever order it is taken: neither may the result."""
    case = random_case(4, 33, gamma=0.5, lambda_=0.5)
    for name in ("rewards", "values", "bootstrap_values"):
        x = getattr(case, name)
        x *= 7e37 / np.abs(x).max()
    assert np.isfinite(np.abs(case.expected(dtype=np.float32)).max())
    check(case, target)


def discounts(kind, shape):
    return {"50": 50.0, "3e38": 3e38, "tensor": np.full(shape, 50.0), "huge tensor": np.full(shape, 3e38)}[kind]


@pytest.mark.parametrize("kind", ["50", "3e38", "tensor", "huge tensor"])
@pytest.mark.parametrize("flag", ["terminated", "truncated", "mask", None])
def test_a_decay_that_overflows_leaves_zeros_alone(target, kind, flag):
    """A serial loop over zeros gives zeros whatever the decay; a tree must not meet 0 * infinity."""
    if target.interpreted and kind in ("3e38", "tensor"):
        pytest.skip("the interpreter takes its time")
    zeros = np.zeros((2, 70))
    done = np.zeros((2, 70), bool)
    done[0, 35] = done[1, ::13] = True
    case = Case(zeros, zeros, gamma=discounts(kind, zeros.shape), lambda_=1.0)
    if flag is not None:
        case = replace(case, **{flag: ~done if flag == "mask" else done})
    for mask_mode, time_dim in itertools.product(("skip", "reset") if flag == "mask" else ("skip",), (-1, 0)):
        for got in run(replace(case, mask_mode=mask_mode), target, How(time_dim=time_dim)):
            assert not got.any(), got


@pytest.mark.parametrize("kind", ["50", "tensor"])
@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_a_decay_that_overflows_stays_in_its_episode(target, kind, flag):
    """Side by side with episodes of zeros and of few steps, which are a serial loop's to the bit."""
    rewards, done = np.zeros((1, 100)), np.zeros((1, 100), bool)
    done[0, [29, 34, 69]] = True
    rewards[0, [34, 69]] = 1.0  # 5 steps: up to 50**4; 35 steps: beyond the range 22 steps before their end
    case = Case(rewards, np.zeros((1, 100)), gamma=discounts(kind, (1, 100)), lambda_=1.0, **{flag: done})
    with np.errstate(over="ignore"):
        serial = case.expected(dtype=np.float32)[0][0]
    finite, overflows = np.isfinite(serial), np.zeros(100, bool)
    overflows[35:70] = True
    assert finite.sum() == 100 - 12 and finite[~overflows].all()
    assert not serial[:30].any() and not serial[70:].any()
    for got in (*run(case, target), *run(case, target, How(time_dim=0))):
        x = got[0].double().numpy()
        np.testing.assert_array_equal(x[~overflows], serial[~overflows])
        np.testing.assert_allclose(x[finite], serial[finite], rtol=1e-5)


def test_the_same_bits_every_time(target):
    case = random_case(*big(target), valid=0.9)
    first = run(case, target)
    for _ in range(1 if target.interpreted else 3):
        for one, other in zip(first, run(case, target), strict=True):
            assert same_bits(one, other)


@pytest.mark.parametrize("time_dim", [-1, 0])
def test_a_row_does_not_depend_on_the_others(target, time_dim):
    case, how = random_case(9, 65, term=0.05, valid=0.9), How(time_dim=time_dim)
    alone = random_case(9, 65, seed=1, term=0.2, valid=0.5)
    alone.rewards[::2] = np.nan
    names = ("rewards", "values", "terminated", "truncated", "bootstrap_values", "mask")
    for n in (0, 4, 8):
        for name in names:
            getattr(alone, name)[n] = getattr(case, name)[n]
    for one, other in zip(run(case, target, how), run(alone, target, how), strict=True):
        for n in (0, 4, 8):
            assert same_bits(one[n].contiguous(), other[n].contiguous())
