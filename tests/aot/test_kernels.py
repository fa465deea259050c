"""Every kernel variant compiles for every target, and none spills registers."""

import pytest
import torch
from ahead_of_time import compile_for

import rl_triton_core  # noqa: F401, it describes all estimators
from rl_triton_core.kernels.launch import TABLE
from rl_triton_core.recurrence import RECURRENCES, Problem

LAUNCHES = [(layout, launch) for layout, rows in TABLE.items() for _, launch in rows]
VARIANTS = ("plain", "all", "skip", "reset", "half", "packed")
OTHERS = [name for name in RECURRENCES if name != "gae"]


def problem(variant: str, layout: str, name: str = "gae") -> Problem:
    """A window large enough that nothing but the variant decides what is compiled."""
    recurrence = RECURRENCES[name]
    packed = variant == "packed"
    shape = (1 << 20,) if packed else (4096, 2048)
    real = torch.bfloat16 if variant == "half" else torch.float32

    def stream(dtype=real):
        return torch.empty(shape, dtype=dtype, device="meta")

    plain = variant == "plain"
    outputs = [stream(torch.float32) for _ in recurrence.outputs]
    return Problem(
        recurrence=recurrence,
        like=stream(),
        inputs=tuple(None if plain and name == "behaviour_log_probs" else stream() for name in recurrence.inputs),
        outputs=(outputs[0], *((None,) * (len(outputs) - 1) if plain else outputs[1:])),
        time_dim=1 if layout == "env-major" or packed else 0,
        cu_seqlens=torch.empty(1025, dtype=torch.int64, device="meta") if packed else None,
        gamma=stream() if variant == "all" else 0.99,
        lambda_=0.95,
        params=tuple(1.0 + i for i in range(len(recurrence.params))),
        bootstrap=0.0 if plain else stream(),
        terminated=stream(torch.bool),
        truncated=None if plain else stream(torch.uint8),
        mask=stream(torch.bool) if variant in ("all", "skip", "reset", "packed") else None,
        initial=None if plain or recurrence.backward else stream(),
        departed=None if plain or recurrence.backward else stream(torch.bool),
        skip=variant != "reset",
    )


@pytest.mark.parametrize(("layout", "launch"), LAUNCHES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variant_spills(variant, layout, launch):
    assert_no_spills(compile_for("sm_90", problem(variant, layout), launch))


@pytest.mark.parametrize(("layout", "launch"), LAUNCHES)
@pytest.mark.parametrize("variant", ["plain", "all", "packed"])
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_no_target_spills(target, variant, layout, launch):
    assert_no_spills(compile_for(target, problem(variant, layout), launch))


@pytest.mark.parametrize(("layout", "launch"), LAUNCHES)
@pytest.mark.parametrize("variant", ["plain", "all", "packed"])
@pytest.mark.parametrize("name", OTHERS)
def test_no_estimator_spills(name, variant, layout, launch):
    assert_no_spills(compile_for("sm_90", problem(variant, layout, name), launch))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_every_estimator_compiles_for_every_target(target, name):
    layout, launch = LAUNCHES[-1]
    assert_no_spills(compile_for(target, problem("all", layout, name), launch))


def assert_no_spills(resources):
    assert resources.registers > 0
    assert resources.spilled_bytes == 0


def test_spills_would_be_seen():
    """The same kernel, allowed far fewer registers than it needs."""
    layout, launch = LAUNCHES[0]
    assert compile_for("sm_90", problem("all", layout), launch, maxnreg=24).spilled_bytes > 0
