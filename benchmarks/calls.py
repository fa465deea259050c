"""Calls of the estimators: suites of workloads, and the arms that meet on them, each verified against an oracle."""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from benchmarks import harness
from benchmarks.providers import REGISTRY, Expected, Provider
from benchmarks.results import Row, describe_failure, make_row
from benchmarks.workloads import ESTIMATORS, LAYOUTS, VARIANTS, Inputs, Workload, count_bytes, draw_inputs
from rl_triton_core.testing import relative_error

TOLERANCE = 1e-5  # the largest ‖x − exact‖ / ‖exact‖ of an arm that counts; float32 loops stay well below
LARGEST_COMPILED = 1 << 27
MAX_CELLS_VERIFIED, ENVS_SAMPLED = 1 << 26, 64  # of a rollout with more cells only some environments are verified
LOOP_LONGEST = 1024
Shape = tuple[int, int]

SWEEP_SHAPES: tuple[Shape, ...] = (
    (64, 512), (128, 1024), (256, 1024), (512, 128), (512, 512), (512, 2048), (512, 4096), (4096, 128), (4096, 512),
    (4096, 2048), (16384, 128), (16384, 512),
)  # fmt: skip
HEADLINE: Shape = (4096, 128)
SHORT_ROWS = [(envs, steps) for steps, envs in product((8, 16, 32, 64, 128), (4096, 8192, 16384, 32768))]
LONGER_ROWS = list(product((128, 1024, 4096), (128, 256, 512, 1024, 2048, 4096, 8192)))
RETRACE_SHAPES = [(512, steps) for steps in (512, 1024, 2048, 4096, 8192)]
LONG_SHAPES: tuple[Shape, ...] = ((64, 65536), (16, 262144), (1, 1048576), (8, 131072))
LENGTHENING = [(16, steps) for steps in (1024, 4096, 16384, 65536, 131072, 1048576)]
LARGE_SHAPES: tuple[Shape, ...] = ((16384, 512), (4096, 2048), (65536, 512))
HUGE_SHAPE: Shape = (65536, 32896)
CPU_SHAPES: tuple[Shape, ...] = ((1, 2048), (8, 2048), (4096, 128))
FLAG_SHAPES: tuple[Shape, ...] = ((16384, 512), (4096, 2048), (512, 4096))
FLAG_DTYPES = ("bool", "uint8", "bfloat16", "float32")
TINY_SHAPES: tuple[Shape, ...] = ((5, 16), (3, 33))


class Suite(NamedTuple):
    """Workloads, and the arms that are measured besides the floors."""

    workloads: Sequence[Workload]
    providers: tuple[str, ...]
    shown: tuple[str, ...] = ()
    """The arms whose ratios to ours are on the page, docs/benchmarks.md, which says what is aimed at."""
    device: str = "cuda"

    @property
    def ours(self) -> str:
        return "ours" if "ours" in self.providers else "ours_out"

    @property
    def SETTINGS(self) -> dict[str, Sequence[Workload]]:
        """The workloads, for its device; tiny ones to see that everything runs."""
        quick = list(dict.fromkeys(w._replace(num_envs=n, num_steps=t) for w in self.workloads for n, t in TINY_SHAPES))
        return {"cpu": [], "cuda": [], self.device: self.workloads, "quick": quick}

    def prepare(self, settings: Sequence[Workload], options: Namespace) -> None:
        """Compile what will be timed, but for rollouts that need all of the memory."""
        chosen = [workload for workload in settings if workload.cells <= LARGEST_COMPILED]
        jobs = [(arm, x, options.device) for x in chosen for arm in self.list_arms(x) if REGISTRY[arm].compiles]
        harness.compile_ahead(compile_arm, jobs, options)

    def list_arms(self, workload: Workload) -> tuple[str, ...]:
        """The arms of a workload, without those that would take too long.

        The compiled scan compiles for seconds: it is where the paper's table has it. The loop runs for as long: away
        from the headline and the CPU it is there for plain GAE on rows that are not long.
        """
        plain = workload.layout == "env-major" and not workload.truncated
        headline = {(w.num_envs, w.num_steps) for w in self.workloads} == {HEADLINE}
        short_gae = plain and workload.estimator == "gae" and workload.num_steps <= LOOP_LONGEST
        kept = {"compiled_scan": plain or headline, "loop": self.device == "cpu" or headline or short_gae}
        return tuple(name for name in self.providers if kept.get(name, True))

    def measure(self, workload: Workload, options: Namespace) -> Iterator[Row]:
        """The lines of every arm that there is, and on a GPU the time in which a copy moves as many bytes."""
        oracle, calls = Oracle(workload, draw_inputs(workload, options.device)), {}
        for name in ("null", "torch_add", *self.list_arms(workload)):
            call, note = prepare_arm(name, oracle, options.device)
            if note:
                yield make_row(name, "full", "µs", [], note)
            elif call is not None:
                calls[name] = call
        host_only = [name for name in calls if not REGISTRY[name].captured]
        moved = count_bytes(workload)
        yield from harness.measure_arms(calls, options.device, options.seconds, self.ours, host_only, moved)


def compile_arm(name: str, workload: Workload, device: str) -> None:
    call = REGISTRY[name].make_call(workload, draw_inputs(workload, device))
    if call is not None:
        call()
    harness.wait_for(device)


class Oracle:
    """A workload's inputs, and its results in float64: of all environments, or of some where they are many."""

    def __init__(self, workload: Workload, inputs: Inputs) -> None:
        self.workload, self.inputs = workload, inputs
        self.envs: torch.Tensor | None = None
        if workload.cells > MAX_CELLS_VERIFIED:
            count = min(ENVS_SAMPLED, workload.num_envs)
            places = torch.arange(count, device=next(iter(inputs.values())).device)
            self.envs = places * (workload.num_envs - 1) // max(1, count - 1)
        self.known: dict[Expected, tuple[torch.Tensor, ...]] = {}

    def find_error(self, provider: Provider, found: Any) -> float:
        expected = provider.find_oracle()
        if expected not in self.known:
            self.known[expected] = expected(self.workload, self.inputs, self.envs)
        chosen = list_tensors(found)
        if self.envs is not None:
            chosen = [x.index_select(1 - self.workload.time_dim, self.envs) for x in chosen]
        pairs = zip(map(provider.select_written, chosen), self.known[expected], strict=True)
        return float(torch.tensor([relative_error(x, want) for x, want in pairs]).max())


def prepare_arm(name: str, oracle: Oracle, device: str) -> tuple[harness.Call | None, str]:
    """The call of a provider, if it has one and its results are right; and why there is none, if it should have one."""
    provider, call = REGISTRY[name], None
    if provider.unavailable(device):
        return None, ""
    try:
        call = provider.make_call(oracle.workload, oracle.inputs)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # TorchRL's convolution: timed as it comes
            error = oracle.find_error(provider, call()) if call is not None and provider.verified else 0.0
    except Exception as failure:  # an arm that fails must not end the run
        return None, describe_failure(failure)
    return (call, "") if error <= TOLERANCE else (None, f"wrong: its relative error is {error:.3g}")


def list_tensors(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else [x for x in found if x is not None]


def combine_workloads(
    shapes: Iterable[Shape],
    estimators: Iterable[str] = ESTIMATORS,
    layouts: Iterable[str] = LAYOUTS,
    truncated: Iterable[bool] = (False,),
    dtype: str = "float32",
    flags: Iterable[str] = ("bool",),
) -> list[Workload]:
    """Every combination that there is, each once; shapes last, so that what compiles alike comes together."""
    combinations = product(estimators, flags, truncated, layouts, shapes)
    found = (Workload(name, *shape, layout, cut, dtype, flag) for name, flag, cut, layout, shape in combinations)
    return list(dict.fromkeys(workload for workload in found if workload.spec.truncates or not workload.truncated))


ENV_MAJOR, BOTH = ("env-major",), (False, True)
LONG_ESTIMATORS = ("gae", "eligibility_traces")
SUITES = {
    "headline": Suite(
        combine_workloads([HEADLINE], layouts=ENV_MAJOR, truncated=BOTH),
        ("ours", "ours_out", "ours_annealed", "loop", "compiled_scan", "flat_triton", "torchrl"),
        ("ours_annealed", "compiled_scan", "flat_triton", "loop"),
    ),
    "sweep": Suite(
        combine_workloads(SWEEP_SHAPES, truncated=BOTH),
        ("ours", "flat_triton", "compiled_scan", "loop", "torchrl"),
        ("flat_triton", "compiled_scan"),
    ),
    "rows": Suite(
        combine_workloads([*SHORT_ROWS, *LONGER_ROWS], ["gae_advantages"], ENV_MAJOR),
        ("ours_out", "cuda_rows", "cuda_rows_by_four"),
        ("cuda_rows", "cuda_rows_by_four"),
    ),
    "retrace_long": Suite(
        combine_workloads(RETRACE_SHAPES, ["retrace"], ENV_MAJOR),
        ("ours", "ours_out", "compiled_scan", "flat_triton"),
        ("flat_triton", "compiled_scan"),
    ),
    "long": Suite(
        [
            *combine_workloads(LONG_SHAPES, LONG_ESTIMATORS, ENV_MAJOR),
            *combine_workloads(LONG_SHAPES, ["gae"], ["time-major"]),
            *combine_workloads(LENGTHENING, ["gae"], ENV_MAJOR),
        ],
        ("ours", "flat_triton", "blocks_triton"),
        ("flat_triton", "blocks_triton"),
    ),
    "large": Suite(combine_workloads(LARGE_SHAPES), ("ours", "ours_out")),
    "flags": Suite(
        combine_workloads(FLAG_SHAPES, ["gae"], flags=FLAG_DTYPES), ("ours", "flat_triton"), ("flat_triton",)
    ),
    "bf16": Suite(combine_workloads([HEADLINE, (16384, 512)], dtype="bfloat16"), ("ours", "ours_out")),
    "variants": Suite(
        combine_workloads([HEADLINE, *LARGE_SHAPES[:2], LONG_SHAPES[0]], VARIANTS, ENV_MAJOR),
        ("ours", "flat_triton"),
        ("flat_triton",),
    ),
    "huge": Suite(
        [
            Workload("prefix_sum", *HUGE_SHAPE, dtype="bfloat16"),
            Workload("gae", *HUGE_SHAPE, "time-major", dtype="bfloat16"),
        ],
        ("ours",),
    ),
    "cpu": Suite(
        combine_workloads(CPU_SHAPES), ("ours", "ours_out", "loop", "numpy", "numba", "sb3", "torchrl"), device="cpu"
    ),
}
ON_GPU = {name: suite for name, suite in SUITES.items() if suite.device == "cuda"}
