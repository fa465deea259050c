"""`rl-triton selftest`: compare the compiled backends with the reference backend on this machine."""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_triton_core._internal.backend import BACKENDS, why_unavailable
from rl_triton_core.cli.output import Report, track_progress
from rl_triton_core.cli.warmup import FLAGS, FUNCTIONS, NUM_CALLS, choose_tensors, shape_of
from rl_triton_core.testing import assert_close

HELP = "Compare random calls with the reference backend on this machine. The exit status is 1 if one is wrong."
COMPILED = tuple(name for name in BACKENDS if name != "reference")
MAX_FAILURES_SHOWN = 5
SIZES = (1, 2, 3, 5, 8, 17, 31, 64, 129, 256, 513, 1024)
MAX_CELLS, MAX_CELLS_INTERPRETED = 20_000, 65
OPTIONS = {
    "gamma": (0.9, 0.99, 1.0),
    "lambda_": (0.0, 0.9, 1.0),
    "reverse": (False, True),
    "mask_mode": ("skip", "reset"),
}
"""What is drawn for the arguments that are no tensors."""
LIMIT = 1e-5
"""The largest relative error of a result in the Euclidean norm; all are float32."""


class Call(NamedTuple):
    """Describes a call."""

    backend: str
    device: str
    """Of its tensors."""
    function: str
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    dtype: torch.dtype
    flag_dtype: torch.dtype
    time_dim: int
    options: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how many cases, and which."""
    parser.add_argument("--cases", type=int, default=400, help="The number of random calls (default: 400).")
    parser.add_argument("--seed", type=int, default=0, help="The seed of the random calls (default: 0).")
    parser.add_argument("--backend", nargs="+", choices=COMPILED, default=list(COMPILED), help="The backends to test.")
    parser.add_argument("--case", type=int, help="The number of the only call to make, as one that failed before.")


def run(options: argparse.Namespace) -> Report:
    """Make random calls and compare their results with those of the reference backend."""
    for name, limit in {"cases": 1, "seed": 0, "case": 0}.items():
        number = getattr(options, name)
        if number is not None and number < limit:
            raise ValueError(f"--{name}: got {number}, expected at least {limit}")
    targets = find_targets(options.backend)
    if not targets:
        raise ValueError(f"--backend: got {' '.join(options.backend)}, expected one that runs here (rl-triton env)")
    numbers = range(options.cases) if options.case is None else [options.case]
    failures, repeat = [], f"rl-triton selftest --seed {options.seed} --cases {options.cases} --backend"
    for number, call, error in run_cases(targets, numbers, options.cases, options.seed):
        if error:
            command = f"{repeat} {' '.join(options.backend)} --case {number}"
            failures.append({"case": number, "error": error, "call": str(call), "repeat": command})
    verdict = f"{len(failures)} of {len(numbers)} results are wrong (seed {options.seed})"
    if not failures:
        verdict = f"all {len(numbers)} results agree with the reference (seed {options.seed})"
    parts = [f"{x['error']}\n{x['call']}\nto repeat it: {x['repeat']}\n" for x in failures[:MAX_FAILURES_SHOWN]]
    backends = [f"{backend} on {device}" for backend, device in targets]
    data = {"seed": options.seed, "cases": len(numbers), "backends": backends, "failures": failures}
    return Report(data, [f"compared: {', '.join(backends)}\n", *parts, verdict], int(bool(failures)))


def find_targets(backends: Iterable[str]) -> list[tuple[str, str]]:
    """Find the backends that run here, each with its devices."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    targets = [(backend, device) for backend in backends for device in devices]
    return [(backend, device) for backend, device in targets if why_unavailable(backend, torch.device(device)) is None]


def run_cases(
    targets: Sequence[tuple[str, str]], numbers: Sequence[int], num_cases: int, seed: int
) -> Iterator[tuple[int, Call, str]]:
    """Make some of the calls that a seed numbers, and tell of each what was wrong, if anything was."""
    for number in track_progress(numbers, "comparing with the reference", len(numbers)):
        call, error = draw_call(targets, number, num_cases, seed), ""
        try:
            with np.errstate(all="ignore"):  # Triton's interpreter computes with NumPy, and masked steps hold NaN
                compare_results(call, draw_arguments(call, (seed * 2**32 + number) % 2**64))
        except Exception as caught:  # whatever goes wrong is what is looked for
            error = f"{type(caught).__name__}: {caught}"
        yield number, call, error


def draw_call(targets: Sequence[tuple[str, str]], number: int, num_cases: int, seed: int) -> Call:
    """Choose the arguments of a call. Few cases share a few compiled variants, or compiling would take all the time."""
    rest, index = divmod(number, len(targets))
    round_number, which = divmod(rest, len(FUNCTIONS))
    name = list(FUNCTIONS)[which]
    pick = Random(f"{seed} {round_number % max(2, math.isqrt(num_cases) // 24)} {which}").choice
    draw = Random(f"{seed} {number}").choice
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    further = [x for x in ("truncated", "mask") if x in parameters and pick((True, False))]
    max_cells = MAX_CELLS_INTERPRETED if targets[index] == ("triton", "cpu") else MAX_CELLS
    num_steps = draw([n for n in SIZES if n <= max_cells])
    num_envs = draw([n for n in SIZES if n * num_steps <= max_cells])
    time_dim = pick((-1, 0))
    return Call(
        *targets[index],
        name,
        (num_envs, num_steps) if time_dim == -1 else (num_steps, num_envs),
        (*choose_tensors(parameters), *further),
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


def compare_results(call: Call, arguments: dict[str, Any]) -> None:
    """Raise unless a backend gives what the reference gives, also where it takes the fast path."""
    function = FUNCTIONS[call.function]
    expected = function(**arguments, backend="reference")
    moved = {name: x.to(call.device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    for _ in range(NUM_CALLS):
        results = function(**moved, backend=call.backend)
    names = getattr(results, "_fields", ["result"])
    pairs = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (results, expected)), strict=True)
    for name, (got, want) in zip(names, pairs, strict=True):
        assert_close(got.cpu(), want, rtol=LIMIT, name=name)
