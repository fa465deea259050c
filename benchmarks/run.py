"""Verify every arm against a float64 oracle, then time it, and write the times to a folder.

    python benchmarks/run.py FOLDER --suite headline rows [--estimator gae] [--commit HASH] [--quick] [--budget SECONDS]

Writes bench_SUITE.json (hardware, versions, commit, protocol, bandwidth, medians) and bench_SUITE.csv after every
suite, with the names of estimators in them if only some were asked for. When the budget is used up, the rest is skipped
and listed. On a GPU everything is compiled beforehand, in parallel processes. Needs no installation of the project.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files, harness
from benchmarks.compile_ahead import Compiled, compile_ahead, key_of, limit_threads
from benchmarks.harness import Call, Clock, Plan
from benchmarks.providers import FLOORS, REGISTRY, Expected, Provider
from benchmarks.suites import SUITES, Suite
from benchmarks.workloads import ESTIMATORS, Inputs, Workload, count_bytes, draw_inputs
from rl_triton_core.testing import relative_error

TOLERANCE = 1e-5
"""The largest ‖x − exact‖ / ‖exact‖ of an arm that counts; float32 loops stay well below."""
COMPILING = 0.5
"""The share of the budget that compilation may take."""
MAX_CELLS_VERIFIED, ENVS_SAMPLED = 1 << 26, 64
"""Of a rollout with more cells only some environments are verified."""


@dataclass
class Session:
    """What all suites of one run share."""

    folder: Path
    device: str
    clock: Clock
    plan: Plan
    commit: str | None = None
    seconds: float = float("inf")
    compiled: Compiled = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.seconds - (time.perf_counter() - self.started)


# --- one workload -----------------------------------------------------------------------------------------------------


@dataclass
class Arm:
    """A provider on a workload: its call if its results are right, and what is known of it."""

    provider: str
    status: str
    call: Call | None = None
    error: float | None = None


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

    def find_error(self, provider: Provider, results: Any) -> float:
        """The largest ‖x − exact‖ / ‖exact‖ of the results; NaN if there is any."""
        expected = provider.find_oracle()
        if expected not in self.known:
            self.known[expected] = expected(self.workload, self.inputs, self.envs)
        chosen = list_tensors(results)
        if self.envs is not None:
            chosen = [x.index_select(1 - self.workload.time_dim, self.envs) for x in chosen]
        pairs = zip(map(provider.select_written, chosen), self.known[expected], strict=True)
        return float(torch.tensor([relative_error(x, want) for x, want in pairs]).max())


def measure_workload(workload: Workload, providers: Iterable[str], session: Session) -> list[files.Row]:
    """A row for every arm that there is."""
    oracle = Oracle(workload, draw_inputs(workload, session.device))
    arms = [arm for name in (*FLOORS, *providers) if (arm := prepare_arm(name, oracle, session)) is not None]
    calls = {arm.provider: arm.call for arm in arms if arm.call is not None}
    host_only = frozenset(name for name in calls if not REGISTRY[name].captured)
    times = harness.measure_calls(calls, session.clock, session.plan, host_only)
    return [make_row(workload, arm, times.get(arm.provider, harness.Times())) for arm in arms]


def prepare_arm(name: str, oracle: Oracle, session: Session) -> Arm | None:
    """The arm, verified; None where the provider has none."""
    provider = REGISTRY[name]
    if provider.unavailable(session.device):
        return None
    if trouble := session.compiled.get(key_of((name, oracle.workload))):
        return Arm(name, trouble)
    try:
        call = provider.make_call(oracle.workload, oracle.inputs)
        if call is None:
            return None
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # TorchRL's convolution: timed as it comes
            error = oracle.find_error(provider, call()) if provider.verified else 0.0
    except Exception as failure:  # an arm that fails must not end the run
        return Arm(name, f"failed: {type(failure).__name__}: {str(failure)[:200]}")
    return Arm(name, "ok", call, error) if error <= TOLERANCE else Arm(name, "wrong", None, error)


def list_tensors(results: Any) -> list[torch.Tensor]:
    """Results as a list."""
    return [results] if isinstance(results, torch.Tensor) else [x for x in results if x is not None]


def make_row(workload: Workload, arm: Arm, times: harness.Times) -> files.Row:
    """A line of the result file; times in microseconds."""
    return {
        **workload._asdict(),
        "provider": arm.provider,
        "status": arm.status,
        "error": None if arm.error is None else float(f"{arm.error:.3g}"),
        "bytes": count_bytes(workload),
        "full_medians": [round(x, 3) for x in times.full],
        "device_medians": [round(x, 3) for x in times.device],
        "calls": times.calls,
        "captured": times.captured,
        "note": times.note,
    }


# --- suites -----------------------------------------------------------------------------------------------------------


def run_suites(names: Iterable[str], estimators: tuple[str, ...], session: Session) -> int:
    """All suites, each written when it is done; how many arms were wrong or failed."""
    suites = {name: select_estimators(SUITES[name], estimators) for name in names}
    if session.device == "cuda":
        jobs = [(arm, w) for suite in suites.values() for w in suite.workloads for arm in suite.arms_of(w)]
        session.compiled = compile_ahead(jobs, session.left * COMPILING, session.device)
        limit_threads()
    bandwidth = harness.measure_copy_bandwidth(session.device, session.clock, session.plan)
    bad = 0
    for name, suite in suites.items():
        rows, skipped = run_suite(name, suite, session)
        head = {
            "system": files.describe_system(session.commit),
            "suite": name,
            "device": session.device,
            "threads": torch.get_num_threads(),
            "protocol": session.plan._asdict(),
            "tolerance": TOLERANCE,
            "copy_bandwidth_gb_per_s": bandwidth,
            "skipped": skipped,
        }
        path = session.folder / ("_".join(["bench", name, *estimators]) + ".json")
        files.write_result(path, head, rows=rows)
        files.write_csv(path.with_suffix(".csv"), head["system"], rows)
        bad += report_suite(path, rows, skipped)
    return bad


def select_estimators(suite: Suite, estimators: tuple[str, ...]) -> Suite:
    """The workloads of these estimators; of all if none are named."""
    return suite._replace(workloads=tuple(w for w in suite.workloads if not estimators or w.estimator in estimators))


def run_suite(name: str, suite: Suite, session: Session) -> tuple[list[files.Row], list[str]]:
    """The rows, and what was skipped when the budget was used up."""
    rows: list[files.Row] = []
    for index, workload in enumerate(suite.workloads):
        if session.left <= 0:
            return rows, [str(left) for left in suite.workloads[index:]]
        print(f"{name} {index + 1}/{len(suite.workloads)}: {workload}", flush=True)
        rows += measure_workload(workload, suite.arms_of(workload), session)
        if session.device == "cuda" and workload.cells > MAX_CELLS_VERIFIED:
            torch.cuda.empty_cache()
    return rows, []


def report_suite(path: Path, rows: list[files.Row], skipped: list[str]) -> int:
    """Print what came of a suite; how many arms were wrong or failed."""
    bad = [row for row in rows if row["status"] != "ok"]
    for row in bad:
        print(f"{Workload.of(row)}: {row['provider']} {row['status']} {row['error'] or ''}")
    print(f"wrote {path}: {len(rows)} rows, {len(bad)} arms not timed, {len(skipped)} workloads skipped", flush=True)
    return len(bad)


def main(arguments: list[str] | None = None) -> int:
    """Run the suites that were asked for; 1 if an arm was wrong or failed."""
    parser = files.make_parser(__doc__)
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=["cpu"])
    parser.add_argument("--estimator", nargs="+", choices=ESTIMATORS, default=())
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, to see that everything runs")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which the rest is skipped")
    options = parser.parse_args(arguments)
    (device,) = {SUITES[name].device for name in options.suite}
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is false")
    plan = harness.QUICK if options.quick else harness.PLANS[device]
    session = Session(options.folder, device, harness.make_clock(device), plan, options.commit, options.budget)
    return bool(run_suites(options.suite, tuple(options.estimator), session))


if __name__ == "__main__":
    sys.exit(main())
