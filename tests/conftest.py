"""The backends under test, and how hard Hypothesis tries.

RL_TRITON_TEST_BACKENDS (names, commas between) narrows the first; HYPOTHESIS_PROFILE (ci, gpu, fuzz) sets the
second. Where there is no GPU, a test that is marked `covering` takes some combinations of its parameters, with every
value of each among them; so does every test that is interpreted, which takes every sixth of the estimators, or of the
parameter that has most values. RL_TRITON_TEST_COMBINATIONS=all asks for all, =few for such a choice in every test.
"""

import fcntl
import importlib.util
import itertools
import os
import sys
import zlib
from pathlib import Path
from types import FunctionType

import cases
import pytest
import torch
from gpu_checks import GPU
from hypothesis import Phase, settings
from recorded_graphs import allow_captures

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
sys.path += [str(ROOT / name) for name in ("", "examples", "scripts")]

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # a case is a seed: shrinking it makes no smaller arrays
settings.register_profile("ci", max_examples=8, deadline=None, phases=PHASES, derandomize=True)
settings.register_profile("gpu", max_examples=16, deadline=None, phases=PHASES)  # most of them compile a kernel
settings.register_profile("fuzz", max_examples=int(os.environ.get("CASES", "10000")), deadline=None, phases=PHASES)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gpu" if torch.cuda.is_available() else "ci"))


@pytest.fixture(params=["cpu", GPU])
def device(request):
    return request.param


@pytest.fixture(params=[False, True])
def captured(request, monkeypatch):
    """Whether steps are captured, without a GPU in recorded graphs."""
    if request.param:
        allow_captures(monkeypatch)
    return request.param


def pytest_configure(config):
    # Triton's interpreter computes with NumPy, which remarks on every NaN that a test puts there.
    config.addinivalue_line("filterwarnings", r"ignore:\w+( value)? encountered in:RuntimeWarning:triton\..*")


@pytest.fixture
def switched_off(monkeypatch):
    """RL_TRITON=0, with which an adapter may call no function of the core that computes or compiles."""

    def refuse(*args, **kwargs):
        raise AssertionError("the core was called")

    import rl_triton_core.losses

    core = {**vars(rl_triton_core), **vars(rl_triton_core.losses)}.items()
    computing = [x for name, x in core if isinstance(x, FunctionType) and not name.startswith(("check_", "get_"))]
    for module in [x for name, x in sys.modules.items() if name.startswith("rl_triton_adapters.")]:
        for name, x in [*vars(module).items()]:
            if any(x is function for function in computing):
                monkeypatch.setattr(module, name, refuse)
    monkeypatch.setenv("RL_TRITON", "0")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("no CUDA device")


def pytest_collection_modifyitems(config, items):
    """Leave out combinations that take long here and that a GPU takes all."""
    if EVERYTHING:
        return
    tests = {}
    for item in items:
        if not hasattr(item, "callspec") or item.get_closest_marker("gpu"):
            continue
        if FEW or is_interpreted(item) or item.get_closest_marker("covering"):
            of_target = item.nodeid.split("[")[0], str(find_target(item))
            tests.setdefault(of_target, []).append(item)
    left_out = set()
    for (name, _), combinations in tests.items():
        considered = take_turns(name, combinations) if is_interpreted(combinations[0]) else combinations
        left_out |= set(combinations) - set(select_covering(considered))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def take_turns(test, combinations):
    """Those with every sixth value of the parameter that has most, or every sixth estimator.

    With which one it begins depends on the test's name.
    """
    given = [{name: repr(value) for name, value in item.callspec.params.items()} for item in combinations]
    values = {name: [*dict.fromkeys(each[name] for each in given)] for name in given[0]}
    name = "estimator" if "estimator" in values else max(values, key=lambda name: len(values[name]))
    taken = values[name][zlib.crc32(test.encode()) % min(6, len(values[name])) :: 6]
    return [item for item, each in zip(combinations, given, strict=True) if each[name] in taken]


def find_target(item):
    """The target of a test that has one."""
    params = item.callspec.params
    return params.get("target", params.get("float64_target"))


def is_interpreted(item):
    """Whether a test runs Triton in its interpreter: with that target, or with a launch of its own."""
    target = find_target(item)
    has_launch = "launch" in item.callspec.params and not ON_GPU
    return has_launch or (isinstance(target, Target) and target.interpreted)


def select_covering(items):
    """Combinations in which every value of every parameter occurs, those first that bring several new ones.

    With `covering(2)`, in which every pair of values of two parameters does.
    """
    marker, met, groups = items[0].get_closest_marker("covering"), set(), {}
    together = marker.args[0] if marker and marker.args else 1
    for item in items:
        values = sorted((name, repr(value)) for name, value in item.callspec.params.items())
        groups[item] = set(itertools.combinations(values, together))
    for new in range(max(map(len, groups.values())), 0, -1):
        for item in items:
            if len(groups[item] - met) >= new:
                met |= groups[item]
                yield item


class Target(cases.Target):
    """A backend as the tests take it."""

    @property
    def exhaustive(self):
        """Whether it takes every pattern of boundaries: always the cpu backend, the others where there is a GPU."""
        return self.backend == "cpu" or (EVERYTHING and not self.interpreted)


ON_GPU = torch.cuda.is_available()
COMBINATIONS = os.environ.get("RL_TRITON_TEST_COMBINATIONS")
EVERYTHING, FEW = COMBINATIONS == "all" or (ON_GPU and COMBINATIONS != "few"), COMBINATIONS == "few"
ASKED_FOR = os.environ.get("RL_TRITON_TEST_BACKENDS", "reference,cpu,triton").split(",")
TARGETS = [
    Target("reference", "cpu", 129),
    Target("cpu", "cpu", 300),
    Target("triton", "cuda", 5003) if ON_GPU else Target("triton", "cpu", 33),
]
TARGETS = [target for target in TARGETS if target.backend in ASKED_FOR]


def take_target(request):
    target, needed = request.param, {"cpu": "numba", "triton": "triton"}.get(request.param.backend)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    if target.interpreted and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no CUDA device, and TRITON_INTERPRET=1 is not set")
    return target


WIDE = [target for target in TARGETS if target.backend != "triton"]  # what computes float64 inputs in float64
target, float64_target = (
    pytest.fixture(take_target, scope="session", params=targets, ids=lambda target: target.backend)
    for targets in (TARGETS, WIDE)
)


@pytest.fixture
def no_device(monkeypatch):
    """Kernels are launched as on a device, whose stream is 77."""
    from rl_triton_core._internal.launch import launcher as triton_launcher

    monkeypatch.setattr(triton_launcher, "current_device", lambda: 0)
    monkeypatch.setattr(triton_launcher, "stream_getter", lambda index: lambda: 77)


@pytest.fixture
def much_memory(tmp_path_factory):
    """For tests that fill the device: one at a time, and what they took is given back."""
    with (tmp_path_factory.getbasetemp().parent / "much_memory").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


CHECKED = set()
SPILLED_BYTES = 32
"""Per thread, at most: Triton 3.6 keeps a few registers of some kernels in memory although it has others to spare."""


@pytest.fixture(autouse=ON_GPU)
def spills(request):
    """On a GPU no kernel that a test compiles spills more, unless its launch is in no table; what does is reported."""
    yield
    from rl_triton_core._internal.scan.kernel.scan import scan

    new = {kernel for caches in scan.device_caches.values() for kernel in caches[0].values()} - CHECKED
    CHECKED.update(new)
    worst = max(new, key=lambda kernel: kernel.n_spills, default=None)
    most = 4 * worst.n_spills if worst else 0
    if most and request.path.stem != "test_launches":
        request.node.user_properties.append(("spilled_bytes", most))
        assert most <= SPILLED_BYTES, f"{worst.metadata} {worst.src.constants}"  # a string is not shortened
