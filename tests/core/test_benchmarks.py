"""What the benchmarks compute, count, time and write; not how fast anything is."""

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("benchmarks.calls", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks import __main__ as runner
from benchmarks import calls, harness, packed, results, token_log_probs
from benchmarks.providers import REGISTRY, others
from benchmarks.results import make_row
from benchmarks.settings import TABLE, combine, read_settings
from benchmarks.workloads import ESTIMATORS, VARIANTS, Workload, draw_inputs, select_envs

INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
WALKED, BOTH = ("gae", "eligibility_traces"), ["env-major", "time-major"]


def combine_workloads(estimators, dtype, truncated, *shapes):
    names = ["estimator", "dtype", "truncated", "layout", "num_envs num_steps"]
    found = (Workload(**values) for values in combine(names, [[[*estimators], dtype, truncated, BOTH, [*shapes]]]))
    return [workload for workload in found if workload.spec.truncates or not workload.truncated]


TINY = combine_workloads(ESTIMATORS, "float32", [False, True], (3, 17), (2, 1))
SMALL = [workload for workload in TINY if workload.num_steps > 1]
FURTHER = combine_workloads(VARIANTS, "float32", [False, True], (3, 17))
HALF = combine_workloads(ESTIMATORS, "bfloat16", False, (3, 17))


def measure_error(name, workload):
    """The error of a provider's arm on a CPU, by the benchmarks' own equations; None where it has no arm."""
    oracle = calls.Oracle(workload, draw_inputs(workload, "cpu"))
    call = REGISTRY[name].make_call(workload, oracle.inputs)
    return None if call is None else oracle.find_error(REGISTRY[name], call())


@pytest.mark.parametrize(
    "name",
    [
        *("ours", "ours_out", "ours_annealed", "loop", "numpy", "numba", "sb3", "torchrl", "compiled_scan"),
        pytest.param("flat_triton", marks=INTERPRETED),
    ],
)
def test_providers_agree_on_a_cpu(name, monkeypatch):
    """The compiled scan is one graph."""
    monkeypatch.setattr(others, "COMPILER", "eager")
    if name != "flat_triton" and not REGISTRY[name].is_available("cpu"):
        pytest.skip(f"without {REGISTRY[name].needs}")
    workloads = {"ours": [*TINY, *HALF, *FURTHER], "compiled_scan": SMALL[::2]}.get(name, SMALL)
    errors = [error for workload in workloads if (error := measure_error(name, workload)) is not None]
    assert errors and max(errors) < 1e-6
    assert name not in ("compiled_scan", "flat_triton") or len(errors) == len(workloads)


@INTERPRETED
@pytest.mark.parametrize("workload", [Workload(x, 2, 9, layout) for x in WALKED for layout in BOTH], ids=str)
def test_a_row_in_blocks_agrees(workload, monkeypatch):
    """Its state goes from block to block."""
    flat_triton = pytest.importorskip("benchmarks.providers.flat_triton")
    monkeypatch.setattr(flat_triton, "BLOCK", 4)
    assert measure_error("blocks_triton", workload) < 1e-6
    assert measure_error("blocks_triton", workload._replace(truncated=True)) is None


def test_some_rows_stand_for_large_windows(monkeypatch):
    monkeypatch.setattr(calls, "MAX_CELLS_VERIFIED", 10)
    monkeypatch.setattr(calls, "ENVS_SAMPLED", 3)
    for layout in ("env-major", "time-major"):
        workload = Workload("gae", 7, 5, layout, truncated=True)
        oracle = calls.Oracle(workload, draw_inputs(workload, "cpu"))
        assert oracle.envs.tolist() == [0, 3, 6]
        assert oracle.find_error(REGISTRY["loop"], REGISTRY["loop"].make_call(workload, oracle.inputs)()) < 1e-6
    edge = select_envs(draw_inputs(Workload("gae", 7, 5, "time-major"), "cpu"), workload, torch.tensor([6, 0]))
    assert edge["bootstrap_values"].shape == (2,) and edge["rewards"].shape == (5, 2)


@pytest.mark.parametrize("name", [name for name, table in TABLE.items() if "arms" in table])
def test_suites(name):
    assert set(TABLE[name]["arms"]) <= set(REGISTRY)
    for where in ("cpu", "cuda", "quick"):
        found = read_settings(name, where, Workload)
        assert len(set(found)) == len(found) and all(x.spec.truncates or not x.truncated for x in found)


def test_what_is_compiled_ahead(tmp_path):
    """In processes of their own, as far as the time goes; what fails there ends nothing."""
    jobs = [(tmp_path / "a" / "b",), (tmp_path / "c",)]
    harness.compile_ahead(Path.touch, jobs, SimpleNamespace(device="cpu", ends=float("inf")))
    assert not jobs[1][0].exists()
    harness.compile_ahead(Path.touch, jobs, SimpleNamespace(device="cuda", ends=float("inf")))
    assert jobs[1][0].exists()
    started = time.monotonic()
    harness.compile_ahead(time.sleep, [(1000,)], SimpleNamespace(device="cuda", ends=time.perf_counter()))
    assert time.monotonic() - started < 100


class FakeClock:
    """Each call takes what it returns, or 1 where that is no number."""

    def __init__(self, monkeypatch):
        self.events = []
        monkeypatch.setattr(harness, "time_call", lambda call, device: self.time(call))

    def time(self, call):
        found = call()
        self.events.append(found if isinstance(found, float) else 1.0)
        return self.events[-1]


def test_arms_take_turns(monkeypatch):
    """Bursts in turns, each after as many warm-ups; slow calls come in shorter bursts."""
    clock = FakeClock(monkeypatch)
    arms = {"slow": lambda: 100_000.0 + len(clock.events), "fast": lambda: 2.0}
    times = harness.time_in_turns(arms, "cpu", seconds=1, turns=2)
    assert times["slow"] == [[100_002, 100_003], [100_056, 100_057]], "after two calls that say how many there are"
    assert times["fast"] == [[2.0] * 50] * 2
    times = harness.time_in_turns(arms, "cpu", turns=3, burst=4)
    assert [len(burst) for burst in times["slow"]] == [4] * 3
    fast, _, _, over = harness.measure_arms(
        {"fast": lambda: 2.0, "null": lambda: 1.0, "other": lambda: 5.0}, "cpu", reference="fast", kind="x"
    )
    assert fast[:8] == ("kind=x", "fast", "full", "µs", 2, 2, 2, harness.TURNS * harness.BURST)
    assert over[:8] == ("kind=x", "other", "over fast", "×", 2.5, 2.5, 2.5, harness.TURNS)


def test_ratios_are_those_of_turns():
    times = {"ours": [[2.0, 4.0, 3.0], [1.0], [10.0]], "loop": [[9.0], [4.0], [20.0]]}
    *_, over = harness.list_times(times)
    assert over[4:7] == (2.5, 3.0, 3.5)


def test_wrong_and_failing_arms_are_recorded_and_not_timed(monkeypatch):
    class Broken(type(REGISTRY["loop"])):
        def make_call(self, workload, inputs):
            if workload.num_envs == 2:
                raise ValueError("no")
            return lambda: torch.full_like(inputs["rewards"], float("nan"))

    FakeClock(monkeypatch)
    monkeypatch.setitem(REGISTRY, "loop", Broken("loop"))
    options = SimpleNamespace(device="cpu", seconds=1e-6, table={"arms": ["loop"]})
    for envs, note in ((3, "wrong: its relative error is nan"), (2, "failed: ValueError: no")):
        broken, null, add = calls.measure(Workload("gae_advantages", envs, 4), options)
        assert (broken.note, broken.median, null.note, add.note) == (note, None, "", "")
        assert null.median == add.median == 1.0


def test_a_result_file_is_what_was_measured(tmp_path):
    path, system = tmp_path / "x.csv", {"cpu": "a CPU", "gpu": "none", "commit": "abc"}
    one = make_row("ours", "full", "µs", [1.0, 2.0, 4.0, 3.0, 5.0], kind="a, b")
    assert one[:8] == ("kind=a, b", "ours", "full", "µs", 2.0, 3.0, 4.0, 5)
    bad = make_row("other", "full", "µs", [], "failed: no")
    for n in (1, 2, 3):
        results.add_rows(path, system, {"n": n}, [one, bad])
    results.add_rows(path, {**system, "commit": "def"}, {"n": 2}, [make_row("ours", "full", "µs", 7)])
    found = results.read_result(path)
    assert found.system["commit"] == "def"
    assert [(row.setting, row.commit) for row in found.rows] == [
        ("n=1; kind=a, b", "abc"), ("n=1", "abc"), ("n=2", "def"), ("n=3; kind=a, b", "abc"), ("n=3", "abc"),
    ]  # fmt: skip
    assert found.rows[0].read_setting() == {"n": "1", "kind": "a, b"} and found.rows[0][4:8] == one[4:8]
    assert found.rows[1].median is None and found.rows[1].note == "failed: no"
    assert [row.median for row in results.select_rows(found.rows, "ours", "full", n=2)] == [7]
    with pytest.raises(SystemExit, match="name another folder"):
        results.add_rows(path, {**system, "cpu": "another"}, {"n": 2}, [])


def test_files_of_a_suite(tmp_path, capsys):
    pytest.importorskip("numba")
    arguments = [str(tmp_path), "calls_cpu", "--quick", "--device", "cpu", "--commit", "abc", "--seconds", "0.01"]
    assert runner.main([*arguments, "--only", "prefix_sum 5x16"]) == 0
    found = results.read_result(tmp_path / "calls_cpu.csv")
    assert {row.commit for row in found.rows} == {"abc"} and "cpu" in found.system
    assert {row.arm for row in found.rows} == {"null", "torch_add", "ours", "ours_out", "loop", "numpy"}
    assert all(row.median > 0 and row.low <= row.median <= row.high for row in found.rows)
    assert runner.main([*arguments, "--budget", "-1"]) == 0
    assert "skipped for lack of time:\n  gae 5x16 env-major float32" in capsys.readouterr().out
    assert runner.main([*arguments, "--only", "no such"]) == 1
    assert "--only: got ['no such'], expected a part of one of:\n  gae 5x16" in capsys.readouterr().out


def test_a_setting_that_fails_and_a_package_that_is_missing(tmp_path, monkeypatch, capsys):
    def fail(setting, options):
        raise ValueError("no\nreally")
        yield

    monkeypatch.setattr(packed, "measure", fail)
    chosen = ["--only", "'gae', sequences=8,"]
    assert runner.main([str(tmp_path), "packed", "--device", "cpu", "--commit", "abc", *chosen]) == 1
    (row,) = results.read_result(tmp_path / "packed.csv").rows
    assert row.note == "failed: ValueError: no" and row.median is None
    monkeypatch.setitem(TABLE["packed"], "needs", ["torch", "no_such_package"])
    assert runner.main([str(tmp_path), "packed", "--device", "cpu"]) == 0
    assert "packed: no_such_package not installed" in capsys.readouterr().out


def test_results_name_a_commit_that_holds_what_was_measured(tmp_path, monkeypatch, capsys):
    """Results and pages themselves may differ from it."""
    monkeypatch.setattr(results, "find_commit", lambda: "abc-dirty")
    monkeypatch.setattr(results, "has_changes", lambda: False)
    parse = results.Parser("").parse_args
    assert results.describe_system(None)["commit"] == "abc" and parse([str(results.RESULTS / "cpu")]).commit is None
    monkeypatch.setattr(results, "has_changes", lambda: True)
    assert results.describe_system(None)["commit"] == "abc-dirty" and results.describe_system("def")["commit"] == "def"
    assert parse([str(tmp_path)]).commit is None and parse([str(results.RESULTS), "--commit", "def"]).commit == "def"
    with pytest.raises(SystemExit):
        parse([str(results.RESULTS / "cpu")])
    assert "--commit: got none" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_what_a_commit_does_not_hold(tmp_path, monkeypatch):
    """Changes of results and pages do not count."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    files = [tmp_path / path for path in ("docs/a.md", "benchmarks/results/cpu/a.csv", "a.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    for words in ("init -q", "add .", "commit -q -m a"):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words.split()], cwd=tmp_path, check=True)
    for file in files:
        assert not results.has_changes()
        file.write_text("2")
    assert results.has_changes()


def test_kernels_of_logits_are_right_or_left_out(monkeypatch):
    plain = token_log_probs.compute_plain
    others = {
        "right": ("torch", lambda _: plain),
        "wrong": ("torch", lambda _: lambda logits, tokens: plain(1.001 * logits, tokens)),
        "rounded": ("torch", lambda _: lambda logits, tokens: [x.bfloat16() for x in plain(logits, tokens)]),
        "absent": ("no_such.package", lambda _: plain),
        "older": ("torch", lambda module: module.no_such_function),
    }
    monkeypatch.setattr(token_log_probs, "KERNELS", others)
    found, notes = token_log_probs.find_kernels(torch.randn(6, 50), torch.arange(6))
    assert [*found] == ["right", "rounded"]
    assert notes.pop("absent") == "no_such not installed"
    assert [(name, note.split(":")[1]) for name, note in notes.items()] == [
        ("wrong", " AssertionError"),
        ("older", " AttributeError"),
    ]
