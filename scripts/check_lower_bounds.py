"""Test with the oldest supported packages: every ``>=`` of pyproject.toml taken as ``==``.

Slow, and by hand: it makes an environment of its own under build/ and downloads another torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis")


def pin_lowest_version(requirement: str) -> str:
    """'numpy>=2.0,<3; marker' -> 'numpy==2.0; marker'."""
    bound, semicolon, marker = requirement.partition(";")
    return bound.partition(",")[0].replace(">=", "==").strip() + semicolon + marker


def oldest_packages(project: dict[str, Any], extras: Sequence[str]) -> list[str]:
    """The core's dependencies and those of the extras, each at its lower bound."""
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    return [pin_lowest_version(requirement) for requirement in requirements]


def run_command(*command: str | Path, **environment: str) -> None:
    """Run a command in the checkout; stop where it fails."""
    print("+", *command, flush=True)
    result = subprocess.run(command, check=False, cwd=ROOT, env={**os.environ, **environment})
    if result.returncode:
        sys.exit(f"{command[0]}: exit status {result.returncode}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter to test with")
    parser.add_argument("--extra", action="append", default=[], help="an adapter to test too, for example sb3")
    parser.add_argument("--venv", type=Path, default=ROOT / "build" / "lower-bounds", help="where to install")
    parser.add_argument("--list", action="store_true", help="print the packages and stop")
    return parser.parse_args()


def main() -> None:
    """Install the lower bounds and run the tests."""
    arguments = parse_arguments()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = oldest_packages(project, arguments.extra)
    if arguments.list:
        print(*packages, sep="\n")
        return
    python = arguments.venv / "bin" / "python"
    run_command(arguments.python, "-m", "venv", arguments.venv)
    run_command(python, "-m", "pip", "install", "--upgrade", "pip")
    run_command(python, "-m", "pip", "install", *packages, *TEST_TOOLS, "-e", ".")
    tests = ["tests/core", *(f"tests/adapters/test_{extra}.py" for extra in arguments.extra)]
    run_command(python, "-m", "pytest", "-n", "2", *tests, TRITON_INTERPRET="1")
    print("lower bounds hold:", *packages, sep="\n  ")


if __name__ == "__main__":
    main()
