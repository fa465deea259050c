"""The self-test finds what is wrong, and what it finds can be repeated."""

import json
import random

import numpy as np
import pytest

from rl_triton_core import compute_gae
from rl_triton_core._internal.selftest import campaign as campaigns
from rl_triton_core._internal.selftest import cases
from rl_triton_core._internal.selftest.cases import GAE, LAMBDA
from rl_triton_core.cli import main

TARGET = cases.Target("reference", "cpu", 129)


def run_selftest(capsys, *arguments):
    """Run it in this process, and return its exit status and what it printed."""
    status = main(["selftest", "--backend", "reference", "--json", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


def test_it_takes_all_estimators(capsys):
    status, report = run_selftest(capsys, "--cases", 18, "--seed", 3)
    assert (status, report["cases"], report["failures"]) == (0, 18, [])
    parts = report["backends"]  # one for each device
    assert {(x["backend"], x["wrong"]) for x in parts} == {("reference", 0)} and sum(x["cases"] for x in parts) == 18
    campaign = campaigns.Campaign(campaigns.find_targets(["reference"]), 18, 3, 2)
    assert {x.estimator for x in campaigns.run_campaign(campaign)} == {x.name for x in campaigns.TESTED}


def compute_wrong_gae(*args, lambda_, **kwargs):
    return compute_gae(*args, lambda_=1 - lambda_, **kwargs)


def test_a_wrong_result_is_found_and_can_be_repeated(capsys, monkeypatch):
    monkeypatch.setattr(campaigns, "TESTED", (GAE._replace(function=compute_wrong_gae), LAMBDA))
    status, report = run_selftest(capsys, "--cases", 24, "--seed", 1)
    assert status == 1 and report["failures"]
    assert {x["estimator"] for x in report["failures"]} == {"gae"}
    for failure in report["failures"]:
        program, _, *arguments = failure["repeat"].split()
        assert program == "rl-triton"
        status, again = run_selftest(capsys, *arguments)
        assert status == 1
        assert again["failures"] == [failure]
    assert main(["selftest", "--backend", "reference", "--cases", "24", "--seed", "1"]) == 1
    printed = capsys.readouterr().out
    assert "advantages: errors" in printed and f"{len(report['failures'])} of 24 results are wrong (seed 1)" in printed


def test_it_stops_in_time(capsys):
    status, report = run_selftest(capsys, "--cases", 100_000, "--seconds", 0.2)
    assert status == 0 and 0 < report["cases"] < 100_000


@pytest.mark.parametrize(("option", "number"), [("--cases", 0), ("--combinations", -1)])
def test_wrong_numbers(capsys, option, number):
    with pytest.raises(SystemExit) as stopped:
        main(["selftest", option, str(number)])
    assert stopped.value.code == 2
    assert f"{option}: got {number}, expected at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(40))
def test_decays_of_as_many_steps_as_features(seed):
    """Say by their shape which of the two they are for."""
    choice = cases.Choice(TARGET, np.random.default_rng(seed), *[random.Random(seed).choice] * 2)
    case = cases.random_case(cases.TRACES, 2, 2, features=(2, 2))
    for time_dim in (0, -1):
        cases.check_case(case.replace(**cases.choose_decay(choice, (2, 2, 2, 2))), TARGET, cases.How(time_dim=time_dim))
