"""The table of launches against what was timed, and how that is found and judged."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
pytest.importorskip("benchmarks", reason="only the package is here", exc_type=ModuleNotFoundError)
pytest.importorskip("rl_triton_core._internal.scan.triton", reason="Triton is not installed")

from benchmarks import results, tune
from benchmarks.results import make_row
from benchmarks.workloads import Workload, draw_inputs
from rl_triton_core._internal.launch.table import TABLE, Launch, narrow_launch
from rl_triton_core._internal.launch.tuning import launch_candidates

TIMED = sorted(results.RESULTS.glob("*/tune.csv"))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNAVAILABLE = tune.backend.unavailable(DEVICE) or ""
INTERPRETED = not UNAVAILABLE and DEVICE.type == "cpu"


def make_line(rollout, launch, segments, microseconds, note=""):
    name = tune.name_candidate((launch, segments))
    return make_row(name, "device", "µs", microseconds, note, **rollout._asdict())


@pytest.mark.parametrize("path", TIMED, ids=lambda path: path.parent.name)
def test_the_table_has_nearly_the_best_launch_for_every_window_timed(path):
    verdicts = tune.judge_rows(results.read_result(path).rows)
    assert verdicts
    behind = {str(x.rollout): x.ratio for x in verdicts if not x.ratio <= tune.LIMIT}
    assert not behind


@pytest.mark.parametrize("steps", [1, 7, 64, 4096])
@pytest.mark.parametrize("lanes", [1, 2, 3, 7, 33])
def test_every_thread_has_a_chunk_of_its_own(steps, lanes):
    """Also where lanes are few; and what is narrowed has no more threads than before, and few without a step."""
    for launch in {launch for rows in TABLE.values() for _, launch in rows}:
        narrow = narrow_launch(launch, steps, lanes)
        assert narrow.block_lanes * narrow.chunks == 32 * narrow.num_warps <= 32 * launch.num_warps
        assert narrow == launch or narrow.steps < 2 * max(steps, launch.unroll)


@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
@pytest.mark.covering
@pytest.mark.parametrize("layout", TABLE)
@pytest.mark.parametrize("flags", ["bool", "float32"])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("estimator", ["gae_advantages", "gae", "retrace"])
def test_the_judge_counts_as_the_backend_does(estimator, truncated, flags, layout, monkeypatch):
    """Results and the sizes of flags included."""
    found, find = [], tune.backend.launch.find_launch
    monkeypatch.setattr(
        tune.backend.launch, "find_launch", lambda *window, **table: found.append(window) or find(*window, **table)
    )
    monkeypatch.setattr(tune.backend, "VARIANTS", {})
    workload = Workload(estimator, 4, 8, layout, truncated, flags=flags)
    tune.ours.make_normal_call(workload, draw_inputs(workload, DEVICE.type))(backend="triton")
    tune.Rollout(*workload).look_up()
    assert len(found) == 2 if INTERPRETED else len(found) > 2  # those of general kernels come first
    assert len(set(found[-2:])) == 1


def test_a_verdict():
    rollout = tune.Rollout("gae", 4096, 128)
    ours, number = rollout.look_up()
    other = Launch(1, 32, 4, 1)
    rows = [
        make_line(rollout, ours, number, 3.0),
        make_line(rollout, other, 1, 2.5),
        make_line(rollout, other, 2, 1.0, "disagrees"),
        make_line(rollout._replace(masked=True), other, 4, 1.0),
    ]
    plain, masked = tune.judge_rows(rows)
    assert (plain.rollout, plain.ratio) == (rollout, 1.2)
    assert tune.read_candidate(plain.best) == (other, 1)
    assert str(plain).endswith("takes 1.20 of the time of 1 32 4 1 1, 2.50 µs")
    assert masked.rollout.masked and masked.ours is None and masked.ratio == float("inf")


def test_one_environment_is_one_window_in_both_layouts():
    rollout = tune.Rollout("gae", 1, 1 << 20)
    ours, number = rollout.look_up()
    rows = [
        make_line(rollout, ours, number, 2.0),
        make_line(rollout._replace(layout="time-major"), Launch(32, 1, 8, 1), 8, 1.0),
    ]
    (verdict,) = tune.judge_rows(rows)
    assert verdict.ratio == 2.0


# --- the search -------------------------------------------------------------------------------------------------------


def test_a_window_has_the_candidates_of_its_numbers():
    window = tune.Rollout("retrace", 64, 512, truncated=True, masked=True)
    held = 4 * 4 + 2 * 4 * 4 + 2 * 4 + 3  # inputs, two of every action, results, flags
    assert set(window.list_candidates()) == set(launch_candidates(512, 64, held, "env-major"))
    assert str(window).endswith("masked")


@pytest.mark.parametrize("estimator", ["gae", "eligibility_traces"])
def test_the_call_that_is_timed(estimator, monkeypatch):
    """Truncated and masked, forward and backward; never replayed."""
    monkeypatch.setattr(tune, "draw_inputs", lambda workload, device: draw_inputs(workload, "cpu"))
    call = tune.make_call(tune.Rollout(estimator, 3, 20, truncated=True, masked=True))
    assert {"truncated", "mask"} <= set(call.keywords)
    assert not hasattr(call.func, "__wrapped__")
    assert all(x.shape == (3, 20) for x in tune.list_tensors(call()))


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 and no GPU")
def test_every_candidate_is_timed_and_compared(monkeypatch):
    """The first is the table's; one whose results differ is marked, one that fails is left out."""
    (window,) = tune.SETTINGS["quick"]
    inputs = draw_inputs(window.workload, "cpu")
    function = tune.inspect.unwrap(tune.ours.make_call(window.workload, inputs).func)
    results, timed = [], []

    def call():
        found = function(**inputs, backend="triton")
        results.append(found.advantages)
        return found.advantages + (len(results) == 3)

    def device_time(call):
        timed.append(call)
        if len(timed) == 4:
            raise RuntimeError("out of resources")
        return 10.0 - len(timed)

    chosen = tune.backend.default_launch
    monkeypatch.setattr(tune, "make_call", lambda window: call)
    monkeypatch.setattr(tune, "device_time", device_time)
    rows = list(tune.measure(window, None))
    launches = {tune.read_candidate(row) for row in rows}
    assert len(timed) > 4 and len(launches) == len(rows) == len(timed) - 1
    assert [row.median for row in rows] == sorted(row.median for row in rows)
    assert [row.note for row in rows].index("in the table") == len(rows) - 1
    assert [row.note for row in rows].count("disagrees") == 1
    assert tune.backend.default_launch is chosen
