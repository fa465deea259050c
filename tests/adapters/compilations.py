"""What Numba compiles in a fresh process with an empty cache: while something is built, and while it is used."""

import json
import os
from pathlib import Path

from processes import run_python

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
    paths = [
        *(str(ROOT / name) for name in ("", "adapters", "tests", "tests/adapters")),
        environment.pop("PYTHONPATH", os.environ.get("PYTHONPATH", "")),
    ]
    environment |= {"NUMBA_CACHE_DIR": str(cache), "NUMBA_OPT": "0", "PYTHONPATH": os.pathsep.join(paths)}
    built, used = json.loads(run_python(PROGRAM, setup, use, **environment).splitlines()[-1])
    return built, used
