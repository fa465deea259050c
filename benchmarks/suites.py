"""What is measured together: workloads and the arms that meet on them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from benchmarks.workloads import ESTIMATORS, LAYOUTS, VARIANTS, Workload

Shape = tuple[int, int]

SWEEP_SHAPES: tuple[Shape, ...] = (
    (64, 512), (128, 1024), (256, 1024), (512, 128), (512, 512), (512, 2048), (512, 4096), (4096, 128), (4096, 512),
    (4096, 2048), (16384, 128), (16384, 512),
)  # fmt: skip
HEADLINE: Shape = (4096, 128)
SHORT_ROWS: tuple[Shape, ...] = tuple(
    (envs, steps) for steps, envs in product((8, 16, 32, 64, 128), (4096, 8192, 16384, 32768))
)
LONGER_ROWS: tuple[Shape, ...] = tuple(
    shape for shape in product((128, 1024, 4096), (128, 256, 512, 1024, 2048, 4096, 8192)) if shape not in SHORT_ROWS
)
RETRACE_SHAPES: tuple[Shape, ...] = tuple((512, steps) for steps in (512, 1024, 2048, 4096, 8192))
LONG_SHAPES: tuple[Shape, ...] = ((64, 65536), (16, 262144), (1, 1048576), (8, 131072))
LENGTHENING: tuple[Shape, ...] = tuple((16, steps) for steps in (1024, 4096, 16384, 65536, 131072, 1048576))
LARGE_SHAPES: tuple[Shape, ...] = ((16384, 512), (4096, 2048), (65536, 512))
HUGE_SHAPE: Shape = (65536, 32896)
CPU_SHAPES: tuple[Shape, ...] = ((1, 2048), (8, 2048), (4096, 128))
FLAG_SHAPES: tuple[Shape, ...] = ((16384, 512), (4096, 2048), (512, 4096))
FLAG_DTYPES = ("bool", "uint8", "bfloat16", "float32")
LOOP_LONGEST = 1024
FLAT_LONGEST = 131072
"""Longer rows are too much for the flat Triton kernel: a whole row is one block of one program."""
SERIAL_LONGEST = 262144
"""Longer rows take a thread of the CUDA kernel a second."""
TINY_SHAPES: tuple[Shape, ...] = ((5, 16), (3, 33))


class Suite(NamedTuple):
    """Workloads, and the arms that are measured besides the floors."""

    workloads: tuple[Workload, ...]
    providers: tuple[str, ...]
    device: str = "cuda"

    def arms_of(self, workload: Workload) -> tuple[str, ...]:
        """The arms of a workload, without those that would take too long.

        The compiled scan compiles for seconds: it is where the paper's table has it. The loop runs for as long: away
        from the headline and the CPU it is there for plain GAE on rows that are not long.
        """
        plain = workload.layout == "env-major" and not workload.truncated
        headline = {(w.num_envs, w.num_steps) for w in self.workloads} == {HEADLINE}
        short_gae = plain and workload.estimator == "gae" and workload.num_steps <= LOOP_LONGEST
        kept = {"compiled_scan": plain or headline, "loop": self.device == "cpu" or headline or short_gae}
        return tuple(name for name in self.providers if kept.get(name, True))


def combine_workloads(
    shapes: Iterable[Shape],
    estimators: Iterable[str] = ESTIMATORS,
    layouts: Iterable[str] = LAYOUTS,
    truncated: Iterable[bool] = (False,),
    dtype: str = "float32",
    flags: Iterable[str] = ("bool",),
) -> tuple[Workload, ...]:
    """Every combination that there is, shapes last, so that what compiles alike comes together."""
    combinations = product(estimators, flags, truncated, layouts, shapes)
    found = (Workload(name, *shape, layout, cut, dtype, flag) for name, flag, cut, layout, shape in combinations)
    return tuple(workload for workload in found if workload.spec.truncates or not workload.truncated)


ENV_MAJOR, BOTH = ("env-major",), (False, True)
LONG_ESTIMATORS = ("gae", "eligibility_traces")
SWEEP = combine_workloads(SWEEP_SHAPES, layouts=ENV_MAJOR, truncated=BOTH)
SUITES = {
    "headline": Suite(
        combine_workloads([HEADLINE], layouts=ENV_MAJOR, truncated=BOTH),
        ("ours", "ours_out", "ours_normal_path", "loop", "compiled_scan", "flat_triton", "torchrl"),
    ),
    "rows": Suite(
        combine_workloads((*SHORT_ROWS, *LONGER_ROWS), ["gae_advantages"], ENV_MAJOR), ("ours_out", "cuda_rows")
    ),
    "retrace_long": Suite(
        combine_workloads(RETRACE_SHAPES, ["retrace"], ENV_MAJOR), ("ours", "ours_out", "compiled_scan", "flat_triton")
    ),
    "long": Suite(
        (
            *combine_workloads(LONG_SHAPES, LONG_ESTIMATORS, ENV_MAJOR),
            *combine_workloads(LONG_SHAPES, ["gae"], ["time-major"]),
            *combine_workloads(LENGTHENING, ["gae"], ENV_MAJOR),
        ),
        ("ours", "flat_triton", "blocks_triton"),
    ),
    "large": Suite(combine_workloads(LARGE_SHAPES), ("ours", "ours_out")),
    "bf16": Suite(combine_workloads([HEADLINE, (16384, 512)], dtype="bfloat16"), ("ours", "ours_out")),
    "variants": Suite(
        combine_workloads([HEADLINE, *LARGE_SHAPES[:2], LONG_SHAPES[0]], VARIANTS, ENV_MAJOR), ("ours", "flat_triton")
    ),
    "flags": Suite(combine_workloads(FLAG_SHAPES, ["gae"], flags=FLAG_DTYPES), ("ours", "flat_triton")),
    "huge": Suite(
        (
            Workload("prefix_sum", *HUGE_SHAPE, dtype="bfloat16"),
            Workload("gae", *HUGE_SHAPE, "time-major", dtype="bfloat16"),
        ),
        ("ours",),
    ),
    "sweep": Suite(
        combine_workloads(SWEEP_SHAPES, truncated=BOTH), ("ours", "flat_triton", "compiled_scan", "loop", "torchrl")
    ),
    "cpu": Suite(
        combine_workloads(CPU_SHAPES),
        ("ours", "ours_out", "loop", "numpy", "numba", "sb3", "torchrl", "rlax"),
        device="cpu",
    ),
    "tiny": Suite(
        combine_workloads(TINY_SHAPES, truncated=BOTH), ("ours", "ours_out", "loop", "numpy", "numba"), device="cpu"
    ),
}
