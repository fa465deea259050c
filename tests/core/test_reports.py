"""Generated pages are what their scripts make of the result files, and the scripts measure what they say."""

import sys
from functools import partial
from pathlib import Path

import cases
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
pytest.importorskip("benchmarks", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks import accuracy, files, first_call, losses, packed, pages, regimes, targets, verbs
from benchmarks.end_to_end import aims
from benchmarks.files import ROOT

ORACLES = {estimator.function.__name__: estimator.table for estimator in cases.ESTIMATORS}


@pytest.mark.parametrize("page", pages.PAGES)
def test_a_generated_page_is_what_its_script_makes(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("written by make report") == len(pages.MARKED.findall(text)) > 0
    assert text == pages.fill_page(page), "make report writes it"


def test_figures_are_drawn_from_the_result_files(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    plots.draw_all(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir() if "<svg" in path.read_text()}
    shown = {path.name for path in (ROOT / "docs" / "plots").iterdir()}
    assert drawn == shown


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", accuracy.CASES)
def test_errors_are_measured_against_the_oracles(name, dtype, monkeypatch):
    """The loops over all environments at once are the oracles of the tests: in float64, and in float32 nearly so."""
    settings = [accuracy.Setting(0.99, 0.95, None), accuracy.Setting(0.9, 1.0, 4)]
    monkeypatch.setattr(accuracy, "SETTINGS", settings)
    case, rollouts = accuracy.CASES[name], accuracy.draw_rollouts(40, 3)
    results = accuracy.compute_exactly(case, rollouts, dtype)
    for i in range(len(settings)):
        rows = slice(3 * i, 3 * i + 3)
        args = {argument: rollouts.inputs[argument][rows].numpy() for argument in case.inputs}
        rates = {rate: float(getattr(rollouts.rates, rate)[rows][0]) for rate in case.rates}
        rates = {} if case.function == "linear_recurrence" else rates
        expected = ORACLES[case.function](**for_oracle(name, {**args, **rates}), **case.options)
        for got, want in zip(results, expected, strict=False):
            tolerance = 1e-12 if dtype == torch.float64 else 1e-5
            np.testing.assert_allclose(got[rows].numpy(), want, rtol=tolerance, atol=1e-6)


def for_oracle(name, args):
    """Arguments as the oracles call them."""
    args = {{"bootstrap_values": "bootstrap"}.get(key, key): x for key, x in args.items()}
    if name == "compute_eligibility_traces":
        args["decay"] = args.pop("gamma") * args.pop("lambda_")
    return args


def test_a_result_file_makes_a_page(tmp_path, monkeypatch, capsys):
    pytest.importorskip("numba")
    monkeypatch.setattr(accuracy, "CASES", {"compute_gae": accuracy.CASES["compute_gae"]})
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    arguments = ["--backend", "cpu", "--steps", "16", "32", "--rows", "4", "--commit", "abc"]
    assert accuracy.main([str(tmp_path / "cpu"), *arguments]) == 0
    (result,) = files.read_results("cpu/accuracy_cpu.json", tmp_path)
    assert result["system"]["commit"] == "abc"
    assert {(row["steps"], row["rows"]) for row in result["float32"]} == {(16, 4), (32, 4)}
    assert {row["layout"] for row in result["float32"]} == {"env-major", "time-major"}
    assert {row["dtype"] for row in result["half"]} == {"bfloat16", "float16"}
    assert all(row["ratio"] <= 1 for row in result["float32"]), "the cpu backend is the serial loop"
    page = pages.write_accuracy()
    assert page.count("| `compute_gae` |") == 4 and "`triton`" not in page


def test_every_limit_is_checked():
    fine = {"ratio": 1.0, "beyond_rounding": {"ratio": 1.0}}
    bad = [{**fine, "ratio": x} for x in (np.nan, 1.1, 0.9)] + [{**fine, "beyond_rounding": {"ratio": 2.1}}]
    assert accuracy.find_failures({"float32": [fine], "half": [fine]}) == []
    assert accuracy.find_failures({"float32": [], "half": [fine, *bad]}) == bad
    assert accuracy.find_failures({"float32": [bad[0], {"ratio": 2.1}, fine], "half": []}) == [bad[0], {"ratio": 2.1}]


def test_committed_results_keep_the_limits():
    results = files.read_results("*/accuracy_*.json")
    assert results[0]["backend"] == "cpu" and not any(map(accuracy.find_failures, results))


def test_first_calls_with_and_without_what_was_compiled(monkeypatch):
    pytest.importorskip("numba")
    assert all(seconds > 0 for seconds in first_call.time_phases("prefix_sum"))
    turns = iter([(0.3, 5.0, 0.2), (0.1, 0.5, 0.001), (0.2, 9.0, 0.2), (0.4, 0.6, 0.003)])
    monkeypatch.setattr(first_call, "PAIRS", 2)
    monkeypatch.setattr(first_call, "run_in_new_process", lambda estimator: next(turns))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "put back")
    assert first_call.measure_estimator("gae") == {
        "estimator": "gae",
        "import": [0.175, 0.25, 0.325],
        "compiled": [6.0, 7.0, 8.0],
        "loaded": [0.525, 0.55, 0.575],
        "second": [0.0015, 0.002, 0.0025],
    }


def test_regimes(tmp_path, monkeypatch):
    """Every regime is checked and timed; wrong results are no times."""
    monkeypatch.setattr(regimes, "REPEATED", (4, 8))
    monkeypatch.setattr(regimes, "COUNTED", 3)
    monkeypatch.setattr(regimes, "LAYOUTS", ["env-major"])
    monkeypatch.setattr(regimes, "MAX_CELLS", 200)
    monkeypatch.setattr(regimes, "DEVICE", "cpu")
    monkeypatch.setattr(regimes, "time_repeated", lambda call: {"full": [float(call() is not None)] * 3})
    monkeypatch.setattr(regimes, "list_floors", lambda: {"empty call": lambda: None})
    arguments = [str(tmp_path), "--commit", "abc", "--estimator", "gae", "--shapes", "3"]
    regimes.main(arguments)
    rows = files.read_result(next(tmp_path.iterdir()))["rows"]
    found = {(row.get("estimator"), row.get("layout"), row["regime"]) for row in rows}
    assert ("gae", "env-major", "annealed numbers") in found
    assert ("gae", "env-major", "packed rows of changing lengths") in found
    assert len(found) == len(rows) == 1 + 6
    workload = regimes.Workload("gae", 4, 8)
    inputs = regimes.draw_inputs(workload, "cpu")
    monkeypatch.setattr(regimes, "make_call", lambda workload, inputs, change: lambda: torch.rand(3))
    with pytest.raises(AssertionError):
        regimes.check_results(workload, inputs, {})


def test_a_missed_target_has_its_reason():
    """Measured and missed: benchmarks/notes.json says why, and the page of targets is what its script makes."""
    notes = files.read_result(ROOT / "benchmarks" / "notes.json")
    for machine in targets.read_gpus():
        missed = {key for key, target in targets.TARGETS.items() if target.judge(machine)[0] == "missed"}
        assert missed <= notes.keys() <= {*targets.TARGETS, *aims.AIMS, *aims.AIMS_ON_CPU}
        path = files.RESULTS / machine.name / "targets.md"
        assert path.read_text(encoding="utf-8") == targets.write_page(machine, notes), "make report writes it"
    assert "no evidence yet" not in aims.list_aims()


def test_losses_against_operations(tmp_path, monkeypatch):
    """In a few milliseconds, in eager mode alone."""
    monkeypatch.setattr(losses, "WIDTHS", {"log-probs": (1,), "categorical": (2,), "gaussian": (3,), "tokens": (1,)})
    monkeypatch.setitem(losses.SECONDS, "cpu", 0)
    monkeypatch.setattr(losses.torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(losses.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(losses.torch, "set_num_threads", lambda number: None)
    losses.main([str(tmp_path), "--commit", "abc", "--sizes", "64", "128"])
    result = files.read_result(tmp_path / "losses_cpu.json")
    assert len(result["rows"]) == 4 * 2 * 2
    assert {*result["rows"][0]["microseconds"]} == {"eager", "compiled", "ours"}
    page = pages.list_losses(result)
    assert "| `gaussian` | 3 | 128 |" in page and "Threads: 1." in pages.describe_protocol(result)
    for row in result["rows"]:
        times = {"low": 3.0, "median": 4.0, "high": 5.0, "device": [1.0, 2.0, 3.0]}
        row["microseconds"] = dict.fromkeys(row["microseconds"], times)
        row["times_faster"] = {arm: [0.5, 1.0, 1.5] for arm in row["times_faster"]}
    page = pages.list_losses({**result, "backend": "triton", "copy_bandwidth_gb_per_s": [0.001] * 3})
    device, ratio = "2.0 [1.0, 3.0] / 2.0 [1.0, 3.0]", "1.00× [0.50, 1.50] / 1.00× [0.50, 1.50]"
    assert f"| 4.0 [3.0, 5.0] / 4.0 [3.0, 5.0] | {ratio} | {ratio} | {device} | {device} | 5132 / 7192 |" in page, (
        "128 elements of the Gaussian, a byte per microsecond"
    )


def test_sequences_end_to_end_and_padded(tmp_path, monkeypatch):
    """The arms agree, which the script checks."""
    pytest.importorskip("numba")
    monkeypatch.setattr(packed, "LENGTHS", {"3 of 1-9": (3, 1, 9), "2 of 4": (2, 4, 4)})
    monkeypatch.setattr(packed, "PACKABLE", ["discounted_returns"])
    monkeypatch.setattr(packed.torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(packed.harness.PLANS, "cpu", packed.harness.Plan(1, 1, 1))
    packed.main([str(tmp_path), "--commit", "abc"])
    result = files.read_result(tmp_path / "packed_cpu.json")
    ragged, equal = result["rows"]
    assert ragged["steps"] < ragged["padded_steps"] and equal["steps"] == equal["padded_steps"] == 8
    assert [*ragged["microseconds"]] == ["packed", "padded"]
    assert [*equal["microseconds"]] == ["packed", "padded", "unmasked"]
    for row in result["rows"]:
        assert all(0 < low <= median <= high for low, median, high in row["microseconds"].values())


def test_how_long_the_verbs_take(tmp_path, monkeypatch):
    """Those that are measured again take the place of the former ones; without all of them there is no sentence."""
    monkeypatch.setattr(files, "read_results", partial(files.read_results, folder=tmp_path))
    seconds = {"demo": 130.0, "test": 3300.0}
    monkeypatch.setattr(verbs, "time_verb", lambda verb: seconds[verb])
    verbs.main([str(tmp_path / "cpu"), "--commit", "abc", "--verb", "test"])
    assert pages.write_verbs() == ""
    seconds["test"] = 5400.1
    verbs.main([str(tmp_path / "cpu"), "--commit", "def"])
    rows = files.read_result(tmp_path / "cpu" / "verbs.json")["rows"]
    assert rows == [{"verb": "demo", "seconds": 130.0}, {"verb": "test", "seconds": 5400.1}]
    assert pages.write_verbs().startswith("`make demo` takes about 2 minutes and `make test` about 2 hours on ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(26, "about 30 seconds"), (50, "about a minute"), (100, "about 2 minutes"), (2800, "about an hour")],
)
def test_durations_are_said_as_one_says_them(seconds, text):
    assert pages.describe_duration(seconds) == text
