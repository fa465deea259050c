"""What Numba compiles in a fresh process with an empty cache: while something is built, and while it is used."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json
import sys

from numba.core.event import install_recorder

setup, use = sys.argv[1:]
scope = {}
with install_recorder("numba:compile") as compilations:
    exec(setup, scope)
    built = len(compilations.buffer)
    exec(use, scope)
print(json.dumps([built, len(compilations.buffer) - built]))
"""


def count_compilations(setup: str, use: str, cache: Path, **environment: str) -> tuple[int, int]:
    """Run two pieces of a program, one after the other, and count the compilations in each."""
    paths = [str(ROOT), str(ROOT / "adapters"), environment.pop("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, setup, use],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)} | environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    built, used = json.loads(result.stdout.splitlines()[-1])
    return built, used
