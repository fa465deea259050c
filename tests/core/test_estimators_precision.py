"""How exact the results are, what overflows, and that the same input gives the same bits."""

import itertools

import cases
import numpy as np
import pytest
import torch
from cases import Case, How, check_case, get_name, random_case, run_case, same_bits, with_form

from rl_triton_core import compute_vtrace
from rl_triton_core.extending import Recurrence, check_layout, read_state, select, solve
from rl_triton_core.testing import assert_close

pytestmark = pytest.mark.covering

ALL = pytest.mark.parametrize("estimator", cases.ESTIMATORS, ids=get_name)
RATES = [(0.99, 0.95), (1.0, 1.0), (0.999, 1.0), ("per step", 0.9)]


def set_rates(case, gamma, lambda_):
    """The case with a discount and lambda, or what comes nearest to them."""
    rng = np.random.default_rng(0)
    if case.estimator is cases.PREFIX:
        return case
    gamma = rng.uniform(0.8, 1.0, case.shape) if gamma == "per step" else gamma
    if case.estimator is cases.LINEAR:
        return case.replace(beta=np.broadcast_to(gamma * lambda_, case.shape).copy())
    if case.estimator is cases.TRACES:
        return case.replace(decay=gamma * lambda_)
    return case.replace(gamma=gamma, lambda_=None if case.estimator is cases.DISCOUNTED else lambda_)


def assert_as_exact_as_a_loop(case, target, dtype=torch.float32):
    """The relative error in the norm is at most twice that of a serial float32 loop on the same, rounded, inputs."""
    got, case = run_case(case, target, How(dtype=dtype)), case.rounded(dtype)
    exact, serial = case.expected(), case.expected(dtype=np.float32)
    for name, result, want, loop in zip(case.estimator.outputs, got, exact, serial, strict=False):
        assert result.dtype == torch.float32
        error, limit = np.linalg.norm(result.double().numpy() - want), 2 * np.linalg.norm(loop - want)
        assert error <= limit, (name, error / limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("gamma", "lambda_"), RATES, ids=str)
@ALL
def test_the_error_is_at_most_twice_that_of_a_serial_float32_loop(target, estimator, gamma, lambda_, dtype):
    """Half-precision inputs are rounded once, by the caller: the error counts from the rounded inputs."""
    shape = (64, 500) if target.device == "cuda" else (4, 60) if target.interpreted else (32, 257)
    assert_as_exact_as_a_loop(
        set_rates(random_case(estimator, *shape, term=0.01, trunc=0.01), gamma, lambda_), target, dtype
    )


@pytest.mark.parametrize("clips", [(1.0, 1.0), (4.0, 1.0), (1.0, 0.05), (1e3, 1e3)], ids=str)
@pytest.mark.parametrize("lambda_", [0.0, 1e-30, 0.01, 0.9])
@pytest.mark.parametrize("estimator", cases.OFF_POLICY, ids=get_name)
def test_no_digits_are_lost_in_advantages(target, estimator, lambda_, clips):
    """Neither where little credit flows nor where the clips differ: nothing is divided by a small trace."""
    shape, bars = (4, 60) if target.interpreted else (16, 130), {"rho_bar": clips[0], "c_bar": clips[1]}
    case = random_case(estimator, *shape, lambda_=lambda_, gamma=0.95, **bars)
    assert_as_exact_as_a_loop(case, target)


@ALL
def test_a_very_long_rollout(target, estimator):
    if target.interpreted or target.backend == "reference":
        pytest.skip("too long for this backend here")
    case = random_case(estimator, 1, 32_768 if target.device == "cpu" else 131_072, term=1e-4, trunc=1e-4)
    assert_as_exact_as_a_loop(set_rates(case, 0.999, 1.0), target)


@ALL
def test_values_near_the_largest_float(target, estimator):
    """No step of the sum leaves the range, in whatever order it is taken: neither may the result."""
    case = set_rates(random_case(estimator, 4, 33), 0.5, 0.5)
    names = ("rewards", "values", "q_values", "expected_next_q", "bootstrap_values", "x", "alpha")
    size = 1e36 if estimator is cases.PREFIX else 4e37
    case = case.map_arrays(lambda x: x * (size / np.abs(x).max()), *names)
    assert all(np.isfinite(x).all() for x in case.expected(dtype=np.float32)[: len(estimator.outputs)])
    check_case(case, target)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("form", ["dense", "next_values"])
def test_the_cpu_backend_is_the_serial_loop_to_the_bit(target, form, mask_mode):
    if target.backend != "cpu":
        pytest.skip("only the cpu backend is a serial float32 loop")
    for dtype, valid in itertools.product((torch.float32, torch.bfloat16), (1.0, 0.8)):
        case = with_form(random_case(cases.GAE, 7, 129, valid=valid, mask_mode=mask_mode), form).rounded(dtype)
        for time_dim in (-1, 0):
            got = run_case(case, target, How(dtype=dtype, time_dim=time_dim))
            for result, loop in zip(got, case.expected(dtype=np.float32), strict=True):
                assert same_bits(result.contiguous(), torch.as_tensor(loop))


DECAYS = ("50", "3e38", "tensor", "huge tensor")


def make_overflowing_case(estimator, rewards, flag, done, kind):
    """Zeros but for the rewards, a decay that overflows, and a boundary after every done step."""
    decay = {"50": 50.0, "3e38": 3e38, "tensor": np.full(done.shape, 50.0), "huge tensor": np.full(done.shape, 3e38)}[
        kind
    ]
    zeros = np.zeros(done.shape)
    if estimator is cases.LINEAR:
        return Case(estimator, {"alpha": rewards, "beta": np.where(done, 0.0, decay), "reverse": True})
    args = dict.fromkeys(estimator.inputs, zeros)
    args |= {"decay": decay} if estimator is cases.TRACES else {"gamma": decay}
    if estimator in cases.BOOTSTRAPPED:
        args["bootstrap_values"] = 0.0
    if estimator not in (cases.TRACES, cases.DISCOUNTED):
        args["lambda_"] = 1.0
    if flag == "mask":
        args |= {"mask": ~done, "mask_mode": "reset"}
    elif flag is not None:
        args[flag] = done
    return Case(estimator, {**args, "x" if estimator is cases.TRACES else "rewards": rewards})


OVERFLOWING = pytest.mark.parametrize("estimator", [*cases.BACKWARD, cases.TRACES, cases.LINEAR], ids=get_name)


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("flag", ["terminated", "truncated", "mask", None])
@OVERFLOWING
def test_a_decay_that_overflows_leaves_zeros_alone(target, estimator, kind, flag):
    """A serial loop over zeros gives zeros whatever the decay; a tree must not meet 0 * infinity."""
    if target.interpreted and kind in ("3e38", "tensor"):
        pytest.skip("the interpreter takes its time")
    if target.backend == "cpu" and flag in ("truncated", None):
        pytest.skip("it is a serial loop")
    zeros, done = np.zeros((2, 70)), np.zeros((2, 70), bool)
    done[0, 35] = done[1, ::13] = True
    case = make_overflowing_case(estimator, zeros, flag, done, kind)
    modes = ("skip", "reset") if "mask" in case.args else (None,)
    for mask_mode, time_dim in itertools.product(modes, (-1,) if target.interpreted else (-1, 0)):
        for got in run_case(case.replace(mask_mode=mask_mode), target, How(time_dim=time_dim)):
            assert not got.any(), got


@pytest.mark.parametrize("kind", ["50", "tensor"])
@pytest.mark.parametrize("flag", ["terminated", "truncated"])
@OVERFLOWING
def test_a_decay_that_overflows_stays_in_its_episode(target, estimator, kind, flag):
    """Side by side with episodes of zeros and of few steps, which are a serial loop's to the bit."""
    rewards, done = np.zeros((1, 100)), np.zeros((1, 100), bool)
    done[0, [29, 34, 69]] = True
    rewards[0, [34, 69]] = 1.0  # 5 steps: up to 50**4; 35 steps: beyond the range 22 steps before their end
    step = np.arange(100)
    if estimator is cases.TRACES:
        rewards, done, step = rewards[:, ::-1].copy(), np.roll(done[:, ::-1], -1, axis=1), step[::-1]
    case = make_overflowing_case(estimator, rewards, flag, done, kind)
    overflows, serial = (step >= 35) & (step < 70), case.expected(dtype=np.float32)
    infinite = ~np.isfinite(serial[0][0])
    assert infinite.sum() == 12 and not infinite[~overflows].any() and not serial[0][0, step < 30].any()
    both = (run_case(case, target, How(time_dim=time_dim)) for time_dim in (-1, 0))
    for got, want in (pair for results in both for pair in zip(results, serial, strict=False)):
        x, loop = got[0].double().numpy(), want[0]
        np.testing.assert_array_equal(x[~overflows], loop[~overflows])
        finite = np.isfinite(loop)
        np.testing.assert_allclose(x[finite], loop[finite], rtol=1e-5)


@pytest.mark.parametrize("time_dim", [-1, 0])
@ALL
def test_a_row_does_not_depend_on_the_others(target, estimator, time_dim):
    how = How(time_dim=time_dim)
    shape = (9, 15 if target.interpreted else 65)
    case = random_case(estimator, *shape, term=0.05, valid=0.9)
    other = random_case(estimator, *shape, seed=1, term=0.2, valid=0.5)
    other[estimator.inputs[0]][::2] = np.nan
    keep = [0, 4, 8]
    for name, x in other.args.items():
        if isinstance(x, np.ndarray):
            x[keep] = case[name][keep]
    for one, two in zip(run_case(case, target, how), run_case(other, target, how), strict=True):
        assert all(same_bits(one[n].contiguous(), two[n].contiguous()) for n in keep)


@ALL
def test_a_problem_for_several_threads(target, estimator, monkeypatch):
    """Rows of a large problem, which the cpu backend splits, are those of a small one; so are features."""
    if target.backend != "cpu":
        pytest.skip("the others have no threads")
    monkeypatch.setattr("rl_triton_core._internal.scan.cpu.MIN_ELEMENTS_PER_CHUNK", 1 << 12)
    monkeypatch.setattr("rl_triton_core._internal.launch.threads.Setting.num_threads", 2)
    shapes = [(70, 801, ()), (801, 70, ())]
    shapes += [(1, 801, (70,)), (3, 4000, (5,))] if estimator in (cases.TRACES, cases.PREFIX, cases.LINEAR) else []
    for num_envs, num_steps, features in shapes:
        case = random_case(estimator, num_envs, num_steps, valid=0.9, features=features)
        for time_dim in (-1, 0):
            whole, rows = run_case(case, target, How(time_dim=time_dim)), slice(num_envs // 2, num_envs // 2 + 1)
            alone = run_case(case.map_arrays(lambda x, rows=rows: x[rows]), target)
            assert all(same_bits(one[rows].contiguous(), two) for one, two in zip(whole, alone, strict=True))


@pytest.mark.parametrize("reach", [1e-3, 1.0, 85.0])
def test_the_exponential_function_is_exact_to_the_last_place(target, reach):
    """One step with a reward of 1 has the target exp(log ratio)."""
    log_ratios = torch.linspace(-reach, reach, 257 if target.interpreted else 2001)[:, None]
    ones, zeros = torch.ones_like(log_ratios), torch.zeros_like(log_ratios)
    given = {"log_ratios": log_ratios, "rho_bar": np.inf, "gamma": 0.0, "bootstrap_values": 0.0}
    given = {k: x.to(target.device) if isinstance(x, torch.Tensor) else x for k, x in given.items()}
    got = compute_vtrace(ones.to(target.device), zeros.to(target.device), **given, backend=target.backend).targets
    exact = log_ratios.double().exp()
    assert ((got.cpu().double() - exact).abs() / exact).max() <= 2.0**-23


def test_the_exponential_function_at_its_ends(target):
    log_ratios = torch.tensor([[0.0, -0.0, 88.7, 88.8, -103.0, -104.5, -1e9, np.inf, -np.inf, np.nan]]).T
    given = {"log_ratios": log_ratios.to(target.device), "rho_bar": np.inf, "bootstrap_values": 0.0}
    ones, zeros = torch.ones_like(given["log_ratios"]), torch.zeros_like(given["log_ratios"])
    got = compute_vtrace(ones, zeros, **given, backend=target.backend).targets
    np.testing.assert_allclose(got.cpu().numpy(), log_ratios.exp().numpy(), rtol=1e-6, atol=1e-45)


def choose_decay(step):
    """Of positive rewards 0.7 is kept, of others 0.3."""
    (reward,) = step.inputs
    return reward, select(step.continues, select(reward > 0.0, 0.7, 0.3), 0.0)


CHOICE = Recurrence("choice", ("rewards",), 0, ("sums",), choose_decay, read_state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_select_rounds_no_numbers(target, dtype):
    """Nor do they change the precision, with a graph or without."""
    if dtype == torch.float64 and target.backend == "triton":
        pytest.skip("it takes none")
    rewards = torch.randn(2, 9, generator=torch.Generator().manual_seed(0), dtype=dtype)
    want, state = [], torch.zeros(2, dtype=torch.float64)
    for reward in rewards.double().unbind(1)[::-1]:
        state = reward + torch.tensor([0.7 if x > 0 else 0.3 for x in reward], dtype=torch.float64) * state
        want.append(state)
    rewards = rewards.to(target.device)
    for given in (rewards, rewards.clone().requires_grad_()):
        (got,) = solve(
            CHOICE, {"rewards": given}, check_layout("rewards", given, -1), bootstrap_values=0.0, backend=target.backend
        )
        assert got.dtype == dtype and got.requires_grad == given.requires_grad
        assert_close(got.cpu(), torch.stack(want[::-1], 1), rtol=1e-14 if dtype == torch.float64 else 1e-6)
