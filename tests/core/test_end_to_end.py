"""Training loops end to end: what is timed and concluded; not how fast anything is."""

from argparse import Namespace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("benchmarks.end_to_end", reason="only the package is here", exc_type=ModuleNotFoundError)

from benchmarks import end_to_end, harness, report, settings
from benchmarks.end_to_end import Arm, Entry, Setting, stopwatch


@pytest.mark.parametrize("arms", ["ab", "abc", "abcd"])
def test_every_arm_takes_every_place_equally_often(arms):
    orders = np.array(list(harness.take_turns(arms, 0, least=2 * len(arms)))).reshape(-1, len(arms))
    assert len(orders) == 2 * len(arms) and len(list(harness.take_turns(arms, 10, least=2, most=1))) == len(arms)
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


def make_rows(entries):
    return {(row.arm, row.metric): row for row in end_to_end.make_rows(entries, Setting(epochs=4, minibatches=4))}


def test_shares_bounds_and_speed_ups():
    (slow_times, fast_times), rest, slow, fast = random_times()
    share = np.median(slow / (rest + slow))
    rows = make_rows([Entry("stock", times=slow_times), Entry("ours", times=fast_times)])
    want = np.percentile((rest + slow) / (rest + fast), [25, 50, 75])
    np.testing.assert_allclose(rows["ours", "speed-up"][4:7], want, rtol=1e-4)
    assert rows["stock", "share"].median == pytest.approx(100 * share, rel=1e-4)


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


def make_framework(**results):
    def make_arm(name, setting, watch):
        if results[name] is None:
            raise ValueError("no\nreally")
        return Arm(watch.around("advantages", lambda: None), lambda: [torch.tensor(results[name])])

    return SimpleNamespace(list_arms=lambda setting: [*results], make_arm=make_arm)


def test_wrong_and_failing_arms_are_recorded_and_not_timed():
    nan = float("nan")
    fake = make_framework(stock=[1.0, 2.0], bad=None, nan=[1.0, nan], off=[1.0, 2.001], ours=[1.0, 2.000001])
    entries = end_to_end.time_arms(fake, Setting(), Namespace(device="cpu", rounds=2, seconds=9))
    wrong = ["wrong: its relative error is nan", "wrong: its relative error is 0.000447"]
    assert [entry.note for entry in entries] == ["", "failed: ValueError: no", *wrong, ""]
    assert [len(entry.times) for entry in entries] == [2, 0, 0, 0, 2]
    rows = make_rows(entries)
    assert rows["off", ""].note == wrong[1] and rows["ours", "speed-up"].count == 2


def test_rounds_end_with_the_time():
    fake = make_framework(stock=[1.0], ours=[1.0])
    entries = end_to_end.time_arms(fake, Setting(), Namespace(device="cpu", rounds=50, seconds=0.0))
    assert [len(entry.times) for entry in entries] == [4, 4], "every place twice, and no more"


@pytest.mark.parametrize("device", ["cpu", "cuda", "quick"])
@pytest.mark.parametrize("name", report.LOOPS)
def test_the_table_holds_what_it_should(name, device):
    found = settings.read_settings(name, device, Setting)
    assert found and len({str(x) for x in found}) == len(found)
    assert all(x.batch_size * x.minibatches == x.num_envs * x.num_steps for x in found)


def test_a_list_in_the_table_stands_for_each_of_its_values(monkeypatch):
    table = {
        "names": ["env", "processes"],
        "cpu cuda": [[["a", "b"], [1, 99]]],
        "cuda": [["Hopper-v5", 1]],
        "rounds": 9,
    }
    monkeypatch.setattr(settings, "TABLE", {"x": table})
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    cpu, cuda = (settings.read_settings("x", device) for device in ("cpu", "cuda"))
    assert cpu == cuda == [settings.Setting(env=x, processes=1) for x in "ab"], "without so many GPUs, and MuJoCo"
    options = settings.complete_options("x", Namespace(quick=False, seconds=None))
    assert (options.rounds, options.seconds) == (9, None)
