"""Forward scans over windows in a row: the state handed on makes them one long one."""

import itertools

import numpy as np
import pytest
import torch
from cases import DEFAULT, FORWARD, PREFIX, TRACES, Call, How, Vector, get_name, random_case, same_bits

from rl_triton_core import ScanState, compute_eligibility_traces
from rl_triton_core.testing import assert_close

FORWARD_ONES = pytest.mark.parametrize("estimator", FORWARD, ids=get_name)
MODES = pytest.mark.parametrize("mask_mode", ["skip", "reset"])
BOUNDARY = {"boundary": "starts_at"}


def stream_case(case, target, cuts, how=DEFAULT):
    """The results of the windows between the cuts, one after another, and the last state; all [num_envs, T, ...]."""
    state, pieces = case.get("state"), []
    edges = [0, *cuts, case.shape[1]]
    for low, high in itertools.pairwise(edges):
        window = case.map_arrays(lambda x, low=low, high=high: x[:, low:high]).replace(state=None)
        call = Call(window, target.device, how)
        if isinstance(state, tuple) and not isinstance(state, ScanState):
            state = Call(case, target.device, how).kwargs["state"]
        piece, state = call(target.backend, state=state, return_state=True)
        assert isinstance(state, ScanState) and state.done.dtype == torch.bool
        assert state.value.shape == (case.shape[0], *case["x"].shape[2:]) and state.done.shape == case.shape[:1]
        assert state.value.dtype == piece.dtype
        pieces.append(call.env_major(piece))
    return torch.cat(pieces, dim=1).cpu(), ScanState(*(x.cpu() for x in state))


def assert_streams(case, target, cuts, how=DEFAULT):
    """The windows equal the long one, which equals the oracle; to the bit on the cpu backend."""
    pieces, state = stream_case(case, target, cuts, how)
    whole, final = stream_case(case, target, [], how)
    exact, (value, done) = case.rounded(how.dtype).expected()
    np.testing.assert_array_equal(state.done, done)
    np.testing.assert_array_equal(final.done, done)
    if case["x"].dtype.kind == "i" or target.backend == "cpu":
        assert same_bits(pieces, whole.contiguous()) and same_bits(state.value, final.value)
    if case["x"].dtype.kind == "i":
        np.testing.assert_array_equal(whole, exact)
        np.testing.assert_array_equal(state.value, value)
    else:
        for got, want in ((pieces, exact), (whole, exact), (state.value, value), (final.value, value)):
            assert_close(got, want)


def make_streaming_case(estimator, num_steps=24, term=0.15, **changes):
    case = random_case(estimator, 6, num_steps, term=term, trunc=term, **changes)
    return case.replace(decay=0.9) if estimator is TRACES and "decay" not in changes else case


@MODES
@FORWARD_ONES
def test_two_windows(target, estimator, mask_mode):
    """Split at every step: done flags, masked steps, and both, on either side of the seam."""
    case = make_streaming_case(estimator, 16, valid=0.7, mask_mode=mask_mode)
    for changes in ({}, BOUNDARY) if estimator is PREFIX else ({},):
        for at in (8,) if target.interpreted else range(17):
            assert_streams(case.replace(**changes), target, [at])


@MODES
@FORWARD_ONES
def test_windows_without_a_valid_step(target, estimator, mask_mode):
    """The state passes through: value and all, and in mode "reset" what follows a masked step starts afresh."""
    case = make_streaming_case(estimator, 9, mask_mode=mask_mode)
    mask = np.ones(case.shape, bool)
    mask[:, 3:6] = False
    assert_streams(case.replace(mask=mask), target, [3, 6])
    for steps in (0, 4):
        nothing = case.map_arrays(lambda x, steps=steps: x[:, :steps]).replace(mask=np.zeros((6, steps), bool))
        (_, state), afresh = stream_case(nothing, target, []), mask_mode == "reset" and steps > 0
        assert not state.value.any() and state.done.tolist() == [afresh] * 6
        value, done = np.arange(6.0), np.arange(6) % 2 == 0
        _, state = stream_case(nothing.replace(state=(value, done)), target, [2] * (steps > 0))
        np.testing.assert_array_equal(state.value, value)
        np.testing.assert_array_equal(state.done, done | afresh)


@pytest.mark.parametrize("time_dim", [-1, 0])
@FORWARD_ONES
def test_windows_in_any_layout(target, estimator, time_dim):
    case = make_streaming_case(estimator, features=(3,), valid=0.8)
    case = case.replace(state=(np.random.default_rng(0).standard_normal((6, 3)), np.arange(6) % 3 == 0))
    for layout in ("padded_transposed",) if target.interpreted else ("contiguous", "padded_transposed"):
        assert_streams(case, target, [13] if target.interpreted else [7, 13], How(time_dim=time_dim, layouts=(layout,)))


@pytest.mark.parametrize("form", ["per step", "vector", "full", "gamma"])
def test_decays_stream(target, form):
    rng = np.random.default_rng(0)
    decay = {"per step": rng.random((6, 24)), "vector": Vector(rng.random(2)), "full": rng.random((6, 24, 2))}.get(form)
    case = make_streaming_case(TRACES, features=(2,), valid=0.8, decay=decay)
    if form == "gamma":
        case = case.replace(decay=None, gamma=0.9, lambda_=0.8)
    assert_streams(case, target, [10])


@pytest.mark.parametrize("dtype", [np.int8, np.int64])
def test_integers_stream_exactly(target, dtype):
    limits = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(limits.min // 30, limits.max // 30, (6, 24), dtype)
    case = random_case(PREFIX, 6, 24, term=0.1, valid=0.9, x=x)
    for boundary in ("ends_at", "starts_at"):
        assert_streams(case.replace(boundary=boundary), target, [9, 10])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@FORWARD_ONES
def test_a_state_is_not_rounded_to_half_precision(target, estimator, dtype):
    assert_streams(make_streaming_case(estimator), target, [5, 11], How(dtype=dtype))


@pytest.mark.parametrize("valid", [1.0, 0.8])
@FORWARD_ONES
def test_one_out_for_every_window(target, estimator, valid):
    """A buffer used again does not overwrite the state that came out of it, nor is it mistaken for an input."""
    case = make_streaming_case(estimator, valid=valid)
    want, out, state = stream_case(case, target, [8, 16])[0], torch.full((6, 8), torch.nan, device=target.device), None
    for low in (0, 8, 16):
        call = Call(case.map_arrays(lambda x, low=low: x[:, low : low + 8]), target.device)
        got, state = call(target.backend, state=state, return_state=True, out=out)
        assert got is out and same_bits(out.cpu(), want[:, low : low + 8].contiguous())


@pytest.mark.parametrize("name", ["x", "state", "decay"])
def test_no_out_rounds_a_state(name):
    """Of float64, by any argument, a float32 buffer holds none."""
    tensors = {"x": torch.ones(2, 3), "decay": torch.ones(2, 3)}
    tensors["state"] = ScanState(torch.ones(2), torch.zeros(2))
    double = {"state": ScanState(torch.ones(2).double(), torch.zeros(2))}.get(name, torch.ones(2, 3).double())
    compute_eligibility_traces(**tensors, return_state=True, out=torch.empty(2, 3))
    for dtype, changes in ((torch.float32, {name: double}), (torch.bfloat16, {}), (torch.float16, {})):
        with pytest.raises(ValueError, match=f"out: got dtype {dtype} together with return_state"):
            arguments = {**tensors, **changes, "out": torch.empty(2, 3, dtype=dtype)}
            compute_eligibility_traces(**arguments, return_state=True, backend="reference")


@FORWARD_ONES
def test_gradients_flow_through_a_seam(float64_target, estimator):
    """The gradient of two windows is that of one, the initial state's included."""
    case = make_streaming_case(estimator, 8, valid=0.8)
    gradients = []
    for cuts in ([], [3]):
        call = Call(case, how=How(dtype=torch.float64))
        x = call.kwargs["x"].requires_grad_()
        value = torch.arange(6.0).double().requires_grad_()
        state, pieces = ScanState(value, torch.zeros(6, dtype=torch.bool)), []
        for low, high in itertools.pairwise([0, *cuts, 8]):
            window = {k: v[:, low:high] for k, v in call.kwargs.items() if isinstance(v, torch.Tensor) and v.ndim == 2}
            kwargs = {**call.kwargs, **window, "backend": float64_target.backend}
            piece, state = estimator.function(**kwargs, state=state, return_state=True)
            pieces.append(piece)
        result = torch.cat(pieces, dim=1)
        (result * torch.linspace(1, 2, 8)).sum().backward()
        gradients.append((x.grad, value.grad))
    for one, other in zip(*gradients, strict=True):
        assert_close(other, one)
    assert gradients[0][1].any()


@FORWARD_ONES
def test_gradients_reach_the_final_state(float64_target, estimator):
    call = Call(make_streaming_case(estimator, 8, term=0.0), how=How(dtype=torch.float64))
    x = call.kwargs["x"].requires_grad_()
    _, state = call(float64_target.backend, return_state=True)
    state.value.sum().backward()
    assert x.grad[:, -1].eq(1).all() and x.grad[:, 0].all()


def test_a_discount_per_step_is_refused():
    """Elsewhere it acts on what follows step t, a decay on what enters it: read as one it would cut a step apart."""
    with pytest.raises(TypeError, match="gamma"):
        compute_eligibility_traces(torch.ones(1, 4), gamma=torch.tensor([[1.0, 0.0, 1.0, 1.0]]), lambda_=1.0)
