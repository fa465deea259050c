"""Every kernel variant compiles for every target, and none spills registers."""

from dataclasses import replace

import pytest
import torch
from ahead_of_time import compile_for

import rl_triton_core  # noqa: F401, it describes all estimators
from rl_triton_core.backends.triton import streams
from rl_triton_core.kernels.launch import TABLE, Limits
from rl_triton_core.recurrence import RECURRENCES, Expectation, Problem

ROWS = [(layout, limits, launch) for layout, rows in TABLE.items() for limits, launch in rows]
LAST_ROWS = [(layout, *rows[-1]) for layout, rows in TABLE.items()]
"""For windows of any size."""
VARIANTS = ("plain", "all", "skip", "reset", "half", "uneven", "packed")


def problem(variant: str, layout: str, limits: Limits = Limits(), name: str = "gae") -> Problem:  # noqa: B008
    """The largest window within the limits."""
    recurrence = RECURRENCES[name]
    packed = variant == "packed"
    shape = tuple(int(min(size, limit)) for size, limit in ((4096, limits.lanes), (2048, limits.steps)))
    shape = tuple(x - (variant == "uneven") for x in shape[:: 1 if layout == "env-major" else -1])
    shape = (1 << 20,) if packed else shape
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


def cases(names, variants):
    """Every estimator and variant with every row of the table that it may get."""
    for name in names:
        for variant in variants:
            for layout, limits, launch in ROWS:
                window = problem(variant, layout, limits, name)
                if streams(window) <= limits.streams and (variant != "packed" or layout == "env-major"):
                    yield window, launch


def last(variants, names=tuple(RECURRENCES)):
    """Estimators with the last rows of the table."""
    for name in names:
        for layout, _, launch in LAST_ROWS:
            for variant in variants:
                if variant != "packed" or layout == "env-major":
                    yield problem(variant, layout, name=name), launch


@pytest.mark.parametrize(("window", "launch"), list(cases(["gae"], ["all"])))
def test_no_row_spills(window, launch):
    assert_no_spills(compile_for("sm_90", window, launch))


@pytest.mark.parametrize(("window", "launch"), list(cases(["vtrace", "retrace"], ["plain"])))
def test_no_row_spills_where_the_equation_is_long(window, launch):
    assert_no_spills(compile_for("sm_90", window, launch))


@pytest.mark.parametrize(("window", "launch"), list(last(VARIANTS)))
def test_no_estimator_or_variant_spills(window, launch):
    assert_no_spills(compile_for("sm_90", window, launch))


@pytest.mark.parametrize(("window", "launch"), list(last(["plain", "all"], ["gae", "vtrace", "trace"])))
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_no_target_spills(target, window, launch):
    assert_no_spills(compile_for(target, window, launch))


@pytest.mark.parametrize(("window", "launch"), list(last(["plain"])))
def test_segments_do_not_spill(window, launch):
    assert_no_spills(compile_for("sm_90", window, launch, segments=64))


def with_actions(number, rows):
    """Retrace over so many actions with every row of the table that it may get."""
    for layout, limits, launch in rows:
        window = problem("plain", layout, limits, "retrace")
        probs, values = torch.empty(2, *window.like.shape, number, device="meta")
        window = replace(window, next_values=Expectation(probs, values))
        if streams(window) <= limits.streams:
            yield window, launch


@pytest.mark.parametrize(
    ("window", "launch"), [*with_actions(16, ROWS), *with_actions(4, LAST_ROWS), *with_actions(17, LAST_ROWS)]
)
def test_no_number_of_actions_spills(window, launch):
    assert_no_spills(compile_for("sm_90", window, launch))


def assert_no_spills(launches):
    assert launches
    for resources in launches:
        assert resources.registers > 0
        assert resources.spilled_bytes == 0


def test_spills_would_be_seen():
    """The same kernel, allowed far fewer registers than it needs."""
    layout, _, launch = ROWS[0]
    (resources,) = compile_for("sm_90", problem("all", layout), launch, maxnreg=24)
    assert resources.spilled_bytes > 0
