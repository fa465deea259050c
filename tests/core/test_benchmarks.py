"""What the benchmarks compute, count, time and conclude; not how fast anything is."""

import csv
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

from benchmarks import compare, compile_ahead, files, harness, run
from benchmarks.providers import REGISTRY, compiled_scan, loop
from benchmarks.suites import LONG_ESTIMATORS, SUITES, combine_workloads
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
SMALL = [workload for workload in TINY if workload.num_steps > 1]
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


def measure_error(name, workload):
    """The error of a provider's arm on a CPU; None where it has no arm."""
    oracle = run.Oracle(workload, draw_inputs(workload, "cpu"))
    call = REGISTRY[name].make_call(workload, oracle.inputs)
    return None if call is None else oracle.find_error(REGISTRY[name], call())


@pytest.mark.parametrize("workload", [*SMALL, HALF[0], *FURTHER[::6]], ids=str)
def test_ours_runs_on_every_workload(workload):
    pytest.importorskip("numba")
    assert measure_error("ours", workload) < 1e-6


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", ["ours_out", "ours_normal_path"])
def test_ours_runs_in_every_way(name, estimator):
    pytest.importorskip("numba")
    assert measure_error(name, Workload(estimator, 3, 17)) < 1e-6


@pytest.mark.parametrize("name", ["loop", "numpy", "numba", "sb3", "torchrl", "rlax"])
def test_providers_agree_on_a_cpu(name):
    if REGISTRY[name].unavailable("cpu"):
        pytest.skip(REGISTRY[name].unavailable("cpu"))
    errors = [error for workload in SMALL if (error := measure_error(name, workload)) is not None]
    assert errors
    assert max(errors) < 1e-6


@pytest.mark.parametrize("workload", SMALL[::2], ids=str)
def test_the_compiled_scan_is_one_graph_that_agrees(workload, monkeypatch):
    monkeypatch.setattr(compiled_scan, "BACKEND", "eager")
    assert measure_error("compiled_scan", workload) < 1e-6


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("workload", SMALL, ids=str)
def test_the_flat_kernels_agree(workload):
    pytest.importorskip("triton")
    assert measure_error("flat_triton", workload) < 1e-6


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("workload", combine_workloads([(2, 9)], LONG_ESTIMATORS), ids=str)
def test_a_row_in_blocks_agrees(workload, monkeypatch):
    """Its state goes from block to block."""
    flat_triton = pytest.importorskip("benchmarks.providers.flat_triton")
    monkeypatch.setattr(flat_triton, "BLOCK", 4)
    assert measure_error("blocks_triton", workload) < 1e-6
    assert measure_error("blocks_triton", workload._replace(truncated=True)) is None


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


@pytest.mark.parametrize("workload", [*TINY, *HALF, *FURTHER, TINY[0]._replace(flags="float32")], ids=str)
def test_bytes_are_those_of_the_tensors(workload):
    outputs = 4 * workload.cells * len(workload.spec.outputs)
    assert count_bytes(workload) == sum(x.nbytes for x in draw_inputs(workload, "cpu").values()) + outputs


def test_suites():
    for suite in SUITES.values():
        assert len(set(suite.workloads)) == len(suite.workloads)
        assert set(suite.providers) <= set(REGISTRY)
    jobs = [(name, w) for w in SUITES["rows"].workloads for name in SUITES["rows"].arms_of(w)]
    ahead = compile_ahead.select_jobs(jobs)
    assert [name for name, _ in ahead] == ["cuda_rows"] + ["ours_out"] * len(SUITES["rows"].workloads)


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
    times = harness.measure_calls({"slow": lambda: next(slow), "fast": lambda: 2.0}, clock, plan)
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
    times = harness.measure_calls({"bad": lambda: -1.0, "null": lambda: 1.0}, FakeClock(), FAST, frozenset({"null"}))
    assert times["bad"].note == "not capturable: operation not permitted"
    assert times["bad"].device == times["null"].device == []
    assert times["null"].note == ""


def test_arms_wait_for_each_other():
    """Bursts in turns, each prepared for, until all had theirs and the time is over."""
    events, clock = [], FakeClock()
    arms = {"stock": lambda: float(len(clock.events)), "ours": lambda: 2.0}
    times = harness.time_in_turns(arms, clock, turns=2, burst=3, prepare=events.append)
    assert events == ["stock", "ours"] * 2
    assert times == {"stock": [[0.0, 1.0, 2.0], [6.0, 7.0, 8.0]], "ours": [[2.0] * 3] * 2}
    assert harness.summarize_calls(times, unit=2.0) == {"stock": [0.625, 2.0, 3.375], "ours": [1.0] * 3}
    times["adapter"] = [[0.5, 0.5, 9.0], [0.5] * 3]
    assert harness.compare_with_stock(times) == [5.0, 8.0, 11.0], "1 and 7 over 0.5, turn by turn"
    assert len(harness.time_in_turns(arms, clock, turns=1, seconds=0.05)["ours"]) > 1


def test_wrong_and_failing_arms_are_recorded_and_not_timed(monkeypatch, tmp_path):
    class Broken(type(REGISTRY["loop"])):
        def make_call(self, workload, inputs):
            if workload.num_envs == 2:
                raise ValueError("no")
            return lambda: torch.full_like(inputs["rewards"], float("nan"))

    monkeypatch.setitem(REGISTRY, "loop", Broken("loop"))
    session = run.Session(tmp_path, "cpu", FakeTime(), FAST)
    for envs, status in ((3, "wrong"), (2, "failed: ValueError: no")):
        null, add, broken = run.measure_workload(Workload("gae_advantages", envs, 4), ["loop"], session)
        assert (null["status"], add["status"], broken["status"]) == ("ok", "ok", status)
        assert null["full_medians"] == add["full_medians"] == [1.0] and broken["full_medians"] == []
    session.compiled["loop", None] = "not compiled in time"
    assert (
        run.measure_workload(Workload("gae_advantages", 3, 4), ["loop"], session)[-1]["status"]
        == "not compiled in time"
    )


class FakeTime(harness.Clock):
    """Calls are made, and take a microsecond."""

    def time(self, call):
        call()
        return 1.0


def test_files_of_a_suite(tmp_path, monkeypatch):
    pytest.importorskip("numba")
    assert run.main([str(tmp_path), "--suite", "tiny", "--estimator", "prefix_sum", "--quick", "--commit", "abc"]) == 0
    result = files.read_result(tmp_path / "bench_tiny_prefix_sum.json")
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
    result = files.read_result(tmp_path / "bench_tiny_gae.json")
    assert result["rows"] == [] and len(result["skipped"]) == 8 and result["skipped"][0] == "gae 5x16 env-major float32"


def test_results_name_a_commit_that_holds_what_was_measured(tmp_path, monkeypatch, capsys):
    """Results and pages themselves may differ from it."""
    monkeypatch.setattr("rl_triton_core.system_info.find_commit", lambda: "abc-dirty")
    monkeypatch.setattr(files, "has_changes", lambda: False)
    parse = files.make_parser("").parse_args
    assert files.describe_system(None)["commit"] == "abc" and parse([str(files.RESULTS / "cpu")]).commit is None
    monkeypatch.setattr(files, "has_changes", lambda: True)
    assert files.describe_system(None)["commit"] == "abc-dirty" and files.describe_system("def")["commit"] == "def"
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
    assert not files.has_changes()
    file.write_text("2")
    assert files.has_changes() is differs


# --- what is concluded ------------------------------------------------------------------------------------------------


def make_row(workload, provider, full, device=None, status="ok"):
    """A line of a result file."""
    turns = {f"{kind}_medians": [] if time is None else [time] for kind, time in (("full", full), ("device", device))}
    return {**workload._asdict(), "provider": provider, "status": status, "error": None, **turns}


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
