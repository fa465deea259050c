"""Print what a bug report needs: ``python -m rl_triton_core``; compile ahead: ``python -m rl_triton_core warmup``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from rl_triton_core._internal.backends import BackendUnavailableError
from rl_triton_core.system_info import system_info
from rl_triton_core.warmup import FUNCTIONS, USUAL_TENSORS, warm_up

ESTIMATORS = [name.removeprefix("compute_") for name in FUNCTIONS if name != "linear_recurrence"]
"""Names on the command line; `linear_recurrence` takes a direction, which training code knows."""
DTYPES = ("float32", "bfloat16", "float16", "float64")
FLAG_DTYPES = ("bool", "uint8", *DTYPES)


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command != "warmup":
        print_system_info()
        return
    try:
        run_warmup(options)
    except (BackendUnavailableError, TypeError, ValueError) as error:
        parser.error(str(error))


def build_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(
        prog="python -m rl_triton_core", description="Describe the machine and the installation, or compile ahead."
    )
    warmup = parser.add_subparsers(dest="command").add_parser(
        "warmup",
        description="Compile what calls need, before training begins.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    warmup.add_argument("--estimator", nargs="+", choices=ESTIMATORS, default=ESTIMATORS, help="what will be called")
    warmup.add_argument("--shape", nargs=2, type=int, default=(64, 128), help="of per-step tensors")
    warmup.add_argument("--time-dim", type=int, choices=(-2, -1, 0, 1), default=-1, help="which of the two is time")
    warmup.add_argument("--dtype", choices=DTYPES, default="float32", help="of real-valued tensors")
    warmup.add_argument("--flag-dtype", choices=FLAG_DTYPES, default="bool", help="of terminations and the like")
    usual = f"arguments that will be passed beside the required ones; by default these: {', '.join(USUAL_TENSORS)}"
    warmup.add_argument("--tensors", nargs="*", help=usual)
    warmup.add_argument("--backend", choices=("triton", "cpu", "reference"), help="by default, by device")
    warmup.add_argument("--device", help="of the tensors, such as cuda; by default, by backend")
    return parser


def run_warmup(options: argparse.Namespace) -> None:
    """Compile what is asked for, and tell how long each took."""
    for estimator in options.estimator:
        seconds = warm_up(
            estimator if estimator in FUNCTIONS else f"compute_{estimator}",
            options.shape,
            tensors=options.tensors,
            dtype=getattr(torch, options.dtype),
            flag_dtype=getattr(torch, options.flag_dtype),
            time_dim=options.time_dim,
            backend=options.backend,
            device=options.device,
        )
        print(f"{estimator:<20}  {seconds:.1f} s", flush=True)


def print_system_info() -> None:
    """Print names and values."""
    info = system_info()
    width = max(map(len, info))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in info.items()))


if __name__ == "__main__":
    main()
