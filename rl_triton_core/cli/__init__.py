"""The command line: ``rl-triton``, or ``python -m rl_triton_core``.

A command is a module with a line of `HELP` and `run(options)`, which returns a `Report`, perhaps with
`add_arguments(parser)`, and an entry of `COMMANDS`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from typing import Any

from rl_triton_core._internal.backend import BackendUnavailableError
from rl_triton_core._version import __version__
from rl_triton_core.cli import doctor, env, output, selftest, warmup

COMMANDS: dict[str, Any] = {"env": env, "doctor": doctor, "selftest": selftest, "warmup": warmup}
with suppress(ImportError):  # where the core alone can be imported
    COMMANDS["run"] = import_module("rl_triton_adapters.auto")  # which imports no framework, nor does the next one
    COMMANDS["estimate"] = import_module("rl_triton_adapters.estimate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit status."""
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(sys.stdout or nowhere),
        redirect_stderr(sys.stderr or nowhere),
    ):
        try:
            return run_command(sys.argv[1:] if arguments is None else arguments)
        except OSError as error:
            with suppress(OSError):  # or Python would write there as it ends
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):  # whoever reads has read enough
                return 0
            with suppress(OSError):
                print(f"rl-triton: error: {error}", file=sys.stderr)
            return 1


def run_command(arguments: Sequence[str]) -> int:
    """Do what the arguments say, and return the exit status; what is printed is written at once."""
    parser = build_parser()
    try:
        options = parser.parse_args(arguments or ["env"])
        report: output.Report = COMMANDS[options.command].run(options)
        output.print_report(report, options.json)
        return report.exit_code
    except (BackendUnavailableError, ImportError, TypeError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130  # as of a shell
    finally:
        sys.stdout.flush()


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands and their options."""
    parser = argparse.ArgumentParser(
        prog="rl-triton",
        description="Switch rl-triton-core on in a program, and look after its installation.",
        epilog="Exit status: 0 if all is fine, 1 if something is wrong, 2 if an argument is. The default is env.",
    )
    parser.add_argument("--version", action="version", version=f"rl-triton-core {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        if name != "run":  # which becomes the command, and prints nothing
            command.add_argument("--json", action="store_true", help="Print one JSON document and nothing else.")
        if hasattr(module, "add_arguments"):
            module.add_arguments(command)
    return parser
