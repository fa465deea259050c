"""What Numba compiles, or loads from its cache, in a fresh process: while something is built, and while it is used."""

import json
import os
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from numba.core.event import install_recorder
from processes import run_python

from rl_triton_core._internal.equations.disk import DiskCache

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / name) for name in ("", "adapters", "examples", "tests", "tests/adapters")]
PROGRAM = """
import json
import sys

from compilations import counting

setup, use = sys.argv[1:]
scope = {}
with counting() as count:
    exec(setup, scope)
    built = count()
    exec(use, scope)
    print(json.dumps([built, count() - built]))
"""


@contextmanager
def counting():
    """A function that says how many functions were compiled or loaded: without the cache, these would be compiled."""
    loaded, load = [], DiskCache.load_overload

    def note(*given):
        found = load(*given)
        loaded.extend([] if found is None else [found])
        return found

    with install_recorder("numba:compile") as compiled, mock.patch.object(DiskCache, "load_overload", note):
        yield lambda: len(compiled.buffer) + len(loaded)


def count_compilations(setup: str, use: str, **environment: str) -> tuple[int, int]:
    """Run two pieces of a program, one after the other, and count the functions that each needs anew."""
    built, used = json.loads(run_with_paths(PROGRAM, setup, use, **environment).splitlines()[-1])
    return built, used


def run_with_paths(program: str, *arguments: str, **environment: str) -> str:
    """What a program prints that imports examples and helpers of tests."""
    paths = [*PATHS, environment.pop("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    return run_python(program, *arguments, **environment, PYTHONPATH=os.pathsep.join(paths))
