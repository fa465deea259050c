"""The verbs of the Makefile that a newcomer runs first, with the environment that is there. Seconds."""

from __future__ import annotations

import os
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.harness import time_call
from benchmarks.results import ROOT, Row, make_row


class Setting(NamedTuple):
    """A verb."""

    verb: str


SETTINGS = {"cpu": [Setting("demo"), Setting("test")], "cuda": [], "quick": [Setting("help")]}


def measure(setting: Setting, options: Namespace) -> Iterator[Row]:
    """The time of a verb, whose environment is made before; one that fails has none."""
    run_make(f"{os.environ.get('VENV', '.venv')}/.ready")
    yield make_row(setting.verb, "time", "s", time_call(lambda: run_make(setting.verb), "cpu") / 1e6)


def run_make(target: str) -> None:
    """Make it."""
    subprocess.run(["make", target], cwd=ROOT, check=True)
