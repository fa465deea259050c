"""Test the core with the oldest supported packages: every ``>=`` of pyproject.toml taken as ``==``.

    python scripts/check_lower_bounds.py PYTHON

Slow, and by hand: it makes an environment of its own under build/ and downloads another torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / "build" / "lower-bounds"


def pin_lowest_version(requirement: str) -> str:
    """'numpy>=2.0,<3; marker' -> 'numpy==2.0; marker'."""
    bound, semicolon, marker = requirement.partition(";")
    return bound.partition(",")[0].replace(">=", "==").strip() + semicolon + marker


def run_command(*command: str | Path) -> None:
    """Run a command in the checkout; stop where it fails."""
    print("+", *command, flush=True)
    result = subprocess.run(command, check=False, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"})
    if result.returncode:
        sys.exit(f"{command[0]}: exit status {result.returncode}")


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages, python = [*map(pin_lowest_version, project["dependencies"])], VENV / "bin" / "python"
    run_command(sys.argv[1], "-m", "venv", VENV)
    run_command(python, "-m", "pip", "install", "--upgrade", "pip")
    run_command(python, "-m", "pip", "install", *packages, "pytest", "pytest-xdist", "hypothesis", "-e", ".")
    run_command(python, "-m", "pytest", "-n", "2", "tests/core")
    print("lower bounds hold:", *packages, sep="\n  ")
