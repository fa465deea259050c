"""What the benchmarks compute, count, time and conclude; not how fast anything is."""

import csv
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path

import numpy as np
import oracles
import oracles_estimators as tables
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
pytest.importorskip("benchmarks.run", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks import compare, compile_ahead, equations, files, harness, measured, run, speed_page
from benchmarks import targets as targets_
from benchmarks.providers import REGISTRY, compiled_scan
from benchmarks.suites import LONG_ESTIMATORS, LONGER_ROWS, SHORT_ROWS, SUITES, SWEEP_SHAPES, workloads
from benchmarks.workloads import ESTIMATORS, GAMMA, VARIANTS, Workload, bytes_moved, draw, rows_of

TINY = workloads([(3, 17), (2, 1)], truncated=(False, True))
FURTHER = workloads([(3, 17)], VARIANTS, truncated=(False, True))
HALF = workloads([(3, 17)], dtype="bfloat16")
FAST = harness.Plan(warmups=1, calls=1, medians=1)

ORACLES = {
    "gae": oracles.gae,
    "gae_with_returns": oracles.gae,
    "gae_masked": oracles.gae,
    "vtrace": tables.vtrace,
    "retrace": tables.retrace,
    "lambda_returns": tables.lambda_returns,
    "discounted_returns": tables.discounted_returns,
    "eligibility_traces": tables.eligibility_traces,
    "prefix_sum": tables.eligibility_traces,
}
"""A prefix sum is a trace with a decay of 1, which the flags of its episodes end."""


# --- what is computed -------------------------------------------------------------------------------------------------


def from_papers(workload, inputs):
    """The results of the oracles of the tests, in the workload's layout."""
    dim = workload.time_dim
    arrays = {name: (x.movedim(dim, 1) if x.ndim > 1 else x).double().numpy() for name, x in inputs.items()}
    options = {"gamma": GAMMA, "lambda_": workload.spec.lambda_}
    if "bootstrap_values" in arrays:
        edge = arrays.pop("bootstrap_values")
        arrays["bootstrap"] = oracles.dense_bootstrap(edge, arrays["rewards"].shape, arrays.get("mask"))
    if "x" in arrays:
        options = {"decay": 1.0 if workload.estimator == "prefix_sum" else GAMMA * workload.spec.lambda_}
        arrays["terminated"] = arrays.pop("dones", arrays.get("terminated"))
    elif workload.spec.lambda_ is None:
        del options["lambda_"]
    results = ORACLES[workload.estimator](**arrays, **options)[: workload.spec.outputs]
    return [torch.from_numpy(x).movedim(1, dim) for x in results]


@pytest.mark.parametrize("workload", TINY + FURTHER, ids=str)
def test_the_oracle_is_that_of_the_tests(workload):
    inputs = draw(workload, "cpu")
    found = equations.expected(workload, inputs)
    assert len(found) == workload.spec.outputs
    for got, want in zip(found, from_papers(workload, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def error_of(name, workload):
    """The error of a provider's arm on a CPU; None where it has no arm."""
    oracle = run.Oracle(workload, draw(workload, "cpu"))
    call = REGISTRY[name].arm(workload, oracle.inputs)
    return None if call is None else oracle.error(REGISTRY[name], call())


@pytest.mark.parametrize("workload", TINY + HALF + FURTHER[::6], ids=str)
@pytest.mark.parametrize("name", ["ours", "ours_out", "ours_whole"])
def test_ours_runs_on_every_workload(name, workload):
    pytest.importorskip("numba")
    assert error_of(name, workload) < 1e-6


@pytest.mark.parametrize("name", ["loop", "numpy", "numba", "sb3", "torchrl", "rlax"])
def test_providers_agree_on_a_cpu(name):
    if REGISTRY[name].unavailable("cpu"):
        pytest.skip(REGISTRY[name].unavailable("cpu"))
    errors = [error for workload in TINY if workload.num_steps > 1 if (error := error_of(name, workload)) is not None]
    assert errors
    assert max(errors) < 1e-6


@pytest.mark.parametrize("workload", TINY[::3], ids=str)
def test_the_compiled_scan_is_one_graph_that_agrees(workload, monkeypatch):
    monkeypatch.setattr(compiled_scan, "BACKEND", "eager")
    assert error_of("compiled_scan", workload) < 1e-6


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("workload", TINY, ids=str)
def test_the_flat_kernels_agree(workload):
    pytest.importorskip("triton")
    assert error_of("flat_triton", workload) < 1e-6


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("workload", workloads([(2, 9)], LONG_ESTIMATORS), ids=str)
def test_a_row_in_blocks_agrees(workload, monkeypatch):
    """Its state goes from block to block."""
    flat_triton = pytest.importorskip("benchmarks.providers.flat_triton")
    monkeypatch.setattr(flat_triton, "BLOCK", 4)
    assert error_of("blocks_triton", workload) < 1e-6
    assert error_of("blocks_triton", workload._replace(truncated=True)) is None


def test_the_cuda_kernel_is_checked_where_it_writes():
    """A loop in its place, with its indices."""
    cuda_rows = pytest.importorskip("benchmarks.providers.cuda_rows")
    workload = Workload("gae", 3, 9)
    inputs = draw(workload, "cpu")
    rewards, values, dones = (inputs[name].double().numpy() for name in ("rewards", "values", "terminated"))
    out = np.full(rewards.shape, np.nan)
    advantage = np.zeros(3)
    for t in reversed(range(8)):
        nonterminal = 1 - dones[:, t + 1]
        delta = rewards[:, t + 1] + GAMMA * values[:, t + 1] * nonterminal - values[:, t]
        out[:, t] = advantage = delta + GAMMA * 0.95 * nonterminal * advantage
    (want,) = cuda_rows.expected(workload, inputs)
    torch.testing.assert_close(cuda_rows.written(torch.from_numpy(out)), want, rtol=1e-12, atol=0)


def test_some_rows_stand_for_large_windows(monkeypatch):
    monkeypatch.setattr(run, "ALL_ROWS", 10)
    monkeypatch.setattr(run, "SAMPLED_ROWS", 3)
    for layout in ("env-major", "time-major"):
        workload = Workload("gae", 7, 5, layout, truncated=True)
        oracle = run.Oracle(workload, draw(workload, "cpu"))
        assert oracle.rows.tolist() == [0, 3, 6]
        assert oracle.error(REGISTRY["loop"], REGISTRY["loop"].arm(workload, oracle.inputs)()) < 1e-6
    edge = rows_of(draw(Workload("gae", 7, 5, "time-major"), "cpu"), workload, torch.tensor([6, 0]))
    assert edge["bootstrap_values"].shape == (2,) and edge["rewards"].shape == (5, 2)


# --- what is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (Workload("gae", 10, 100), 1000 * (4 + 4 + 1 + 4) + 10 * 4),
        (Workload("gae", 10, 100, truncated=True), 1000 * (4 + 4 + 1 + 1 + 4 + 4)),
        (Workload("gae", 10, 100, "time-major", dtype="bfloat16"), 1000 * (2 + 2 + 1 + 4) + 10 * 2),
        (Workload("gae_with_returns", 10, 100), 1000 * (4 + 4 + 1 + 8) + 10 * 4),
        (Workload("gae_masked", 10, 100), 1000 * (4 + 4 + 1 + 1 + 4) + 10 * 4),
        (Workload("vtrace", 10, 100), 1000 * (4 * 4 + 1 + 2 * 4) + 10 * 4),
        (Workload("retrace", 10, 100), 1000 * (4 * 4 + 1 + 2 * 16 + 2 * 4)),
        (Workload("retrace", 10, 100, truncated=True), 1000 * (4 * 4 + 2 + 2 * 16 + 2 * 4)),
        (Workload("lambda_returns", 10, 100), 1000 * 13 + 10 * 4),
        (Workload("discounted_returns", 10, 100), 1000 * 9 + 10 * 4),
        (Workload("eligibility_traces", 10, 100), 1000 * 9),
        (Workload("prefix_sum", 10, 100), 1000 * 9),
    ],
    ids=str,
)
def test_bytes(workload, expected):
    assert bytes_moved(workload) == expected


@pytest.mark.parametrize("workload", TINY + HALF, ids=str)
def test_bytes_are_those_of_the_tensors(workload):
    outputs = 4 * workload.cells * workload.spec.outputs
    assert bytes_moved(workload) == sum(x.nbytes for x in draw(workload, "cpu").values()) + outputs


def test_suites():
    assert len(SUITES["rows"].workloads) == 40 == len({*SHORT_ROWS, *LONGER_ROWS})
    assert {n for n, _ in LONGER_ROWS} >= {128, 4096} and {t for _, t in LONGER_ROWS} >= {128, 8192}
    loops = [w for w in SUITES["sweep"].workloads if "loop" in SUITES["sweep"].arms_of(w)]
    shapes = [shape for shape in SWEEP_SHAPES if shape[1] <= 1024]
    assert {*loops} == {*workloads(shapes, ["gae"], ["env-major"])}, "it runs for long"
    for name in ("headline", "cpu"):
        assert all("loop" in SUITES[name].arms_of(w) for w in SUITES[name].workloads)
    assert len(SUITES["sweep"].workloads) == 12 * 2 * (2 * len(ESTIMATORS) - 1), "a prefix sum has no truncations"
    assert max(workload.cells for workload in SUITES["huge"].workloads) > 2**31
    for suite in SUITES.values():
        assert len(set(suite.workloads)) == len(suite.workloads)
        assert set(suite.providers) <= set(REGISTRY)
    jobs = [(name, w) for w in SUITES["rows"].workloads for name in SUITES["rows"].arms_of(w)]
    ahead = compile_ahead.distinct(jobs)
    assert [name for name, _ in ahead] == ["cuda_rows"] + ["ours_out"] * 40
    assert len(set(map(compile_ahead.key_of, ahead))) == 41


def test_a_failure_to_compile_is_told():
    failed, dead, done = (Future() for _ in range(3))
    failed.set_exception(ValueError("no"))
    dead.set_exception(BrokenExecutor())
    done.set_result(None)
    happened = [compile_ahead.what_happened(future) for future in (failed, dead, done)]
    assert happened == ["failed: ValueError: no", "", ""]


# --- how it is timed --------------------------------------------------------------------------------------------------


class FakeClock:
    """Each call takes what it returns; a replay takes half, for each captured call."""

    def __init__(self):
        self.events = []

    def time(self, call):
        self.events.append(call())
        return self.events[-1]

    def capture(self, call, times):
        if call() < 0:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return lambda: call() * times / 2


def test_the_protocol():
    clock, plan = FakeClock(), harness.Plan(warmups=2, calls=4, medians=3, captured=20, replays=5)
    slow = iter([9.0] * 4 + [30.0, 10.0, 20.0, 40.0] + [9.0] * 4 + [8.0, 6.0, 4.0, 100.0] + [9.0] * 1000)
    times = harness.measure({"slow": lambda: next(slow), "fast": lambda: 2.0}, clock, plan)
    assert times["slow"].full == [25.0, 7.0, 9.0], "medians of the calls after two first ones and two warm-ups"
    assert times["fast"].full == [2.0] * 3
    assert times["fast"].device == [1.0] * 3, "a replay over the calls in it"
    assert (times["fast"].calls, times["fast"].captured) == (4, 20)
    alternating = [event == 2.0 for event in clock.events[:18]]
    assert alternating == [False] * 6 + [True] * 6 + [False] * 6, "arms take turns"


def test_slow_calls_are_repeated_less():
    plan = harness.Plan()
    assert plan.calls_of(60.0) == (20, 50)
    assert plan.calls_of(100_000.0) == (2, 7)
    assert plan.calls_of(1e9) == (1, 3)
    assert (plan.captured_of(60.0), plan.captured_of(50_000.0), plan.captured_of(1e9)) == (20, 1, 1)
    assert (plan.replays_of(1200.0), plan.replays_of(400_000.0), plan.replays_of(1e9)) == (10, 2, 1)


def test_what_cannot_be_captured_says_why():
    times = harness.measure({"bad": lambda: -1.0, "null": lambda: 1.0}, FakeClock(), FAST, frozenset({"null"}))
    assert times["bad"].note == "not capturable: operation not permitted"
    assert times["bad"].device == times["null"].device == []
    assert times["null"].note == ""


def test_wrong_and_failing_arms_are_recorded_and_not_timed(monkeypatch, tmp_path):
    class Broken(type(REGISTRY["loop"])):
        def arm(self, workload, inputs):
            if workload.num_envs == 2:
                raise ValueError("no")
            return lambda: torch.full_like(inputs["rewards"], float("nan"))

    monkeypatch.setitem(REGISTRY, "loop", Broken("loop"))
    session = run.Session(tmp_path, "cpu", FakeTime(), FAST)
    for envs, status in ((3, "wrong"), (2, "failed: ValueError: no")):
        null, add, broken = run.measure(Workload("gae", envs, 4), ["loop"], session)
        assert (null["status"], add["status"], broken["status"]) == ("ok", "ok", status)
        assert null["full"] == add["full"] == 1.0 and broken["full"] is None
    session.compiled["loop", None] = "not compiled in time"
    assert run.measure(Workload("gae", 3, 4), ["loop"], session)[-1]["status"] == "not compiled in time"


class FakeTime(harness.CpuClock):
    """Calls are made, and take a microsecond."""

    def time(self, call):
        call()
        return 1.0


def test_files_of_a_suite(tmp_path, monkeypatch):
    pytest.importorskip("numba")
    assert run.main([str(tmp_path), "--suite", "tiny", "--estimator", "prefix_sum", "--quick", "--commit", "abc"]) == 0
    result = files.read(tmp_path / "bench_tiny_prefix_sum.json")
    assert result["system"]["commit"] == "abc" and result["protocol"]["calls"] == 5 and result["skipped"] == []
    arms = {row["provider"] for row in result["rows"]}
    assert arms == {"null", "torch_add", "ours", "ours_out", "loop", "numpy"}
    assert all(row["status"] == "ok" and len(row["full_medians"]) == 2 for row in result["rows"])
    with (tmp_path / "bench_tiny_prefix_sum.csv").open() as file:
        lines = file.read().splitlines()
    head = [line for line in lines if line.startswith("# ")]
    assert f"# cpu: {result['system']['cpu']}" in head and "# commit: abc" in head
    assert len(list(csv.DictReader(lines[len(head) :]))) == len(result["rows"])
    run.main([str(tmp_path), "--suite", "tiny", "--estimator", "gae", "--quick", "--budget", "0"])
    result = files.read(tmp_path / "bench_tiny_gae.json")
    assert result["rows"] == [] and len(result["skipped"]) == 8 and result["skipped"][0] == "gae 5x16 env-major float32"


def test_results_name_a_commit_that_holds_what_was_measured(tmp_path, monkeypatch, capsys):
    """Results and pages themselves may differ from it."""
    monkeypatch.setattr("rl_triton_core.system_info.commit", lambda: "abc-dirty")
    monkeypatch.setattr(files, "differs", lambda: False)
    parse = files.parser("").parse_args
    assert files.system(None)["commit"] == "abc" and parse([str(files.RESULTS / "cpu")]).commit is None
    monkeypatch.setattr(files, "differs", lambda: True)
    assert files.system(None)["commit"] == "abc-dirty" and files.system("def")["commit"] == "def"
    assert parse([str(tmp_path)]).commit is None and parse([str(files.RESULTS), "--commit", "def"]).commit == "def"
    with pytest.raises(SystemExit):
        parse([str(files.RESULTS / "cpu")])
    assert "--commit: got none" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize(
    ("path", "differs"), [("docs/a.md", False), ("benchmarks/results/cpu/a.json", False), ("a.py", True)]
)
def test_what_a_commit_does_not_hold(path, differs, tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True
        )

    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "a")
    monkeypatch.setattr(files, "ROOT", tmp_path)
    assert not files.differs()
    file.write_text("2")
    assert files.differs() is differs


# --- what is concluded ------------------------------------------------------------------------------------------------


def row(workload, provider, full, device=None, status="ok"):
    """A line of a result file."""
    return {**workload._asdict(), "provider": provider, "status": status, "error": None, "full": full, "device": device}


def write(folder, suite, rows, bandwidth=1000.0):
    """A result file by hand."""
    system = {"gpu": "a GPU", "cpu": "a CPU", "commit": "0123456789abcdef"}
    names = ("python", "torch", "triton", "numba", "numpy", "cuda", "rocm")
    head = {"system": {**dict.fromkeys(names, "1"), **system}, "suite": suite, "skipped": [], "threads": 1}
    head |= {"copy_bandwidth_gb_per_s": bandwidth, "protocol": harness.Plan()._asdict()}
    files.write(folder / f"bench_{suite}.json", head, rows=rows)
    return measured.Results(folder)


def verdict(key, results, sb3=None):
    return targets_.TARGETS[key].judge(results, sb3)


def test_compare_names_the_regression(tmp_path, capsys):
    quick, slow, gone = (Workload("gae", n, 8) for n in (1, 2, 3))
    old = [row(w, "ours", 10.0, 4.0) for w in (quick, slow, gone)] + [row(slow, "loop", 1.0)]
    new = [row(quick, "ours", 10.5, 4.1), row(slow, "ours", 10.0, 4.8), row(slow, "loop", 9.0)]
    paths = [tmp_path / name for name in ("old.json", "new.json")]
    for path, rows in zip(paths, (old, new), strict=True):
        path.write_text(json.dumps({"rows": rows}))
    assert compare.main(list(map(str, paths))) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("not in")] == [f"not in the new file: ours on {gone}"]
    named = [line for line in lines if line.startswith("regression")]
    assert len(named) == 1 and "device" in named[0] and "gae 2x8" in named[0] and "1.200" in named[0]
    assert compare.main([*map(str, paths), "--threshold", "1.3"]) == 0
    paths[1].write_text(json.dumps({"rows": [row(quick, "ours", None, None, "wrong")]}))
    assert compare.main(list(map(str, paths))) == 1
    assert "no time" in capsys.readouterr().out


def test_targets_of_ratios(tmp_path):
    chosen = SUITES["rows"].workloads
    assert verdict("cuda_rows", measured.Results(tmp_path)) == targets_.NOT_YET
    both = [row(w, name, time) for w in chosen for name, time in (("ours_out", 5.0), ("cuda_rows", 10.0))]
    assert verdict("cuda_rows", write(tmp_path, "rows", both[:-2])).status == "incomplete"
    found = verdict("cuda_rows", write(tmp_path, "rows", both))
    assert found.status == "reached" and found.number.startswith("2.00× at the worst") and "40 of 40" in found.number
    found = verdict("cuda_rows", write(tmp_path, "rows", [*both[:-1], row(chosen[-1], "cuda_rows", 4.0)]))
    assert found.status == "missed" and "0.80×" in found.number and "39 of 40" in found.number


def test_targets_of_means(tmp_path):
    rows = [row(w, name, 10.0 if name == "ours" else 40.0) for w in targets_.SWEEP for name in ("ours", "flat_triton")]
    rows[1]["full"] = 5.0
    results = write(tmp_path, "sweep", rows)
    assert verdict("flat_mean", results).status == "reached"
    assert verdict("flat_each", results).status == "missed"


def test_targets_of_lengths(tmp_path):
    """Per byte on longer rows; and against the kernel that holds a row, if one does."""
    shortest, *longer = SUITES["retrace_long"].workloads

    def at(factor):
        rows = [
            row(w, "ours", 1.0, bytes_moved(w) / 1e6 * (1.0 if w is shortest else factor)) for w in (shortest, *longer)
        ]
        return write(tmp_path, "retrace_long", rows)

    assert (
        verdict("retrace_length", at(0.9)).status == "reached" and "4 of 4" in verdict("retrace_length", at(0.9)).number
    )
    assert verdict("retrace_length", at(1.1)).status == "missed"
    others = {"flat_triton": 30.0, "blocks_triton": 13.0}
    chosen = [w for w in SUITES["long"].workloads if w.layout == "env-major"]
    rows = [row(w, "ours", 1.0, 1.0) for w in chosen]
    rows += [
        row(w, arm, 1.0, x if w.num_steps <= 131072 or arm == "blocks_triton" else None)
        for w in chosen
        for arm, x in others.items()
    ]
    found = verdict("long_flat", write(tmp_path, "long", rows))
    assert found.status == "reached" and "13.00× at the worst" in found.number and "8 of 8" in found.number


def test_targets_of_bytes(tmp_path):
    """At 1000 GB/s a million bytes take a microsecond."""
    chosen = targets_.LARGE

    def at(percent):
        rows = [row(w, "ours", 1.0, bytes_moved(w) / 1e6 * 100 / percent) for w in chosen]
        return write(tmp_path, "large", rows)

    assert verdict("roofline_light", at(86)).status == "reached"
    assert (
        verdict("roofline_light", at(84)).status == "missed" and verdict("roofline_heavy", at(84)).status == "reached"
    )
    assert "84.00 %" in verdict("roofline_light", at(84)).number
    assert verdict("roofline_heavy", at(74)).status == "missed"


def test_targets_of_layouts_truncations_and_overhead(tmp_path):
    shapes = SUITES["sweep"].workloads

    def sweep(time_major, truncated):
        def device(w):
            extra = (bytes_moved(w) - bytes_moved(w._replace(truncated=False))) / 1e6
            return 100.0 * (time_major if w.layout == "time-major" else 1) * (truncated if w.truncated else 1) + extra

        return write(tmp_path, "sweep", [row(w, "ours", 1.0, device(w)) for w in shapes])

    assert verdict("time_major", sweep(1.1, 1.2)).status == "incomplete", "the large suite is not there"
    assert verdict("time_major", sweep(1.2, 1.2)).status == "missed"
    assert verdict("truncations", sweep(1.1, 1.24)).status == "reached"
    assert verdict("truncations", sweep(1.1, 1.26)).status == "missed"
    headline = [w for w in SUITES["headline"].workloads if not w.truncated]
    add = [row(w, "torch_add", 12.0) for w in headline]
    good, bad = ([row(w, "ours", time) for w in headline] for time in (13.9, 14.1))
    assert verdict("host_overhead", write(tmp_path, "headline", [*add, *good])).status == "reached"
    assert verdict("host_overhead", write(tmp_path, "headline", [*add, *bad])).status == "missed"


def test_targets_of_the_cpu(tmp_path):
    results = measured.Results(tmp_path)
    fields = ("n_steps", "n_envs", "threads", "speedup", "microseconds")

    def passes(*shapes):
        return {"rows": [dict(zip(fields, (*shape, {"adapter": ours}), strict=True)) for *shape, ours in shapes]}

    sb3 = passes((2048, 1, 1, 60.0, 9.0), (2048, 1, 2, 61.0, 9.0), (128, 4096, 1, 1.4, 9.0), (128, 4096, 2, 1.3, 8.0))
    assert verdict("cpu_short", results, sb3).status == "reached"
    assert verdict("cpu_wide", results, sb3).status == "missed"
    assert verdict("cpu_threads", results, sb3).status == "reached"
    slower = passes((128, 4096, 1, 1.4, 9.0), (128, 4096, 2, 3.0, 10.0))  # where the stock pass is much slower
    assert verdict("cpu_threads", results, slower).status == "missed"
    assert verdict("cpu_threads", results, passes((128, 4096, 1, 1.4, 9.0))).status == "not measured yet"


def test_the_page_says_what_is_missed_and_why(tmp_path):
    chosen = SUITES["rows"].workloads
    rows = [row(w, name, time, 1.0) for w in chosen for name, time in (("ours_out", 5.0), ("cuda_rows", 4.0))]
    gpu, cpu = write(tmp_path / "gpu", "rows", rows), measured.Results(tmp_path / "cpu")
    notes = {"cuda_rows": "because", "flat_mean": "never shown"}
    page = speed_page.page([gpu], cpu, None, notes)
    assert "**missed**" in page and "because" in page and "never shown" not in page
    assert speed_page.NO_EVIDENCE not in page
    assert speed_page.NO_EVIDENCE in speed_page.page([gpu], cpu, None, {}), "a missed target says that nothing says why"
    assert page.count(speed_page.NOT_YET) == 9, "one section of ten has results"
    assert "5.0 / 4.0" in page and "plots/gpu_rows.svg" in page and "plots/gpu_sweep.svg" not in page
    reached = write(tmp_path / "gpu", "rows", [{**x, "full": 9.0} if x["provider"] == "cuda_rows" else x for x in rows])
    assert "because" not in speed_page.page([reached], cpu, None, notes)


def test_the_page_has_every_machine(tmp_path):
    """Whose folder has results of the suites."""
    shapes = SUITES["rows"].workloads
    for folder, time in (("a100", 5.0), ("b200", 4.0), ("cpu", 3.0)):
        write(tmp_path / folder, "rows", [row(w, "ours_out", time, 1.0) for w in shapes])
    (tmp_path / "empty").mkdir()
    machines, cpu, sb3 = speed_page.load(tmp_path)
    assert [gpu.name for gpu in machines] == ["a100", "b200"] and cpu.name == "cpu" and sb3 is None
    page = speed_page.page(machines, cpu, sb3, {})
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert "## Targets, a100" in titles and "## Targets, b200" in titles and len(set(titles)) == len(titles)
    assert "5.0 / –" in page and "4.0 / –" in page and "plots/b200_rows.svg" in page


def test_every_section_of_the_page(tmp_path):
    """Whatever a suite measures finds its place."""
    for name, suite in SUITES.items():
        rows = [row(w, arm, 7.0, 3.0) for w in suite.workloads for arm in ("null", "torch_add", *suite.arms_of(w))]
        write(tmp_path, name, [*rows, row(suite.workloads[0], "rlax", None, status="wrong")])
    results = measured.Results(tmp_path)
    page = speed_page.page([results], results, None, {})
    assert speed_page.NOT_YET not in page and "Arms that were not timed" in page
    text = speed_page.readme(f"a\n{speed_page.MARKS[0]}\nold\n{speed_page.MARKS[1]}\nb\n", [results], None)
    assert "old" not in text and text.startswith("a\n") and text.endswith("\nb\n") and "7.0 µs" in text


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_figures_are_drawn(tmp_path, monkeypatch):
    from benchmarks import plots

    for name in ("headline", "rows", "long", "large", "sweep"):
        suite = SUITES[name]
        rows = [row(w, arm, 7.0, 3.0) for w in suite.workloads for arm in suite.arms_of(w)]
        write(tmp_path / "h200", name, rows)
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "plots")
    plots.main()
    first = {path.name: path.read_text() for path in (tmp_path / "plots").iterdir()}
    assert set(first) == {f"h200_{name}.svg" for name in plots.FIGURES}
