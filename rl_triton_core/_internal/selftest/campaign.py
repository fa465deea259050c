"""A campaign: random calls of all estimators on all backends of this machine, numbered, each made from its number."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from rl_triton_core._internal.backends import why_unavailable
from rl_triton_core._internal.selftest.cases import ESTIMATORS, NSTEP, Target, check_case, make_random_call

TESTED = (*ESTIMATORS, NSTEP)
MAX_STEPS = {"reference": 129, "cpu": 300, "triton": 5003}
MAX_STEPS_INTERPRETED = 33


class Campaign(NamedTuple):
    """Which calls are made."""

    targets: list[Target]
    num_cases: int
    seed: int
    num_combinations: int
    """Of the arguments that decide what is compiled, for each estimator."""


class Outcome(NamedTuple):
    """What came of a call."""

    number: int
    target: Target
    estimator: str
    error: str
    """What was wrong, empty if nothing was."""
    call: str
    seconds: float


def find_targets(backends: Iterable[str]) -> list[Target]:
    """Find the backends that run here, each with its devices."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    pairs = [(backend, device) for backend in backends for device in devices]
    return [
        Target(backend, device, MAX_STEPS_INTERPRETED if (backend, device) == ("triton", "cpu") else MAX_STEPS[backend])
        for backend, device in pairs
        if why_unavailable(backend, torch.device(device)) is None
    ]


def choose_num_combinations(num_cases: int) -> int:
    """Few cases share a few combinations, or compiling would take all the time."""
    return max(2, math.isqrt(num_cases) // 24)


def run_campaign(campaign: Campaign) -> Iterator[Outcome]:
    """Make the calls, one after another."""
    return (run_numbered_case(campaign, number) for number in range(campaign.num_cases))


def run_numbered_case(campaign: Campaign, number: int) -> Outcome:
    """Make one call of a campaign and compare it with the oracle."""
    rest, index = divmod(number, len(campaign.targets))
    round_number, estimator = divmod(rest, len(TESTED))
    target, estimator = campaign.targets[index], TESTED[estimator]
    seed = campaign.seed * 2**32 + number
    combination = campaign.seed * 2**32 + round_number % campaign.num_combinations
    case, how = make_random_call(estimator, target, seed, combination)
    start, error = time.perf_counter(), ""
    try:
        with np.errstate(all="ignore"):  # Triton's interpreter computes with NumPy, and many cases hold NaN
            check_case(case, target, how)
    except Exception as caught:  # whatever goes wrong is what is looked for
        error = f"{type(caught).__name__}: {caught}"
    return Outcome(number, target, estimator.name, error, f"{case} {how}", time.perf_counter() - start)
