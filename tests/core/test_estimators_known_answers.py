"""The estimators by hand: literal numbers, every pattern of a few steps, extremes, and the forms of arguments."""

import itertools

import cases
import numpy as np
import pytest
import torch
from cases import Call, Case, How, Sparse, check_case, get_name, random_case, run_case, same_bits, with_form

import rl_triton_core as ours
from rl_triton_core import FinalValues
from rl_triton_core.testing import assert_close

NAN, INF = np.nan, np.inf
FIRST, MIDDLE, LAST = (np.arange(3)[None] == t for t in range(3))
BOTH = {"terminated": MIDDLE, "truncated": MIDDLE}
RESET = {"mask_mode": "reset"}
HALVES = {"gamma": 0.5, "lambda_": 0.5}


def make_row(*numbers):
    return np.array([numbers], float)


def expect_numbers(*expected, **changes):
    """Changes of a row, and what it gives then: all results, or one that is the same as the other."""
    return changes, expected


GAE_ROW = Case(
    cases.GAE,
    {
        **{"rewards": make_row(1, 1, 1), "values": make_row(0, 0, 0)},
        **{"gamma": 1.0, "lambda_": 1.0, "bootstrap_values": 0.0},
    },
)
EVERY = np.ones((1, 3), bool)
# delta: 1 + 1/2 - 1/2 = 1;  -2 - 3/2 - 1 = -4.5;  4 + 3 = 7 (terminal);  8 + 16/2 - 2 = 14;  A = delta + A[t+1]/4
FOUR_STEPS = {
    **{"rewards": make_row(1, -2, 4, 8), "values": make_row(0.5, 1, -3, 2), "terminated": np.arange(4)[None] == 2},
    **{**HALVES, "bootstrap_values": np.array([16.0])},
}
GAE_NUMBERS = [
    expect_numbers([3, 2, 1]),
    expect_numbers([2, 1, 1], terminated=MIDDLE),
    expect_numbers([12, 11, 1], truncated=MIDDLE, bootstrap_values=Sparse([0], [1], [10.0], 0.0)),
    expect_numbers([12, 11, 1], truncated=MIDDLE, bootstrap_values=make_row(NAN, 10.0, 0.0)),
    expect_numbers([2, 1, 1], **BOTH, bootstrap_values=make_row(NAN, NAN, 0.0)),
    expect_numbers([1, 1, 1], terminated=EVERY, bootstrap_values=np.array([NAN])),
    expect_numbers([6, 6, 6], truncated=EVERY, bootstrap_values=5.0),
    expect_numbers([13, 12, 11], bootstrap_values=10.0),
    expect_numbers([13, 12, 11], bootstrap_values=np.array([10.0])),
    expect_numbers([13, 12, 11], bootstrap_values=Sparse([0], [2], [10.0])),
    expect_numbers([3, 2, 1], terminated=LAST, bootstrap_values=10.0),
    expect_numbers([13, 12, 11], truncated=LAST, bootstrap_values=10.0),
    expect_numbers([NAN, NAN, NAN], bootstrap_values=Sparse([], [], [])),
    expect_numbers([NAN, NAN, 1], truncated=MIDDLE, bootstrap_values=Sparse([], [], [], 0.0)),
    expect_numbers([2, 1, NAN], truncated=MIDDLE, bootstrap_values=Sparse([0], [1], [0.0])),
    expect_numbers([2.25, 2.5, 3], bootstrap_values=4.0, gamma=0.5),
    expect_numbers([1, 1, 5], bootstrap_values=4.0, lambda_=0.0),
    expect_numbers([1, 3.5, 5], bootstrap_values=4.0, gamma=make_row(0.0, 0.5, 1.0)),
    expect_numbers(
        [1, 3, NAN], bootstrap_values=make_row(2.0, 2.0, NAN), gamma=make_row(0.0, 1.0, 1.0), truncated=MIDDLE
    ),
    expect_numbers([2, 1, 1], bootstrap_values=make_row(NAN, NAN, NAN), gamma=make_row(1.0, 0.0, 0.0)),
    expect_numbers([1, 3, 2], next_values=make_row(0.0, 2.0, 1.0), bootstrap_values=None, lambda_=0.0),
    expect_numbers([6, 5, 2], next_values=make_row(0.0, 2.0, 1.0), bootstrap_values=None),
    expect_numbers([2, 1, 2], **BOTH, bootstrap_values=1.0),
    expect_numbers([0, 12, 11], mask=~FIRST, bootstrap_values=10.0),
    expect_numbers([12, 0, 11], mask=~MIDDLE, bootstrap_values=10.0),
    expect_numbers([12, 11, 0], mask=~LAST, bootstrap_values=10.0),
    expect_numbers([12, 11, 0], mask=~LAST, bootstrap_values=np.array([10.0])),
    expect_numbers([12, 11, 0], mask=~LAST, bootstrap_values=make_row(NAN, 10.0, NAN)),
    expect_numbers([12, 11, 0], mask=~LAST, bootstrap_values=Sparse([0, 0], [1, 2], [10.0, NAN], 3.0)),
    expect_numbers([5, 4, 0], mask=~LAST, bootstrap_values=Sparse([0], [2], [NAN], 3.0)),
    expect_numbers([5, 4, 0], mask=~LAST, bootstrap_values=Sparse([0], [2], [NAN], np.array([3.0]))),
    expect_numbers([2, 1, 0], mask=~LAST, **RESET, bootstrap_values=np.array([NAN])),
    expect_numbers([1, 0, 11], mask=~MIDDLE, **RESET, bootstrap_values=10.0),
    expect_numbers([0, 12, 11], mask=~FIRST, **RESET, bootstrap_values=10.0),
    expect_numbers([7, 6, 0], mask=~LAST, **RESET, truncated=MIDDLE, bootstrap_values=5.0),
    expect_numbers([12, 0, 11], mask=~MIDDLE, **BOTH, bootstrap_values=10.0),
    expect_numbers([0, 0, 0], mask=~EVERY, bootstrap_values=np.array([NAN])),
    expect_numbers([0.3125, -2.75, 7, 14], [0.8125, -1.75, 4, 16], **FOUR_STEPS),
]
# alpha = rho*(r + NV/2 - V), rho = (2, 1/2, 1); D[t] = alpha + c/2*D[t+1], c = (1/2, 1/4, 1/2); A = rho_pg*(...)
#   alpha[2] = 4 + 8/2 - 3 = 5             D[2] = 5                      A[2] = 4 + 8/2 - 3
#   alpha[1] = (2 + 3/2 + 1)/2 = 2.25      D[1] = 2.25 + 5/8 = 2.875     A[1] = (2 + 8/2 + 1)/2
#   alpha[0] = 2*(1 - 1/2 - 2) = -3        D[0] = -3 + 2.875/4           A[0] = 1 + 1.875/2 - 2
VTRACE_ROW = Case(
    cases.VTRACE,
    {
        **{"rewards": make_row(1, 2, 4), "values": make_row(2, -1, 3), "log_ratios": np.log(make_row(4, 0.5, 1))},
        **{**HALVES, "rho_bar": 2.0, "c_bar": 1.0, "rho_bar_pg": 1.0, "bootstrap_values": 8.0},
    },
)
VTRACE_NUMBERS = [
    expect_numbers([-0.28125, 1.875, 8], [-0.0625, 3.5, 5]),
    expect_numbers([-0.28125, 1.875, 8], [-0.0625, 3.5, 5], bootstrap_values=np.array([8.0])),
    expect_numbers([-0.28125, 1.875, 8], [-0.0625, 3.5, 5], next_values=make_row(-1, 3, 8), bootstrap_values=None),
    expect_numbers([-0.28125, 1.875, 8], [-0.125, 3.5, 5], rho_bar_pg=None),
    expect_numbers([-0.40625, 1.375, 4], [-0.3125, 2.5, 1], terminated=LAST, bootstrap_values=NAN),
    expect_numbers([0, 3, 8], [0.5, 4, 5], truncated=MIDDLE, bootstrap_values=make_row(NAN, 10, 8)),
    expect_numbers([-1, 1.25, 8], [-0.375, 3.5, 5], lambda_=0.0),
    expect_numbers([0.5, -1, 8], [-1.5, 0, 5], log_ratios=make_row(0, -INF, 0), rho_bar=1.0),
    expect_numbers([4.25, 0, 8], [3, 0, 5], mask=~MIDDLE),
    expect_numbers([0, 0, 0], [0, 0, 0], mask=FIRST & MIDDLE, bootstrap_values=NAN),
]
# alpha = r + NQ/2 - Q; D[t] = alpha + c[t+1]/2*D[t+1] with c = (1/2, 1/4, 1/2); A = rho*(...) with rho = (1, 1/2, 1)
#   alpha[2] = 4 + 8/2 - 3 = 5     D[2] = 5                   A[2] = 4 + 8/2 - 3
#   alpha[1] = 2 + 2/2 + 1 = 4     D[1] = 4 + 5/4 = 5.25      A[1] = (2 + 8/2 + 1)/2
#   alpha[0] = 1 + 4/2 - 2 = 1     D[0] = 1 + 5.25/8          A[0] = 1 + 4.25/2 - 2
RETRACE_ROW = Case(
    cases.RETRACE,
    {
        **{"rewards": make_row(1, 2, 4), "q_values": make_row(2, -1, 3), "log_ratios": np.log(make_row(4, 0.5, 1))},
        **{"expected_next_q": make_row(4, 2, 8), **HALVES},
    },
)
ACTIONS = {
    "expected_next_q": None,
    "next_action_probs": np.array([[[0.25, 0.75], [0.5, 0.5], [1, 0]]]),
    "next_q_values": np.array([[[1.0, 5.0], [-6.0, 10.0], [8.0, -3.0]]]),
}
RETRACE_NUMBERS = [
    expect_numbers([3.65625, 4.25, 8], [1.125, 3.5, 5]),
    expect_numbers([3.65625, 4.25, 8], [1.125, 3.5, 5], **ACTIONS),
    expect_numbers([3.65625, 4.25, 8], [2.25, 3.5, 5], rho_bar=2.0),
    expect_numbers([3.53125, 3.25, 4], [0.625, 2.5, 1], terminated=LAST, expected_next_q=make_row(4, 2, NAN)),
    expect_numbers([3.5, 3, 8], [0.5, 2, 5], truncated=MIDDLE),
    expect_numbers([3, 3, 8], [0.5, 3.5, 5], lambda_=0.0),
    expect_numbers([3, 4.25, 8], [1.125, 0, 5], log_ratios=make_row(0, -INF, 0)),
    expect_numbers([4, 3, 8], [0.5, 7, 0], log_ratios=make_row(0, 0, -INF)),
    expect_numbers([4.25, 0, 8], [3, 0, 5], mask=~MIDDLE),
]
LAMBDA_ROW = Case(
    cases.LAMBDA,
    {"rewards": make_row(1, 2, 4), "values": make_row(NAN, 4, -2), **HALVES, "bootstrap_values": np.array([8.0])},
)
LAMBDA_NUMBERS = [
    expect_numbers([2.875, 3.5, 8]),  # 1 + (4 + 3.5)/4, 2 + (-2 + 8)/4, 4 + 8/2
    expect_numbers([2.875, 3.5, 8], values=None, next_values=make_row(4, -2, 8), bootstrap_values=None),
    expect_numbers([3, 1, 8], lambda_=0.0),
    expect_numbers([4, 6, 8], lambda_=1.0),
    expect_numbers([2.625, 2.5, 4], terminated=LAST, bootstrap_values=NAN),
    expect_numbers([3.75, 7, 8], truncated=MIDDLE, bootstrap_values=make_row(NAN, 10, 8)),
    expect_numbers([2.5, 0, 8], mask=~MIDDLE),
]
DISCOUNTED_ROW = Case(
    cases.DISCOUNTED, {"rewards": make_row(1, 2, 4), "gamma": 0.5, "bootstrap_values": np.array([8.0])}
)
DISCOUNTED_NUMBERS = [
    expect_numbers([4, 6, 8]),
    expect_numbers([3, 4, 4], bootstrap_values=0.0),
    expect_numbers([3, 4, 4], terminated=LAST, bootstrap_values=NAN),
    expect_numbers([4.5, 7, 8], truncated=MIDDLE, bootstrap_values=make_row(NAN, 10, 8)),
    expect_numbers([5, 0, 8], mask=~MIDDLE),
]
TRACES_ROW = Case(cases.TRACES, {"x": make_row(1, 2, 4), "decay": 0.5})
EIGHT = (np.array([8.0]), np.array([False]))
FINISHED = (np.array([NAN]), np.array([True]))
TRACES_NUMBERS = [
    expect_numbers([1, 2.5, 5.25]),
    expect_numbers([1, 2.5, 5.25], decay=None, **{"gamma": 0.5, "lambda_": 1.0}),
    expect_numbers([1, 2.25, 4.5625], decay=None, **HALVES),
    expect_numbers([1, 2.5, 4.625], decay=make_row(7, 0.5, 0.25)),
    expect_numbers([1, 2, 5], terminated=FIRST),
    expect_numbers([1, 2.5, 4], truncated=MIDDLE),
    expect_numbers([1, 2.5, 5.25], terminated=LAST),
    expect_numbers([1, 2, 4], terminated=~LAST),
    expect_numbers([5, 4.5, 6.25], state=EIGHT),
    expect_numbers([57, 30.5, 11.625], state=EIGHT, decay=make_row(7, 0.5, 0.25)),
    expect_numbers([0, 6, 7], state=EIGHT, mask=~FIRST),
    expect_numbers([0, 2, 5], state=EIGHT, mask=~FIRST, **RESET),
    expect_numbers([1, 2.5, 5.25], state=FINISHED),
    expect_numbers([0, 2, 5], state=FINISHED, mask=~FIRST),
]
PREFIX_ROW = Case(cases.PREFIX, {"x": make_row(1, 1, 1, 1), "dones": make_row(0, 1, 0, 0) > 0})
STARTS = {"boundary": "starts_at"}
PREFIX_NUMBERS = [
    expect_numbers([1, 2, 1, 2]),
    expect_numbers([1, 1, 2, 3], **STARTS),
    expect_numbers([1, 2, 3, 4], dones=None),
    expect_numbers([1, 0, 2, 3], mask=make_row(1, 0, 1, 1) > 0),
    expect_numbers([1, 0, 2, 3], mask=make_row(1, 0, 1, 1) > 0, **STARTS),
    expect_numbers([1, 0, 1, 2], mask=make_row(1, 0, 1, 1) > 0, **RESET),
    expect_numbers([1, 2, 0, 1], mask=make_row(1, 1, 0, 1) > 0),
    expect_numbers([1, 1, 0, 2], mask=make_row(1, 1, 0, 1) > 0, **STARTS),
    expect_numbers([9, 10, 1, 2], state=EIGHT),
    expect_numbers([9, 1, 2, 3], state=EIGHT, **STARTS),
    expect_numbers([1, 2, 1, 2], state=(EIGHT[0], np.array([True]))),
    expect_numbers([1, 2, 3, 4], state=EIGHT, dones=make_row(1, 0, 0, 0) > 0, **STARTS),
]
LINEAR_ROW = Case(cases.LINEAR, {"alpha": make_row(1, 2, 3), "beta": make_row(0.5, 0.5, 0.5), "reverse": True})
LINEAR_NUMBERS = [
    expect_numbers([2.75, 3.5, 3]),
    expect_numbers([3.25, 4.5, 5], initial=np.array([4.0])),
    expect_numbers([1, 2.5, 4.25], reverse=False),
    expect_numbers([3, 3.5, 4.75], reverse=False, initial=np.array([4.0])),
    expect_numbers([2, 2, 3], beta=make_row(0.5, 0, 0.5)),
    expect_numbers([NAN, 2, 4], beta=make_row(0.5, 0, 0.5), reverse=False, alpha=make_row(NAN, 2, 3)),
    expect_numbers([2, 2, NAN], beta=make_row(0.5, 0, 0.5), alpha=make_row(1, 2, NAN)),
    expect_numbers([2, 2, INF], beta=make_row(0.5, 0, 0.5), initial=np.array([INF])),
]
LITERALS = [  # of a row, how exactly, and with which type of numbers
    (GAE_ROW, GAE_NUMBERS, 0.0, float),
    (VTRACE_ROW, VTRACE_NUMBERS, 1e-6, float),
    (RETRACE_ROW, RETRACE_NUMBERS, 1e-6, float),
    (LAMBDA_ROW, LAMBDA_NUMBERS, 0.0, float),
    (DISCOUNTED_ROW, DISCOUNTED_NUMBERS, 0.0, float),
    (TRACES_ROW, TRACES_NUMBERS, 0.0, float),
    *((PREFIX_ROW, PREFIX_NUMBERS, 0.0, dtype) for dtype in (float, np.int8, np.int64)),
    (LINEAR_ROW, LINEAR_NUMBERS, 0.0, float),
]


def list_literals():
    for row, numbers, rtol, dtype in LITERALS:
        for changes, expected in numbers:
            label = f"{row.estimator.name}-{dtype.__name__}-{','.join(changes) or 'plain'}-{expected}"
            case, state = row.replace(**changes), changes.get("state")
            if dtype is not float:
                state = None if state is None else (state[0].astype(np.int64), state[1])
                case = case.replace(x=case["x"].astype(dtype), state=state)
            yield pytest.param(case, expected, rtol, id=label)


@pytest.mark.parametrize(("case", "expected", "rtol"), [*list_literals()])
def test_literal_numbers(target, case, expected, rtol):
    """By hand; of GAE boundaries too, which stand below in every pattern. Its values are 0 but in the last row."""
    for time_dim in (-1, 0):
        results = run_case(case, target, How(time_dim=time_dim))
        for got, want in zip(results, expected * (len(results) // len(expected)), strict=True):
            np.testing.assert_allclose(got[0].double().numpy(), want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("estimator", (*cases.BACKWARD, *cases.FORWARD), ids=get_name)
def test_every_pattern_of_a_few_steps(target, estimator, mask_mode):
    """All rollouts of three or four steps with their flags in every combination, in every form or state."""
    names = ("terminated", "mask", "truncated") if estimator is not cases.PREFIX else ("dones", "mask")
    names, steps = (names[:2], 4) if estimator.forward else (names, 3)
    cells = np.array(list(itertools.product(range(2 ** len(names)), repeat=steps)))
    if target.interpreted:
        cells = np.random.default_rng(0).permutation(cells)[:64]
    flags = {name: cells >> bit & 1 > 0 for bit, name in enumerate(names)}
    given = {"term": None, "trunc": None, "mask_mode": mask_mode, **flags}
    case = random_case(estimator, len(cells), steps, **given)
    if estimator.forward:
        state = (np.arange(1.0, len(cells) + 1), np.arange(len(cells)) % 3 == 0)
        variants = [case, case.replace(state=state)]
        variants += [x.replace(**STARTS) for x in variants] if estimator is cases.PREFIX else []
    else:
        forms = (form for form in cases.FORMS[estimator.name] if form != "sparse")
        variants = [with_form(case.replace(gamma=0.9), form) for form in forms]
    for variant in variants:
        check_case(variant, target)


@pytest.mark.parametrize(
    "bars", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1e-6, 1.0), (1.0, 1e-6), (1e6, 1e-6), (1e3, 1e3)]
)
@pytest.mark.parametrize("estimator", cases.OFF_POLICY, ids=get_name)
def test_extreme_bars(target, estimator, bars):
    case = random_case(estimator, 4, 16, rho_bar=bars[0], c_bar=bars[1])
    check_case(case.replace(rho_bar_pg=1.0) if estimator is cases.VTRACE else case, target)


@pytest.mark.parametrize("estimator", cases.OFF_POLICY, ids=get_name)
def test_extreme_ratios(target, estimator):
    """Ratios of 0, as good as 0, and beyond the largest float: a clipped infinity is the bar."""
    rng = np.random.default_rng(0)
    ratios = rng.choice([-np.inf, -200.0, -95.0, -30.0, 0.0, 30.0, 95.0, 200.0, np.inf], (8, 32))
    case = random_case(estimator, 8, 32, rho_bar=2.0, log_ratios=ratios)
    check_case(case, target)
    if estimator is cases.VTRACE:
        check_case(case.replace(rho_bar_pg=0.5), target)


@pytest.mark.parametrize("num_actions", [1, 2, 5, 18, 33, 300])
def test_any_number_of_actions(target, num_actions):
    if target.interpreted and num_actions == 300:
        pytest.skip("too many for the interpreter")
    rng = np.random.default_rng(0)
    shape = (*((2, 4) if target.interpreted else (3, 9)), num_actions)
    case = random_case(cases.RETRACE, *shape[:2], valid=0.9).replace(expected_next_q=None)
    q = rng.standard_normal(shape)
    case = case.replace(next_action_probs=rng.dirichlet(np.ones(num_actions), shape[:2]), next_q_values=q)
    for time_dim in (-1, 0):
        check_case(case, target, How(time_dim=time_dim))
    expected = case.expected(lambda **x: ((x["next_action_probs"] * x["next_q_values"]).sum(-1),))[0]
    reduced = case.replace(next_action_probs=None, next_q_values=None, expected_next_q=expected)
    for one, other in zip(run_case(case, target), run_case(reduced, target), strict=True):
        assert_close(one, other, rtol=3e-6)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize(("num_envs", "valid"), [(33, 1.0), (4, 0.9), (1037, 0.7)])
@pytest.mark.parametrize("estimator", cases.ESTIMATORS, ids=get_name)
def test_layouts_agree(target, estimator, num_envs, valid, mask_mode):
    """Environments side by side in memory, and apart; to the bit on the cpu backend, which has a walk for either."""
    if target.interpreted and num_envs > 33:
        pytest.skip("too wide for the interpreter")
    modes = {} if estimator is cases.LINEAR else {"mask_mode": mask_mode}
    case = random_case(estimator, num_envs, 16, valid=valid, **modes)
    for one, other in zip(run_case(case, target), run_case(case, target, How(time_dim=0)), strict=True):
        assert_close(other.contiguous(), one)
        assert target.backend != "cpu" or same_bits(other.contiguous(), one)


@pytest.mark.parametrize("estimator", cases.BOOTSTRAPPED, ids=get_name)
def test_forms_of_a_scalar_bootstrap(target, estimator):
    call = Call(random_case(estimator, 4, 8, truncated=None), target.device)
    want = call(target.backend, bootstrap_values=2.5)
    zero_dim, dense = (torch.full(shape, 2.5, device=target.device) for shape in ((), (4, 8)))
    for same in (zero_dim, dense, FinalValues([], [], [], 2.5)):
        for got, expected in zip(call(target.backend, bootstrap_values=same), want, strict=True):
            assert_close(got, expected)


@pytest.mark.parametrize("estimator", cases.BOOTSTRAPPED, ids=get_name)
def test_forms_of_final_values(target, estimator):
    """Lists, arrays and tensors are alike; an explicit entry wins over the edge."""
    case = random_case(estimator, 4, 8, term=0)
    case["truncated"][1, 7] = False  # it gets an entry of its own
    call, device = Call(case, target.device), target.device
    env, time = np.nonzero(case["truncated"])
    env, time = np.append(env, 1), np.append(time, 7)
    value = np.arange(len(env), dtype=np.float32)
    edge = torch.arange(4.0, device=device)
    sparse = Sparse(env.tolist(), time.tolist(), value.tolist(), np.arange(4.0))
    want = case.replace(bootstrap_values=sparse).expected()
    for form in (
        FinalValues(env.tolist(), time.tolist(), value.tolist(), edge),
        FinalValues(env, time, value, edge),
        FinalValues(*(torch.as_tensor(x, device=device) for x in (env, time, value)), edge),
        FinalValues(*(torch.as_tensor(x, device=device) for x in (env.astype(np.int32), time, value)), edge),
    ):
        for got, expected in zip(call(target.backend, bootstrap_values=form), want, strict=True):
            assert_close(got, expected)


@pytest.mark.parametrize(
    ("estimator", "kind"),
    [(cases.GAE, ours.GAEOutput), (cases.VTRACE, ours.VTraceOutput), (cases.RETRACE, ours.RetraceOutput)],
)
def test_two_results_have_names(estimator, kind):
    result = estimator.function(**Call(random_case(estimator, 2, 3)).kwargs, backend="reference")
    assert type(result) is kind and result._fields == estimator.outputs


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("estimator", cases.ESTIMATORS, ids=get_name)
def test_empty_in_empty_out(target, estimator, shape):
    case = random_case(estimator, *shape, valid=0.5)
    for how in (How(), How(time_dim=0), How(returns=False), How(out_layout=None)):
        run_case(case, target, how)
        if estimator in cases.FORWARD or estimator is cases.LINEAR:
            run_case(random_case(estimator, *shape, features=(2,)), target, how)
    for form in cases.FORMS.get(estimator.name, ()):
        if form != "sparse":
            run_case(with_form(case, form), target)
