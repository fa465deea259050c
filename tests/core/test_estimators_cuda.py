"""What only a GPU can show: graphs, streams, no synchronisation, a second device, more than 2**31 elements."""

import gc
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import cases
import numpy as np
import oracles
import pytest
import torch
from cases import Call, How, check_case, get_name, random_case, same_bits, with_form
from gpu_checks import assert_replays, forbid_waiting, measure_peak
from test_estimators_precision import assert_as_exact_as_a_loop, set_rates

from rl_triton_core import FinalValues, compute_gae
from rl_triton_core._internal.launch.fast_path import forget_plans
from rl_triton_core._internal.launch.kernels import VARIANTS
from rl_triton_core.testing import assert_close

pytestmark = pytest.mark.gpu

GPU = SimpleNamespace(backend="triton", device="cuda", interpreted=False)
ALL = pytest.mark.parametrize("estimator", cases.ESTIMATORS, ids=get_name)
SHAPE = (64, 128)


def draw_cases(estimator):
    features = (3,) if estimator in cases.FORWARD or estimator is cases.LINEAR else ()
    yield random_case(estimator, *SHAPE, valid=0.9, features=features)
    if estimator in cases.FORWARD:
        state = (np.zeros((64, 3)), np.zeros(64, bool))
        yield random_case(estimator, *SHAPE, features=features, state=state)
    if estimator is cases.RETRACE:
        yield with_form(random_case(estimator, *SHAPE), "actions")
    if estimator in cases.BACKWARD:
        yield random_case(estimator, *SHAPE, gamma=np.full(SHAPE, 0.9))
    for form in {"scalar", "next_values", "edge"}.intersection(cases.FORMS.get(estimator.name, ())):
        yield with_form(random_case(estimator, *SHAPE), form)


def make_out(call):
    like = call.kwargs[call.estimator.inputs[0]]
    outs = tuple(torch.full_like(like, torch.nan) for _ in call.estimator.outputs)
    return outs if len(outs) > 1 else outs[0]


def renew_first(call, case):
    """The first input is that of another case."""
    name = call.estimator.inputs[0]
    call.kwargs[name].copy_(Call(case, "cuda", call.how).kwargs[name])


@pytest.mark.parametrize("time_dim", [-1, 0])
@ALL
def test_no_synchronisation(estimator, time_dim):
    for case in draw_cases(estimator):
        call = Call(case, "cuda", How(time_dim=time_dim))
        want, out = call("triton"), make_out(call)
        with forbid_waiting():
            results = [call("triton"), call("triton", out=out)]
        for got in results:
            assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("estimator", cases.BOOTSTRAPPED, ids=get_name)
def test_final_values_on_the_device_do_not_synchronise(estimator):
    call = Call(random_case(estimator, *SHAPE), "cuda")
    env, time = torch.nonzero(call.kwargs["truncated"], as_tuple=True)
    value, edge = torch.ones(len(env), device="cuda"), torch.zeros(SHAPE[0], device="cuda")
    want = call("triton", bootstrap_values=FinalValues(env, time, value, edge))
    with forbid_waiting():
        got = call("triton", bootstrap_values=FinalValues(env, time, value, edge))
    assert all(same_bits(x, y) and x.isfinite().all() for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("estimator", cases.FORWARD, ids=get_name)
def test_no_synchronisation_with_a_state(estimator):
    for valid in (1.0, 0.9):
        call = Call(random_case(estimator, *SHAPE, valid=valid), "cuda")
        for context in (nullcontext, forbid_waiting):
            with context():
                _, state = call("triton", return_state=True)
                call("triton", state=state, return_state=True)


@ALL
def test_no_synchronisation_with_gradients(estimator):
    call = Call(random_case(estimator, *SHAPE), "cuda")
    first = call.kwargs[estimator.inputs[0]].requires_grad_()
    sum(x.sum() for x in call("triton")).backward()  # the first one compiles
    first.grad = None
    with forbid_waiting():
        sum(x.sum() for x in call("triton")).backward()
    assert first.grad.isfinite().all()


@pytest.mark.parametrize("given", [False, True], ids=["fresh", "out"])
@ALL
def test_graph_capture(estimator, given):
    """The replay reads what stands in the inputs then, and writes where the capture wrote."""
    for case in draw_cases(estimator):
        call, options = Call(case, "cuda"), {"features": case[estimator.inputs[0]].shape[2:]}
        changes = {"out": make_out(call)} if given else {}
        renewals = [partial(renew_first, call, random_case(estimator, *SHAPE, seed=seed, **options)) for seed in (1, 2)]
        assert_replays(partial(call, "triton", **changes), *renewals)


@pytest.mark.parametrize("time_dim", [-1, 0])
@ALL
def test_graph_capture_of_rows_split_over_time(estimator, time_dim, monkeypatch):
    """Two launches, and memory between them that is the graph's own; captured whole, and as a replay."""
    from rl_triton_core._internal.scan import triton as backend

    numbers = []
    launches = backend.build_launches

    def note_launches(problem, *settings):
        made = list(launches(problem, *settings))
        numbers.append(len(made))
        return made

    monkeypatch.setattr(backend, "build_launches", note_launches)
    forget_plans()
    VARIANTS.clear()
    call = Call(random_case(estimator, 2, 40_000), "cuda", How(time_dim=time_dim))
    renewals = [partial(renew_first, call, random_case(estimator, 2, 40_000, seed=seed)) for seed in (1, 2)]
    for _ in range(2):
        assert_replays(partial(call, "triton"), *renewals)
    assert numbers == [2]  # built at the first call, kept for the captures


@pytest.mark.parametrize("time_dim", [-1, 0])
@ALL
def test_no_memory_but_that_of_the_results(estimator, time_dim):
    """Where nothing requires grad: nothing is copied meanwhile, and nothing held afterwards. Whole, and replayed."""
    VARIANTS.clear()  # general kernels have room for more segments
    call = Call(random_case(estimator, 1024, 512, valid=0.9), "cuda", How(time_dim=time_dim))
    size = sum(x.nbytes for x in call("triton"))
    gc.collect()  # what other tests left must not go meanwhile
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call("triton")
        held, most = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        assert size == sum(x.nbytes for x in results)
        assert held <= most < size + 2**18  # an input takes 2**21 bytes, its flags 2**19
        assert all(x.grad_fn is None for x in results)
        del results
        assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("layout", ["transposed", "padded", "padded_transposed", "expanded"])
@pytest.mark.parametrize("time_dim", [-1, 0])
@pytest.mark.parametrize("estimator", [cases.GAE, cases.TRACES], ids=get_name)
def test_strided_views_are_read_in_place(estimator, layout, time_dim):
    """With `out`, a call takes no memory worth mentioning: nothing is copied."""
    case = random_case(estimator, 1024, 512, valid=0.9)
    first = case[estimator.inputs[0]]
    first[:] = first[:, :1]
    call = Call(case, "cuda", How(time_dim=time_dim, layouts=(layout,)))
    out = make_out(call)
    call("triton", out=out)
    assert measure_peak(lambda: call("triton", out=out)) < 2**18  # an input takes 2**21 bytes, its flags 2**19


@ALL
def test_a_stream_of_its_own(estimator):
    """Inputs that are filled late on a side stream, of a call that is repeated: elsewhere it would read them early."""
    forget_plans()
    VARIANTS.clear()
    call, first = Call(random_case(estimator, *SHAPE), "cuda"), estimator.inputs[0]
    want = [call("triton") for _ in range(2)][-1]
    late = torch.full_like(call.kwargs[first], torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(call.kwargs[first])
        got = call("triton", **{first: late})
    stream.synchronize()
    assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))


@ALL
def test_a_second_device(estimator):
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    VARIANTS.clear()  # the shape is a first one on both devices
    case = random_case(estimator, *SHAPE)
    want, got = Call(case, "cuda:0")("triton"), Call(case, "cuda:1")("triton")
    assert got[0].device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))
    first = estimator.inputs[0]
    with pytest.raises(ValueError, match="cuda:0"):
        Call(case, "cuda:1")("triton", **{first: Call(case, "cuda:0").kwargs[first]})


@pytest.mark.parametrize("grad", [False, True])
@ALL
def test_compiles_with_inductor(estimator, grad):
    call = Call(random_case(estimator, *SHAPE), "cuda")
    first = call.kwargs[estimator.inputs[0]].requires_grad_(grad)

    def call_estimator(x):
        return call("triton", **{estimator.inputs[0]: x + 1})[0] * 2

    cases.check_full_graph(call_estimator, first, compiler="inductor", compare=assert_close)


@ALL
def test_a_long_time_major_rollout(estimator):
    case = random_case(estimator, 3, 50_003, term=1e-4, trunc=1e-4)
    check_case(set_rates(case, 0.999, 1.0), GPU, How(time_dim=0))


@ALL
def test_many_environments(estimator):
    assert_as_exact_as_a_loop(random_case(estimator, 4096, 24), GPU)


@pytest.mark.parametrize("time_dim", [-1, 0])
def test_a_million_steps(time_dim):
    case = random_case(cases.GAE, 3, 1_000_003, term=1e-4, trunc=1e-4, gamma=0.999, lambda_=1.0)
    check_case(case, GPU, How(time_dim=time_dim))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_envs", "num_steps", "time_dim"), [(65_537, 32_769, -1), (65_537, 32_769, 0), (3, 800_000_011, -1)]
)
def test_more_than_2_to_the_31_elements(num_envs, num_steps, time_dim, much_memory):
    """A few stretches at the start, in the middle and at the end are checked, each from one done step to another."""
    assert num_envs * num_steps > 2**31
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("not enough memory on the device")
    shape = (num_envs, num_steps) if time_dim == -1 else (num_steps, num_envs)
    generator = torch.Generator("cuda").manual_seed(0)
    rewards, values = (
        torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator) for _ in range(2)
    )
    terminated = torch.empty(shape, dtype=torch.uint8, device="cuda").random_(0, 100, generator=generator) == 0
    out = tuple(torch.full(shape, torch.nan, device="cuda") for _ in range(2))
    compute_gae(rewards, values, terminated, bootstrap_values=0.5, time_dim=time_dim, out=out, backend="triton")

    def cut_row(x, n, start, stop):
        row = x[n] if time_dim == -1 else x[:, n]
        return row[start:stop].double().cpu().numpy()[None]

    length = 5000
    for n in (0, num_envs // 2, num_envs - 1):
        for start in (0, num_steps // 2, num_steps - length):
            window = n, start, start + length
            r, v, term = (cut_row(x, *window) for x in (rewards, values, terminated))
            bootstrap = np.full(r.shape, np.nan)
            keep = length if start + length == num_steps else np.flatnonzero(term[0])[-1] + 1
            bootstrap[0, -1] = 0.5
            want = oracles.gae(r, v, term, bootstrap=bootstrap)
            for x, expected in zip(out, want, strict=True):
                assert_close(cut_row(x, *window)[:, :keep], expected[:, :keep], rtol=1e-6)
