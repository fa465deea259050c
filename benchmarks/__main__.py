"""Measure, and write a table for each benchmark to a folder.

    python -m benchmarks FOLDER BENCHMARK ... [--only TEXT ...] [--device cpu] [--quick] [--budget SECONDS]

Every arm is verified before it is timed. A setting is written when it is measured, in the place of what the file has of
it; what the budget does not allow is printed. Needs no installation of the project.
"""

import gc
import importlib
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import end_to_end, results
from benchmarks.settings import TABLE, complete_options, find_missing, read_settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 if an arm was wrong or failed."""
    parser = results.Parser(__doc__)
    parser.add_argument("benchmarks", nargs="+", choices=TABLE, metavar="BENCHMARK", help=", ".join(TABLE))
    parser.add_argument("--only", nargs="+", default=[""], help="settings whose description has one of these")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny settings, to see that everything runs")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which the rest is skipped")
    parser.add_argument("--seconds", type=float, help="about how long a setting is measured")
    parser.add_argument("--jobs", type=int, default=2, help="processes, where they do not disturb each other")
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or (0.1 if options.quick else None)
    options.ends = time.perf_counter() + options.budget
    outcomes = [run_benchmark(name, options) for name in options.benchmarks]
    return int(any(outcomes))


def run_benchmark(name: str, options: Namespace) -> bool:
    """Measure the settings of a benchmark; whether an arm was wrong or failed, or no setting was meant."""
    if missing := find_missing(TABLE[name].get("needs", ())):
        print(f"{name}: {', '.join(missing)} not installed")
        return False
    module = importlib.import_module(f"benchmarks.{TABLE[name].get('module', name)}")
    system, options = results.describe_system(options.commit), complete_options(name, options)
    known = read_settings(name, "quick" if options.quick else options.device, module.Setting)
    settings = [x for x in known if any(text in str(x) for text in options.only)]
    if not settings:
        print(f"{name}: --only: got {options.only}, expected a part of one of:", *known, sep="\n  ")
        return True
    if hasattr(module, "prepare"):
        module.prepare(settings, options)
    bad = False
    for i, setting in enumerate(settings):
        if time.perf_counter() > options.ends:
            print(f"{name}: skipped for lack of time:", *settings[i:], sep="\n  ")
            break
        rows = measure_setting(module, setting, options)
        rows = results.add_rows(options.folder / f"{name}.csv", system, setting._asdict(), rows)
        numbers = ("" if x.median is None else f" {x.median:g} [{x.low:g}, {x.high:g}] {x.unit}" for x in rows)
        found = [f"{x.arm} {x.metric}{number} {x.note}".strip() for x, number in zip(rows, numbers, strict=True)]
        print(f"{name} {i + 1}/{len(settings)}: {setting}", *found, sep="\n  ", flush=True)
        bad |= any(row.note.startswith(("wrong", "failed")) for row in rows)
        gc.collect()
        torch.cuda.empty_cache()
    return bad


def measure_setting(module: Any, setting: Any, options: Namespace) -> list[results.Row]:
    """The lines of a setting, or one that says why there are none. A training loop has arms instead of a function."""
    function = getattr(module, options.table.get("function", "measure"), partial(end_to_end.measure, module))
    try:
        return list(function(setting, options))
    except Exception as error:
        return [results.make_row("", "", "", [], results.describe_failure(error))]


if __name__ == "__main__":
    sys.exit(main())
