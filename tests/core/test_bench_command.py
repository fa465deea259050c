"""`rl-triton bench`: results are compared with the oracle before they are timed."""

import json

import pytest

from rl_triton_core.cli import bench, main


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(bench, "SECONDS", 0.001)
    monkeypatch.setattr(bench, "SECONDS_PER_SAMPLE", 0.0001)


@pytest.mark.usefixtures("quick")
def test_the_table_and_the_picture(capsys, tmp_path):
    picture = tmp_path / "bench.png"
    options = ["--device", "cpu", "--shapes", "3x17", "2x5", "--skip", "compiled scan", "--output", str(picture)]
    assert main(["bench", *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    measured = [x for x in report["measurements"] if not x["note"]]
    assert {x["provider"] for x in measured} >= {"ours (cpu)", "Python loop"}
    assert not any(x["is_wrong"] for x in report["measurements"])
    for x in measured:
        assert 0 < x["lower_quartile"] <= x["median"] <= x["upper_quartile"]
    if bench.find_spec("matplotlib"):
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("quick")
def test_what_is_wrong_is_not_timed(capsys, monkeypatch, tmp_path):
    def make_wrong_call(rollout):
        call = bench.make_loop(rollout)
        return lambda: call() * 1.001

    monkeypatch.setattr(bench, "PROVIDERS", {"Python loop": bench.make_loop, "ours (wrong)": make_wrong_call})
    assert main(["bench", "--shapes", "3x17", "--device", "cpu", "--output", str(tmp_path / "x.png")]) == 1
    printed = capsys.readouterr().out
    assert "ours (wrong): not timed: its relative error is 1.0e-03" in printed
    assert "3x17                  Python loop" in printed


def test_the_scan_by_doubling_is_right():
    """As it is, before torch.compile."""
    rollout = bench.draw_rollout((5, 37), "cpu")
    assert bench.relative_error(*bench.select_envs(bench.scan_by_doubling(*rollout), rollout)) < 1e-6


def test_shapes():
    assert bench.parse_shape("64x128") == (64, 128)
    for text in ("64", "64x", "0x3", "-1x3", "1x2x3"):
        with pytest.raises(ValueError, match=r"--shapes: got .*, expected environments x steps"):
            bench.parse_shape(text)
