"""The Triton kernel in every way that it can be launched, whichever the table would choose."""

import ctypes
import inspect
import mmap
from types import SimpleNamespace

import pytest
import torch

import rl_triton_core as ours
from rl_triton_core.testing import assert_close

triton_backend = pytest.importorskip("rl_triton_core._internal.scan.triton", reason="Triton is not installed")
from rl_triton_core._internal.launch import kernels  # noqa: E402
from rl_triton_core._internal.launch import table as launches  # noqa: E402
from rl_triton_core._internal.launch.table import TABLE, Launch, balance_segments, count_segments  # noqa: E402
from rl_triton_core._internal.scan.layout import find_vector_width  # noqa: E402

pytestmark = pytest.mark.covering

compute_gae = inspect.unwrap(ours.compute_gae)  # what was launched before is not replayed
FORWARD = [inspect.unwrap(f) for f in (ours.compute_eligibility_traces, ours.compute_episodic_prefix_sum)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

LAUNCHES = {
    "several lanes": (Launch(8, 4, 4, 1), 1),
    "several lanes, segments": (Launch(8, 4, 4, 1), 3),
    "chunks in several warps": (Launch(2, 32, 2, 2), 1),
    "chunks in several warps, segments": (Launch(1, 64, 2, 2), 2),
    "one chunk": (Launch(32, 1, 8, 1), 1),
    "one chunk, segments": (Launch(32, 1, 8, 1), 5),
    "long chunks": (Launch(4, 8, 16, 1), 1),
}
UNEVEN, EVEN = ((5, 201), (32, 256)) if DEVICE == "cuda" else ((3, 45), (2, 64))
"""Environments and steps; tiles fill the even window, whose loads then ask for no bounds unless a mask is given."""


@pytest.fixture(autouse=True)
def available():
    reason = triton_backend.unavailable(torch.device(DEVICE))
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=LAUNCHES)
def launch(request, monkeypatch):
    """Shapes have kernels of their own, with this launch."""
    (row, number), asked = LAUNCHES[request.param], []

    def settings(problem):
        asked.append(problem)
        return row, balance_segments(-(-problem.shape[1] // row.steps), number)

    monkeypatch.setattr(triton_backend, "choose_launch", settings)
    monkeypatch.setattr(kernels, "CALLS_BEFORE_OWN_KERNEL", 0)
    monkeypatch.setattr(kernels, "VARIANTS", {})
    yield row
    assert asked


def draw_window(window, layout, seed=0):
    """Draws of per-step tensors with environments and steps in the layout's order."""
    generator = torch.Generator().manual_seed(seed)
    shape = window if layout == "env-major" else window[::-1]

    def real(*features):
        return torch.randn((*shape, *features), generator=generator).to(DEVICE)

    def flags(probability=0.03):
        return (torch.rand(shape, generator=generator) < probability).to(DEVICE)

    return real, flags


def check_function(function, *args, **kwargs):
    """Equal to the reference backend; what was launched before is not replayed.

    In the interpreter, memory that may not be touched begins where a tensor ends, or ends where it begins: a launch
    that reads or writes outside its tensors crashes. Only forward scans look at what is before a step.
    """
    given, function = (args, kwargs), inspect.unwrap(function)
    want = function(*args, backend="reference", **kwargs)
    results = [function(*args, backend="triton", **kwargs)] if DEVICE == "cuda" else []
    sides = (True, False) if function in FORWARD else (True,)
    for behind in sides if DEVICE == "cpu" else ():
        (guarded, named), out = place_beside_guards(given, behind), place_beside_guards(as_tuple(want), behind)
        results.append(function(*guarded, **named, backend="triton", out=out if isinstance(want, tuple) else out[0]))
    for got in results:
        for x, y in zip(as_tuple(got), as_tuple(want), strict=True):
            if x is not None or y is not None:
                assert_close(x.cpu(), y.cpu().double())


def as_tuple(results):
    return tuple(results) if isinstance(results, tuple) else (results,)


def place_beside_guards(x, behind):
    """A copy of all tensors in tuples and dictionaries, whose guard stands behind them or before them."""
    if isinstance(x, dict):
        return {name: place_beside_guards(y, behind) for name, y in x.items()}
    if isinstance(x, tuple):
        parts = [place_beside_guards(y, behind) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if not isinstance(x, torch.Tensor) or not x.nbytes or torch.empty_like(x).stride() != x.stride():  # it has gaps
        return x
    return guarded_empty(x, behind).copy_(x)


def guarded_empty(like, behind):
    """Memory for a dense tensor between two pages that may not be touched, at the end or at the start of its own."""
    used = -(-like.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, used + 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (start, start + mmap.PAGESIZE + used):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, 0) == 0
    offset = mmap.PAGESIZE + (used - like.nbytes if behind else 0)
    flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset)
    return flat.as_strided(like.shape, like.stride())


LAYOUTS = pytest.mark.parametrize(("layout", "time_dim"), [("env-major", 1), ("time-major", 0)])
BOTH = pytest.mark.parametrize("window", [UNEVEN, EVEN], ids=["uneven", "even"])
MASKED = pytest.mark.parametrize(
    ("window", "masked"),
    [(UNEVEN, None), (EVEN, None), (UNEVEN, "skip"), (UNEVEN, "reset")],
    ids=["uneven", "even", "uneven-skip", "uneven-reset"],
)


@LAYOUTS
@MASKED
def test_gae(launch, window, layout, time_dim, masked):
    real, flags = draw_window(window, layout)
    mask = {} if masked is None else {"mask": ~flags(0.3), "mask_mode": masked}
    ends = {"terminated": flags(), "truncated": flags(), "bootstrap_values": real()}
    check_function(ours.compute_gae, real(), real(), **ends, **mask, time_dim=time_dim)


@LAYOUTS
@BOTH
def test_gae_of_an_endless_episode(launch, window, layout, time_dim):
    real, _ = draw_window(window, layout)
    bootstrap = torch.randn(window[0], device=DEVICE)
    check_function(ours.compute_gae, real(), real(), bootstrap_values=bootstrap, time_dim=time_dim)


@LAYOUTS
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_nothing_leaks_from_an_episode_of_gae(launch, layout, time_dim, masked):
    """A bad step in every row, NaN in one and infinite in the next: not a bit changes in other episodes."""

    def turn_back(x):
        return x if layout == "env-major" else x.T

    real, flags = draw_window(UNEVEN, layout)
    rewards, values, terminated = real(), real(), flags(0.1)
    envs = torch.arange(UNEVEN[0], device=DEVICE)[:, None]
    bad = (envs + 1) * 16 % UNEVEN[1]  # the last of its chunk in scan order
    poison = turn_back(torch.where(envs % 2 == 0, torch.nan, torch.inf))
    poisoned = turn_back(torch.zeros(UNEVEN, dtype=torch.bool, device=DEVICE).scatter(1, bad, True))
    mask = ~flags(0.3) | poisoned if masked else None
    ends = turn_back(terminated & mask if masked else terminated)
    episode = ends.cumsum(1) - ends.long()
    elsewhere = turn_back(episode != episode.gather(1, bad))
    clean, dirty = (
        compute_gae(*given, terminated, bootstrap_values=0.5, mask=mask, time_dim=time_dim, backend="triton").advantages
        for given in ((rewards, values), (torch.where(poisoned, poison, x).contiguous() for x in (rewards, values)))
    )
    assert elsewhere.any() and not dirty[poisoned].isfinite().any()
    assert torch.equal(dirty[elsewhere], clean[elsewhere])


@LAYOUTS
def test_gae_of_zeros(launch, layout, time_dim):
    """A serial loop over zeros gives zeros whatever the decay; products of decays must not meet them as infinity."""
    _, flags = draw_window(UNEVEN, layout)
    terminated = flags()
    zeros = torch.zeros(terminated.shape, device=DEVICE)
    ends = {"terminated": terminated, "bootstrap_values": 0.0}
    results = compute_gae(zeros, zeros, **ends, gamma=3e38, lambda_=1.0, time_dim=time_dim, backend="triton")
    assert not any(x.any() for x in results)


@LAYOUTS
@pytest.mark.skipif(DEVICE == "cpu", reason="too long for the interpreter")
def test_gae_is_as_exact_as_a_loop(launch, layout, time_dim):
    """The error against float64 is at most twice that of a loop in float32 over a long row without an end.

    Powers of this discount are rounded the same way everywhere, which a fixed point multiplies by hundreds.
    """
    pytest.importorskip("numba")
    real, _ = draw_window((16, 20_000), layout)
    arguments = {"rewards": real(), "values": real(), "bootstrap_values": 0.5, "gamma": 0.9997, "lambda_": 1.0}
    on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    in_float64 = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in on_cpu.items()}
    got = compute_gae(**arguments, time_dim=time_dim, backend="triton").advantages.cpu()
    loop = compute_gae(**on_cpu, time_dim=time_dim, backend="cpu").advantages
    exact = compute_gae(**in_float64, time_dim=time_dim, backend="reference").advantages
    assert (got - exact).norm() <= 2 * (loop - exact).norm()


@LAYOUTS
@BOTH
def test_vtrace(launch, window, layout, time_dim):
    real, flags = draw_window(window, layout)
    check_function(
        ours.compute_vtrace, real(), real(), flags(), log_ratios=0.3 * real(), bootstrap_values=0.5, time_dim=time_dim
    )


# No row of the table has long chunks for so many streams, which would compile for minutes.
@pytest.mark.parametrize("launch", [name for name, (row, _) in LAUNCHES.items() if row.unroll <= 8], indirect=True)
@pytest.mark.parametrize(("window", "actions"), [(UNEVEN, 3), (EVEN, 8)], ids=["uneven-3", "even-8"])
@LAYOUTS
def test_retrace(launch, window, layout, time_dim, actions):
    real, flags = draw_window(window, layout)
    probs = torch.softmax(real(actions), -1)
    probs[..., 0] = 0
    values = real(actions)
    values[..., 0] = torch.nan
    more = {"log_ratios": 0.3 * real(), "next_action_probs": probs, "next_q_values": values}
    check_function(ours.compute_retrace, real(), real(), flags(), flags(), **more, time_dim=time_dim)


@LAYOUTS
@MASKED
def test_traces(launch, window, layout, time_dim, masked):
    real, flags = draw_window(window, layout)
    mask = {} if masked is None else {"mask": ~flags(0.3), "mask_mode": masked}
    state = ours.ScanState(torch.randn(window[0], device=DEVICE), torch.arange(window[0], device=DEVICE) % 2 == 0)
    check_function(ours.compute_eligibility_traces, real(), flags(), flags(), **mask, state=state, time_dim=time_dim)


@LAYOUTS
@pytest.mark.parametrize(("window", "boundary"), [(UNEVEN, "ends_at"), (EVEN, "starts_at")], ids=["uneven", "even"])
def test_integer_sums(launch, window, layout, time_dim, boundary):
    real, flags = draw_window(window, layout)
    x, dones = (real() * 2.0**40).long(), flags()
    check_function(ours.compute_episodic_prefix_sum, x, dones, boundary=boundary, time_dim=time_dim)


@pytest.mark.parametrize("launch", [name for name in LAUNCHES if "segments" in name], indirect=True)
@pytest.mark.parametrize("scan", ["backward", "forward"])
@LAYOUTS
def test_gaps_longer_than_segments(launch, layout, time_dim, scan):
    """What enters a segment may come from far away, or from nowhere."""
    steps = max(34, launch.steps + 2) if DEVICE == "cpu" else 1500  # that many segments, and no more tiles
    real, flags = draw_window((4, steps), layout)
    mask = torch.zeros(4, steps, dtype=torch.bool, device=DEVICE)
    mask[0, [0, -1]], mask[1, [3, -5]], mask[2, -20] = True, True, True
    window = {"mask": mask if layout == "env-major" else mask.T, "time_dim": time_dim}
    if scan == "backward":
        check_function(ours.compute_gae, real(), real(), flags(), **window, bootstrap_values=real(), truncated=flags())
    else:
        check_function(ours.compute_eligibility_traces, real(), flags(0.5), **window)


PACKED = torch.tensor([0, 3, 3, 100, 271, 300] if DEVICE == "cuda" else [0, 3, 3, 25, 85, 130])


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_packed_rows(launch, masked):
    real, flags = draw_window((1, PACKED[-1].item()), "env-major")
    rewards, values, ends = real()[0], real()[0], flags()[0]
    window = {"cu_seqlens": PACKED.to(DEVICE), "mask": ~flags(0.3)[0] if masked else None}
    check_function(ours.compute_gae, rewards, values, ends, **window, bootstrap_values=0.25)
    check_function(ours.compute_episodic_prefix_sum, rewards, ends, **window)


def test_steps_of_a_single_environment_lie_side_by_side(monkeypatch):
    """In a window [T, 1] both strides are 1."""
    seen = []
    settings = triton_backend.choose_launch
    monkeypatch.setattr(triton_backend, "choose_launch", lambda problem: seen.append(problem) or settings(problem))
    monkeypatch.setattr(kernels, "VARIANTS", {})
    rewards, values = torch.randn(2, 40, 1, device=DEVICE)
    check_function(ours.compute_gae, rewards, values, bootstrap_values=0.5, time_dim=0)
    assert {(x.layout.order, find_vector_width(x.layout.across)) for x in seen} == {("env-major", 4)}


def test_there_is_a_row_for_every_window():
    for layout in TABLE:
        for steps in (1, 2, 7, 8, 9, 33, 128, 500, 1 << 20):
            for lanes in (1, 3, 1024, 8191, 1 << 16):
                for held in (4, 17, 120):
                    row = triton_backend.table.find_launch(steps, lanes, held, layout)
                    assert row.block_lanes * row.chunks >= 32 * row.num_warps


@pytest.mark.parametrize("steps", [1, 1000, 4097, 1 << 20])
@pytest.mark.parametrize("programs", [1, 7, 300, 5000])
def test_segments_have_all_tiles_and_none_is_empty(steps, programs):
    row = Launch(1, 32, 8, 1)
    number = count_segments(steps, programs, row)
    tiles = -(-steps // row.steps)
    each = -(-tiles // number)
    assert (number - 1) * each < tiles <= number * each
    assert number == 1 or programs < 1000


def test_segments_keep_the_multiprocessors_of_the_gpu_at_hand_busy(monkeypatch):
    numbers = {0: 132, 1: 66}
    row, current = Launch(1, 32, 4, 1), iter((0, 1))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: next(current))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: SimpleNamespace(multi_processor_count=numbers[i]))
    launches.count_multiprocessors.cache_clear()
    try:
        assert [count_segments(132 * 8 * row.steps, 16, row) for _ in numbers] == [132, 66]
    finally:
        launches.count_multiprocessors.cache_clear()
