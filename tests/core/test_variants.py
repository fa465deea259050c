"""Which kernels are compiled over many shapes, and that those that are not compiled for a shape compute the same."""

import inspect
import random

import pytest
import torch
from torch.utils import _pytree as pytree

import rl_triton_core as ours
from rl_triton_core._internal.launch import launcher

backend = pytest.importorskip("rl_triton_core._internal.scan.triton", reason="Triton is not installed")
from test_launches import DEVICE, check_function, draw_window  # noqa: E402

from rl_triton_core._internal.launch import kernels as variants  # noqa: E402
from rl_triton_core._internal.launch import table  # noqa: E402
from rl_triton_core._internal.launch.table import GeneralRows, Launch  # noqa: E402

LAYOUTS = ("time-major", "env-major")  # by the dimension of time


class Kernel:
    """An interpreted kernel that is launched as a compiled one."""

    def __init__(self, compiled, options):
        self.compiled, self.options = compiled, options

    def __getitem__(self, grid):
        def launch(*arguments):
            assert_known(self.compiled, arguments)
            backend.scan.scan[grid[:2]](*arguments, **self.options)

        return launch


def assert_known(compiled, given):
    """What a kernel knows of its arguments is true of those that it is launched with."""
    if isinstance(compiled, tuple):
        assert len(compiled) == len(given)
        for x, y in zip(compiled, given, strict=True):
            assert_known(x, y)
    elif isinstance(compiled, torch.Tensor | variants.Address):
        assert compiled.dtype == given.dtype
        assert compiled.data_ptr() & 15 or not given.data_ptr() & 15
    elif isinstance(compiled, int):
        assert isinstance(given, int)
        assert compiled != 1 or given == 1
        assert compiled & 15 or not given & 15
        assert compiled.bit_length() > 31 or given.bit_length() <= 31
    elif not isinstance(compiled, float):
        assert compiled == given


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Arguments for which kernels are compiled, from none on. Where kernels are interpreted nothing is."""
    reason = backend.unavailable(torch.device(DEVICE))
    if reason is not None:
        pytest.skip(reason)
    given = []
    warmup = getattr(backend.scan.scan, "warmup", None)

    def compile(*arguments, grid, **options):
        given.append(arguments)
        return Kernel(arguments, options) if backend.INTERPRETED else warmup(*arguments, grid=grid, **options)

    monkeypatch.setattr(backend.scan.scan, "warmup", compile, raising=False)
    monkeypatch.setattr(backend, "COMPILES", True)
    monkeypatch.setattr(variants, "VARIANTS", {})
    return given


@pytest.fixture
def only_general(monkeypatch):
    """No shape gets kernels of its own. Where kernels are interpreted they have small tiles."""
    monkeypatch.setattr(variants, "MAX_FIRST_KERNELS", 0)
    if DEVICE == "cpu":
        rows = GeneralRows(*4 * (Launch(8, 4, 4, 1),))
        monkeypatch.setattr(table, "find_general_rows", lambda *_: rows)
    monkeypatch.setattr(variants, "CALLS_BEFORE_OWN_KERNEL", 1 << 30)


SHAPES = [(3, 5), (5, 33), (1, 40), (2, 1)]


@pytest.mark.parametrize("time_dim", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask_mode", [None, "skip"])
def test_general_kernels_of_gae(shape, time_dim, mask_mode, only_general):
    real, flags = draw_window(shape, LAYOUTS[time_dim])
    mask = {} if mask_mode is None else {"mask": ~flags(0.3), "mask_mode": mask_mode}
    ends = {"terminated": flags(), "truncated": flags(), "bootstrap_values": real()}
    check_function(ours.compute_gae, real(), real(), **ends, **mask, time_dim=time_dim)


@pytest.mark.parametrize("actions", [3, 20])
@pytest.mark.parametrize("time_dim", [0, 1])
def test_general_kernels_of_retrace(time_dim, actions, only_general):
    real, flags = draw_window((3, 21), LAYOUTS[time_dim])
    probs = torch.softmax(real(actions), -1)
    more = {"log_ratios": 0.3 * real(), "next_action_probs": probs, "next_q_values": real(actions)}
    check_function(ours.compute_retrace, real(), real(), flags(), flags(), **more, time_dim=time_dim)


@pytest.mark.parametrize("time_dim", [0, 1])
def test_general_kernels_of_sums(time_dim, only_general):
    real, flags = draw_window((3, 21), LAYOUTS[time_dim])
    x, dones = (1e6 * real()).long(), flags()
    check_function(ours.compute_episodic_prefix_sum, x, dones, time_dim=time_dim)


def test_general_kernels_of_packed_rows(only_general, compiled):
    """Other lengths take the same kernels."""
    for offsets in ([0, 3, 3, 21], [0, 21], [0, 5, 9, 9, 30]):
        real, flags = draw_window((1, offsets[-1]), "env-major")
        cu_seqlens = torch.tensor(offsets, device=DEVICE)
        bootstrap = torch.randn(len(offsets) - 1, device=DEVICE)
        packed = {"cu_seqlens": cu_seqlens, "bootstrap_values": bootstrap}
        check_function(ours.compute_gae, real()[0], real()[0], flags()[0], **packed)
    assert len(compiled) <= 2


@pytest.mark.parametrize("time_dim", [0, 1])
def test_general_kernels_of_rows_split_over_time(time_dim, only_general, compiled, monkeypatch):
    monkeypatch.setattr(backend.table, "count_segments", lambda steps, programs, row: 3)
    monkeypatch.setattr(backend, "GENERAL_SEGMENTS", 32)
    real, flags = draw_window((2, 75), LAYOUTS[time_dim])
    check_function(ours.compute_gae, real(), real(), flags(0.01), bootstrap_values=0.5, time_dim=time_dim)
    assert len(compiled) == 2


def test_strided_and_unaligned_tensors(only_general, compiled):
    """Addresses that 16 does not divide take the same kernels; strides of their own other ones."""
    real, flags = draw_window((4, 24), "env-major")
    shifted = torch.randn(4 * 24 + 1, device=DEVICE)[1:].view(4, 24)
    for rewards in (real(), shifted):
        check_function(ours.compute_gae, rewards, real(), flags(), bootstrap_values=0.5)
    assert len(compiled) == 1
    addresses = [x for x in pytree.tree_leaves(compiled[0]) if isinstance(x, variants.Address)]
    assert addresses and all(x.data_ptr() & 15 for x in addresses)
    wide = torch.randn(4, 48, device=DEVICE)
    for rewards in (wide[:, :24], wide[:, ::2]):
        check_function(ours.compute_gae, rewards, real(), flags(), bootstrap_values=0.5)
    assert len(compiled) == 3


def test_outputs_that_are_not_wanted_are_not_written(only_general):
    real, flags = draw_window((4, 24), "env-major")
    rewards, values, terminated = real(), real(), flags()
    before = rewards.clone()
    for wanted in (True, False, True):
        arguments = {"bootstrap_values": 0.5, "compute_returns": wanted}
        check_function(ours.compute_gae, rewards, values, terminated, **arguments)
    assert torch.equal(rewards, before)


def call_gae(envs, steps, time_dim=1, **more):
    """A call of GAE with tensors of these sizes, whatever is in them."""
    shape = (envs, steps) if time_dim == 1 else (steps, envs)
    rewards, values = (torch.empty(shape, device=DEVICE) for _ in range(2))
    done = torch.empty(shape, dtype=torch.bool, device=DEVICE)
    arguments = {"bootstrap_values": torch.empty(envs, device=DEVICE), "time_dim": time_dim, **more}
    return inspect.unwrap(ours.compute_gae)(rewards, values, done, **arguments, backend="triton")


@pytest.fixture
def no_launches(monkeypatch, request):
    if DEVICE == "cpu":
        monkeypatch.setattr(
            Kernel, "__getitem__", lambda kernel, grid: lambda *given: assert_known(kernel.compiled, given)
        )
        request.getfixturevalue("no_device")


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("time_dim", [0, 1])
def test_many_shapes_share_few_kernels(compiled, no_launches, time_dim, calls):
    generator = random.Random(0)
    for _ in range(1000):
        envs, steps = (int(2 ** generator.uniform(1, 13)) for _ in range(2))
        if envs * steps < 1 << 22:
            for _ in range(calls):
                call_gae(envs, steps, time_dim, gamma=generator.random(), lambda_=generator.random())
    assert len(compiled) <= 8
    (only,) = variants.VARIANTS.values()
    assert len(only.general) > 1


def test_the_first_shapes_have_kernels_of_their_own(compiled, no_launches):
    for steps in (64, 128, 64, 128):
        call_gae(8, steps)
    assert [given[-1].ONE_TILE for given in compiled] == [True, True]


@pytest.mark.parametrize(
    ("needed", "admitted"), [([1, 1, 1], [1, 1, 0]), ([2, 1], [1, 0]), ([1, 2, 1], [1, 0, 0]), ([2, 2], [1, 0])]
)
def test_kernels_for_first_shapes_are_few(needed, admitted):
    """A shape whose time is split needs two. The first one gets what it needs."""
    some = variants.Variants()
    assert [some.admit_first(number) for number in needed] == admitted


def test_a_shape_that_is_called_often_gets_a_kernel_of_its_own(compiled, no_launches):
    """Until then its launches are not recorded, since they are not final."""
    for steps in (64, 128):
        call_gae(8, steps)
    compiled.clear()
    for number in range(1, 20):
        with launcher.record_launches():
            call_gae(8, 32)
            assert launcher.RECORDER.is_postponed == (number < variants.CALLS_BEFORE_OWN_KERNEL)
    assert [given[-1].ONE_TILE for given in compiled] == [False, True]


def test_nothing_is_compiled_for_a_shape_while_a_graph_is_captured(compiled, no_launches, monkeypatch):
    for steps in (64, 128):
        call_gae(8, steps)
    compiled.clear()
    monkeypatch.setattr(variants, "is_capturing", lambda like: True)
    for _ in range(20):
        call_gae(8, 32)
    assert len(compiled) == 1


def test_where_there_is_no_room_the_universal_kernel_stands_in():
    rows = [Launch(1, 32, 4, 1), Launch(2, 16, 4, 1), Launch(4, 8, 4, 1), Launch(8, 4, 4, 1)]
    some, universal = variants.Variants(), variants.GeneralSettings(rows[2])
    wanted = [variants.GeneralSettings(row, actions, 1 + actions % 2) for actions in range(9) for row in rows]
    found = [some.find_general(x, universal, lambda chosen: chosen.num_kernels * (chosen,))[0] for x in wanted]
    assert sum(map(len, some.general.values())) <= variants.MAX_GENERAL_KERNELS
    assert all(x in (y, universal) for x, y in zip(found, wanted, strict=True))
    assert found.count(universal) < len(found)


def test_counts_take_bounded_memory(compiled, no_launches, monkeypatch):
    monkeypatch.setattr(variants, "MAX_SHAPES", 5)
    for steps in range(2, 30):
        call_gae(8, steps)
    (only,) = variants.VARIANTS.values()
    assert len(only.calls) <= 5
