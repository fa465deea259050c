"""Replayed calls give what whole calls give, whatever changes between them."""

import sys
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import rl_triton_core as ours
from rl_triton_core._internal import fast_path

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def rollout(envs=6, steps=40, dtype=torch.float32, device="cuda", seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, bootstrap = torch.randn(3, envs, steps, generator=generator).to(device, dtype)
    ends = (torch.rand(2, envs, steps, generator=generator) < 0.1).to(device)
    return {
        "rewards": rewards,
        "values": values,
        "terminated": ends[0],
        "truncated": ends[1],
        "bootstrap_values": bootstrap,
    }


def whole(function, **arguments):
    """The call without replaying."""
    return function.__wrapped__(**arguments)


def same(got, want):
    assert type(got) is type(want)
    for x, y in zip(got, want, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


def counted(backend, monkeypatch):
    """A call of the backend for each that is not a replay."""
    calls, run = [], backend.run
    monkeypatch.setattr(backend, "run", lambda *given: (calls.append(given), run(*given)))
    return calls


@pytest.fixture
def whole_calls(monkeypatch):
    from rl_triton_core._internal.backends import triton

    return counted(triton, monkeypatch)


@pytest.fixture
def whole_normalisations(monkeypatch):
    from rl_triton_core._internal.backends import triton_moments

    return counted(triton_moments, monkeypatch)


@ON_GPU
def test_like_calls_are_replayed(whole_calls):
    wants = [whole(ours.compute_gae, **rollout(5, 37, seed=seed)) for seed in range(4)]
    whole_calls.clear()
    for seed, want in enumerate(wants):
        same(ours.compute_gae(**rollout(5, 37, seed=seed)), want)
    first = rollout(5, 37)
    results = [ours.compute_gae(**first).advantages for _ in range(2)]
    assert len(whole_calls) == 2
    assert results[0].data_ptr() != results[1].data_ptr()


@ON_GPU
@pytest.mark.parametrize(
    "function", ["gae", "vtrace", "lambda_returns", "discounted_returns", "retrace", "traces", "sums", "linear", "long"]
)
def test_every_estimator(function, whole_calls):
    x = rollout(7, 50)
    ratios = {"log_ratios": 0.1 * x["rewards"]}
    calls = {
        "gae": (ours.compute_gae, x),
        "vtrace": (ours.compute_vtrace, {**x, **ratios}),
        "lambda_returns": (ours.compute_lambda_returns, x),
        "discounted_returns": (ours.compute_discounted_returns, {k: v for k, v in x.items() if k != "values"}),
        "retrace": (
            ours.compute_retrace,
            {
                "rewards": x["rewards"],
                "q_values": x["values"],
                "terminated": x["terminated"],
                "next_action_probs": torch.rand(7, 50, 4, device="cuda"),
                "next_q_values": torch.randn(7, 50, 4, device="cuda"),
                **ratios,
            },
        ),
        "traces": (ours.compute_eligibility_traces, {"x": x["rewards"], "terminated": x["terminated"], "gamma": 0.9}),
        "sums": (ours.compute_episodic_prefix_sum, {"x": x["rewards"], "dones": x["terminated"]}),
        "linear": (ours.linear_recurrence, {"alpha": x["rewards"], "beta": x["values"].sigmoid(), "reverse": True}),
        "long": (ours.compute_gae, rollout(2, 40_000)),
    }
    function, arguments = calls[function]
    wants = whole(function, **arguments)
    for _ in range(4):
        got = function(**arguments)
        same(got if isinstance(got, tuple) else (got,), wants if isinstance(wants, tuple) else (wants,))
    assert len(whole_calls) == 3


@ON_GPU
@pytest.mark.parametrize("form", ["plain", "masked", "transposed", "half", "out"])
def test_normalisation(form, whole_normalisations):
    for seed in range(5):
        x = rollout(300, 40, seed=seed)
        advantages = {"transposed": x["rewards"].t(), "half": x["rewards"].bfloat16()}.get(form, x["rewards"])
        options = {"masked": {"mask": ~x["terminated"]}, "out": {"out": torch.empty_like(advantages)}}.get(form, {})
        got = ours.normalize_advantages(advantages, **options)
        want = whole(ours.normalize_advantages, advantages=advantages, **options | {"out": None})
        assert torch.equal(got, want) and got.stride() == want.stride()
    assert len(whole_normalisations) == 2 + 5


@ON_GPU
def test_normalisation_in_place(whole_normalisations):
    in_place = rollout(30, 40)["rewards"]
    for _ in range(4):
        want = whole(ours.normalize_advantages, advantages=in_place)
        assert ours.normalize_advantages(in_place, out=in_place) is in_place
        assert torch.equal(in_place, want)
    assert len(whole_normalisations) == 2 + 4


@ON_GPU
def test_what_changes_is_noticed():
    """Shapes, strides, dtypes, alignment, numbers and names, one after another and back again."""
    plain = rollout(6, 40)
    shifted = {**plain, "rewards": torch.randn(6 * 40 + 1, device="cuda")[1:].view(6, 40)}
    transposed = {name: x.t().contiguous().t() for name, x in plain.items()}
    sliced = {name: torch.cat([x, x], 1)[:, :40] for name, x in plain.items()}
    reordered = {"gamma": 0.99, **dict(reversed(plain.items()))}
    variants = [
        plain,
        shifted,
        transposed,
        sliced,
        reordered,
        {**plain, "gamma": 0.5},
        {**plain, "gamma": 1},
        {**plain, "lambda_": 0.0},
        {**plain, "compute_returns": False},
        {**plain, "truncated": None},
        {**plain, "values": plain["values"].bfloat16()},
        {**plain, "mask": plain["terminated"]},
        {**plain, "mask": plain["terminated"], "mask_mode": "reset"},
        {**plain, "terminated": plain["terminated"].float()},
        {**plain, "rewards": plain["values"]},
        rollout(40, 6),
    ]
    for _ in range(3):
        for arguments in variants:
            same(ours.compute_gae(**arguments), whole(ours.compute_gae, **arguments))


@ON_GPU
def test_a_number_may_come_first(whole_calls):
    x = {"time_dim": 0, "gamma": 0.9, **rollout()}
    want = whole(ours.compute_gae, **x)
    for _ in range(4):
        same(ours.compute_gae(**x), want)
    assert len(whole_calls) == 3


@ON_GPU
def test_out(whole_calls):
    x = rollout(4, 30)
    want = whole(ours.compute_gae, **x)
    for _ in range(4):
        out = torch.empty(2, 4, 30, device="cuda").unbind()
        results = ours.compute_gae(**x, out=out)
        assert all(got.data_ptr() == given.data_ptr() for got, given in zip(results, out, strict=True))
        same(results, want)
    assert len(whole_calls) == 3
    with pytest.raises(ValueError, match=r"out \(advantages\)"):
        ours.compute_gae(**x, out=(x["rewards"], out[1]))
    with pytest.raises(ValueError, match="out"):
        ours.compute_gae(**x, out=(out[0], out[0]))


@ON_GPU
def test_errors_stay():
    x = rollout(4, 30)
    for _ in range(2):
        ours.compute_gae(**x)
    for bad in ({"gamma": float("nan")}, {"gamma": True}, {"lambda_": 2.0}, {"values": x["values"][:, 1:]}):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError)):
                ours.compute_gae(**{**x, **bad})


@ON_GPU
def test_gradients_stay():
    x = rollout(4, 30)
    for _ in range(3):
        ours.compute_gae(**x)
        values = x["values"].clone().requires_grad_()
        ours.compute_gae(**{**x, "values": values}).advantages.sum().backward()
        assert values.grad is not None
        with torch.no_grad():
            assert not ours.compute_gae(**{**x, "values": values}).advantages.requires_grad


@ON_GPU
def test_another_stream_and_a_graph():
    x = rollout(4, 30)
    for _ in range(2):
        want = ours.compute_gae(**x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = ours.compute_gae(**x)
    stream.synchronize()
    same(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ours.compute_gae(**x)
    x["rewards"].mul_(2)
    graph.replay()
    same(got, whole(ours.compute_gae, **x))


@ON_GPU
def test_several_threads():
    inputs = [rollout(3 + i % 2, 20 + i % 3, seed=i) for i in range(12)]
    wants = [whole(ours.compute_gae, **x) for x in inputs]
    gots = [None] * len(inputs)

    def work(i):
        for _ in range(20):
            gots[i] = ours.compute_gae(**inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for got, want in zip(gots, wants, strict=True):
        same(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second device")
def test_a_second_device():
    for device in 3 * ("cuda:0", "cuda:1"):
        x = rollout(4, 30, device=device)
        got = ours.compute_gae(**x)
        assert got.advantages.device == torch.device(device)
        same(got, whole(ours.compute_gae, **x))


def test_calls_on_the_cpu_are_left_alone(monkeypatch):
    x = rollout(2, 5, device="cpu")
    monkeypatch.setattr(fast_path, "record_launches", None)
    same(ours.compute_gae(**x), whole(ours.compute_gae, **x))


@pytest.fixture(params=[True, False], ids=["guards", "no guards"])
def guards(request, monkeypatch):
    """With PyTorch's check of tensors, and without it."""
    if not request.param:
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)


def test_what_is_alike(guards):
    x, y = torch.zeros(4, 6), torch.zeros(4, dtype=torch.bool)
    fits = fast_path.tensor_guard([x, y])
    assert fits(torch.ones(4, 6), torch.ones(4, dtype=torch.bool))
    assert fits(x.clone().requires_grad_().detach(), y)
    for other in (torch.zeros(6, 4), torch.zeros(4, 12)[:, ::2], torch.zeros(6, 4).t(), x.double(), x.to("meta")):
        assert not fits(other, y)
    assert not fits(x.clone().requires_grad_(), y)
    assert not fits(x, torch.zeros(4))


class Launcher:
    """Like Triton's: it hands everything to `launch`, with arguments of its own between."""

    global_scratch_size = 0

    def __init__(self, launched):
        self.launch = lambda *given: launched.append(given)

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, "own", *rest)


class Kernel:
    """Like what Triton compiles: how it is launched shows in what order its launcher wants what."""

    def __init__(self, launched, launcher=Launcher):
        self.run, self.function, self.packed_metadata = launcher(launched), "function", "metadata"

    def __getitem__(self, grid):
        return lambda *args, stream: self.run(
            *grid,
            stream,
            self.function,
            self.packed_metadata,
            self.launch_metadata(grid),
            *fast_path.launch_hooks(),
            *args,
        )


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(fast_path, "device_guards", lambda index, names: ["stream = 77"])
    monkeypatch.setattr(fast_path, "launch_hooks", lambda: (None, None))


@pytest.fixture
def recorded(no_device):
    """A call f(x, 0.5, (y, None)) that launched a kernel with (x, (y, new, 3), 0.5) and returned (new, y)."""
    launched = []
    x, y, new = torch.zeros(4, 6), torch.zeros(5), torch.zeros(4, 6)
    launch = fast_path.RecordedLaunch(Kernel(launched), (8, 2), (x, (y, new, 3), 0.5), None)
    return fast_path.build_plan((x, 0.5, (y, None)), [launch], Pair(new, y)), launched


def test_a_call_made_again(recorded):
    call, launched = recorded
    x, y = torch.ones(4, 6), torch.ones(5)
    results = call(x, 0.5, (y, None))
    assert type(results) is Pair
    assert results.second is y
    new = results.first
    assert (new.shape, new.dtype) == (x.shape, x.dtype)
    arguments = (x.data_ptr(), (y.data_ptr(), new.data_ptr(), 3), 0.5)
    assert launched == [(8, 2, 1, 77, "function", "own", "metadata", None, None, None, *arguments)]


def test_calls_that_are_not_alike(recorded):
    call, launched = recorded
    x, y = torch.ones(4, 6), torch.ones(5)
    shifted = torch.ones(25)[1:].view(4, 6)
    others = [
        (x, 0.25, (y, None)),
        (x, None, (y, None)),
        (x, x, (y, None)),
        (x, 0.5, (y, y)),
        (x, 0.5, (None, y)),
        (x, 0.5, (y, None, None)),
        (x, 0.5, y),
        (x, 0.5, (0.5, None)),
        (y, 0.5, (x, None)),
        (shifted, 0.5, (y, None)),
        (x.clone().requires_grad_(), 0.5, (y, None)),
    ]
    assert [call(*arguments) for arguments in others] == [None] * len(others)
    assert not launched


def test_a_call_without_a_graph_is_not_like_one_with_it(guards, no_device):
    """Replayed without one as often as wanted; with one it goes the whole way, which builds the graph."""
    x, new, launched = torch.zeros(4).requires_grad_(), torch.zeros(4), []
    launch = fast_path.RecordedLaunch(Kernel(launched), (1, 1), (x, new), None)
    with torch.no_grad():
        without = fast_path.build_plan((x,), [launch], new)
    graph = fast_path.build_plan((x,), [launch], new)
    assert (without(x), len(launched)) == (None, 0)
    assert graph(x) is fast_path.SLOW_PATH
    with torch.no_grad():
        assert graph(x) is None
        assert not without(x).requires_grad
    assert len(launched) == 1


def test_in_place(no_device):
    """Calls f(x, x) that wrote to x are replayed, and f(x, y) is another kind, which may not overlap at all."""
    launched = []
    x = torch.zeros(8)
    twice = fast_path.build_plan((x, x), [fast_path.RecordedLaunch(Kernel(launched), (1, 1), (x, x), None)], x)
    other, y = torch.ones(8), torch.ones(8)
    assert twice(other, other) is other
    assert launched.pop()[-2:] == (other.data_ptr(), other.data_ptr())
    assert twice(other, y) is None
    view = fast_path.build_plan((x, x[:]), [fast_path.RecordedLaunch(Kernel(launched), (1, 1), (x, x), None)], x)
    assert view(other, y) is None
    overlap_guard = fast_path.build_plan((x, y), [fast_path.RecordedLaunch(Kernel(launched), (1, 1), (x, y), None)], y)
    assert overlap_guard(other, other) is None
    assert overlap_guard(x, other) is other
    both = torch.ones(12)
    assert overlap_guard(both[:8], both[4:]) is fast_path.SLOW_PATH


def test_preparing_takes_no_memory(no_device, monkeypatch):
    """Of the device: what a result would look like is asked without making one."""
    x, new, made, empty_like = torch.zeros(4), torch.zeros(4), [], torch.empty_like

    def call_and_record(*given, **options):
        made.append(empty_like(*given, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty_like", call_and_record)
    call = fast_path.build_plan((x,), [fast_path.RecordedLaunch(Kernel([]), (1, 1), (x, new), None)], new)
    assert {y.device.type for y in made} == {"meta"}
    assert call(x).device == x.device


def test_results_that_may_overlap_the_inputs(recorded):
    call, launched = recorded
    x = torch.ones(24)
    assert call(x.view(4, 6), 0.5, (x[4:9], None)) is fast_path.SLOW_PATH
    assert not launched


def copied(kernel, given):
    """A call f(x) that launched a kernel with x and something else, and returned a new tensor."""
    x, new = torch.zeros(4), torch.zeros(4)
    return fast_path.build_plan((x,), [fast_path.RecordedLaunch(kernel, (1, 1), (x, *given, new), None)], new)


def test_a_tensor_from_elsewhere(no_device):
    assert copied(Kernel([]), [torch.zeros(3)])(torch.zeros(4)) is fast_path.SLOW_PATH


class Unwatched(Launcher):
    """What it calls in the end cannot be replaced."""

    launch = property(lambda self: lambda *given: None, lambda self, launch: None)


class WithoutStream(Launcher):
    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, function, *rest)


class Twice(Launcher):
    def __call__(self, *given):
        self.launch(*given)
        self.launch(*given)


class OfFewer(Launcher):
    def __call__(self, x, y, z, stream, function, metadata):
        self.launch(x, y, z, stream, function, metadata)


class OfNames(Launcher):
    def __call__(self, *given, cluster):
        self.launch(*given, cluster)


@pytest.mark.parametrize("launcher", [Unwatched, WithoutStream, Twice, OfFewer, OfNames])
def test_a_launcher_that_is_not_known(no_device, launcher):
    launched = []
    assert copied(Kernel(launched, launcher), [])(torch.zeros(4)) is fast_path.SLOW_PATH
    assert not launched


@pytest.mark.parametrize("missing", ["run", "function", "packed_metadata", "__getitem__"])
def test_a_kernel_that_is_not_known(no_device, missing):
    kernel = Kernel([])
    if missing == "__getitem__":
        kernel = SimpleNamespace(run=kernel.run, function=kernel.function, packed_metadata=kernel.packed_metadata)
    else:
        delattr(kernel, missing)
    assert copied(kernel, [])(torch.zeros(4)) is fast_path.SLOW_PATH


def test_a_triton_without_knobs(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.delattr(triton, "knobs", raising=False)
    monkeypatch.setitem(sys.modules, "triton.knobs", None)
    assert copied(Kernel([]), [])(torch.zeros(4)) is fast_path.SLOW_PATH


def test_a_kernel_launched_in_another_order(no_device):
    """Its own way to launch it says so."""

    class Reordered(Launcher):
        def __call__(self, stream, function, *rest):
            self.launch(function, stream, *rest)

    class Other(Kernel):
        def __getitem__(self, grid):
            return lambda *args, stream: self.run(stream, self.function, grid, *args)

    launched = []
    call, x = copied(Other(launched, Reordered), [5]), torch.ones(4)
    new = call(x)
    assert launched == [("function", 77, (1, 1, 1), x.data_ptr(), 5, new.data_ptr())]


def test_normalisation_notes_what_its_kernels_take():
    """Arguments in the order of the kernels', and the memory between them."""
    backend = pytest.importorskip("rl_triton_core._internal.backends.triton_moments", reason="Triton is not installed")
    x = torch.randn(3, 50)
    if backend.kernels.moments.__class__.__name__ != "InterpretedFunction":
        pytest.skip("TRITON_INTERPRET=1 is not set")
    with fast_path.record_launches() as launches:
        ours.normalize_advantages(x, mask=x > 0, backend="triton")
    assert len(launches) == 2
    for launched, kernel in zip(launches, (backend.kernels.moments, backend.kernels.standardize), strict=True):
        given = dict(zip(kernel.arg_names, launched.arguments, strict=True))
        assert given["parts"] is launched.scratch
        assert launched.grid == (1, 1)
        assert (given["BLOCK_ROWS"], given["BLOCK_COLUMNS"]) == backend.cut(1, 150)[:2]


def test_the_triton_that_is_installed(monkeypatch):
    """A replay hands its launcher's last function what its own way to launch a kernel hands it, but the hooks."""
    pytest.importorskip("triton")
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler.compiler import CompiledKernel

    launched = []
    kernel, launcher = object.__new__(CompiledKernel), object.__new__(CudaLauncher)
    own = {"launch_cooperative_grid": False, "launch_pdl": True, "arg_annotations": [], "kernel_signature": b"s"}
    vars(launcher).update(own, launch=lambda *given: launched.append(given), num_ctas=1)
    vars(launcher).update(dict.fromkeys(["global_scratch_size", "profile_scratch_size"], 0))
    vars(launcher).update(dict.fromkeys(["global_scratch_align", "profile_scratch_align"], 1))
    vars(kernel).update(module="module", function="function", packed_metadata="metadata", src=None, name="scan")
    vars(kernel)["run" if "run" not in vars(CompiledKernel) else "_run"] = launcher

    monkeypatch.setattr(fast_path, "device_guards", lambda index, names: ["stream = 77"])
    call, x = copied(kernel, [(3, None), 0.5]), torch.ones(4)
    new = call(x)
    kernel[(1, 1, 1)](x.data_ptr(), (3, None), 0.5, new.data_ptr(), stream=77)
    got, want = launched
    launch_hooks = [*fast_path.launch_hooks(), None]
    metadata = want.index("metadata")
    replaced = range(metadata + 1, metadata + 4)
    assert [got[i] for i in replaced] == [None] * 3
    assert all(any(want[i] is hook for hook in launch_hooks) for i in list(replaced)[1:])
    assert all(x == y for i, (x, y) in enumerate(zip(got, want, strict=True)) if i not in replaced)


def test_the_second_call_of_a_kind_is_prepared(monkeypatch):
    """And the third is the first to be replayed; kinds that never come again cost no preparation."""
    build_plan = []

    def note(given, launches, results):
        build_plan.append(given)
        return lambda *others: "replayed" if others[0].shape == given[0].shape and others[1:] == given[1:] else None

    monkeypatch.setattr(fast_path, "is_plannable", lambda given: True)
    monkeypatch.setattr(fast_path, "build_plan", note)
    function = fast_path.with_fast_path(lambda x, number=0.5, out=None: "whole")
    assert [function(torch.zeros(n)) for n in range(5)] == 5 * ["whole"]
    assert [function(torch.zeros(3), 0.1 * n) for n in range(5)] == 5 * ["whole"]
    assert [function(torch.zeros(3), out=(torch.zeros(n), None)) for n in range(5)] == 5 * ["whole"]
    assert not build_plan
    assert [function(torch.ones(3), 0.2) for _ in range(3)] == ["whole", "replayed", "replayed"]
    assert function(number=0.2, x=torch.ones(3)) == "replayed"
    assert function(torch.ones(3)) == "whole"
    assert len(build_plan) == 2
    fast_path.forget_plans()
    assert [function(torch.ones(3), 0.2) for _ in range(3)] == ["whole", "whole", "replayed"]


def test_calls_met_once_take_bounded_memory():
    seen = set()
    assert not any(fast_path.is_second_call(seen, kind) for kind in range(10 * fast_path.MAX_SEEN_SIGNATURES))
    assert len(seen) <= fast_path.MAX_SEEN_SIGNATURES
    assert fast_path.is_second_call(seen, 10 * fast_path.MAX_SEEN_SIGNATURES - 1)
    assert not fast_path.is_second_call(seen, 10 * fast_path.MAX_SEEN_SIGNATURES - 1)


def test_an_error_is_no_first_call(monkeypatch):
    calls = []

    def function(x):
        calls.append(x)
        if len(calls) == 1:
            raise ValueError("x: got nothing")

    monkeypatch.setattr(fast_path, "is_plannable", lambda given: True)
    monkeypatch.setattr(fast_path, "build_plan", lambda *_: pytest.fail("prepared at the first call that succeeded"))
    call = fast_path.with_fast_path(function)
    with pytest.raises(ValueError, match="got nothing"):
        call(torch.zeros(3))
    call(torch.zeros(3))


def test_span():
    assert fast_path.byte_span(torch.zeros(4, 5)) == 80
    assert fast_path.byte_span(torch.zeros(4, 5).t()[:, ::2]) == (4 + 10 + 1) * 4
