"""Measure speed on a CUDA machine, everything in ten minutes, and write the times to a folder.

    python scripts/gpu_benchmarks.py FOLDER [--commit HASH] [--suite headline rows ...] [--budget SECONDS] [--quick]

Needs no installation of the project: torch, triton, numpy, and for all of it nvcc and ninja. Every arm is
verified before it is timed. A suite's files (bench_SUITE.json, bench_SUITE.csv) are written when it ends; what the
budget did not allow is listed in them. Several calls with some of the suites each give them more time.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import run
from benchmarks.suites import SUITES

BUDGET = 540.0


def main(arguments: list[str]) -> int:
    """All suites of GPUs, unless some are named."""
    defaults = ["--budget", str(BUDGET), "--suite", *(name for name, suite in SUITES.items() if suite.device == "cuda")]
    folder, rest = arguments[:1], arguments[1:]
    return run.main([*folder, *defaults, *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
