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

import cases
import numpy as np
import oracles
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
pytest.importorskip("benchmarks.run", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks import compare, compile_ahead, files, harness, measured, pages, run, targets
from benchmarks.providers import REGISTRY, compiled_scan, loop
from benchmarks.suites import LONG_ESTIMATORS, LONGER_ROWS, SHORT_ROWS, SUITES, SWEEP_SHAPES, combine_workloads
from benchmarks.workloads import (
    ESTIMATORS,
    GAMMA,
    VARIANTS,
    Workload,
    compute_oracle,
    count_bytes,
    draw_inputs,
    select_envs,
)

TINY = combine_workloads([(3, 17), (2, 1)], truncated=(False, True))
FURTHER = combine_workloads([(3, 17)], VARIANTS, truncated=(False, True))
HALF = combine_workloads([(3, 17)], dtype="bfloat16")
FAST = harness.Plan(warmups=1, calls=1, medians=1)

ORACLES = {estimator.function.__name__: estimator.table for estimator in cases.ESTIMATORS} | {
    "compute_episodic_prefix_sum": oracles.eligibility_traces
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
        options = {"decay": 1.0 if "dones" in arrays else GAMMA * workload.spec.lambda_}
        arrays["terminated"] = arrays.pop("dones", arrays.get("terminated"))
    elif workload.spec.lambda_ is None:
        del options["lambda_"]
    results = ORACLES[workload.spec.function](**arrays, **options)[: len(workload.spec.outputs)]
    return [torch.from_numpy(x).movedim(1, dim) for x in results]


@pytest.mark.parametrize("workload", TINY + FURTHER, ids=str)
def test_the_oracle_is_that_of_the_tests(workload):
    inputs = draw_inputs(workload, "cpu")
    found = compute_oracle(workload, inputs)
    assert len(found) == len(workload.spec.outputs)
    for got, want in zip(found, from_papers(workload, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def error_of(name, workload):
    """The error of a provider's arm on a CPU; None where it has no arm."""
    oracle = run.Oracle(workload, draw_inputs(workload, "cpu"))
    call = REGISTRY[name].make_call(workload, oracle.inputs)
    return None if call is None else oracle.find_error(REGISTRY[name], call())


@pytest.mark.parametrize("workload", TINY + HALF + FURTHER[::6], ids=str)
@pytest.mark.parametrize("name", ["ours", "ours_out", "ours_normal_path"])
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
@pytest.mark.parametrize("workload", combine_workloads([(2, 9)], LONG_ESTIMATORS), ids=str)
def test_a_row_in_blocks_agrees(workload, monkeypatch):
    """Its state goes from block to block."""
    flat_triton = pytest.importorskip("benchmarks.providers.flat_triton")
    monkeypatch.setattr(flat_triton, "BLOCK", 4)
    assert error_of("blocks_triton", workload) < 1e-6
    assert error_of("blocks_triton", workload._replace(truncated=True)) is None


def test_the_cuda_kernel_is_checked_where_it_writes():
    """A loop in its place, with its indices."""
    cuda_rows = pytest.importorskip("benchmarks.providers.cuda_rows")
    workload = Workload("gae_advantages", 3, 9)
    inputs = draw_inputs(workload, "cpu")
    rewards, values, dones = (inputs[name].double().numpy() for name in ("rewards", "values", "terminated"))
    out = np.full(rewards.shape, np.nan)
    advantage = np.zeros(3)
    for t in reversed(range(8)):
        nonterminal = 1 - dones[:, t + 1]
        delta = rewards[:, t + 1] + GAMMA * values[:, t + 1] * nonterminal - values[:, t]
        out[:, t] = advantage = delta + GAMMA * 0.95 * nonterminal * advantage
    (want,) = cuda_rows.compute_oracle(workload, inputs)
    torch.testing.assert_close(cuda_rows.select_written(torch.from_numpy(out)), want, rtol=1e-12, atol=0)


def test_a_provider_may_leave_an_estimator_out(monkeypatch):
    workload = Workload("gae", 3, 5)
    monkeypatch.delitem(loop.LOOPS, "compute_gae")
    assert REGISTRY["loop"].make_call(workload, draw_inputs(workload, "cpu")) is None


def test_some_rows_stand_for_large_windows(monkeypatch):
    monkeypatch.setattr(run, "MAX_CELLS_VERIFIED", 10)
    monkeypatch.setattr(run, "ENVS_SAMPLED", 3)
    for layout in ("env-major", "time-major"):
        workload = Workload("gae", 7, 5, layout, truncated=True)
        oracle = run.Oracle(workload, draw_inputs(workload, "cpu"))
        assert oracle.envs.tolist() == [0, 3, 6]
        assert oracle.find_error(REGISTRY["loop"], REGISTRY["loop"].make_call(workload, oracle.inputs)()) < 1e-6
    edge = select_envs(draw_inputs(Workload("gae", 7, 5, "time-major"), "cpu"), workload, torch.tensor([6, 0]))
    assert edge["bootstrap_values"].shape == (2,) and edge["rewards"].shape == (5, 2)


# --- what is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (Workload("gae_advantages", 10, 100), 1000 * (4 + 4 + 1 + 4) + 10 * 4),
        (Workload("gae", 10, 100, truncated=True), 1000 * (4 + 4 + 1 + 1 + 8 + 4)),
        (Workload("gae", 10, 100, "time-major", dtype="bfloat16"), 1000 * (2 + 2 + 1 + 8) + 10 * 2),
        (Workload("gae", 10, 100), 1000 * (4 + 4 + 1 + 8) + 10 * 4),
        (Workload("gae", 10, 100, flags="float32"), 1000 * (4 + 4 + 4 + 8) + 10 * 4),
        (Workload("gae_masked", 10, 100), 1000 * (4 + 4 + 1 + 1 + 8) + 10 * 4),
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
    assert count_bytes(workload) == expected


@pytest.mark.parametrize("workload", TINY + HALF, ids=str)
def test_bytes_are_those_of_the_tensors(workload):
    outputs = 4 * workload.cells * len(workload.spec.outputs)
    assert count_bytes(workload) == sum(x.nbytes for x in draw_inputs(workload, "cpu").values()) + outputs


def test_suites():
    assert len(SUITES["rows"].workloads) == 40 == len({*SHORT_ROWS, *LONGER_ROWS})
    assert {n for n, _ in LONGER_ROWS} >= {128, 4096} and {t for _, t in LONGER_ROWS} >= {128, 8192}
    loops = [w for w in SUITES["sweep"].workloads if "loop" in SUITES["sweep"].arms_of(w)]
    shapes = [shape for shape in SWEEP_SHAPES if shape[1] <= 1024]
    assert {*loops} == {*combine_workloads(shapes, ["gae"], ["env-major"])}, "it runs for long"
    for name in ("headline", "cpu"):
        assert all("loop" in SUITES[name].arms_of(w) for w in SUITES[name].workloads)
    assert len(SUITES["sweep"].workloads) == 12 * 2 * (2 * len(ESTIMATORS) - 1), "a prefix sum has no truncations"
    assert max(workload.cells for workload in SUITES["huge"].workloads) > 2**31
    for suite in SUITES.values():
        assert len(set(suite.workloads)) == len(suite.workloads)
        assert set(suite.providers) <= set(REGISTRY)
    jobs = [(name, w) for w in SUITES["rows"].workloads for name in SUITES["rows"].arms_of(w)]
    ahead = compile_ahead.select_jobs(jobs)
    assert [name for name, _ in ahead] == ["cuda_rows"] + ["ours_out"] * 40
    assert len(set(map(compile_ahead.key_of, ahead))) == 41


def test_a_failure_to_compile_is_told():
    failed, dead, done = (Future() for _ in range(3))
    failed.set_exception(ValueError("no"))
    dead.set_exception(BrokenExecutor())
    done.set_result(None)
    happened = [compile_ahead.describe_outcome(future) for future in (failed, dead, done)]
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
        def make_call(self, workload, inputs):
            if workload.num_envs == 2:
                raise ValueError("no")
            return lambda: torch.full_like(inputs["rewards"], float("nan"))

    monkeypatch.setitem(REGISTRY, "loop", Broken("loop"))
    session = run.Session(tmp_path, "cpu", FakeTime(), FAST)
    for envs, status in ((3, "wrong"), (2, "failed: ValueError: no")):
        null, add, broken = run.measure(Workload("gae_advantages", envs, 4), ["loop"], session)
        assert (null["status"], add["status"], broken["status"]) == ("ok", "ok", status)
        assert null["full"] == add["full"] == 1.0 and broken["full"] is None
    session.compiled["loop", None] = "not compiled in time"
    assert run.measure(Workload("gae_advantages", 3, 4), ["loop"], session)[-1]["status"] == "not compiled in time"


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
    monkeypatch.setattr("rl_triton_core.system_info.find_commit", lambda: "abc-dirty")
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


def make_row(workload, provider, full, device=None, status="ok"):
    """A line of a result file."""
    return {**workload._asdict(), "provider": provider, "status": status, "error": None, "full": full, "device": device}


def write_results(folder, suite, rows, bandwidth=1000.0):
    """A result file by hand, and what is read of its machine."""
    system = {"gpu": "a GPU", "cpu": "a CPU", "commit": "0123456789abcdef"}
    names = ("python", "torch", "triton", "numba", "numpy", "cuda", "rocm")
    head = {"system": {**dict.fromkeys(names, "1"), **system}, "suite": suite, "skipped": [], "threads": 1}
    head |= {"copy_bandwidth_gb_per_s": bandwidth, "protocol": harness.Plan()._asdict()}
    files.write(folder / f"bench_{suite}.json", head, rows=rows)
    return measured.read_machine(folder)


def judge(key, machine):
    return targets.TARGETS[key].judge(machine)


def test_compare_names_the_regression(tmp_path, capsys):
    quick, slow, gone = (Workload("gae", n, 8) for n in (1, 2, 3))
    old = [make_row(w, "ours", 10.0, 4.0) for w in (quick, slow, gone)] + [make_row(slow, "loop", 1.0)]
    new = [make_row(quick, "ours", 10.5, 4.1), make_row(slow, "ours", 10.0, 4.8), make_row(slow, "loop", 9.0)]
    paths = [tmp_path / name for name in ("old.json", "new.json")]
    for path, rows in zip(paths, (old, [*new, make_row(gone, "ours", 10.0, 4.0)]), strict=True):
        path.write_text(json.dumps({"rows": rows}))
    assert compare.main(list(map(str, paths))) == 1
    assert "6 times compared, 1 regressions beyond 1.1" in capsys.readouterr().out
    assert compare.main([*map(str, paths), "--threshold", "1.3"]) == 0
    paths[1].write_text(json.dumps({"rows": new}))
    assert compare.main([*map(str, paths), "--threshold", "1.3"]) == 1, "a time that is gone is a regression"


def test_targets_of_ratios(tmp_path):
    chosen = SUITES["rows"].workloads
    assert judge("cuda_rows", measured.read_machine(tmp_path))[0] == "not measured yet"
    both = [make_row(w, name, time) for w in chosen for name, time in (("ours_out", 5.0), ("cuda_rows", 10.0))]
    assert judge("cuda_rows", write_results(tmp_path, "rows", both[:-2]))[0] == "incomplete"
    status, text = judge("cuda_rows", write_results(tmp_path, "rows", both))
    assert status == "reached" and text.startswith("2.00× at the worst") and "40 of 40" in text
    status, text = judge(
        "cuda_rows", write_results(tmp_path, "rows", [*both[:-1], make_row(chosen[-1], "cuda_rows", 4.0)])
    )
    assert status == "missed" and "0.80×" in text and "39 of 40" in text


def test_targets_of_means(tmp_path):
    arms = ("ours", "flat_triton")
    rows = [make_row(w, name, 10.0 if name == "ours" else 40.0) for w in targets.SWEEP for name in arms]
    rows[1]["full"] = 5.0
    machine = write_results(tmp_path, "sweep", rows)
    assert judge("flat_mean", machine)[0] == "reached"
    assert judge("flat_each", machine)[0] == "missed"


def test_targets_of_lengths(tmp_path):
    """Per byte on longer rows; and against the kernel that holds a row, if one does."""
    shortest, *longer = SUITES["retrace_long"].workloads

    def write_at(factor):
        times = {w: count_bytes(w) / 1e6 * (1.0 if w is shortest else factor) for w in (shortest, *longer)}
        return write_results(tmp_path, "retrace_long", [make_row(w, "ours", 1.0, time) for w, time in times.items()])

    status, text = judge("retrace_length", write_at(0.9))
    assert status == "reached" and "4 of 4" in text
    assert judge("retrace_length", write_at(1.1))[0] == "missed"
    chosen = [w for w in SUITES["long"].workloads if w.layout == "env-major"]
    rows = [make_row(w, "ours", 1.0, 1.0) for w in chosen] + [make_row(w, "blocks_triton", 1.0, 13.0) for w in chosen]
    rows += [make_row(w, "flat_triton", 1.0, 30.0 if w.num_steps <= 131072 else None) for w in chosen]
    status, text = judge("long_flat", write_results(tmp_path, "long", rows))
    assert status == "reached" and "13.00× at the worst" in text and "8 of 8" in text


def test_targets_of_bytes(tmp_path):
    """At 1000 GB/s a million bytes take a microsecond."""

    def write_at(percent):
        rows = [make_row(w, "ours", 1.0, count_bytes(w) / 1e6 * 100 / percent) for w in targets.LARGE]
        return write_results(tmp_path, "large", rows)

    assert judge("roofline_light", write_at(86))[0] == "reached"
    status, text = judge("roofline_light", write_at(84))
    assert status == "missed" and "84.00 %" in text and judge("roofline_heavy", write_at(84))[0] == "reached"
    assert judge("roofline_heavy", write_at(74))[0] == "missed"


def test_targets_of_flags(tmp_path):
    """float32 flags may take longer by the ratio of the bytes, and a tenth of that."""

    def write_at(factor):
        rows = [
            make_row(w, "ours", 1.0, count_bytes(w) / 1e6 * (factor if w.flags == "float32" else 1))
            for w in SUITES["flags"].workloads
        ]
        return write_results(tmp_path, "flags", rows)

    assert judge("flags", write_at(1.09))[0] == "reached"
    assert judge("flags", write_at(1.11))[0] == "missed"


def test_targets_of_layouts_truncations_and_overhead(tmp_path):
    def write_sweep(time_major, truncated):
        def find_time(w):
            extra = (count_bytes(w) - count_bytes(w._replace(truncated=False))) / 1e6
            return 100.0 * (time_major if w.layout == "time-major" else 1) * (truncated if w.truncated else 1) + extra

        rows = [make_row(w, "ours", 1.0, find_time(w)) for w in SUITES["sweep"].workloads]
        return write_results(tmp_path, "sweep", rows)

    assert judge("time_major", write_sweep(1.1, 1.2))[0] == "incomplete", "the large suite is not there"
    assert judge("time_major", write_sweep(1.2, 1.2))[0] == "missed"
    assert judge("truncations", write_sweep(1.1, 1.24))[0] == "reached"
    assert judge("truncations", write_sweep(1.1, 1.26))[0] == "missed"
    headline = [w for w in SUITES["headline"].workloads if not w.truncated]
    add = [make_row(w, "torch_add", 12.0) for w in headline]
    good, bad = ([make_row(w, "ours", time) for w in headline] for time in (13.9, 14.1))
    assert judge("host_overhead", write_results(tmp_path, "headline", [*add, *good]))[0] == "reached"
    assert judge("host_overhead", write_results(tmp_path, "headline", [*add, *bad]))[0] == "missed"


def test_the_targets_page_says_what_is_missed_and_why(tmp_path):
    chosen = SUITES["rows"].workloads
    rows = [make_row(w, name, time, 1.0) for w in chosen for name, time in (("ours_out", 5.0), ("cuda_rows", 4.0))]
    page = targets.write_page(
        write_results(tmp_path, "rows", rows), {"cuda_rows": "because", "flat_mean": "never shown"}
    )
    assert "**missed**" in page and "because" in page and "never shown" not in page
    assert page.count("not measured yet") == len(targets.TARGETS) - 1


def test_the_page_has_every_machine_and_every_suite(tmp_path, monkeypatch):
    for folder in ("a100", "b200", "cpu"):
        for name, suite in SUITES.items():
            if (suite.device == "cpu") == (folder == "cpu"):
                arms = {w: ("null", "torch_add", *suite.arms_of(w)) for w in suite.workloads}
                rows = [make_row(w, arm, 7.0, 3.0) for w in suite.workloads for arm in arms[w]]
                write_results(
                    tmp_path / folder, name, [*rows, make_row(suite.workloads[0], "rlax", None, status="wrong")]
                )
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert [machine.name for machine in measured.read_gpus(tmp_path)] == ["a100", "b200"]
    page = pages.write_benchmarks()
    assert page.count("7.0 / 3.0") > 1000 and pages.NOT_YET not in page and "rlax on" in page
    assert all(page.count(f"## {title}") == 2 for title, _ in pages.SECTIONS.values())
    text = pages.write_readme()
    assert text.count("7.0 µs per call (3.0 µs on the device)") == 2 and "1.00× faster than a flat" in text


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_pictures_are_drawn(tmp_path):
    """Those of the first pages, from the result files that there are."""
    from benchmarks import pictures

    pictures.draw_all(tmp_path)
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert names == ["boundary_rule.svg", "h200_speed_up.svg", "iteration_shares.svg"]
    assert all(f"plots/{name}" in (files.ROOT / "docs" / "index.md").read_text() for name in names)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_figures_are_drawn(tmp_path, monkeypatch):
    from benchmarks import plots

    for name in plots.DRAWINGS:
        suite = SUITES[name]
        rows = [make_row(w, arm, 7.0, 3.0) for w in suite.workloads for arm in suite.arms_of(w)]
        write_results(tmp_path / "h200", name, rows)
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "plots")
    monkeypatch.setattr("benchmarks.end_to_end.plots.REGISTRY", {})
    plots.draw_all()
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {f"h200_{name}.svg" for name in plots.DRAWINGS}
    assert set(plots.DRAWINGS) == set(pages.FIGURES)
