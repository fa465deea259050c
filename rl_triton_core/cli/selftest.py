"""`rl-triton selftest`: compare the compiled backends with the reference backend on this machine."""

from __future__ import annotations

import argparse
import inspect
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_triton_core._internal.backend import BACKENDS, why_unavailable
from rl_triton_core.cli.output import Report, Table, track_progress
from rl_triton_core.testing import assert_close
from rl_triton_core.warmup import FLAGS, FUNCTIONS, NUM_CALLS, choose_tensors, shape_of

HELP = "compare results with those of the reference backend on this machine; exit status 1 if one is wrong"
COMPILED = tuple(name for name in BACKENDS if name != "reference")
MAX_FAILURES_SHOWN = 5
SIZES = (1, 2, 3, 5, 8, 17, 31, 64, 129, 256, 513, 1024)
MAX_CELLS, MAX_CELLS_INTERPRETED = 20_000, 65
OPTIONS = {
    "gamma": (0.9, 0.99, 1.0),
    "lambda_": (0.0, 0.9, 1.0),
    "n": (1, 3, 8),
    "reverse": (False, True),
    "mask_mode": ("skip", "reset"),
}
"""What is drawn for the arguments that are no tensors."""
LIMIT = 1e-5
"""The largest relative error of a result in the Euclidean norm; all are float32."""


class Target(NamedTuple):
    """A backend, and the device of its tensors."""

    backend: str
    device: str


class Campaign(NamedTuple):
    """Which calls are made: random ones, numbered, each made from its number."""

    targets: list[Target]
    num_cases: int
    seed: int
    num_combinations: int
    """Of the arguments that decide what is compiled, for each function."""


class Call(NamedTuple):
    """Describes the arguments of a call."""

    function: str
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    dtype: torch.dtype
    flag_dtype: torch.dtype
    time_dim: int
    options: dict[str, Any]


class Outcome(NamedTuple):
    """What came of a call."""

    number: int
    target: Target
    call: Call
    error: str
    """What was wrong, empty if nothing was."""
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how many cases, and which."""
    parser.add_argument("--cases", type=int, default=400, help="how many random calls to make")
    parser.add_argument("--seed", type=int, default=0, help="of the random calls")
    parser.add_argument("--backend", nargs="+", choices=COMPILED, default=list(COMPILED), help="of those that run here")
    parser.add_argument("--case", type=int, help="make this one only, with the other arguments as when it failed")
    parser.add_argument("--seconds", type=float, help="stop after this time, whatever is left")
    combinations = "of the arguments that decide what is compiled, for each function; by default, more with more cases"
    parser.add_argument("--combinations", type=int, help=combinations)


def run(options: argparse.Namespace) -> Report:
    """Make random calls and compare their results with those of the reference backend."""
    least = {"cases": 1, "combinations": 1, "seed": 0, "case": 0, "seconds": 0}
    for name, limit in least.items():
        number = getattr(options, name)
        if number is not None and not number >= limit:
            raise ValueError(f"--{name}: got {number}, expected at least {limit}")
    targets = find_targets(options.backend)
    if not targets:
        raise ValueError(f"--backend: got {' '.join(options.backend)}, expected one that runs here (rl-triton env)")
    # Few cases share a few combinations, or compiling would take all the time.
    combinations = options.combinations or max(2, math.isqrt(options.cases) // 24)
    campaign = Campaign(targets, options.cases, options.seed, combinations)
    is_one = options.case is not None
    outcomes = [run_case(campaign, options.case)] if is_one else [*run_campaign(campaign, options.seconds)]
    return report_outcomes(campaign, outcomes)


def find_targets(backends: Iterable[str]) -> list[Target]:
    """Find the backends that run here, each with its devices."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    targets = [Target(backend, device) for backend in backends for device in devices]
    return [x for x in targets if why_unavailable(x.backend, torch.device(x.device)) is None]


def run_campaign(campaign: Campaign, seconds: float | None) -> Iterator[Outcome]:
    """Make the calls of a campaign with a progress bar, until the time is over."""
    end = None if seconds is None else time.monotonic() + seconds
    for number in track_progress(range(campaign.num_cases), "comparing with the reference", campaign.num_cases):
        yield run_case(campaign, number)
        if end is not None and time.monotonic() > end:
            return


def run_case(campaign: Campaign, number: int) -> Outcome:
    """Make one call of a campaign and compare its results with those of the reference backend."""
    target, call = draw_call(campaign, number)
    start, error = time.perf_counter(), ""
    try:
        with np.errstate(all="ignore"):  # Triton's interpreter computes with NumPy, and masked steps hold NaN
            compare_results(call, target, draw_arguments(call, (campaign.seed * 2**32 + number) % 2**64))
    except Exception as caught:  # whatever goes wrong is what is looked for
        error = f"{type(caught).__name__}: {caught}"
    return Outcome(number, target, call, error, time.perf_counter() - start)


def draw_call(campaign: Campaign, number: int) -> tuple[Target, Call]:
    """Choose the arguments of a call. Calls of one combination share what is compiled for them."""
    rest, index = divmod(number, len(campaign.targets))
    round_number, which = divmod(rest, len(FUNCTIONS))
    target, name = campaign.targets[index], list(FUNCTIONS)[which]
    pick = Random(f"{campaign.seed} {round_number % campaign.num_combinations} {which}").choice
    draw = Random(f"{campaign.seed} {number}").choice
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    further = [x for x in ("truncated", "mask") if x in parameters and pick((True, False))]
    max_cells = MAX_CELLS_INTERPRETED if target == ("triton", "cpu") else MAX_CELLS
    num_steps = draw([n for n in SIZES if n <= max_cells])
    num_envs = draw([n for n in SIZES if n * num_steps <= max_cells])
    time_dim = pick((-1, 0))
    return target, Call(
        name,
        (num_envs, num_steps) if time_dim == -1 else (num_steps, num_envs),
        (*choose_tensors(parameters, None), *further),
        pick((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
        pick((torch.bool, torch.uint8, torch.float32)),
        time_dim,
        {option: draw(values) for option, values in OPTIONS.items() if option in parameters},
    )


def draw_arguments(call: Call, seed: int) -> dict[str, Any]:
    """Draw the tensors of a call; NaN stands where the mask leaves a step out."""
    generator, arguments = torch.Generator().manual_seed(seed), dict(call.options)
    for name in call.tensors:
        shape = shape_of(name, call.shape, call.time_dim, per_step="truncated" in call.tensors)
        x = torch.randn(shape, generator=generator)
        if name in FLAGS:  # are rarely set, masks mostly
            x = torch.rand(shape, generator=generator) < (0.8 if name == "mask" else 0.1)
        arguments[name] = (x.tanh() if name == "beta" else x).to(call.flag_dtype if name in FLAGS else call.dtype)
    if "mask" in call.tensors:
        for name in call.tensors:
            if name not in FLAGS and arguments[name].shape == call.shape:
                arguments[name][arguments["mask"] == 0] = math.nan
    if "time_dim" in inspect.signature(FUNCTIONS[call.function]).parameters:
        arguments["time_dim"] = call.time_dim
    return arguments


def compare_results(call: Call, target: Target, arguments: dict[str, Any]) -> None:
    """Raise unless a backend gives what the reference gives, also where it takes the fast path."""
    function = FUNCTIONS[call.function]
    expected = function(**arguments, backend="reference")
    moved = {name: x.to(target.device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    for _ in range(NUM_CALLS):
        results = function(**moved, backend=target.backend)
    names = getattr(results, "_fields", ["result"])
    pairs = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (results, expected)), strict=True)
    for name, (got, want) in zip(names, pairs, strict=True):
        assert_close(got.cpu(), want, rtol=LIMIT, name=name)


def report_outcomes(campaign: Campaign, outcomes: Sequence[Outcome]) -> Report:
    """Count what was right and say how to repeat what was wrong."""
    failures = [x for x in outcomes if x.error]
    counts = []
    for target in campaign.targets:
        own = [x for x in outcomes if x.target == target]
        wrong, seconds = sum(bool(x.error) for x in own), round(sum(x.seconds for x in own), 1)
        counts.append({**target._asdict(), "cases": len(own), "wrong": wrong, "seconds": seconds})
    rows = [[str(value) for value in count.values()] for count in counts]
    described = [describe_failure(campaign, failure) for failure in failures]
    data: dict[str, Any] = {"seed": campaign.seed, "cases": len(outcomes), "combinations": campaign.num_combinations}
    verdict = f"{len(failures)} of {len(outcomes)} results are wrong (seed {campaign.seed})"
    if not failures:
        verdict = f"all {len(outcomes)} results agree with the reference (seed {campaign.seed})"
    parts = [f"\n{x['error']}\n{x['call']}\nto repeat it: {x['repeat']}" for x in described[:MAX_FAILURES_SHOWN]]
    table = Table("", ("backend", "device", "cases", "wrong", "seconds"), rows)
    data |= {"backends": counts, "failures": described}
    return Report(data, [table, *parts, f"\n{verdict}"], int(bool(failures)))


def describe_failure(campaign: Campaign, failure: Outcome) -> dict[str, str | int]:
    """Say what was wrong, and with which command it is wrong again."""
    backends = " ".join(dict.fromkeys(target.backend for target in campaign.targets))
    return {
        "case": failure.number,
        **failure.target._asdict(),
        "error": failure.error,
        "call": str(failure.call),
        "repeat": f"rl-triton selftest --seed {campaign.seed} --cases {campaign.num_cases} --combinations "
        f"{campaign.num_combinations} --backend {backends} --case {failure.number}",
    }
