"""Training loops end to end: what is timed, concluded and written; not how fast anything is."""

import json
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
pytest.importorskip("benchmarks.end_to_end.run", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks import files
from benchmarks.end_to_end import frameworks, page, run, stopwatch
from benchmarks.end_to_end.frameworks import REGISTRY, Arm, Framework, Setting
from benchmarks.providers import compiled_scan

# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arms", ["ab", "abc", "abcd"])
def test_every_arm_takes_every_place_equally_often(arms):
    orders = np.array([run.order_arms(arms, round_) for round_ in range(2 * len(arms))])
    for place in orders.T:
        assert all((place == arm).sum() == 2 for arm in arms)
    assert (orders[::2] == orders[1::2, ::-1]).all(), "backwards after forwards: a drift falls on all alike"


def random_times(rounds=7, seed=0):
    """Iterations of two arms that differ in the advantage step, and their arrays [rounds]."""
    rest, slow, fast = np.random.default_rng(seed).uniform(1, 9, (3, rounds))
    times = [
        [{"total": r + a, "rest": r, "advantages": a} for r, a in zip(rest, step, strict=True)] for step in (slow, fast)
    ]
    return times, rest, slow, fast


def test_shares_bounds_and_speed_ups():
    (slow_times, fast_times), rest, slow, fast = random_times()
    shares = np.percentile(slow / (rest + slow), [25, 50, 75])
    assert run.find_share(slow_times) == pytest.approx(shares, abs=1e-6)
    assert run.find_bound(0.2) == 1.25 and run.find_bound(0.0) == 1.0
    entries = [run.Entry("stock", times=slow_times), run.Entry("ours", times=fast_times)]
    (row,) = run.make_pair_rows(SimpleNamespace(OURS=("ours",)), Setting(1, 1), entries)
    want = np.percentile((rest + slow) / (rest + fast), [25, 50, 75])
    np.testing.assert_allclose(row["speed_up"], want, atol=1e-4)
    assert row["share"] == row["share_of_all_parts"] == pytest.approx(shares[1], abs=1e-6)
    assert run.find_share(slow_times, ["advantages", "rest"]) == pytest.approx([1.0] * 3)


def test_a_step_that_takes_no_time_reaches_the_bound():
    (times, _), *_ = random_times(rounds=1)
    without = [{**found, "total": found["rest"], "advantages": 0.0} for found in times]
    entries = [run.Entry("stock", times=times), run.Entry("ours", times=without)]
    (row,) = run.make_pair_rows(SimpleNamespace(OURS=("ours",)), Setting(1, 1), entries)
    assert row["speed_up"][1] == pytest.approx(row["bound"], abs=2e-4)


# --- the stopwatch ----------------------------------------------------------------------------------------------------


def test_a_part_interrupts_the_one_around_it(monkeypatch):
    """A second passes between any two moments."""
    ticks = count()
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(ticks))
    watch = stopwatch.Stopwatch("cpu")

    def iteration():
        with watch.part("advantages"):
            watch.around("rest", lambda: None)()
            with pytest.raises(ZeroDivisionError), watch.part("inner"):
                raise ZeroDivisionError

    for _ in range(2):
        assert watch.time(iteration) == {"total": 7e6, "rest": 3e6, "advantages": 3e6, "inner": 1e6}
    with watch.part("outside"):
        pass
    assert watch.time(lambda: None) == {"total": 1e6, "rest": 1e6}


# --- arms -------------------------------------------------------------------------------------------------------------


def make_framework(**results):
    """A framework whose arms have these results."""

    def make_arm(name, setting, watch):
        if results[name] is None:
            raise ValueError("no\nreally")
        return Arm(watch.around("advantages", lambda: None), lambda: [torch.tensor(results[name])])

    return SimpleNamespace(ARMS=dict.fromkeys(results, ""), OURS=("ours",), make_arm=make_arm)


def test_wrong_and_failing_arms_are_recorded_and_not_timed():
    nan = float("nan")
    fake = make_framework(stock=[1.0, 2.0], bad=None, nan=[1.0, nan], off=[1.0, 2.001], ours=[1.0, 2.000001])
    entries = run.measure_setting(fake, Setting(1, 1, device="cpu"), run.QUICK)
    assert [entry.status for entry in entries] == ["ok", "failed: ValueError: no", "wrong", "wrong", "ok"]
    assert [len(entry.times) for entry in entries] == [2, 0, 0, 0, 2]
    rows = [run.make_arm_row(Setting(1, 1), entry) for entry in entries]
    assert json.loads(json.dumps(rows))[-1]["error"] < run.TOLERANCE and "times" not in rows[1]
    (pair,) = run.make_pair_rows(fake, Setting(1, 1), entries)
    assert (pair["slow"], pair["fast"]) == ("stock", "ours")


def test_rounds_end_with_the_time():
    fake = make_framework(stock=[1.0], ours=[1.0])
    entries = run.measure_setting(fake, Setting(1, 1, device="cpu"), run.Plan(1, 50), seconds=0.0)
    assert [len(entry.times) for entry in entries] == [4, 4], "every place twice, and no more"


@pytest.mark.parametrize("name", REGISTRY)
def test_a_file_holds_what_it_should(name):
    loaded = REGISTRY[name].load()
    assert set(loaded.OURS) < set(loaded.ARMS) and next(iter(loaded.ARMS)) == "stock"
    for settings in loaded.SETTINGS.values():
        assert len(set(settings)) == len(settings) == len({(str(x), x.device) for x in settings})
        assert all(x.batch_size * x.minibatches == x.num_envs * x.num_steps for x in settings)
    assert {x.device for x in loaded.SETTINGS["cpu"]} == {"cpu"}


# --- files, pages, figures --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with the files of a quick run."""
    pytest.importorskip("numba")
    folder, names = tmp_path_factory.mktemp("results"), ["synthetic", "cleanrl", "torchrl"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_scan, "BACKEND", "eager")
        patch.setitem(REGISTRY, "torchrl", Framework("torchrl", ("no_such_package",)))
        arguments = ["--suite", *names, "--device", "cpu", "--quick", "--commit", "abc"]
        assert run.main([str(folder / "cpu"), *arguments]) == 0
    return folder


def test_a_quick_run_makes_files_and_a_page(results):
    (found,) = page.load_results(results, "synthetic")
    assert found["system"]["commit"] == "abc" and found["skipped"] == [] and found["unavailable"] == ""
    assert [row["arm"] for row in found["arms"]] == ["stock", "compiled", "ours"] * 2
    assert all(row["status"] == "ok" and row["error"] <= run.TOLERANCE for row in found["arms"])
    for row in found["arms"]:
        parts = np.array([row["times"][name] for name in ("rest", "advantages")])
        np.testing.assert_allclose(parts.sum(0), row["times"]["total"], atol=0.2)
    pairs = [(row["slow"], row["fast"]) for row in found["pairs"]]
    assert pairs == [("stock", "compiled"), ("stock", "ours"), ("compiled", "ours")] * 2
    (absent,) = page.load_results(results, "torchrl")
    assert absent["unavailable"] == "no_such_package not installed" and absent["arms"] == []
    text = page.write_frameworks(results)
    assert "Not measured there: no_such_package not installed" in text
    assert text.count(page.NOT_YET) == len(REGISTRY) - 3
    assert text.count("plots/end_to_end_") == 2 and "4x16, hidden 8, 2 epochs x 2: stock → ours" in text


def test_other_settings_stay_in_a_file(tmp_path, monkeypatch):
    """Those that --only leaves out; not where other hardware has measured them."""
    monkeypatch.setattr(compiled_scan, "BACKEND", "eager")
    arguments = [str(tmp_path), "--suite", "synthetic", "--device", "cpu", "--quick", "--commit"]
    assert run.main([*arguments, "abc"]) == 0
    before = files.read_result(tmp_path / "end_to_end_synthetic.json")
    assert run.main([*arguments, "def", "--only", "recomputed", "no such setting"]) == 0
    after = files.read_result(tmp_path / "end_to_end_synthetic.json")
    assert after["system"]["commit"] == "abc, def"
    for table in ("arms", "pairs"):
        assert [Setting.of(row) for row in before[table]] == [Setting.of(row) for row in after[table]]
        assert [x == y for x, y in zip(before[table], after[table], strict=True)] == [True] * 3 + [False] * 3
    system = files.describe_system("ghi") | {"cpu": "another"}
    monkeypatch.setattr(files, "describe_system", lambda commit: system)
    with pytest.raises(SystemExit, match="name another folder"):
        run.main([*arguments, "ghi", "--only", "recomputed"])


def test_shares_of_all_parts_and_their_bounds():
    times = {"total": [10.0], "acting": [2.0], "advantages": [0.1], "update": [5.0], "rest": [2.9]}
    cells = "20 % [20, 20]", "1 % [1, 1]", "50 % [50, 50]", "29 % [29, 29]"
    bounds = (f"{x} [{x}, {x}]" for x in ("1.25", "1.01", "2.00", "3.45"))
    row = {**Setting(8, 16, env="CartPole-v1")._asdict(), "arm": "stock", "times": times}
    ours, bare = {**row, "arm": "ours"}, {**row, "times": {"total": [1.0]}}
    line = f"| {' | '.join(['CartPole-v1 8x16, hidden 64, 4 epochs x 4', *cells, *bounds])} |"
    assert page.list_parts({"arms": [row, ours, bare]}).splitlines()[2:] == [line]
    assert page.list_parts({"arms": [bare]}) == ""


def test_bands_overlap_where_runs_have_the_same_steps():
    curves = {"stock": [[1.0, 2.0, 3.0], [1.0, 2.0]], "ours": [[1.1, 9.0, 3.0], [0.9, 9.0, 3.0]]}
    rows = [
        {"task": "x", "target_return": 1.0, "arm": arm, "steps": [8, 16, 24][: len(run)], "returns": run}
        for arm, runs in curves.items()
        for run in runs
    ]
    assert page.compare_bands({"rows": rows}) == "Points at which the 95 % bands of both overlap: x, 1 of 2."
    assert page.compare_bands({"rows": rows[:3]}) == "", "a band needs two runs"


def test_what_the_budget_does_not_allow_is_listed(tmp_path):
    arguments = ["--suite", "synthetic", "--device", "cpu", "--budget", "0", "--seconds", "3"]
    assert run.main([str(tmp_path / "cpu"), *arguments]) == 0
    (found,) = page.load_results(tmp_path, "synthetic")
    settings = REGISTRY["synthetic"].load().SETTINGS["cpu"]
    assert found["protocol"]["seconds"] == 3
    assert found["skipped"] == [str(setting) for setting in settings] and found["arms"] == []
    assert str(settings[0]) in page.compare_arms(found)


def test_packages_are_looked_up():
    assert frameworks.Framework("x", ("torch", "no_such_package")).unavailable() == "no_such_package not installed"
    assert frameworks.Framework("x", ("torch",)).unavailable() == ""
