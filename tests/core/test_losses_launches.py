"""Which calls share a compiled kernel of the losses, shown with a kernel that remembers what it was called with."""

import pytest
import torch

from rl_triton_core import set_fast_path

triton_losses = pytest.importorskip("rl_triton_core._internal.loss.triton", reason="Triton is not installed")
kernels = pytest.importorskip("rl_triton_core._internal.launch.kernels")

NUMBERS = torch.arange(8.0)
HUGE = torch.empty(1 << 31, dtype=torch.uint8, device="meta")
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class RecordingKernel:
    """In the place of one of Triton's: compiles for each call, and remembers the launches of what it compiled."""

    arg_names = ("x", "y", "FACTOR", "BLOCK")

    def __init__(self, name="kernel"):
        self.__name__ = name
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, num_warps, **options):
            self.compiled.append((grid, arguments, options, num_warps))
            return self.Compiled(self)

        return compile_and_launch

    class Compiled:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *arguments: self.kernel.launched.append((grid, arguments))


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", {})


def launch(kernel, *arguments, device=FIRST, **given):
    settings = {"programs": 3, "constants": {"FACTOR": 2, "BLOCK": 4}, "num_warps": triton_losses.NUM_WARPS}
    kernels.launch_kernel(kernels.KernelCall(kernel, arguments=arguments, **settings | given), device)


@pytest.mark.parametrize(
    ("first", "second"),
    {
        "dtypes": (NUMBERS, NUMBERS.double()),
        "alignments": (NUMBERS, NUMBERS[1:]),
        "addresses beyond 32 bits": (HUGE[:8], HUGE[:8].clone()),
        "absent": (NUMBERS, None),
        "one": (2, 1),
        "multiples of 16": (8, 16),
        "numbers beyond 32 bits": (1 << 31, 16),
        "negative numbers beyond 32 bits": (-(1 << 31) - 16, -16),
        "kinds of numbers": (2, 2.0),
        "pointers and numbers": (2, NUMBERS),
        "nested": ((NUMBERS, 2), (NUMBERS, 1)),
        "lengths": ((NUMBERS,), (NUMBERS, NUMBERS)),
    }.values(),
)
def test_arguments_that_need_another_kernel(first, second):
    kernel = RecordingKernel()
    for x in (first, second, first, second):
        launch(kernel, NUMBERS, x)
    assert len(kernel.compiled) == 2 == len(kernel.launched)


@pytest.mark.parametrize(
    "other",
    [
        {"constants": {"FACTOR": 2, "BLOCK": 8}},
        {"num_warps": 8},
        {"device": SECOND},
        {"choices": triton_losses.Choices("given")},
    ],
    ids=lambda other: next(iter(other)),
)
def test_settings_that_need_another_kernel(other):
    kernel = RecordingKernel()
    for given in ({}, other, {}, other):
        launch(kernel, NUMBERS, 3, **given)
    assert len(kernel.compiled) == 2 == len(kernel.launched)


def test_kernels_are_told_apart():
    for kernel in (RecordingKernel("first"), RecordingKernel("second")):
        launch(kernel, NUMBERS, 3)
        assert len(kernel.compiled) == 1


def test_other_numbers_share_a_kernel():
    """It is launched with its own arguments, and with all that was compiled into it."""
    kernel, y = RecordingKernel(), torch.zeros(100)
    launch(kernel, NUMBERS, (8, 0.5))
    launch(kernel, y, (24, 0.25), programs=7)
    options = {"FACTOR": 2, "BLOCK": 4, "enable_fp_fusion": True}
    assert kernel.compiled == [((3,), (NUMBERS, (8, 0.5)), options, triton_losses.NUM_WARPS)]
    assert kernel.launched == [((7, 1, 1), (y, (24, 0.25), 2, 4))]


def test_without_the_fast_path_triton_finds_its_kernels():
    kernel = RecordingKernel()
    launch(kernel, NUMBERS, 3)
    with set_fast_path(False):
        launch(kernel, NUMBERS, 3)
    launch(kernel, NUMBERS, 3)
    assert len(kernel.compiled) == 2 and len(kernel.launched) == 1


@pytest.mark.parametrize("compiled", [None, object()], ids=["interpreted", "of another Triton"])
def test_what_cannot_be_launched_by_itself_is_found_anew(compiled, monkeypatch):
    kernel = RecordingKernel()
    monkeypatch.setattr(kernel, "Compiled", lambda _: compiled)
    for _ in range(2):
        launch(kernel, NUMBERS, 3)
    assert len(kernel.compiled) == 2
