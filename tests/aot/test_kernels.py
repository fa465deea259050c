"""Every kernel variant compiles for every target, and none spills registers."""

import pytest
import torch
from ahead_of_time import compile_for

from rl_triton_core.estimators.gae import GAE
from rl_triton_core.kernels.launch import TABLE
from rl_triton_core.recurrence import Problem

LAUNCHES = [(layout, launch) for layout, rows in TABLE.items() for _, launch in rows]
VARIANTS = ("plain", "all", "skip", "reset", "half")


def problem(variant: str, layout: str) -> Problem:
    """A window large enough that nothing but the variant decides what is compiled."""
    shape = (4096, 2048)
    time_dim = 1 if layout == "env-major" else 0
    real = torch.bfloat16 if variant == "half" else torch.float32

    def stream(dtype=real):
        return torch.empty(shape, dtype=dtype, device="meta")

    inputs = (stream(), stream())
    return Problem(
        recurrence=GAE,
        like=inputs[0],
        inputs=inputs,
        outputs=(stream(torch.float32), None if variant == "plain" else stream(torch.float32)),
        time_dim=time_dim,
        gamma=stream() if variant == "all" else 0.99,
        lambda_=0.95,
        params=(),
        next_values=None,
        bootstrap=0.0 if variant == "plain" else stream(),
        terminated=stream(torch.bool),
        truncated=None if variant == "plain" else stream(torch.uint8),
        mask=stream(torch.bool) if variant in ("all", "skip", "reset") else None,
        skip=variant != "reset",
    )


@pytest.mark.parametrize(("layout", "launch"), LAUNCHES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variant_spills(variant, layout, launch):
    assert_no_spills(compile_for("sm_90", problem(variant, layout), launch))


@pytest.mark.parametrize(("layout", "launch"), LAUNCHES)
@pytest.mark.parametrize("variant", ["plain", "all"])
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_no_target_spills(target, variant, layout, launch):
    assert_no_spills(compile_for(target, problem(variant, layout), launch))


def assert_no_spills(resources):
    assert resources.registers > 0
    assert resources.spilled_bytes == 0


def test_spills_would_be_seen():
    """The same kernel, allowed far fewer registers than it needs."""
    layout, launch = LAUNCHES[0]
    assert compile_for("sm_90", problem("all", layout), launch, maxnreg=24).spilled_bytes > 0
