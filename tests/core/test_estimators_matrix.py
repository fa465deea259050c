"""Every estimator against its oracle over shapes, memory layouts, types, boundary patterns, bootstraps and masks."""

import itertools

import cases
import numpy as np
import pytest
import torch
from cases import Call, How, Sparse, Vector, check_case, draw_any_case, get_name, random_case, run_case, same_bits
from hypothesis import event, given
from hypothesis import strategies as st

from rl_triton_core import FinalValues
from rl_triton_core.testing import assert_close

ALL = pytest.mark.parametrize("estimator", cases.ESTIMATORS, ids=get_name)


@ALL
@given(data=st.data())
def test_random_cases(target, estimator, data):
    case, how = data.draw(draw_any_case(estimator, target))
    event(f"{how.dtype}, T={case.shape[1]}")
    check_case(case, target, how)


@ALL
def test_every_length(target, estimator):
    for num_steps in cases.SIZES:
        if num_steps <= target.max_steps and not (target.interpreted and num_steps % 2):
            check_case(random_case(estimator, 3, num_steps, term=0.03, trunc=0.03), target)


@pytest.mark.parametrize("time_dim", [0, np.int64(1)])
@ALL
def test_every_width(target, estimator, time_dim):
    widths = (
        (1, 2, 31, 32, 33) if target.interpreted else (1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1029)
    )
    for num_envs in widths:
        check_case(random_case(estimator, num_envs, 4), target, How(time_dim=time_dim))


@pytest.mark.parametrize("features", [(1,), (7,), (2, 3), (1, 1, 4), (33,)], ids=str)
@pytest.mark.parametrize("estimator", [cases.TRACES, cases.PREFIX, cases.LINEAR], ids=get_name)
def test_every_kind_of_features(target, estimator, features):
    if target.interpreted and features == (33,):
        pytest.skip("too many for the interpreter")
    case = random_case(estimator, 2, 7, features=features, valid=0.8)
    for time_dim, layout in itertools.product((-1, 0), ("contiguous", "padded_transposed")):
        check_case(case, target, How(time_dim=time_dim, layouts=(layout,), out_layout=layout))


@pytest.mark.parametrize("estimator", [cases.TRACES, cases.PREFIX, cases.LINEAR], ids=get_name)
def test_features_that_no_stride_spans(target, estimator):
    """Two feature dimensions, the second outermost in memory; and none at all."""
    case = random_case(estimator, 2, 7, features=(2, 3))
    call, want = Call(case, target.device), run_case(case, target)[0]
    turned = {name: x.mT.contiguous().mT for name, x in call.kwargs.items() if getattr(x, "ndim", 0) == 4}
    out = torch.full((2, 7, 3, 2), torch.nan, device=target.device).mT
    for given_ in (None, out):
        assert same_bits(call(target.backend, **turned, out=given_)[0].cpu(), want)
    assert same_bits(out.cpu().contiguous(), want)
    run_case(random_case(estimator, 2, 7, features=(0,)), target)


@pytest.mark.parametrize("time_dim", [-1, 0])
@ALL
def test_longer_than_a_block(target, estimator, time_dim):
    """One episode over a whole long row, and a few episodes that end far from any block's edge."""
    num_steps = max(1500, min(target.max_steps, 3000)) if target.compiled else 130 if time_dim else 70
    decay = {cases.TRACES: {"decay": 0.999}, cases.DISCOUNTED: {"gamma": 0.999}, cases.PREFIX: {}, cases.LINEAR: {}}
    changes = decay.get(estimator, {"gamma": 0.999, "lambda_": 1.0})
    for term, valid in [(0.003, 1.0)] if target.interpreted else [(0, 1.0), (0.003, 0.9)]:
        case = random_case(estimator, 1 if target.interpreted else 2, num_steps, term=term, trunc=term, valid=valid)
        check_case(case.replace(**changes), target, How(time_dim=time_dim))


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("estimator", (*cases.BACKWARD, *cases.FORWARD), ids=get_name)
def test_a_hole_longer_than_a_block(target, estimator, mask_mode):
    """The next valid step, and the rollout's end, may be many blocks away; NaN stands in between."""
    num_steps = 2500 if target.compiled else 150
    case = random_case(estimator, 2, num_steps, term=0, trunc=0, mask_mode=mask_mode)
    mask = np.ones(case.shape, bool)
    mask[0, 5:-5] = mask[1, 7:] = False
    case = case.map_arrays(lambda x: np.where(mask, x, np.nan) if x.dtype.kind == "f" else x).replace(mask=mask)
    for time_dim in (-1,) if target.interpreted else (-1, 0):
        check_case(case, target, How(time_dim=time_dim))


def every_argument(estimator, shape):
    """A case with as many tensors as the estimator takes, the first input constant along a row."""
    rng = np.random.default_rng(0)
    features = (2,) if estimator in cases.FORWARD or estimator is cases.LINEAR else ()
    case = random_case(estimator, *shape, valid=0.8, features=features)
    first = estimator.inputs[0]
    case[first][:] = case[first][:, :1]
    if estimator in cases.BACKWARD:
        case = case.replace(gamma=rng.uniform(0.5, 1, shape))
    if estimator is cases.TRACES:
        case = case.replace(decay=rng.random(case["x"].shape))
    if estimator in cases.OFF_POLICY:
        case = cases.with_log_probs(case)
    if estimator is cases.LINEAR:
        return case.replace(initial=np.ones((shape[0], *features)))
    return cases.with_form(case, "actions") if estimator is cases.RETRACE else case


@pytest.mark.parametrize("time_dim", [-1, 0])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
@ALL
def test_layouts(target, estimator, layout, time_dim):
    """All arguments and results in one layout; and of any two arguments, one in some call where the other is not."""
    out_layout = layout if layout in cases.LAYOUTS[:5] else None
    hows = [How(time_dim=time_dim, layouts=(layout,), out_layout=out_layout)]
    case = every_argument(estimator, (3, 7) if target.interpreted else (5, 13))
    if layout in ("strided", "transposed") and not target.interpreted:
        number, kinds = len(Call(case).placed), ("contiguous", layout)
        codes = [tuple(kinds[i >> bit & 1] for i in range(number)) for bit in range((number - 1).bit_length())]
        hows += [How(time_dim=time_dim, layouts=code) for code in codes]
    want = run_case(case, target, How(time_dim=time_dim))
    for how in hows:
        for got, expected in zip(run_case(case, target, how), want, strict=True):
            assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


@ALL
def test_mixed_dtypes(target, estimator):
    case = every_argument(estimator, (4, 8)).rounded(torch.bfloat16).rounded(torch.float16)
    call, kinds = Call(case, target.device), itertools.cycle([torch.float16, torch.float32, torch.bfloat16])
    names = [name for name, x in call.kwargs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    got = call(target.backend, **{name: call.kwargs[name].to(next(kinds)) for name in names})
    for x, expected in zip(got, call(target.backend), strict=True):
        assert x.dtype == torch.float32
        assert_close(x, expected)


@ALL
def test_one_float64_input_makes_the_result_float64(float64_target, estimator):
    """It is not rounded, and the others are float32."""
    case = every_argument(estimator, (4, 8))
    if estimator in cases.FORWARD:
        case = case.replace(state=(np.random.default_rng(1).random((4, 2)), np.arange(4) % 2 == 1))
    narrow, wide = Call(case), Call(case, how=How(dtype=torch.float64))
    for name in case.args:
        x = case[name][0] if name == "state" else case[name]
        if name not in cases.FLAGS and isinstance(x, np.ndarray):
            got = narrow(float64_target.backend, **{name: wide.kwargs[name]})
            mixed = case.rounded(torch.float32).replace(**{name: case[name]})
            for x, want in zip(got, mixed.expected(), strict=False):
                assert x.dtype == torch.float64, name
                assert_close(x, want, rtol=1e-13)


FINAL_DTYPES = {  # of the rewards, the values, the final values and the last ones; None: numbers of Python
    "rewards": (torch.float64, torch.float32, None, None),
    "values": (torch.float32, torch.float64, None, None),
    "beside float32": (torch.float64, torch.float32, torch.float32, None),
    "final values": (torch.float32, torch.float32, torch.float64, None),
    "last values": (torch.float32, torch.float32, torch.float32, torch.float64),
    "last values beside numbers": (torch.float32, torch.float32, None, torch.float64),
}


@pytest.mark.parametrize("dtypes", FINAL_DTYPES.values(), ids=FINAL_DTYPES)
def test_final_values_are_not_rounded(float64_target, dtypes):
    """Neither numbers nor tensors, where any argument is float64."""
    case = random_case(cases.GAE, 4, 9, term=0.0, trunc=0.4)
    env, time = np.nonzero(case["truncated"])
    value, last = np.random.default_rng(1).random(len(env)), 0.1 if dtypes[3] is None else np.arange(1, 5) / 3
    parts = [case["rewards"], case["values"], value, last]
    exact = [x if dtype is None else cases.round_array(x, dtype) for x, dtype in zip(parts, dtypes, strict=True)]
    want = case.replace(rewards=exact[0], values=exact[1], bootstrap_values=Sparse(env, time, *exact[2:])).expected()
    rewards, values, value, last = (
        x if dtype is None else torch.tensor(x, dtype=dtype) for x, dtype in zip(exact, dtypes, strict=True)
    )
    final = FinalValues(env, time, value if dtypes[2] else value.tolist(), last)
    arguments = {"rewards": rewards, "values": values, "bootstrap_values": final}
    for got, expected in zip(Call(case)(float64_target.backend, **arguments), want, strict=True):
        assert got.dtype == torch.float64
        assert_close(got, expected, rtol=1e-13)


@ALL
def test_triton_takes_no_float64(target, estimator):
    if target.backend != "triton":
        pytest.skip("the others do")
    call = Call(every_argument(estimator, (4, 8)), target.device)
    for name, x in call.kwargs.items():
        if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
            with pytest.raises(TypeError, match="float64"):
                call("triton", **{name: x.double()})


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@ALL
def test_out(target, estimator, out_dtype):
    """In float32 every layout; else those that differ most."""
    every = out_dtype == torch.float32 and not target.interpreted
    layouts = cases.LAYOUTS[:5] if every else ("strided", "padded_transposed")
    for out_layout, time_dim in itertools.product(layouts, (-1, 0)):
        how = How(out_layout=out_layout, out_dtype=out_dtype, time_dim=time_dim)
        check_case(random_case(estimator, 4, 8), target, how)


@pytest.mark.parametrize("estimator", cases.TWO_RESULTS, ids=get_name)
def test_either_output_may_be_left_to_us(target, estimator):
    case = random_case(estimator, 4, 8)
    call, want = Call(case, target.device), run_case(case, target)
    for given_ in (0, 1):
        out = [None, None]
        out[given_] = torch.full((4, 8), torch.nan, device=target.device)
        results = call(target.backend, out=tuple(out))
        assert results[given_] is out[given_]
        assert all(same_bits(x.cpu(), y) for x, y in zip(results, want, strict=True))


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("edge", [None, 2.5, np.arange(6.0)], ids=["none", "float", "tensor"])
@pytest.mark.parametrize("estimator", cases.BOOTSTRAPPED, ids=get_name)
def test_final_values(target, estimator, edge, mask_mode):
    """Some cuts have an entry, some have not; entries at steps that are no cuts mean nothing."""
    case = random_case(estimator, 6, 15, trunc=0.3, valid=0.6, mask_mode=mask_mode)
    for share in (0.0, 0.4, 1.0):
        env, time = np.nonzero(np.random.default_rng(0).random((6, 15)) < share)
        form = Sparse(env.tolist(), time.tolist(), np.arange(1.0, len(env) + 1).tolist(), edge)
        check_case(case.replace(bootstrap_values=form), target)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        *((np.int64, layout) for layout in cases.LAYOUTS[:5]),
        *((dtype, "strided") for dtype in (np.int8, np.int16, np.int32)),
    ],
)
def test_integer_sums_are_exact(target, dtype, layout):
    """Numbers that no float holds, in every width."""
    limits, shape = np.iinfo(dtype), (3, 8) if target.interpreted else (5, 17)
    x = np.random.default_rng(0).integers(limits.min // 20, limits.max // 20, shape, dtype)
    case = random_case(cases.PREFIX, *shape, valid=0.9, x=x)
    case = case.replace(state=(np.full(shape[0], 2**53 + 1), np.arange(shape[0]) % 2 == 1))
    for boundary, time_dim in itertools.product(("ends_at", "starts_at"), (-1, 0)):
        check_case(
            case.replace(boundary=boundary), target, How(layouts=(layout,), time_dim=time_dim, out_layout=layout)
        )


def test_a_decay_of_any_form_in_any_layout(target):
    rng = np.random.default_rng(0)
    case = random_case(cases.TRACES, 4, 8, features=(3, 2), valid=0.8)
    decays = (rng.random((4, 8)), rng.random(case["x"].shape), Vector(rng.random((3, 2))))
    for decay, layout, time_dim in itertools.product(decays, cases.LAYOUTS, (-1, 0)):
        if not target.interpreted or layout == "transposed":
            check_case(case.replace(decay=decay), target, How(layouts=("contiguous", layout), time_dim=time_dim))
