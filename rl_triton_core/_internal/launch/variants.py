"""Which compiled kernel a launch takes: one of its shape's own, or a general one.

Triton compiles a kernel for its constants, and for what it sees in the other arguments: that 16 divides an address or
a number, that a number is 1. Over many shapes this would compile without end. So the first shapes of a form of problem
get kernels of their own, and later each shape that was called often enough. All others share a few general kernels, in
which sizes and strides are numbers like any others, but for strides of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.launch.table import Launch

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

SHORT, MIDDLE = 16, 128
"""Up to how many steps rows are short, and of middle length."""


class GeneralRows(NamedTuple):
    """The rows of the launch table that general kernels take, for rows by their length and for those that are split."""

    short: Launch
    middle: Launch
    long: Launch
    split: Launch


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

    def __init__(self, rows: GeneralRows) -> None:
        self.rows = rows
        self.own: dict[Hashable, Launches] = {}
        """For each shape that has kernels of its own."""
        self.calls: dict[Hashable, int] = {}
        self.num_first = 0
        self.general: dict[GeneralSettings, tuple[Any, ...]] = {}
        """Kernels with their constants, by the settings that they are compiled for."""

    def count_call(self, sizes: Hashable) -> int:
        """Count a call of a shape, and return how many there were."""
        if len(self.calls) >= MAX_SHAPES:
            self.calls.clear()
        self.calls[sizes] = number = self.calls.get(sizes, 0) + 1
        return number

    def admit_first(self, num_kernels: int) -> bool:
        """Whether a new shape gets so many kernels of its own at once. Once one does not, no other does."""
        admitted = self.num_first == 0 or self.num_first + num_kernels <= MAX_FIRST_KERNELS
        self.num_first = self.num_first + num_kernels if admitted else MAX_FIRST_KERNELS
        return admitted

    def keep_own(self, sizes: Hashable, launches: Launches) -> Launches:
        """Keep the launches of a shape that has kernels of its own."""
        if len(self.own) >= MAX_SHAPES:
            self.own.clear()
        self.calls.pop(sizes, None)
        self.own[sizes] = launches
        return launches

    def find_general(
        self, settings: GeneralSettings, compile: Callable[[GeneralSettings], tuple[Any, ...]]
    ) -> tuple[GeneralSettings, tuple[Any, ...]]:
        """Return settings and their kernels; those of universal settings where there would be too many kernels."""
        universal = GeneralSettings(self.rows.long)
        if settings not in self.general:
            room = MAX_GENERAL_KERNELS - sum(map(len, self.general.values())) - (universal not in self.general)
            if settings != universal and settings.num_kernels > room:
                settings = universal
        if settings not in self.general:
            self.general[settings] = compile(settings)
        return settings, self.general[settings]


VARIANTS: dict[Hashable, Variants] = {}
"""By device and form of problem."""


class Address:
    """Stands for tensors of a dtype, at any address, while a kernel is compiled."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        """Return an address that 16 does not divide."""
        return 8
