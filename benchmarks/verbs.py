"""The verbs of the Makefile that a newcomer runs first, with the environment that is there; an installation's size."""

from __future__ import annotations

import os
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement

from benchmarks.harness import time_call
from benchmarks.results import ROOT, Row, make_row
from rl_triton_core.cli.doctor import DISTRIBUTION, applies


class Setting(NamedTuple):
    """A verb."""

    verb: str


SETTINGS = {"cpu": [Setting("demo"), Setting("test"), Setting("install")], "cuda": [], "quick": [Setting("help")]}


def measure(setting: Setting, options: Namespace) -> Iterator[Row]:
    """The time of a verb, whose environment is made before; one that fails has none. The size of an installation."""
    if setting.verb == "install":
        yield make_row(setting.verb, "size", "GB", measure_size(DISTRIBUTION) / 1e9)
        return
    run_make(f"{os.environ.get('VENV', '.venv')}/.ready")
    yield make_row(setting.verb, "time", "s", time_call(lambda: run_make(setting.verb), "cpu") / 1e6)


def run_make(target: str) -> None:
    """Make it."""
    subprocess.run(["make", target], cwd=ROOT, check=True)


def measure_size(*names: str) -> int:
    """The bytes of installed distributions and of all that they require, without extras."""
    wanted = list(names)
    for name in wanted:
        required = map(Requirement, metadata.requires(name) or [])
        wanted += [x.name for x in required if applies(x, "") and x.name not in wanted]
    paths = {path.locate() for name in wanted for path in metadata.files(name) or []}
    return sum(os.stat(path).st_size for path in paths if os.path.exists(path))
