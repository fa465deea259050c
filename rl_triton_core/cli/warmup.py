"""`rl-triton warmup`: compile what calls need, before training begins."""

from __future__ import annotations

import argparse
import inspect

import torch

from rl_triton_core._internal.arguments.validation import check_choice
from rl_triton_core.cli.output import Report, Table, track_progress
from rl_triton_core.warmup import FUNCTIONS, USUAL_TENSORS, choose_tensors, list_required_options, warm_up

HELP = "compile what calls need, before training begins"
ESTIMATORS = [name.removeprefix("compute_") for name, x in FUNCTIONS.items() if not list_required_options(x)]
"""Names on the command line; the others take what only training code knows: a direction, a number of steps."""
DTYPES = ("float32", "bfloat16", "float16", "float64")
FLAG_DTYPES = ("bool", "uint8", *DTYPES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what describes the calls."""
    parser.add_argument("--estimator", nargs="+", choices=ESTIMATORS, default=ESTIMATORS, help="what will be called")
    parser.add_argument("--updates", nargs="+", default=(), help="whole updates on the CPU, by distribution of actions")
    parser.add_argument("--shape", nargs=2, type=int, default=(64, 128), help="of per-step tensors")
    parser.add_argument("--time-dim", type=int, choices=(-2, -1, 0, 1), default=-1, help="which of the two is time")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of real-valued tensors")
    parser.add_argument("--flag-dtype", choices=FLAG_DTYPES, default="bool", help="of terminations and the like")
    usual = f"arguments that will be passed beside the required ones; by default these: {', '.join(USUAL_TENSORS)}"
    parser.add_argument("--tensors", nargs="*", help=usual)
    parser.add_argument("--backend", choices=("triton", "cpu", "reference"), help="by default, by device")
    parser.add_argument("--device", help="of the tensors, such as cuda; by default, by backend")


def run(options: argparse.Namespace) -> Report:
    """Compile what is asked for, and tell how long each took."""
    functions = {name: FUNCTIONS.get(name) or FUNCTIONS[f"compute_{name}"] for name in options.estimator}
    for function in functions.values():  # before anything is compiled
        choose_tensors(inspect.signature(function).parameters, options.tensors)
    if options.updates:
        from rl_triton_core import compiled  # needs Numba, which not every installation has

        for head in options.updates:
            check_choice("--updates", head, compiled.HEADS)
    common = {"tensors": options.tensors, "time_dim": options.time_dim}
    common |= {"dtype": getattr(torch, options.dtype), "flag_dtype": getattr(torch, options.flag_dtype)}
    common |= {"backend": options.backend, "device": options.device}
    names = track_progress(options.estimator, "compiling", len(options.estimator))
    seconds = {name: warm_up(functions[name].__name__, options.shape, **common) for name in names}
    seconds |= {f"update, {head}": compiled.compile_update(head) for head in options.updates}
    rows = [(name, f"{time:.1f} s") for name, time in seconds.items()]
    return Report({name: round(time, 3) for name, time in seconds.items()}, [Table("", (), rows)])
