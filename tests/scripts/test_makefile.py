"""What the Makefile prints where it makes an environment, with a Python and a pip that only talk."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
case "$*" in
    *"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *install*$FAILS*) echo "ERROR: no matching distribution" >&2; exit 1 ;;
    *--quiet*install*) ;;
    *install*) for i in 1 2 3 4 5 6 7 8 9; do echo "Collecting $i"; done ;;
    *examples*) echo "the demo" ;;
esac
"""


def make(folder, fails):
    """Make the demo in a folder, where the installation of what has this name fails."""
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    command = ["make", "demo", f"PYTHON={python}", f"VENV={folder / 'venv'}"]
    env = {key: x for key, x in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))} | {"FAILS": fails}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_an_installation_says_a_line(tmp_path):
    done = make(tmp_path, "nothing of that name")
    first, second = done.stdout.splitlines()
    assert first.startswith("Installing ") and second == "the demo" and not done.stderr and done.returncode == 0
    assert make(tmp_path, "nothing of that name").stdout == "the demo\n", "there it is"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("fails", ["torch==", "-e "])
def test_an_installation_that_fails_says_so(tmp_path, fails):
    for _ in range(2):
        done = make(tmp_path, fails)
        assert "ERROR: no matching distribution" in done.stderr and "the demo" not in done.stdout
        assert done.returncode != 0
