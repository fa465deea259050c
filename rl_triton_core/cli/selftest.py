"""`rl-triton selftest`: compare results with float64 oracles on this machine, on all backends that run here."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rl_triton_core._internal.backend import BACKENDS
from rl_triton_core._internal.selftest.campaign import (
    Campaign,
    Outcome,
    choose_num_combinations,
    find_targets,
    run_campaign,
    run_numbered_case,
)
from rl_triton_core.cli.output import Report, Table, track_progress

HELP = "compare results with float64 oracles on this machine; exit status 1 if one is wrong"
MAX_FAILURES_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how many cases, and which."""
    parser.add_argument("--cases", type=int, default=400, help="how many random calls to make")
    parser.add_argument("--seed", type=int, default=0, help="of the random calls")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="of those that run here")
    parser.add_argument("--case", type=int, help="make this one only, with the other arguments as when it failed")
    parser.add_argument("--seconds", type=float, help="stop after this time, whatever is left")
    combinations = "of the arguments that decide what is compiled, for each estimator; by default, more with more cases"
    parser.add_argument("--combinations", type=int, help=combinations)


def run(options: argparse.Namespace) -> Report:
    """Make random calls and compare their results with the oracles."""
    least = {"cases": 1, "combinations": 1, "seed": 0, "case": 0, "seconds": 0}
    for name, limit in least.items():
        check_at_least(limit, f"--{name}", getattr(options, name))
    targets = find_targets(options.backend)
    if not targets:
        raise ValueError(f"--backend: got {' '.join(options.backend)}, expected one that runs here (rl-triton env)")
    combinations = options.combinations or choose_num_combinations(options.cases)
    campaign = Campaign(targets, options.cases, options.seed, combinations)
    if options.case is None:
        outcomes = list(track_campaign(campaign, options.seconds))
    else:
        outcomes = [run_numbered_case(campaign, options.case)]
    return report_outcomes(campaign, outcomes)


def check_at_least(limit: int, name: str, number: float | None) -> None:
    """Check an argument that may be missing."""
    if number is not None and not number >= limit:
        raise ValueError(f"{name}: got {number}, expected at least {limit}")


def track_campaign(campaign: Campaign, seconds: float | None) -> Iterator[Outcome]:
    """Make the calls of a campaign with a progress bar, until the time is over."""
    end = None if seconds is None else time.monotonic() + seconds
    for outcome in track_progress(run_campaign(campaign), "comparing with oracles", campaign.num_cases):
        yield outcome
        if end is not None and time.monotonic() > end:
            return


def report_outcomes(campaign: Campaign, outcomes: Sequence[Outcome]) -> Report:
    """Count what was right and say how to repeat what was wrong."""
    failures = [x for x in outcomes if x.error]
    counts = [count_outcomes(target, outcomes) for target in campaign.targets]
    rows = [[str(value) for value in count.values()] for count in counts]
    described = [describe_failure(campaign, failure) for failure in failures]
    data = {
        "seed": campaign.seed,
        "cases": len(outcomes),
        "combinations": campaign.num_combinations,
        "backends": counts,
        "failures": described,
    }
    verdict = f"{len(failures)} of {len(outcomes)} results are wrong (seed {campaign.seed})"
    if not failures:
        verdict = f"all {len(outcomes)} results agree with the oracles (seed {campaign.seed})"
    parts = [f"\n{x['error']}\n{x['call']}\nto repeat it: {x['repeat']}" for x in described[:MAX_FAILURES_SHOWN]]
    table = Table("", ("backend", "device", "cases", "wrong", "seconds"), rows)
    return Report(data, [table, *parts, f"\n{verdict}"], int(bool(failures)))


def count_outcomes(target: Any, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Count the cases of a backend on a device."""
    own = [x for x in outcomes if x.target == target]
    return {
        "backend": target.backend,
        "device": target.device,
        "cases": len(own),
        "wrong": sum(bool(x.error) for x in own),
        "seconds": round(sum(x.seconds for x in own), 1),
    }


def describe_failure(campaign: Campaign, failure: Outcome) -> dict[str, str | int]:
    """Say what was wrong, and with which command it is wrong again."""
    backends = " ".join(dict.fromkeys(target.backend for target in campaign.targets))
    return {
        "case": failure.number,
        "backend": failure.target.backend,
        "device": failure.target.device,
        "estimator": failure.estimator,
        "error": failure.error,
        "call": failure.call,
        "repeat": f"rl-triton selftest --seed {campaign.seed} --cases {campaign.num_cases} --combinations "
        f"{campaign.num_combinations} --backend {backends} --case {failure.number}",
    }
