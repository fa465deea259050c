"""Replayed calls give what whole calls give, whatever changes between them."""

import sys
import threading
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import ESTIMATORS, GAE, RETRACE, Call, random_case, with_form
from process_state import run_in_threads
from processes import run_python

import rl_triton_core as ours
from rl_triton_core._internal import backend as backends
from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.capture.step import is_wanted
from rl_triton_core._internal.launch import fast_path, plan
from rl_triton_core._internal.launch import kernels as launch_kernels
from rl_triton_core._internal.launch import launcher as triton_launcher
from rl_triton_core._internal.launch.launcher import CURRENT_STREAM, RecordedLaunch, ResolvedLaunch
from rl_triton_core.losses import grpo_loss

pytestmark = pytest.mark.covering


def make_rollout(envs=6, steps=40, dtype=torch.float32, device="cuda", seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(3, envs, steps, generator=generator).to(device, dtype)
    ends = (torch.rand(2, envs, steps, generator=generator) < 0.1).to(device)
    names = "rewards", "values", "bootstrap_values", "terminated", "truncated"
    return dict(zip(names, (*numbers, *ends), strict=True))


def take_normal_path(function, **arguments):
    return function.__wrapped__(**arguments)


def assert_same(got, want):
    assert type(got) is type(want)
    for x, y in zip(got, want, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


def count_calls(topic, monkeypatch):
    """A call of the backend's function for each that does not take the fast path. No shape was called before."""
    launch_kernels.VARIANTS.clear()
    calls, backend = [], backends.load_backend("triton")
    own = vars(getattr(backend, topic))
    run = SimpleNamespace(**own | {"run": lambda *given: (calls.append(given), own["run"](*given))})
    counting = backend._replace(**{topic: run})
    monkeypatch.setattr(backends, "load_backend", lambda name: counting)
    monkeypatch.setattr(backends, "choose_automatically", lambda device_type: counting)
    return calls


@pytest.fixture
def normal_calls(device, monkeypatch):
    """A list to which every call that takes the normal path adds one."""
    fast_path.forget_plans()
    if device == "cuda":
        return count_calls("scan", monkeypatch)
    cpu = pytest.importorskip("rl_triton_core._internal.scan.cpu")
    walks, prepare = [], cpu.prepare_walk
    monkeypatch.setattr(cpu, "prepare_walk", lambda *given: (walks.append(1), prepare(*given))[1])
    return walks


@pytest.mark.parametrize("layout", ["env-major", "time-major"])
def test_repeated_calls(device, layout, normal_calls):
    """Other tensors, numbers and outputs give what the normal path gives, bit for bit, in memory of their own."""
    kept = []
    for seed in range(6):
        given = make_rollout(13, device=device, seed=seed) | {"gamma": 0.9 + seed / 100, "lambda_": 0.5 + seed / 20}
        if layout == "time-major":
            given = {k: x.T.contiguous() if isinstance(x, torch.Tensor) else x for k, x in given.items()}
            given["time_dim"] = 0
        want = take_normal_path(ours.compute_gae, **given)
        kept.append(ours.compute_gae(**given))
        assert_same(kept[-1], want)
        out = tuple(torch.full_like(given["rewards"], torch.nan) for _ in range(2))
        assert all(x is y for x, y in zip(ours.compute_gae(**given, out=out), out, strict=True))
        assert_same(ours.GAEOutput(*out), want)
    assert len(normal_calls) == 6 + 2 * 2
    assert len({x.data_ptr() for results in kept for x in results}) == 12


@pytest.mark.parametrize(("estimator", "steps"), [*((x, 50) for x in ESTIMATORS), (GAE, 40_000)])
def test_every_estimator(estimator, steps, device, normal_calls):
    case = random_case(estimator, 7, steps)
    arguments = Call(with_form(case, "actions") if estimator is RETRACE else case, device).kwargs
    wants = take_normal_path(estimator.function, **arguments)
    for _ in range(4):
        got = estimator.function(**arguments)
        assert_same(got if isinstance(got, tuple) else (got,), wants if isinstance(wants, tuple) else (wants,))
    sums_actions_before = estimator is RETRACE and device == "cpu"
    assert len(normal_calls) == (5 if sums_actions_before else 3)


@pytest.fixture
def whole_normalisations(monkeypatch):
    return count_calls("moments", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["plain", "masked", "transposed", "half", "out", "in place"])
def test_normalisation(form, whole_normalisations):
    for seed in range(5):
        x = make_rollout(300, 40, seed=seed)
        advantages = {"transposed": x["rewards"].t(), "half": x["rewards"].bfloat16()}.get(form, x["rewards"])
        options = {"masked": {"mask": ~x["terminated"]}, "out": {"out": torch.empty_like(advantages)}}
        options = (options | {"in place": {"out": advantages}}).get(form, {})
        want = take_normal_path(ours.normalize_advantages, advantages=advantages, **options | {"out": None})
        got = ours.normalize_advantages(advantages, **options)
        assert torch.equal(got, want) and got.stride() == want.stride()
    assert len(whole_normalisations) == 2 + 5


def list_variants(device):
    """Calls that differ in shapes, strides, dtypes, alignment, numbers, names, outputs or gradients."""
    plain = make_rollout(6, 40, device=device)
    sliced = {name: torch.cat([x, x], 1)[:, :40] for name, x in plain.items()}
    variants = [
        {"rewards": torch.randn(6 * 40 + 1, device=device)[1:].view(6, 40)},
        {name: x.t().contiguous().t() for name, x in plain.items()},
        sliced,
        {"gamma": 0.5},
        {"gamma": 1},
        {"gamma": torch.full_like(plain["rewards"], 0.9)},
        {"lambda_": 0.0},
        {"compute_returns": False},
        {"truncated": None},
        {"values": plain["values"].bfloat16()},
        {"mask": plain["terminated"]},
        {"mask": plain["terminated"], "mask_mode": "reset"},
        {"terminated": plain["terminated"].float()},
        {"rewards": plain["values"]},
        {"values": plain["values"].clone().requires_grad_()},
        {"backend": "reference"},
        make_rollout(40, 6, device=device),
        *([{"rewards": plain["rewards"].double()}] if device == "cpu" else []),
    ]
    return [plain, {"gamma": 0.99, **dict(reversed(plain.items()))}, *({**plain, **changes} for changes in variants)]


def test_what_changes_is_noticed(device):
    """One after another and back again."""
    for arguments in 3 * list_variants(device):
        got, want = ours.compute_gae(**arguments), take_normal_path(ours.compute_gae, **arguments)
        assert_same(got, want)
        assert got.advantages.requires_grad == want.advantages.requires_grad


def test_errors_stay(device):
    x, out = make_rollout(4, 30, device=device), torch.empty(2, 4, 30, device=device).unbind()
    for _ in range(3):
        ours.compute_gae(**x)
        ours.compute_gae(**x, out=out)
    for bad in (
        {"gamma": float("nan")},
        {"gamma": True},
        {"lambda_": 2.0},
        {"values": x["values"][:, 1:]},
        {"out": (x["rewards"], out[1])},
        {"out": (out[0], out[0])},
    ):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
                ours.compute_gae(**{**x, **bad})


def test_several_threads(device):
    inputs = [make_rollout(3 + i % 2, 20 + i % 3, device=device, seed=i) for i in range(12)]
    wants = [take_normal_path(ours.compute_gae, **x) for x in inputs]

    def work(x):
        return [ours.compute_gae(**x) for _ in range(20)][-1]

    gots = run_in_threads(*(partial(work, x) for x in inputs))
    for got, want in zip(gots, wants, strict=True):
        assert_same(got, want)


@pytest.fixture(params=[True, False], ids=["guards", "no guards"])
def guards(request, monkeypatch):
    """With PyTorch's check of tensors, and without it."""
    if not request.param:
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)


def test_what_is_alike(guards):
    x, y = torch.zeros(4, 6), torch.zeros(4, dtype=torch.bool)
    fits = plan.make_tensor_guard([x, y])
    assert fits(torch.ones(4, 6), torch.ones(4, dtype=torch.bool))
    assert fits(x.clone().requires_grad_().detach(), y)
    for other in (torch.zeros(6, 4), torch.zeros(4, 12)[:, ::2], torch.zeros(6, 4).t(), x.double(), x.to("meta")):
        assert not fits(other, y)
    assert not fits(x.clone().requires_grad_(), y)
    assert not fits(x, torch.zeros(4))


class Pair(NamedTuple):
    first: Any
    second: Any


def launch(launched, x, *numbers, result=None, resolve=lambda launch: launch):
    """As a function that launches something with x, numbers and a new tensor, which a repeated call adds to a list."""
    result = torch.empty_like(x) if result is None else result
    resolved = ResolvedLaunch(lambda *given: launched.append(given), (x, *numbers, result))
    triton_launcher.record_launch(RecordedLaunch(lambda: resolve(resolved)))
    return result


def repeat_call(arguments, launches, results, outcome=None):
    """A function that takes the fast path of a function whose call with such arguments launched this, or None."""
    sequences = fast_path.find_sequences(arguments)
    values = fast_path.flatten_sequences(arguments, sequences)
    tensors = [*{id(x): x for x in values if isinstance(x, torch.Tensor)}.values()]
    run = fast_path.plan_launches(tensors, launches, results, outcome)
    planned = fast_path.PlannedCall(values, [], run)

    def call(*given):
        values = fast_path.flatten_sequences(given, sequences)
        tensors = None if values is None else planned.match_tensors(values)
        results = None if tensors is None else run(tensors, ())
        return None if results is plan.NOT_ALIKE else results

    return call


def plan_of(arguments, launches, results, *, launch=None, get_stream=lambda: 77, scratch=None):
    """The plan that a recorded call would add. `launches` are lists of arguments; what they launch goes to a list."""
    launched = []

    def note(*given):
        launched.append(given)

    resolved = [ResolvedLaunch(launch or note, given, get_stream) for given in launches]
    recorded = [RecordedLaunch(lambda x=x: x, scratch) for x in resolved]
    return repeat_call(arguments, recorded, results), launched


@pytest.fixture
def recorded():
    """A call f(x, 0.5, (y, None)) that launched something with (x, stream, (y, new, 3), 0.5) and returned (new, y)."""
    x, y, new = torch.zeros(4, 6), torch.zeros(5), torch.zeros(4, 6)
    return plan_of((x, 0.5, (y, None)), [(x, CURRENT_STREAM, (y, new, 3), 0.5)], Pair(new, y))


def test_a_call_made_again(recorded):
    call, launched = recorded
    x, y = torch.ones(4, 6), torch.ones(5)
    results = call(x, 0.5, (y, None))
    assert type(results) is Pair
    assert results.second is y
    new = results.first
    assert (new.shape, new.dtype) == (x.shape, x.dtype)
    assert launched == [(x.data_ptr(), 77, (y.data_ptr(), new.data_ptr(), 3), 0.5)]


def test_calls_that_are_not_alike(recorded):
    call, launched = recorded
    x, y = torch.ones(4, 6), torch.ones(5)
    shifted = torch.ones(25)[1:].view(4, 6)
    others = [
        (x, 0.25, (y, None)),
        (x, np.float64(0.5), (y, None)),
        (x, None, (y, None)),
        (x, x, (y, None)),
        (x, 0.5, (y, y)),
        (x, 0.5, (None, y)),
        (x, 0.5, (y, None, None)),
        (x, 0.5, y),
        (x, 0.5, (0.5, None)),
        (y, 0.5, (x, None)),
        ([x], 0.5, (y, None)),
        (shifted, 0.5, (y, None)),
        (x.clone().requires_grad_(), 0.5, (y, None)),
    ]
    assert [call(*arguments) for arguments in others] == [None] * len(others)
    assert not launched


def test_a_view_inside_of_an_argument():
    """Its address moves with the argument's; between two arguments nobody knows with whose."""
    x, new = torch.zeros(4, 6), torch.zeros(8)
    call, launched = plan_of((x,), [(x[2], new, new[3:])], new)
    other = torch.ones(4, 6)
    result = call(other).data_ptr()
    assert launched == [(other.data_ptr() + 48, result, result + 12)]
    both = torch.zeros(12)
    call, launched = plan_of((both[:8], both[2:]), [(both[4:6], new)], new)
    assert call(both[:8], both[2:]) is plan.NORMAL_PATH and not launched


def test_tensors_in_lists():
    x, y, new = torch.zeros(4), torch.zeros(5), torch.zeros(4)
    call, launched = plan_of(([x, y],), [(y, new)], new)
    other = torch.ones(5)
    assert call([torch.ones(4), other]) is not None and launched[0][0] == other.data_ptr()
    assert call((torch.ones(4), other)) is None and call([x]) is None


def test_numbers_that_are_constants_are_recorded_when_they_come_again(on_cpu):
    launched, recorded = [], []

    def function(x, number: "float"):
        return launch(launched, x, float(number), resolve=lambda launch: (recorded.append(1), launch)[1])

    call = fast_path.with_fast_path(function)
    for number in range(9):
        call(torch.zeros(3), number)
    assert len(recorded) == 1 and not launched
    for _ in range(3):
        call(torch.zeros(3), 20)
    assert len(recorded) == 2 and [given[1] for given in launched] == [20.0]
    assert len(launched) == 1


def test_a_call_without_a_graph_is_not_like_one_with_it(guards):
    """Repeated without one as often as wanted; with one it takes the normal path, which builds the graph."""
    x, new = torch.zeros(4).requires_grad_(), torch.zeros(4)
    with torch.no_grad():
        without, launched = plan_of((x,), [(x, new)], new)
    graph, _ = plan_of((x,), [(x, new)], new)
    assert (without(x), len(launched)) == (None, 0)
    assert graph(x) is plan.NORMAL_PATH
    with torch.no_grad():
        assert graph(x) is None
        assert not without(x).requires_grad
    assert len(launched) == 1


def test_in_place():
    """Calls f(x, x) that wrote to x are repeated, and f(x, y) has another form, which may not overlap at all."""
    x = torch.zeros(8)
    twice, launched = plan_of((x, x), [(x, x)], x)
    other, y = torch.ones(8), torch.ones(8)
    assert twice(other, other) is other
    assert launched.pop() == (other.data_ptr(), other.data_ptr())
    assert twice(other, y) is None
    view, _ = plan_of((x, x[:]), [(x, x)], x)
    assert view(other, y) is None
    apart, _ = plan_of((x, y), [(x, y)], y)
    assert apart(other, other) is None
    assert apart(x, other) is other
    both = torch.ones(12)
    assert apart(both[:8], both[4:]) is plan.NORMAL_PATH


X, NEW = torch.zeros(8), torch.zeros(8)
NOT_REPEATED = {  # what a call f(x) was given, what it launched, and its result
    "a tensor from elsewhere": (X, (X, torch.zeros(3), NEW), NEW),
    "a result that no launch writes": (X, (X,), NEW),
    "more than is known of an argument": (X[:4], (X[:4], X[2:], NEW), NEW),
    "a part of new memory as the result": (X[:4], (X[:4], NEW), NEW[:4]),
    "no stream": (X, (X, CURRENT_STREAM, NEW), NEW),
}


@pytest.mark.parametrize("case", NOT_REPEATED)
def test_launches_that_are_not_repeated(case):
    given, launch, result = NOT_REPEATED[case]
    call, launched = plan_of((given,), [launch], result, get_stream=lambda: None if case == "no stream" else 77)
    assert call(torch.zeros_like(given)) is plan.NORMAL_PATH and not launched


def test_memory_between_launches():
    """Every call has its own, and all of its launches have the same."""
    x, new, scratch = torch.zeros(4), torch.zeros(4), torch.zeros(2, 3)
    call, launched = plan_of((x,), 2 * [(x, scratch, new)], new, scratch=scratch)
    result = call(x)
    (_, first, _), (_, second, at) = launched
    assert first == second != scratch.data_ptr()
    assert at == result.data_ptr()


# -- Triton's launcher ------------------------------------------------------------------------------------------------


def launch_as_triton(launch, x, y, z, stream, function, *rest):
    """With an argument of the launcher's own between."""
    launch(x, y, z, stream, function, "own", *rest)


class Launcher:
    """Like Triton's: it calls `launch` in one way or another."""

    global_scratch_size = 0

    def __init__(self, launched, way=launch_as_triton):
        self.launch, self.way = lambda *given: launched.append(given), way

    def __call__(self, *given):
        self.way(self.launch, *given)


class Kernel:
    """Like what Triton compiles: how it is launched shows in what order its launcher wants what."""

    launch_metadata = staticmethod(lambda *_: None)

    def __init__(self, launcher):
        self.run, self.function, self.packed_metadata = launcher, "function", "metadata"

    def __getitem__(self, grid):
        known = self.function, self.packed_metadata, self.launch_metadata(grid), *triton_launcher.launch_hooks()
        return lambda *args, stream=77: self.run(*grid, stream, *known, *args)


@pytest.fixture
def no_hooks(monkeypatch, no_device):
    monkeypatch.setattr(triton_launcher, "launch_hooks", lambda: (None, None))


def plan_of_kernel(kernel, given, grid=(1, 1)):
    """The plan of a call f(x) that launched a kernel with x and something else, and returned a new tensor."""
    x, new = torch.zeros(4), torch.zeros(4)
    with triton_launcher.record_launches() as launches:
        triton_launcher.record_kernel(kernel, grid, (x, *given, new), None)
    return repeat_call((x,), launches, new)


class Unwatched(Launcher):
    """What it calls in the end cannot be replaced."""

    launch = property(lambda self: lambda *given: None, lambda self, launch: None)


WAYS = {
    "without the stream": lambda launch, x, y, z, stream, *rest: launch(x, y, z, *rest),
    "twice": lambda launch, *given: (launch(*given), launch(*given)),
    "of fewer arguments": lambda launch, x, y, z, stream, function: launch(x, y, z, stream, function),
    "of names": lambda launch, *given, cluster: launch(*given, cluster),
}


@pytest.fixture
def warned(monkeypatch):
    monkeypatch.setattr(fast_path.Switch, "reason", "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@pytest.mark.parametrize("way", ["unwatched", *WAYS])
def test_a_launcher_that_is_not_known(no_hooks, warned, way):
    """One warning says what to do; calls take the normal path."""
    launched = []
    launcher = Unwatched(launched) if way == "unwatched" else Launcher(launched, WAYS[way])
    for _ in range(2):
        assert plan_of_kernel(Kernel(launcher), [])(torch.zeros(4)) is plan.NORMAL_PATH
    assert not launched
    (warning,) = warned
    message = str(warning.message)
    assert all(x in message for x in (sys.modules["triton"].__version__, "3.6 to 3.9", "RL_TRITON_FAST_PATH=0"))
    assert ours.fast_path_status().reason in message


@pytest.mark.parametrize("missing", ["run", "function", "packed_metadata", "__getitem__"])
def test_a_kernel_that_is_not_known(no_hooks, warned, missing):
    kernel = Kernel(Launcher([]))
    if missing == "__getitem__":
        kernel = SimpleNamespace(run=kernel.run, function=kernel.function, packed_metadata=kernel.packed_metadata)
    else:
        delattr(kernel, missing)
    assert plan_of_kernel(kernel, [])(torch.zeros(4)) is plan.NORMAL_PATH


def test_a_triton_without_knobs(monkeypatch, no_device, warned):
    triton = pytest.importorskip("triton")
    monkeypatch.delattr(triton, "knobs", raising=False)
    monkeypatch.setitem(sys.modules, "triton.knobs", None)
    assert plan_of_kernel(Kernel(Launcher([])), [])(torch.zeros(4)) is plan.NORMAL_PATH
    assert "knobs" in str(warned[0].message)


def test_a_kernel_launched_in_another_order(no_hooks):
    """Its own way to launch it says so."""

    def reorder(launch, stream, function, *rest):
        launch(function, stream, *rest)

    class Other(Kernel):
        def __getitem__(self, grid):
            return lambda *args, stream: self.run(stream, self.function, grid, *args)

    launched = []
    call, x = plan_of_kernel(Other(Launcher(launched, reorder)), [5]), torch.ones(4)
    new = call(x)
    assert launched == [("function", 77, (1, 1, 1), x.data_ptr(), 5, new.data_ptr())]


def test_the_triton_that_is_installed(monkeypatch, no_device):
    """A replay hands its launcher's last function what its own way to launch a kernel hands it, but the hooks."""
    pytest.importorskip("triton")
    from triton.runtime import driver

    monkeypatch.setattr(type(driver), "active", SimpleNamespace(), raising=False)  # Triton 3.9 asks for it
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler.compiler import CompiledKernel

    launched = []
    kernel, launcher = object.__new__(CompiledKernel), object.__new__(CudaLauncher)
    own = {"launch_cooperative_grid": False, "launch_pdl": True, "arg_annotations": [], "kernel_signature": b"s"}
    own["gsan_enabled"] = False
    vars(launcher).update(own, launch=lambda *given: launched.append(given), num_ctas=1)
    vars(launcher).update(dict.fromkeys(["global_scratch_size", "profile_scratch_size"], 0))
    vars(launcher).update(dict.fromkeys(["global_scratch_align", "profile_scratch_align"], 1))
    vars(kernel).update(module="module", function="function", packed_metadata="metadata", src=None, name="scan")
    vars(kernel)["_module_pid"] = None
    vars(kernel)["run" if "run" not in vars(CompiledKernel) else "_run"] = launcher

    call, x = plan_of_kernel(kernel, [(3, None), 0.5]), torch.ones(4)
    new = call(x)
    kernel[(1, 1, 1)](x.data_ptr(), (3, None), 0.5, new.data_ptr(), stream=77)
    got, want = launched
    launch_hooks = [*triton_launcher.launch_hooks(), None]
    metadata = want.index("metadata")
    replaced = range(metadata + 1, metadata + 4)
    assert [got[i] for i in replaced] == [None] * 3
    assert all(any(want[i] is hook for hook in launch_hooks) for i in list(replaced)[1:])
    assert all(x == y for i, (x, y) in enumerate(zip(got, want, strict=True)) if i not in replaced)


@pytest.fixture
def on_cpu(monkeypatch):
    """Calls on the CPU are recorded too."""
    monkeypatch.setattr(fast_path, "DEVICES", {"cpu"})


def recording_function():
    """A public function that launches something, and what it launches."""
    launched = []

    def scale(x, gamma: "float" = 0.5, number=1, out=None):
        (gamma,) = triton_launcher.mark_numbers([check.check_number("gamma", gamma, 0.0, 1.0)])
        result = launch(launched, x, gamma, number, result=None if out is None else out[0])
        launched.append("normal path")
        return result

    return fast_path.with_fast_path(scale), launched


def test_the_second_call_is_recorded(on_cpu):
    """The third is the first to be repeated; shapes that never come again cost no plan, and numbers may differ."""
    function, launched = recording_function()
    for n in range(5):
        function(torch.zeros(n + 1))
        function(torch.zeros(3), number=n + 2)
        function(torch.zeros(3), out=(torch.zeros(n + 1), None))
    assert launched == 15 * ["normal path"]
    x = torch.ones(3)
    for names in (False, True):
        launched.clear()
        for gamma in (0.2, 0.3, 0.4, 0.5):
            function(**{"gamma": gamma, "x": x}) if names else function(x, gamma)
        assert launched[:2] == 2 * ["normal path"]
        assert [given[:3] for given in launched[2:]] == [(x.data_ptr(), gamma, 1) for gamma in (0.4, 0.5)]
    fast_path.forget_plans()
    launched.clear()
    for _ in range(3):
        function(x)
    assert launched[:2] == 2 * ["normal path"] and len(launched) == 3


def test_numpy_numbers_take_the_fast_path(on_cpu):
    function, launched = recording_function()
    for number in (np.float32(0.5), np.float64(0.25), 0.125, np.int64(1)):
        function(torch.zeros(3), number)
    assert launched[:2] == 2 * ["normal path"]
    assert [given[1] for given in launched[2:]] == [0.125, 1.0]


def test_switched_off(on_cpu):
    """By a function or for a block, and on again; plans made before are not used meanwhile."""
    function, launched = recording_function()
    for _ in range(3):
        function(torch.zeros(3))
    assert ours.fast_path_status().shapes["scale"] == 1
    for _ in range(2):
        launched.clear()
        with ours.set_fast_path(False):
            assert not ours.fast_path_status().enabled and "set_fast_path" in ours.fast_path_status().reason
            for _ in range(3):
                function(torch.zeros(3))
        assert launched == 3 * ["normal path"]
        assert ours.fast_path_status() == (True, "", {})
    ours.set_fast_path(False)
    function(torch.zeros(3))
    ours.set_fast_path(True)
    for _ in range(3):
        function(torch.zeros(3))
    assert launched[3:6] == 3 * ["normal path"] and len(launched) == 7


@pytest.mark.parametrize(("value", "enabled"), [("0", False), ("1", True), ("", True)])
def test_switched_off_by_the_environment(value, enabled):
    code = "import rl_triton_core as ours; print(ours.fast_path_status().enabled, ours.fast_path_status().reason)"
    printed = run_python(code, RL_TRITON_FAST_PATH=value)
    assert printed.split()[0] == str(enabled)
    assert ("RL_TRITON_FAST_PATH" in printed) == (not enabled)


def test_a_switch_is_0_or_1(monkeypatch):
    with pytest.raises(TypeError, match="enabled: got '0', expected a bool"):
        ours.set_fast_path("0")
    monkeypatch.setenv("RL_TRITON_CAPTURE", "no")
    with pytest.raises(ValueError, match="RL_TRITON_CAPTURE: got 'no', expected one of 0, 1"):
        is_wanted(None)
    code = """
import torch
import rl_triton_core as ours
try:
    ours.compute_discounted_returns(torch.zeros(1, 2), bootstrap_values=0.0)
except ValueError as error:
    print(error, ours.fast_path_status(), sep="\\n")
"""
    printed = run_python(code, RL_TRITON_FAST_PATH="no").splitlines()
    assert all("RL_TRITON_FAST_PATH: got 'no', expected one of 0, 1" in line for line in printed) and len(printed) == 2


def test_a_call_inside_a_recorded_call_is_a_part_of_it(on_cpu):
    """Also one that could take the fast path itself: its launches are made again, in order, with their numbers."""
    inner, launched = recording_function()

    def twice(x, gamma: "float" = 0.5):
        result = inner(x, gamma)
        return inner(result, gamma, 2, (result, None))

    outer = fast_path.with_fast_path(twice)
    x = torch.zeros(3)
    for _ in range(3):
        inner(x, 0.5)
    for _ in range(2):
        outer(x, 0.5)
    launched.clear()
    result = outer(x, 0.5)
    at, out = x.data_ptr(), result.data_ptr()
    assert launched == [(at, 0.5, 1, out), (out, 0.5, 2, out)]
    for gamma in 3 * (0.25, 0.125):
        launched.clear()
        outer(x, gamma)
    assert [given[1] for given in launched] == [0.125, 0.125]


def test_threads_record_apart(on_cpu):
    launched, barrier = [], threading.Barrier(2)

    def meet(x, gamma: "float" = 0.5):
        barrier.wait(10)
        result = launch(launched, x)
        barrier.wait(10)
        return result

    function = fast_path.with_fast_path(meet)

    def work(size):
        for _ in range(2):
            function(torch.zeros(size))

    run_in_threads(*(partial(work, size) for size in (3, 4)))
    for size in (3, 4):
        function(torch.zeros(size))
    assert len(launched) == 2


def test_a_call_that_fails_while_recorded_leaves_nothing(on_cpu):
    function, launched = recording_function()
    function(torch.zeros(3))
    with pytest.raises(ValueError, match="gamma"):
        function(torch.zeros(3), 2.0)
    assert triton_launcher.RECORDER.launches is None
    function(torch.zeros(3))
    assert function(torch.zeros(3)) is not None and len(launched) == 3


def test_signatures_take_bounded_memory():
    seen = set()
    for signature in range(10 * fast_path.MAX_SEEN_SIGNATURES):
        fast_path.remember(seen, signature)
    assert len(seen) <= fast_path.MAX_SEEN_SIGNATURES
    assert signature in seen


def test_shapes_take_bounded_memory(on_cpu, monkeypatch):
    """The shape that was planned first makes room."""
    monkeypatch.setattr(fast_path, "MAX_SHAPES_PER_FORM", 2)
    function, launched = recording_function()
    for size in (3, 3, 4, 4, 5, 5):
        function(torch.zeros(size))
    launched.clear()
    assert ours.fast_path_status().shapes["scale"] == 2
    for size in (4, 5, 3):
        function(torch.zeros(size))
    assert [x == "normal path" for x in launched] == [False, False, True]


def test_several_calls_of_a_shape(on_cpu):
    """Of other options and dtypes: each has its plan, and the other stays."""
    function, launched = recording_function()
    calls = [{"number": 1}, {"number": 2}]
    for given in 2 * calls:
        function(torch.zeros(3), **given)
    launched.clear()
    for given in 2 * calls:
        function(torch.zeros(3), **given)
    assert [given[2] for given in launched] == [1, 2, 1, 2]


def test_an_error_is_no_first_call(on_cpu):
    launched, calls = [], []

    def function(x):
        calls.append(x)
        if len(calls) == 1:
            raise ValueError("x: got nothing")
        return launch(launched, x)

    call = fast_path.with_fast_path(function)
    with pytest.raises(ValueError, match="got nothing"):
        call(torch.zeros(3))
    for _ in range(3):
        call(torch.zeros(3))
    assert (len(calls), len(launched)) == (3, 1)


@pytest.mark.parametrize(
    "function",
    [
        partial(ours.compute_discounted_returns, bootstrap_values=0.0),
        lambda x, **options: grpo_loss(x, x, x[:2], **options),
    ],
    ids=["returns", "losses"],
)
def test_offsets_are_checked_in_every_call_on_the_cpu(function):
    """They are read, unlike on a GPU, where the kernel asserts that they are in order."""
    pytest.importorskip("numba")
    x, offsets = torch.ones(10), torch.tensor([0, 4, 10])
    for _ in range(4):
        function(x, cu_seqlens=offsets)
    with pytest.raises(ValueError, match="cu_seqlens"):
        function(x, cu_seqlens=torch.tensor([0, 4, 11]))


def test_the_number_of_threads_counts_at_once(monkeypatch):
    """Also for calls that took the fast path before it was set."""
    cpu = pytest.importorskip("rl_triton_core._internal.scan.cpu")
    from rl_triton_core._internal.launch.threads import Setting

    monkeypatch.setattr(cpu, "MIN_ELEMENTS_PER_CHUNK", 16)
    monkeypatch.setattr(Setting, "num_threads", 1)
    chunks, run_chunks = [], cpu.run_chunks
    monkeypatch.setattr(cpu, "run_chunks", lambda work, parts: (chunks.append(len(parts)), run_chunks(work, parts)))
    given = make_rollout(device="cpu")
    expected = [ours.compute_gae(**given) for _ in range(3)][-1]
    assert not chunks
    ours.set_num_threads(2)
    for _ in range(4):
        assert_same(ours.compute_gae(**given), expected)
    assert len(chunks) == 4
