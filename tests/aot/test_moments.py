"""The kernels of normalisation compile for every target, and none spills registers."""

import re

import pytest
import torch
from ahead_of_time import TARGETS, compile_kernel

from rl_triton_core._internal.moments import kernel as kernels
from rl_triton_core._internal.moments.rule import Rule, Task
from rl_triton_core._internal.moments.triton import NUM_WARPS, list_launches

KERNELS = ("moments", "standardize", "merge")
VARIANTS = {  # shape, dtype, mask, out
    "plain": ((1, 1 << 20), torch.float32, None, torch.float32),
    "masked": ((1, 1 << 20), torch.float32, torch.bool, torch.float32),
    "half": ((1, 1 << 20), torch.bfloat16, torch.float32, torch.bfloat16),
    "narrow": ((1 << 20, 24), torch.float32, torch.bool, torch.float32),
    "wide": ((4096, 2047), torch.float32, torch.bool, torch.float32),
    "huge": ((1, 1 << 33), torch.float16, torch.uint8, torch.float32),
}


def make_matrix(shape, dtype):
    """One without gaps if it is a row; else one with a gap behind every row, or column by column if it has flags."""
    rows, columns = shape
    if rows > 1 and dtype == torch.bool:
        return torch.empty((columns, rows), dtype=dtype, device="meta").t()
    return torch.empty((rows, columns + 8 * (rows > 1)), dtype=dtype, device="meta")[:, :columns]


def compile_for(target, name, variant):
    """Compile a kernel as a call of that variant would; return it and what a thread of it needs."""
    shape, *dtypes = VARIANTS[variant]
    values, flags, result = (None if dtype is None else make_matrix(shape, dtype) for dtype in dtypes)
    task = Task(values, flags, result, Rule(1.0, 1e-8, 0.0, 0.0))
    kernel = getattr(kernels, name)
    call = next(x for x in list_launches(task, lambda whole: whole) if x.kernel is kernel)
    arguments = dict(zip(kernel.arg_names, (*call.arguments, *call.options.values()), strict=True))
    return compile_kernel(target, kernel, arguments, num_warps=NUM_WARPS)


CASES = [("sm_90", name, variant) for name in KERNELS[:2] for variant in VARIANTS] + [("sm_90", "merge", "plain")]
CASES += [(target, name, "masked") for name in KERNELS for target in TARGETS if target != "sm_90"]


@pytest.mark.parametrize(("target", "name", "variant"), CASES)
def test_registers_and_instructions(target, name, variant):
    """A multiprocessor has registers for three programs at once, none is spilled, and memory is read in wide pieces."""
    kernel, resources = compile_for(target, name, variant)
    assert 0 < resources.registers <= 80
    assert resources.spilled_bytes == 0
    if target == "sm_90":
        assert not re.search(r"\b(atom|red)\.global", kernel.asm["ptx"])
        assert variant != "masked" or re.search(r"ld\.global\S*\.v4\.b32", kernel.asm["ptx"])
