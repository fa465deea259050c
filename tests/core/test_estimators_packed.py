"""Sequences laid end to end in flat tensors: the results are those of every sequence alone."""

from functools import partial
from types import SimpleNamespace

import cases
import numpy as np
import pytest
import torch
from cases import Call, How, assert_gradients, get_name, measure_operands, random_case, run_case, same_bits, with_form
from gpu_checks import assert_replays, forbid_waiting
from hypothesis import given
from hypothesis import strategies as st

import rl_triton_core as ours
from rl_triton_core import FinalValues, ScanState
from rl_triton_core.testing import assert_close

PACKED = (*cases.BACKWARD, cases.PREFIX)
ALL = pytest.mark.parametrize("estimator", PACKED, ids=get_name)
BACKWARDS = pytest.mark.parametrize("estimator", cases.BACKWARD, ids=get_name)
LENGTHS = {
    "ragged": (5, 0, 1, 9, 0, 0, 3),
    "one": (12,),
    "ones": (1, 1, 1, 1),
    "empty at both ends": (0, 4, 3, 0),
    "nothing but empty": (0, 0),
    "none": (),
}


def find_edges(lengths):
    return np.concatenate([[0], np.cumsum(lengths, dtype=int)])


def make_packed_case(estimator, lengths, **changes):
    return random_case(estimator, 1, sum(lengths), **{"term": 0.15, "trunc": 0.15, **changes})


def make_arguments(case, lengths, device="cpu", how=cases.DEFAULT):
    kwargs = Call(case.replace(state=None), device, how).kwargs
    del kwargs["time_dim"]
    names = {name for name, x in case.args.items() if isinstance(x, np.ndarray) and x.ndim > 1}
    kwargs |= {name: kwargs[name][0] for name in names}
    if "state" in case.args:
        value, done = (torch.as_tensor(x, device=device) for x in case["state"])
        kwargs["state"] = ScanState(value if value.dtype == torch.int64 else value.float(), done)
    return {**kwargs, "cu_seqlens": torch.tensor(find_edges(lengths), device=device)}


def run_packed(case, lengths, target, how=cases.DEFAULT, **changes):
    kwargs = make_arguments(case, lengths, target.device, how)
    answer = case.estimator.function(**{**kwargs, "backend": target.backend, **changes})
    results = (answer,) if isinstance(answer, torch.Tensor) else tuple(x for x in answer if x is not None)
    assert all(x.shape == (sum(lengths),) for x in results)
    return [x.cpu() for x in results]


def split_sequences(case, lengths):
    for i, (low, high) in enumerate(zip(find_edges(lengths)[:-1], find_edges(lengths)[1:], strict=True)):
        alone = case.map_arrays(lambda x, low=low, high=high: x[:, low:high])
        bootstrap, state = case.get("bootstrap_values"), case.get("state")
        if isinstance(bootstrap, np.ndarray) and bootstrap.ndim == 1:
            alone = alone.replace(bootstrap_values=bootstrap[i : i + 1])
        yield alone if state is None else alone.replace(state=tuple(x[i : i + 1] for x in state))


def check_packed(case, lengths, target, how=cases.DEFAULT):
    """Against every sequence alone: to the bit on the cpu backend, close to the oracle on all."""
    got = run_packed(case, lengths, target, how)
    alone = list(split_sequences(case, lengths))
    empty = [np.zeros(0)] * len(got)
    exact = [
        np.concatenate(x)
        for x in zip(*([y[0] for y in a.rounded(how.dtype).expected()[: len(got)]] for a in alone), empty, strict=True)
    ]
    size = measure_operands(case).sum()
    for result, want in zip(got, exact, strict=True):
        if result.dtype == torch.int64:
            np.testing.assert_array_equal(result, want)
        else:  # where operands cancel, little is left for the error to be relative to
            error = np.linalg.norm(result.double().numpy() - want)
            assert error <= 1e-6 * (np.linalg.norm(want) + size)
    if target.backend == "cpu" and alone:
        singles = zip(*(run_case(a, target, how) for a in alone), strict=True)
        for result, pieces in zip(got, singles, strict=True):
            assert same_bits(result, torch.cat(pieces, dim=1)[0])


@pytest.mark.parametrize("lengths", LENGTHS)
@ALL
def test_every_sequence_is_as_if_alone(target, estimator, lengths):
    check_packed(make_packed_case(estimator, LENGTHS[lengths]), LENGTHS[lengths], target)


def draw_form_cases(estimator, lengths):
    """Each form of the continuation, one discount per step, log-probabilities."""
    case = make_packed_case(estimator, lengths)
    for form in cases.FORMS[estimator.name]:
        if form == "edge":
            edge = np.arange(1.0, len(lengths) + 1)
            yield form, case.replace(truncated=None, bootstrap_values=edge)
        elif form != "sparse":
            yield form, with_form(case, form)
    gamma = np.where(np.arange(sum(lengths)) % 4 == 1, 0.0, 0.9)[None]
    yield "gamma", case.replace(gamma=gamma)
    if estimator in cases.OFF_POLICY:
        yield "log_probs", cases.with_log_probs(case.replace(rho_bar=2.0))


@BACKWARDS
def test_every_form(target, estimator):
    for _, case in draw_form_cases(estimator, LENGTHS["ragged"]):
        check_packed(case, LENGTHS["ragged"], target)


@pytest.mark.parametrize("valid", [1.0, 0.6])
def test_an_edge_value_per_sequence(target, valid):
    """In mode "skip" it stands behind the last valid step of each sequence."""
    lengths = LENGTHS["ragged"]
    for estimator in (cases.GAE, cases.DISCOUNTED):
        for mask_mode in ("skip", "reset"):
            case = make_packed_case(estimator, lengths, valid=valid, mask_mode=mask_mode)
            case = case.replace(truncated=None, bootstrap_values=np.arange(1.0, len(lengths) + 1))
            check_packed(case, lengths, target)


@pytest.mark.parametrize("boundary", ["ends_at", "starts_at"])
@pytest.mark.parametrize("dtype", [float, np.int8, np.int64])
def test_prefix_sums_with_a_state(target, boundary, dtype):
    lengths, rng = LENGTHS["ragged"], np.random.default_rng(0)
    x = rng.integers(-9, 9, (1, sum(lengths))).astype(dtype)
    value = rng.integers(-9, 9, len(lengths)).astype(float if dtype is float else np.int64)
    case = make_packed_case(cases.PREFIX, lengths, valid=0.8, x=x, boundary=boundary)
    for state in (None, (value, rng.random(len(lengths)) < 0.3)):
        check_packed(case.replace(state=state), lengths, target)


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
def test_prefix_sums_hand_their_state_on(target, mask_mode):
    """Every sequence in two parts, packed beside those of the others; sequences may pause."""
    lengths = ((3, 0, 2, 4, 1), (2, 5, 0, 1, 3))
    pieces_of = [
        make_packed_case(cases.PREFIX, part, valid=0.7, seed=i, mask_mode=mask_mode) for i, part in enumerate(lengths)
    ]
    state, pieces = None, []
    for case, part in zip(pieces_of, lengths, strict=True):
        kwargs = make_arguments(case, part, target.device)
        sums, state = ours.compute_episodic_prefix_sum(**kwargs, state=state, return_state=True, backend=target.backend)
        assert state.value.shape == state.done.shape == (5,)
        pieces.append(sums.cpu())
    for i in range(5):
        parts = [list(split_sequences(case, part))[i] for case, part in zip(pieces_of, lengths, strict=True)]
        whole = {name: np.concatenate([p[name] for p in parts], axis=1) for name in ("x", "dones", "mask")}
        exact, (value, done) = parts[0].replace(**whole).expected()
        edges = [find_edges(part)[i : i + 2] for part in lengths]
        got = torch.cat([x[low:high] for x, (low, high) in zip(pieces, edges, strict=True)])
        assert_close(got, exact[0])
        assert_close(state.value[i].cpu(), value[0])
        assert state.done[i].item() == done[0]


@pytest.mark.parametrize("mask_mode", ["skip", "reset"])
@pytest.mark.parametrize("done", [False, True])
def test_the_state_of_an_empty_sequence_is_the_one_before(target, mask_mode, done):
    """It is not that of the sequence after it, whose first step has the same offset."""
    x, flags = torch.tensor([5.0, 7.0], device=target.device), torch.tensor([1, 1], device=target.device)
    arguments = {"cu_seqlens": torch.tensor([0, 0, 2], device=target.device), "mask": flags, "mask_mode": mask_mode}
    arguments |= {"dones": flags * done, "return_state": True, "backend": target.backend}
    _, state = ours.compute_episodic_prefix_sum(x, **arguments)
    assert state.value.tolist() == [0, 7 if done else 12] and state.done.tolist() == [False, done]

    start = ScanState(torch.tensor([3.0, 4.0], device=target.device), torch.tensor([True, False], device=target.device))
    _, state = ours.compute_episodic_prefix_sum(x, state=start, **arguments)
    assert state.value.tolist() == [3, 7 if done else 16] and state.done.tolist() == [True, done]


@pytest.mark.parametrize("many", [False, True], ids=["long", "many"])
@ALL
def test_long_and_many_sequences(target, estimator, many):
    """Longer than a block, and more than one of them looks through."""
    lengths = (3000, 1, 0, 1500, 17, 1024) if target.compiled else (70, 1, 0, 33, 2)
    if many:
        lengths = tuple(np.random.default_rng(0).integers(0, 4, 3000 if target.compiled else 40))
    for valid in (1.0, 0.9):
        case = make_packed_case(estimator, lengths, term=0.005, trunc=0.005, valid=valid)
        check_packed(case, lengths, target)


@ALL
def test_several_threads(estimator, monkeypatch):
    """The cpu backend splits sequences by their steps."""
    pytest.importorskip("numba")
    monkeypatch.setattr("rl_triton_core._internal.scan.cpu.MIN_ELEMENTS_PER_CHUNK", 64)
    monkeypatch.setattr("rl_triton_core._internal.launch.threads.Setting.num_threads", 2)
    lengths = (0, 300, 1, 0, 40, 41, 7, 0)
    case = make_packed_case(estimator, lengths)
    check_packed(case, lengths, SimpleNamespace(backend="cpu", device="cpu", interpreted=False))


@ALL
@given(data=st.data())
def test_random_cases(target, estimator, data):
    lengths = data.draw(st.lists(st.integers(0, 9), max_size=2 if target.interpreted else 30))
    seed = data.draw(st.integers(0, 2**32 - 1))
    case = make_packed_case(estimator, lengths, seed=seed, valid=data.draw(st.sampled_from([1.0, 0.7])))
    if target.backend != "cpu" and data.draw(st.booleans()):  # where no flags are another loop to compile
        case = case.replace(**{"dones" if estimator is cases.PREFIX else "terminated": None})
    case = case.replace(mask_mode=data.draw(st.sampled_from(["skip", "reset"])))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    check_packed(
        case, lengths, target, How(dtype=dtype, layouts=(data.draw(st.sampled_from(["contiguous", "strided"])),))
    )


@ALL
def test_nothing_crosses_from_one_sequence_to_another(target, estimator):
    """Neither NaN nor infinity, from any step of any input; nor the other way."""
    lengths = (3, 1, 0, 4)
    case = make_packed_case(estimator, lengths, term=0, trunc=0)
    ids, names = np.repeat(np.arange(4), lengths), [n for n, x in case.args.items() if getattr(x, "ndim", 0) == 2]
    want = run_packed(case, lengths, target)
    for name in names:
        if case[name].dtype == bool:
            continue
        for t in range(0, 8, 2) if target.interpreted else range(8):
            dirty = case.replace(**{name: np.where(np.arange(8) == t, np.nan, case[name])})
            for got, clean in zip(run_packed(dirty, lengths, target), want, strict=True):
                outside = torch.as_tensor(ids != ids[t])
                assert same_bits(got[outside], clean[outside]), (name, t)


@ALL
def test_out(target, estimator):
    lengths = LENGTHS["ragged"]
    case = make_packed_case(estimator, lengths)
    want = run_packed(case, lengths, target)
    outs = [torch.full((36,), torch.nan, device=target.device) for _ in want]
    views = [out[::2] for out in outs]
    run_packed(case, lengths, target, out=tuple(views) if len(estimator.outputs) > 1 else views[0])
    for out, result in zip(outs, want, strict=True):
        if target.backend == "triton":  # strided outputs may get another kernel
            assert_close(out[::2].cpu(), result)
        else:
            assert same_bits(out[::2].cpu().contiguous(), result)
        assert out[1::2].isnan().all()


@BACKWARDS
def test_gradients(float64_target, estimator):
    lengths = (3, 0, 1, 2)
    for name, case in draw_form_cases(estimator, lengths):
        kwargs = {**make_arguments(case, lengths, how=How(dtype=torch.float64)), "backend": float64_target.backend}
        names = [k for k, x in kwargs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if name == "gamma":
            kwargs["gamma"] += 0.1  # differentiable where no discount is 0

        def call_estimator(*inputs, kwargs=kwargs, names=names):
            answer = estimator.function(**{**kwargs, **dict(zip(names, inputs, strict=True))})
            return answer if isinstance(answer, torch.Tensor) else tuple(answer)

        assert_gradients(call_estimator, [kwargs[k].requires_grad_() for k in names], float64_target.backend)


TOTAL = sum(LENGTHS["ragged"])


def make_index(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype)


BAD = {
    "a list": (TypeError, [0, TOTAL]),
    "floats": (TypeError, torch.tensor([0.0, TOTAL])),
    "int16": (TypeError, make_index(0, TOTAL, dtype=torch.int16)),
    "bool": (TypeError, torch.tensor([False, True])),
    "two dimensions": (ValueError, make_index(0, TOTAL)[None]),
    "no dimension": (ValueError, torch.tensor(TOTAL)),
    "empty": (ValueError, make_index()),
    "another device": (ValueError, make_index(0, TOTAL).to("meta")),
    "first not 0": (ValueError, make_index(1, TOTAL)),
    "last too small": (ValueError, make_index(0, TOTAL - 1)),
    "last too large": (ValueError, make_index(0, TOTAL + 1)),
    "decreasing": (ValueError, make_index(0, 5, 4, TOTAL)),
    "negative": (ValueError, make_index(0, -1, TOTAL)),
    "beyond and back": (ValueError, make_index(0, TOTAL + 5, TOTAL)),
}


@pytest.mark.parametrize("bad", BAD)
@ALL
def test_bad_cu_seqlens(estimator, bad):
    error, cu_seqlens = BAD[bad]
    kwargs = make_arguments(make_packed_case(estimator, LENGTHS["ragged"]), LENGTHS["ragged"])
    with pytest.raises(error, match="^cu_seqlens"):
        estimator.function(**{**kwargs, "cu_seqlens": cu_seqlens})


@ALL
def test_what_does_not_go_together(estimator):
    lengths = LENGTHS["ragged"]
    case = make_packed_case(estimator, lengths)
    kwargs = make_arguments(case, lengths)
    first = estimator.inputs[0]
    with pytest.raises(ValueError, match="time_dim"):
        estimator.function(**kwargs, time_dim=0)
    with pytest.raises(ValueError, match=f"^{first}"):
        estimator.function(**{**kwargs, first: kwargs[first][None]})
    for name, x in kwargs.items():
        if isinstance(x, torch.Tensor) and name not in (first, "cu_seqlens"):
            with pytest.raises(ValueError, match=f"^{name}"):
                estimator.function(**{**kwargs, name: x[:-1]})
    if "bootstrap_values" in kwargs:
        for bad in (FinalValues([0], [0], [1.0]), torch.zeros(len(lengths)), torch.zeros(len(lengths) + 2)):
            with pytest.raises(ValueError, match="bootstrap_values"):
                estimator.function(**{**kwargs, "bootstrap_values": bad})
        estimator.function(**{**kwargs, "bootstrap_values": torch.zeros(len(lengths)), "truncated": None})
    if estimator is cases.PREFIX:
        for bad in (torch.zeros(1), torch.zeros(len(lengths) + 1)):
            with pytest.raises(ValueError, match="state"):
                estimator.function(**kwargs, state=ScanState(bad, bad > 0))


def make_cuda_call(estimator, lengths):
    """A call without arguments, and its keyword arguments."""
    kwargs = {**make_arguments(make_packed_case(estimator, lengths), lengths, "cuda"), "backend": "triton"}

    def call_packed():
        answer = estimator.function(**kwargs)
        return [answer] if isinstance(answer, torch.Tensor) else [*answer]

    return call_packed, kwargs


@pytest.mark.gpu
@ALL
def test_no_synchronisation(estimator):
    call_packed, _ = make_cuda_call(estimator, tuple(np.random.default_rng(0).integers(0, 300, 40)))
    want = call_packed()
    with forbid_waiting():
        got = call_packed()
    assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.gpu
@ALL
def test_graph_capture(estimator):
    """The replay takes other sequences of the same total length."""
    call_packed, kwargs = make_cuda_call(estimator, (50, 0, 70, 8))
    offsets = [torch.tensor([0, *np.cumsum(x)]) for x in ((1, 2, 3, 122), (0, 0, 0, 128), (50, 0, 70, 8))]
    assert_replays(call_packed, *(partial(kwargs["cu_seqlens"].copy_, x) for x in offsets))
