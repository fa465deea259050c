"""Launches that are searched for: when, which is kept, and that results stay what they are."""

import itertools

import pytest
import torch

import rl_triton_core as ours
from rl_triton_core._internal.launch import fast_path, tuning
from rl_triton_core._internal.launch.variants import forget_variants
from rl_triton_core.testing import assert_close, random_rollout

backend = pytest.importorskip("rl_triton_core._internal.scan.triton", reason="Triton is not installed")
from rl_triton_core._internal.launch.table import TABLE, Launch  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch):
    reason = backend.unavailable(torch.device(DEVICE))
    if reason is not None:
        pytest.skip(reason)
    fast_path.forget_plans()
    forget_variants()
    monkeypatch.setattr(tuning, "FOUND_LAUNCHES", {})
    monkeypatch.delenv("RL_TRITON_AUTOTUNE", raising=False)


@pytest.fixture
def timer(monkeypatch):
    """Nothing is timed: the third launch is the quickest. Returns what was asked for."""
    asked = []

    def device_time(call):
        asked.append(call)
        return abs(len(asked) - 3)

    monkeypatch.setattr(tuning, "device_time", device_time)
    return asked


@pytest.fixture
def launched(monkeypatch):
    """The settings of every launch."""
    made = []
    launches = backend.build_launches

    def note(problem, launch, segments):
        made.append((launch, segments))
        return launches(problem, launch, segments)

    monkeypatch.setattr(backend, "build_launches", note)
    return made


def call(steps=20, **more):
    rollout = random_rollout(3, steps, device=DEVICE)._asdict()
    return ours.compute_gae(**rollout, **more, backend="triton").advantages


def test_nothing_is_searched_unasked(timer, launched):
    call()
    assert not timer and not tuning.FOUND_LAUNCHES
    assert len(launched) == 1


def test_the_quickest_is_kept(timer, launched):
    want = call()
    table = launched.pop()
    timings = ours.tune(call)
    assert [timing.microseconds for timing in timings] == sorted(timing.microseconds for timing in timings)
    assert len(timings) == len(timer) > 3
    best = timings[0][:2]
    assert best != table and table in [timing[:2] for timing in timings]
    got = call()
    assert launched == [best, best]
    assert_close(got.cpu(), want.cpu().double())


def test_other_kinds_of_calls_keep_the_table(timer, launched):
    ours.tune(call)
    launched.clear()
    mask = torch.ones(3, 20, dtype=torch.bool, device=DEVICE)
    for kind in ({"steps": 21}, {"mask": mask}):
        call(**kind)
        assert launched.pop() not in tuning.FOUND_LAUNCHES.values()
    call(gamma=0.5)
    assert launched.pop() in tuning.FOUND_LAUNCHES.values()


def test_the_environment_asks_once_for_each_kind(timer, monkeypatch):
    monkeypatch.setenv("RL_TRITON_AUTOTUNE", "1")
    numbers = []
    for steps in (20, 20, 12):
        call(steps)
        numbers.append(len(timer))
    first, again, second = numbers
    assert 0 < first == again < second
    monkeypatch.setenv("RL_TRITON_AUTOTUNE", "0")
    call(13)
    assert len(timer) == second


def test_launches_that_fail_are_left_out(monkeypatch):
    from triton.runtime.errors import OutOfResources

    errors = itertools.cycle([RuntimeError("no"), OutOfResources(2, 1, "shared memory"), None])

    def device_time(call):
        error = next(errors)
        if error is not None:
            raise error
        return 1.0

    monkeypatch.setattr(tuning, "device_time", device_time)
    assert 0 < len(ours.tune(call)) < 7


def test_where_every_launch_fails_the_table_is_kept(monkeypatch, launched):
    asked = []

    def device_time(call):
        asked.append(call)
        raise RuntimeError("no")

    monkeypatch.setattr(tuning, "device_time", device_time)
    monkeypatch.setenv("RL_TRITON_AUTOTUNE", "1")
    call()
    number = len(asked)
    call()
    assert len(asked) == number > 0
    assert launched == 2 * list(tuning.FOUND_LAUNCHES.values())


@pytest.mark.parametrize("function", ["packed", "elsewhere"])
def test_calls_with_nothing_to_choose_for(timer, function):
    x, offsets = torch.zeros(9, device=DEVICE), torch.tensor([0, 4, 9], device=DEVICE)
    functions = {
        "packed": lambda: ours.compute_gae(x, x, bootstrap_values=0.0, cu_seqlens=offsets, backend="triton"),
        "elsewhere": lambda: ours.compute_gae(x[None], x[None], bootstrap_values=0.0, backend="reference"),
    }
    with pytest.raises(ValueError, match=r"function: got .* expected an estimator's, of tensors on a GPU"):
        ours.tune(functions[function])
    assert not timer and tuning.SEARCH.timings is None


@pytest.mark.parametrize("layout", TABLE)
@pytest.mark.parametrize("window", [(8, 64), (8, 32768), (128, 4096), (2048, 4096), (1 << 20, 1)])
def test_candidates_fit_their_window(layout, window):
    steps, lanes = window
    found = list(tuning.launch_candidates(steps, lanes, 3, layout))
    assert len(found) == len(set(found)) > 0
    for launch, segments in found:
        assert isinstance(launch, Launch)
        assert launch.block_lanes * launch.chunks == 32 * launch.num_warps
        tiles = -(-steps // launch.steps)
        assert (segments - 1) * -(-tiles // segments) < tiles
    assert not list(tuning.launch_candidates(steps, lanes, 1 + tuning.MAX_BYTES_PER_THREAD, layout))


@pytest.mark.gpu
def test_a_search_on_a_gpu(launched):
    want = call(500)
    for _ in range(3):
        call(500)  # replayed, until a search makes it forgotten
    timings = ours.tune(call, 500)
    assert all(timing.microseconds > 0 for timing in timings)
    launched.clear()
    got = call(500)
    assert launched == [timings[0][:2]]
    assert_close(got, want.double())
