"""The self-test finds what is wrong, and what it finds can be repeated."""

import json

import pytest

from rl_triton_core import compute_gae
from rl_triton_core.cli import main, selftest


def run_selftest(capsys, *arguments):
    status = main(["selftest", "--backend", "cpu", "--json", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


def test_it_takes_all_functions_on_all_backends(target, monkeypatch):
    if target.backend == "reference":
        pytest.skip("what the others are compared with")
    functions = dict([*selftest.FUNCTIONS.items()][:: 3 if target.interpreted else 1])
    monkeypatch.setattr(selftest, "FUNCTIONS", functions)
    targets = [x for x in selftest.find_targets(selftest.COMPILED) if x[0] == target.backend]
    numbers = range(len(targets) * len(functions))
    outcomes = [*selftest.run_cases(targets, numbers, len(numbers), 10**20)]
    assert not [error for *_, error in outcomes if error]
    assert {call.function for _, call, _ in outcomes} == set(functions)


def test_one_campaign_differs_from_another():
    calls = {str(selftest.draw_call([("cpu", "cpu")], 30, n, seed)) for seed in (0, 1) for n in (40, 100_000)}
    assert len(calls) == 4


def compute_wrong_gae(rewards, values, terminated, truncated=None, *, lambda_, backend, **kwargs):
    """Right on the reference backend, else with another λ."""
    lambda_ = lambda_ if backend == "reference" else 0.5
    return compute_gae(rewards, values, terminated, truncated, lambda_=lambda_, backend=backend, **kwargs)


def test_a_wrong_result_is_found_and_can_be_repeated(capsys, monkeypatch):
    functions = {"wrong": compute_wrong_gae, **selftest.FUNCTIONS}
    monkeypatch.setattr(selftest, "FUNCTIONS", {x: functions[x] for x in ("wrong", "compute_lambda_returns")})
    monkeypatch.setattr(selftest, "choose_tensors", lambda *_: ["rewards", "values", "terminated", "bootstrap_values"])
    status, report = run_selftest(capsys, "--cases", 24, "--seed", 1)
    assert status == 1 and report["cases"] == 24
    assert report["backends"] == ["cpu on cpu"] and len(report["failures"]) > 5
    assert all("function='wrong'" in x["call"] for x in report["failures"])
    for failure in report["failures"]:
        program, _, *arguments = failure["repeat"].split()
        assert program == "rl-triton"
        status, again = run_selftest(capsys, *arguments)
        assert status == 1
        assert again["failures"] == [failure]
    assert main(["selftest", "--backend", "cpu", "--cases", "24", "--seed", "1"]) == 1
    printed = capsys.readouterr().out
    assert "advantages: relative error" in printed
    assert f"{len(report['failures'])} of 24 results are wrong (seed 1)" in printed
