"""GAE against the oracle over shapes, memory layouts, types, boundary patterns, bootstraps and masks."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import LAYOUTS, SIZES, Call, How, Sparse, cases, check, random_case, run, same_bits
from hypothesis import event, given
from hypothesis import strategies as st

from rl_triton_core.testing import assert_close


@given(data=st.data())
def test_random_cases(target, data):
    case, how = data.draw(cases(target))
    event(f"{how.dtype}, T={case.rewards.shape[1]}")
    check(case, target, how)


def test_every_length(target):
    for num_steps in SIZES:
        if num_steps <= target.max_steps:
            check(random_case(3, num_steps, term=0.03, trunc=0.03), target)


@pytest.mark.parametrize("num_envs", [1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257])
@pytest.mark.parametrize("time_dim", [0, 1])
def test_every_width(target, num_envs, time_dim):
    check(random_case(num_envs, 5), target, How(time_dim=time_dim))


@pytest.mark.parametrize("time_dim", [-1, 0])
def test_longer_than_a_block(target, time_dim):
    """One episode over a whole long row, and a few episodes that end far from any block's edge."""
    num_steps = (130 if time_dim else 70) if target.interpreted else max(1500, target.max_steps)
    how = How(time_dim=time_dim)
    if not target.interpreted:
        check(random_case(2, num_steps, term=0, trunc=0, lambda_=1.0, gamma=0.999), target, how)
    check(random_case(2, num_steps, term=0.003, trunc=0.003, valid=0.9), target, how)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_a_hole_longer_than_a_block(target, mask_mode):
    """The next valid step, and the window's end, may be many blocks away; NaN stands in between."""
    num_steps = 150 if target.interpreted else 2500
    case = random_case(2, num_steps, term=0, trunc=0, mask_mode=mask_mode)
    mask = np.ones((2, num_steps), bool)
    mask[0, 5:-5] = mask[1, 7:] = False
    changes = {name: np.where(mask, getattr(case, name), np.nan) for name in ("rewards", "values", "bootstrap_values")}
    for time_dim in (-1,) if target.interpreted else (-1, 0):
        check(replace(case, mask=mask, **changes), target, How(time_dim=time_dim))


@pytest.mark.parametrize("time_dim", [-1, 0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(target, layout, time_dim):
    """Every other input, then the rest, then all of them and the outputs: the strides of each are its own."""
    case = random_case(5, 13, valid=0.8, gamma=np.random.default_rng(0).random((5, 13)))
    case.rewards[:] = case.rewards[:, :1]
    want = run(case, target, How(time_dim=time_dim))
    for layouts, out_layout in (((layout, "contiguous"), None), (("contiguous", layout), None), ((layout,), layout)):
        how = How(time_dim=time_dim, layouts=layouts, out_layout=out_layout)
        for got, expected in zip(run(case, target, how), want, strict=True):
            assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("flag_dtype", [torch.bool, torch.uint8, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(target, dtype, flag_dtype):
    case = random_case(5, 17, valid=0.8)
    want = Call(case, target.device, How(dtype=dtype))(target.backend)
    how = How(dtype=dtype, flag_dtype=flag_dtype, mask_dtype=flag_dtype)
    for got, expected in zip(Call(case, target.device, how)(target.backend), want, strict=True):
        assert same_bits(got, expected)


@pytest.mark.parametrize("value", [0.25, 2.0, -1.0, 200])
def test_any_nonzero_flag_counts(target, value):
    case = random_case(5, 17, valid=0.8)
    call = Call(case, target.device, How(flag_dtype=torch.float32, mask_dtype=torch.float32))
    want = call(target.backend)
    got = call(target.backend, **{name: call.kwargs[name] * value for name in ("terminated", "truncated", "mask")})
    assert same_bits(got.advantages, want.advantages)


def test_mixed_dtypes(target):
    dtypes = itertools.permutations([torch.float32, torch.bfloat16, torch.float16])
    for one, two, three in dtypes:
        case = random_case(4, 9).rounded(torch.bfloat16).rounded(torch.float16)
        call = Call(case, target.device)
        changes = {"rewards": one, "values": two, "bootstrap_values": three}
        got = call(target.backend, **{name: call.kwargs[name].to(dtype) for name, dtype in changes.items()})
        for x, expected in zip(got, call(target.backend), strict=True):
            assert x.dtype == torch.float32
            assert same_bits(x, expected)


@pytest.mark.parametrize("name", ["rewards", "values", "bootstrap_values", "gamma", "next_values"])
def test_one_float64_input_makes_the_result_float64(float64_target, name):
    form = {"next_values": np.ones((4, 9)), "bootstrap_values": None} if name == "next_values" else {}
    case = random_case(4, 9, gamma=np.full((4, 9), 0.9), **form)
    call = Call(case)
    result = call(float64_target.backend, **{name: call.kwargs[name].double()})
    assert {result.advantages.dtype, result.returns.dtype} == {torch.float64}
    check(case, float64_target, How(dtype=torch.float64))


@pytest.mark.parametrize(
    ("out_dtype", "out_layout"),
    [
        *((torch.float32, layout) for layout in LAYOUTS[:5]),
        *((dtype, "padded_transposed") for dtype in (torch.bfloat16, torch.float16, torch.float64)),
    ],
)
def test_out(target, out_dtype, out_layout):
    for time_dim in (-1, 0):
        check(random_case(5, 17), target, How(out_layout=out_layout, out_dtype=out_dtype, time_dim=time_dim))


def test_either_output_may_be_left_to_us(target):
    case = random_case(5, 17)
    call, want = Call(case, target.device), run(case, target)
    for given_ in (0, 1):
        out = [None, None]
        out[given_] = torch.full((5, 17), torch.nan, device=target.device)
        result = call(target.backend, out=tuple(out))
        assert result[given_] is out[given_]
        assert all(same_bits(x.cpu(), y) for x, y in zip(result, want, strict=True))


def test_without_returns_the_advantages_are_the_same(target):
    case = random_case(5, 17, valid=0.9)
    assert same_bits(run(case, target)[0], run(case, target, How(returns=False))[0])


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("edge", [None, 2.5, np.arange(6.0)], ids=["none", "float", "tensor"])
def test_final_values(target, edge, mask_mode):
    """Some cuts have an entry, some have not; entries at steps that are no cuts mean nothing."""
    case = random_case(6, 21, trunc=0.3, valid=0.6, mask_mode=mask_mode)
    for share in (0.0, 0.4, 1.0):
        env, time = np.nonzero(np.random.default_rng(0).random((6, 21)) < share)
        form = Sparse(env.tolist(), time.tolist(), np.arange(1.0, len(env) + 1).tolist(), edge)
        check(replace(case, bootstrap_values=form), target)


def test_many_rows(target):
    if target.interpreted:
        pytest.skip("too many for the interpreter")
    check(random_case(4099, 3), target, How(time_dim=0))
