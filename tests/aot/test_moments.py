"""The kernels of normalisation compile for every target, and none spills registers."""

import re

import pytest
import torch
from ahead_of_time import compile_kernel

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


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", KERNELS[:2])
def test_no_variant_spills(name, variant):
    assert_fits(compile_for("sm_90", name, variant)[1])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_no_target_spills(target, name):
    assert_fits(compile_for(target, name, "masked")[1])


def assert_fits(resources):
    """A multiprocessor has registers for three programs at once, and none is spilled."""
    assert 0 < resources.registers <= 80
    assert resources.spilled_bytes == 0


@pytest.mark.parametrize("name", KERNELS[:2])
def test_memory_is_read_in_wide_pieces(name):
    kernel, _ = compile_for("sm_90", name, "masked")
    assert re.search(r"ld\.global\S*\.v4\.b32", kernel.asm["ptx"])


def test_no_kernel_is_atomic():
    for name in KERNELS:
        assert not re.search(r"\b(atom|red)\.global", compile_for("sm_90", name, "plain")[0].asm["ptx"])
