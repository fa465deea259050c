"""Launches of Triton kernels: through Triton the first time, of what that has compiled from then on.

Triton compiles a kernel for its constants, and for what it sees in the other arguments: that 16 divides an address or
a number, that a number is 1. Over many shapes this would compile without end. So the first shapes of a form of scan
get kernels of their own, and later each shape that was called often enough. All others share a few general kernels, in
which sizes and strides are numbers like any others, but for strides of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.launch.fast_path import is_switched_on
from rl_triton_core._internal.launch.launcher import postpone_recording, record_kernel, unmark_numbers
from rl_triton_core._internal.launch.table import Launch


class KernelCall(NamedTuple):
    """A launch to be made."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    """What is compiled into the kernel, beside its equations."""
    num_warps: int
    scratch: torch.Tensor | None = None
    """Memory that no launch before took, beside the call's."""
    choices: Hashable = None
    """What its equations depend on, if it has some."""
    compile_equations: Callable[[Any], dict[str, Any]] | None = None
    """From these choices to its equations, by the kernel's names for them."""
    checked: bool = False
    """Whether it asserts something of what it reads."""

    @property
    def options(self) -> dict[str, Any]:
        """All that is compiled into the kernel, by name, in the order of its parameters."""
        equations = {} if self.compile_equations is None else self.compile_equations(self.choices)
        return equations | self.constants


FUSED = {"enable_fp_fusion": True}
"""Products and sums may be rounded once. It is Triton's default up to 3.9, which warns where nothing is said."""
CHECKED = {"debug": True, "sanitize_overflow": False}
"""With which a kernel's assertions are compiled."""
KERNELS: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels, and what is compiled into them. Triton takes longer to find one, as it looks at every equation.

They are a part of the fast path, and are found by Triton where that is switched off.
"""


def device_guard(device: torch.device) -> Any:
    """The context in which a kernel runs on this device."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def launch_kernels(calls: Iterable[KernelCall], device: torch.device) -> None:
    """Launch kernels on a device, one after the other."""
    with device_guard(device):
        for call in calls:
            launch_kernel(call, device)


def launch_kernel(call: KernelCall, device: torch.device) -> None:
    """Launch a kernel on the device that is current."""
    constants = tuple(call.constants.values())
    described = tuple(map(describe_argument, unmark_numbers(call.arguments)))
    key = call.kernel.__name__, call.choices, constants, call.num_warps, device, described
    if is_switched_on() and key in KERNELS:
        compiled, options = KERNELS[key]
        compiled[(call.programs, 1, 1)](*unmark_numbers((*call.arguments, *options)))
    else:
        checks, options = CHECKED if call.checked else {}, tuple(call.options.values())
        chosen = {**call.options, "num_warps": call.num_warps, **FUSED, **checks}
        compiled = call.kernel[(call.programs,)](*unmark_numbers(call.arguments), **chosen)
        if hasattr(compiled, "__getitem__"):  # the interpreter compiles nothing, and it is a private name of Triton's
            KERNELS[key] = compiled, options
    record_kernel(compiled, (call.programs, 1), (*call.arguments, *options), call.scratch)


def explain_float64(names: str) -> TypeError:
    """The error of arguments by whose dtype the arithmetic would be float64."""
    return TypeError(
        f"{names}: got dtype torch.float64 on the triton backend, expected float32, bfloat16 or float16 (the cpu and "
        "reference backends take float64; NumPy's arrays are float64 by default)"
    )


def describe_argument(x: Any) -> Any:
    """What Triton compiles into a kernel of an argument, and perhaps more."""
    kind = type(x)
    if x is None or kind is float:
        return kind
    if kind is tuple:
        return tuple(map(describe_argument, x))
    if kind is int:
        return x == 1, x % 16 == 0, -(1 << 31) <= x < 1 << 31
    return x.dtype, x.data_ptr() % 16 == 0, x.untyped_storage().nbytes() < 1 << 31


# --- which kernel a scan takes ----------------------------------------------------------------------------------------

MAX_FIRST_KERNELS = 2
"""How many kernels of their own the first shapes of a form get at once."""
MAX_GENERAL_KERNELS = 5
CALLS_BEFORE_OWN_KERNEL = 16
"""From so many calls on, a shape gets a kernel of its own however many there are."""
MAX_SHAPES = 4096
"""Shapes of a form whose calls are counted or whose launches are kept."""


class PreparedLaunch(NamedTuple):
    """What the sizes of a problem decide of a launch."""

    kernel: Any
    """As Triton compiled it."""
    grid: tuple[int, int]
    constants: tuple[Any, ...]
    """The arguments that are compiled into it."""
    folds: tuple[int, ...] | None
    """The shape of the memory between two launches, if there are two."""


Launches = tuple[PreparedLaunch, ...]
Prepare = Callable[[], tuple[int, Callable[[], Launches]]]


class GeneralSettings(NamedTuple):
    """What general kernels are compiled for, apart from the form of their arguments."""

    row: Launch
    num_actions: int = 0
    """As in `KernelConfig.ACTIONS`."""
    num_kernels: int = 1
    """Two if time is split."""
    one_tile: bool = False
    """Whether rows are so short that a tile has all their steps."""


class Variants:
    """The kernels of one form of problem on one device."""

    def __init__(self) -> None:
        self.own: dict[Hashable, Launches] = {}
        """For each shape that has kernels of its own."""
        self.calls: dict[Hashable, int] = {}
        self.num_first = 0
        self.general: dict[GeneralSettings, tuple[Any, ...]] = {}
        """Kernels with their constants, by the settings that they are compiled for."""

    def find(
        self, sizes: Hashable, like: torch.Tensor, prepare: Prepare, find_general: Callable[[], Launches]
    ) -> Launches:
        """The launches of a shape's own kernels, if it has some or gets them now, else general ones, not recorded.

        For the former, `prepare` says how many they are and what compiles them.
        """
        if sizes in self.own:
            return self.own[sizes]
        if len(self.calls) >= MAX_SHAPES:
            self.calls.clear()
        self.calls[sizes] = calls = self.calls.get(sizes, 0) + 1
        often = calls >= CALLS_BEFORE_OWN_KERNEL and not is_capturing(like)
        if often or self.num_first < MAX_FIRST_KERNELS:
            number, compile = prepare()
            if often or self.admit_first(number):
                if len(self.own) >= MAX_SHAPES:
                    self.own.clear()
                self.calls.pop(sizes, None)
                self.own[sizes] = launches = compile()
                return launches
        postpone_recording()
        return find_general()

    def admit_first(self, num_kernels: int) -> bool:
        """Whether a new shape gets so many kernels of its own at once. Once one does not, no other does."""
        admitted = self.num_first == 0 or self.num_first + num_kernels <= MAX_FIRST_KERNELS
        self.num_first = self.num_first + num_kernels if admitted else MAX_FIRST_KERNELS
        return admitted

    def find_general(
        self, settings: GeneralSettings, universal: GeneralSettings, compile: Callable[[GeneralSettings], Any]
    ) -> tuple[GeneralSettings, tuple[Any, ...]]:
        """Return settings and their kernels; those of universal settings where there would be too many kernels."""
        if settings not in self.general:
            room = MAX_GENERAL_KERNELS - sum(map(len, self.general.values())) - (universal not in self.general)
            if settings != universal and settings.num_kernels > room:
                settings = universal
        if settings not in self.general:
            self.general[settings] = compile(settings)
        return settings, self.general[settings]


VARIANTS: dict[Hashable, Variants] = {}
"""By device and form of problem."""


def is_capturing(like: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured, during which no kernel should be compiled that is not needed."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


class Address:
    """Stands for tensors of a dtype, at any address, while a kernel is compiled."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        """Return an address that 16 does not divide."""
        return 8
