"""Launches of Triton kernels: through Triton the first time, of what that has compiled from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal.launch.fast_path import is_switched_on
from rl_triton_core._internal.launch.launcher import record_kernel
from rl_triton_core._internal.launch.recording import unmark_numbers


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


def launch_compiled(kernel: Any, grid: tuple[int, int], arguments: Sequence[Any], scratch: torch.Tensor | None) -> None:
    """Launch a compiled kernel, and record that."""
    kernel[(*grid, 1)](*unmark_numbers(arguments))
    record_kernel(kernel, grid, arguments, scratch)


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
