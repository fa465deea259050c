"""Every kernel variant compiles for every target, and none spills registers."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import triton
from ahead_of_time import TARGETS, compile_for, compile_kernel
from packaging.version import Version
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

import rl_triton_core  # noqa: F401, it describes all estimators
from rl_triton_core._internal.launch.kernels import Variants
from rl_triton_core._internal.launch.table import MIDDLE, SHORT, TABLE, Launch, Limits
from rl_triton_core._internal.scan import triton as backend
from rl_triton_core._internal.scan.kernel.scan import scan
from rl_triton_core._internal.scan.problem import Problem
from rl_triton_core._internal.scan.recurrence import RECURRENCES, Expectation

ROWS = [(layout, limits, launch) for layout, rows in TABLE.items() for limits, launch in rows]
VARIANTS = ("plain", "all", "skip", "reset", "half", "uneven")
FORMS = [*((order, variant) for order in TABLE for variant in VARIANTS), ("env-major", "packed")]


def make_problem(
    variant: str,
    layout: str,
    limits: Limits = Limits(),  # noqa: B008
    name: str = "gae",
    most: tuple[int, int] = (4096, 2048),
    flags: torch.dtype = torch.bool,
) -> Problem:
    """The largest window of environments and steps within the limits."""
    recurrence = RECURRENCES[name]
    packed = variant == "packed"
    shape = tuple(int(min(size, limit)) for size, limit in zip(most, (limits.lanes, limits.steps), strict=True))
    shape = tuple(x - (variant == "uneven") for x in shape[:: 1 if layout == "env-major" else -1])
    shape = (1 << 20,) if packed else shape
    real = torch.bfloat16 if variant == "half" else torch.float32

    def make_stream(dtype=real):
        return torch.empty(shape, dtype=dtype, device="meta")

    plain, timed = variant == "plain", variant == "timed"
    outputs = [make_stream(torch.float32) for _ in recurrence.outputs]
    return Problem(
        recurrence=recurrence,
        like=make_stream(),
        inputs=tuple(None if plain and name == "behaviour_log_probs" else make_stream() for name in recurrence.inputs),
        outputs=(outputs[0], *((None,) * (len(outputs) - 1) if plain else outputs[1:])),
        time_dim=1 if layout == "env-major" or packed else 0,
        cu_seqlens=torch.empty(1025, dtype=torch.int64, device="meta") if packed else None,
        gamma=make_stream() if variant == "all" else 0.99,
        lambda_=0.95,
        params=tuple(1.0 + i for i in range(len(recurrence.params))),
        bootstrap=0.0 if plain or timed else make_stream(),
        terminated=make_stream(flags),
        truncated=None if plain or timed else make_stream(torch.uint8),
        mask=make_stream(torch.bool) if variant in ("all", "skip", "reset", "packed") else None,
        initial=None if plain or recurrence.backward else make_stream(),
        previous_done=None if plain or recurrence.backward else make_stream(torch.bool),
        skip=variant != "reset",
    )


@pytest.mark.parametrize(("order", "limits", "launch"), [row for row in ROWS if row[1].bytes_per_step == float("inf")])
def test_no_row_for_all_streams_spills(order, limits, launch):
    """Where there are most; those for fewer are compiled with as many as they admit, below."""
    assert_no_spills(compile_for("sm_90", make_problem("all", order, limits, "retrace"), launch))


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_launch_binds_its_arguments(name):
    """Triton writes the function that does so, with local variables of its own: no argument may have their names."""
    target = make_backend(TARGETS["sm_90"])
    bind = create_function_from_signature(scan.signature, scan.params, target)
    window = make_problem("all", "env-major", name=name)
    for call in backend.build_launches(window, *backend.choose_launch(window)):
        bound, specialization, options = bind(*call.arguments, **call.options)
        assert tuple(bound.values()) == call.arguments
        assert len(specialization) == len(call.arguments)
        assert options == call.options and options["enable_fp_fusion"]


TIMED = [(x, dtype) for x in ("trace", "gae", "vtrace") for dtype in (torch.bool, torch.float32)]
"""Estimators, and dtypes of their flags."""
WIDTHS = {1: ".b8", 4: ".b32", 8: ".v2.b32", 16: ".v4.b32"}
BUDGETS = {
    "3.6": {
        "env-major": "40 72 72 72 40 40 40 56 40 40 48 64 56 48 64 96 80 112 96 80 112 120 96 80 64 64",
        "time-major": "64 112 96 184 96 120 112 144 80 80 80 168 96 112 64 104 96 144 152 96 72 112 80 80",
    },
    "3.7": {
        "env-major": "48 72 72 72 48 40 48 64 48 48 48 64 56 40 64 96 80 112 96 80 112 120 96 112 64 64",
        "time-major": "64 80 96 168 104 104 96 144 80 96 96 160 96 88 56 112 96 152 152 96 64 96 80 96",
    },
    "3.8": {
        "env-major": "48 72 72 72 48 40 48 64 48 48 48 64 56 40 64 96 72 112 96 72 112 112 96 96 64 64",
        "time-major": "64 80 96 144 88 104 104 144 80 96 96 144 96 80 56 104 96 152 144 96 64 104 80 96",
    },
}
"""The most that a thread needs, for every row of the table, in eights as they are given out, from a Triton on."""
REGISTERS = BUDGETS[max((x for x in BUDGETS if Version(x) <= Version(triton.__version__)), default="3.6")]


def make_timed_problem(order, limits):
    """What benchmarks time, of as many bytes per step as the row admits."""
    windows = (
        make_problem("plain" if name == "trace" else "timed", order, limits, name, flags=flags) for name, flags in TIMED
    )
    fitting = (x for x in windows if x.layout.bytes_per_step <= limits.bytes_per_step)
    return max(fitting, key=lambda window: window.layout.bytes_per_step)


@pytest.mark.parametrize(("order", "row"), [(order, i) for order, rows in TABLE.items() for i in range(len(rows))])
def test_every_row_reads_and_writes_every_number_once(order, row):
    """Four at a time where steps lie side by side; and no row needs more registers than it did."""
    limits, launch = TABLE[order][row]
    window = make_timed_problem(order, limits)
    (resources,) = compile_for("sm_90", window, launch)
    assert_no_spills([resources])
    assert resources.accesses == count_accesses(window, launch)
    assert resources.registers <= int(REGISTERS[order].split()[row])


def count_accesses(window, launch):
    """Of a chunk: every tensor's numbers, loaded for the next tile too where there is one; and what follows a chunk."""
    config = backend.kernel_config(window, launch)
    found, tiles = Counter(), 1 if config.ONE_TILE else 2
    read = *window.inputs, window.gamma, window.next_values, window.terminated, window.truncated, window.mask
    for verb, tensors, times in (("ld", read, tiles), ("st", window.outputs, 1)):
        for x in filter(torch.is_tensor, tensors):
            size = launch.unroll * x.itemsize
            at_once = min(16, size) if window.layout.is_env_major else x.itemsize
            found[verb + WIDTHS[at_once]] += times * size // at_once
    if config.TOGETHER and not (window.recurrence.backward or window.starts_at):
        # The flag before each chunk, which else is loaded as its last step's is.
        found["ld" + WIDTHS[window.terminated.itemsize]] += tiles
    num_lookahead = window.inputs[: window.recurrence.num_lookahead]
    found["ld.b32"] += tiles * sum(x is not None for x in num_lookahead)
    return +found


@pytest.mark.parametrize(("order", "launch"), [("env-major", Launch(4, 32, 4, 4)), ("time-major", Launch(32, 8, 8, 8))])
def test_no_row_spills_where_a_long_equation_has_truncations(order, launch):
    window = make_problem("uneven", order, name="vtrace")
    assert window.layout.bytes_per_step <= max(limits.bytes_per_step for limits, row in TABLE[order] if row == launch)
    assert_no_spills(compile_for("sm_90", window, launch))


@pytest.mark.parametrize("variant", ["plain", "skip"])
@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("order", TABLE)
def test_one_launch_or_two_where_time_is_split(order, name, variant):
    for most, number in {
        (32768, 8): 1,
        (4096, 128): 1,
        (16384, 512): 1,
        (4096, 2048): 1,
        (64, 65536): 2,
        (16, 1 << 18): 2,
        (1, 1 << 20): 2,
    }.items():
        window = make_problem(variant, order, name=name, most=most)
        assert len(list(backend.build_launches(window, *backend.choose_launch(window)))) == number


def make_largest_problem(order, name, variant):
    """A window of any size, and the row for those."""
    return make_problem(variant, order, name=name), TABLE[order][-1][1]


@pytest.mark.covering
@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize(("order", "variant"), FORMS)
def test_no_estimator_or_variant_spills(name, order, variant):
    assert_no_spills(compile_for("sm_90", *make_largest_problem(order, name, variant)))


@pytest.mark.covering
@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("order", TABLE)
@pytest.mark.parametrize("variant", ["plain", "all"])
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_no_target_spills(target, variant, order, name):
    assert_no_spills(compile_for(target, *make_largest_problem(order, name, variant)))


@pytest.mark.covering
@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("order", TABLE)
def test_segments_do_not_spill(order, name):
    assert_no_spills(compile_for("sm_90", *make_largest_problem(order, name, "plain"), segments=64))


@pytest.mark.covering
@pytest.mark.parametrize("number", [4, 16, 17])
@pytest.mark.parametrize("order", TABLE)
def test_no_number_of_actions_spills(order, number):
    window, launch = make_largest_problem(order, "retrace", "plain")
    probs, values = torch.empty(2, *window.like.shape, number, device="meta")
    assert_no_spills(compile_for("sm_90", replace(window, next_values=Expectation(probs, values)), launch))


@pytest.mark.covering(2)
@pytest.mark.parametrize("number", [None, 4, 18])
@pytest.mark.parametrize("steps", [SHORT, MIDDLE, 1024])
@pytest.mark.parametrize("variant", ["skip", "half"])
@pytest.mark.parametrize("order", TABLE)
def test_no_general_kernel_spills(order, variant, steps, number, monkeypatch):
    """Those that shapes share which have none of their own; they know neither sizes nor strides."""
    compiled = []

    def compile_call(*arguments, grid, **options):
        compiled.append(compile_kernel("sm_90", scan, dict(zip(scan.arg_names, arguments, strict=True)), **options)[1])

    monkeypatch.setattr(scan, "warmup", compile_call)
    window = make_problem(variant, order, Limits(steps=steps), "retrace")
    if number is not None:
        probs, values = torch.empty(2, *window.like.shape, number, device="meta")
        window = replace(window, next_values=Expectation(probs, values))
    backend.find_general_launches(window, Variants())
    assert_no_spills(compiled)


def assert_no_spills(launches):
    assert launches
    for resources in launches:
        assert resources.registers > 0
        assert resources.spilled_bytes == 0


def test_spills_would_be_seen():
    """The same kernel, allowed far fewer registers than it needs."""
    layout, _, launch = ROWS[0]
    (resources,) = compile_for("sm_90", make_problem("all", layout), launch, maxnreg=24)
    assert resources.spilled_bytes > 0
