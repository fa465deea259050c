"""Measure, and write a table for each benchmark to a folder.

    python -m benchmarks FOLDER BENCHMARK ... [--only TEXT ...] [--device cpu] [--quick] [--budget SECONDS]

Every arm is verified before it is timed. A setting is written when it is measured, in the place of what the file has of
it; what the budget does not allow is printed. Needs no installation of the project.
"""

import gc
import importlib
import importlib.util
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks import end_to_end, results
from benchmarks.calls import SUITES
from benchmarks.end_to_end import run
from benchmarks.settings import complete_options, read_settings


class Benchmark(NamedTuple):
    """A module with `measure(setting, options)`, which gives the lines of a setting of the table.

    Where there is `prepare(settings, options)`, it is called first. A training loop has `make_arm` instead.
    """

    module: str
    needs: tuple[str, ...] = ()
    argument: str = ""  # what the module's functions need besides: the name of a suite

    def find_missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def load(self) -> Any:
        module = importlib.import_module(f"benchmarks.{self.module}")
        return module.SUITES[self.argument] if self.argument else module

    def list_settings(self, name: str, device: str, where: str) -> list[Any]:
        """Those of a device or, if that is `where`, of a quick run on it."""
        if self.module == "calls":
            return list(self.load().SETTINGS[where])
        loop = {"kind": end_to_end.Setting, "device": device} if self.module.startswith("end_to_end") else {}
        return read_settings(name, where, **loop)


RAY = ("ray", "gymnasium")
BENCHMARKS = {
    **{f"calls_{name}": Benchmark("calls", argument=name) for name in SUITES},
    "first_call": Benchmark("first_call", ("numba",)),
    "losses": Benchmark("losses"),
    "packed": Benchmark("packed"),
    "token_log_probs": Benchmark("token_log_probs"),
    "linear_token_log_probs": Benchmark("linear_token_log_probs"),
    "trl_step": Benchmark("trl_step", ("trl", "accelerate", "datasets")),
    "perceptrons": Benchmark("perceptrons", ("stable_baselines3",)),
    "robotics": Benchmark("robotics", ("rsl_rl", "rl_games", "skrl")),
    "multi_gpu": Benchmark("multi_gpu", ("tqdm",)),
    "learning": Benchmark("learning", ("stable_baselines3",)),
    "same_learning": Benchmark("learning", ("stable_baselines3", "sb3_contrib"), "train_sb3"),
    "same_learning_rllib": Benchmark("learning", RAY, "train_rllib"),
    "cleanrl": Benchmark("end_to_end.cleanrl", ("tqdm",)),
    "sb3": Benchmark("end_to_end.sb3", ("stable_baselines3", "gymnasium")),
    "off_policy": Benchmark("off_policy", ("stable_baselines3", "sb3_contrib")),
    "torchrl": Benchmark("end_to_end.torchrl", ("torchrl", "tensordict")),
    "rllib": Benchmark("end_to_end.rllib", RAY),
    "impala": Benchmark("end_to_end.rllib", RAY),
    "rllib_training": Benchmark("rllib_training", RAY),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 if an arm was wrong or failed."""
    parser = results.Parser(__doc__)
    parser.add_argument("benchmarks", nargs="+", choices=BENCHMARKS, metavar="BENCHMARK", help=", ".join(BENCHMARKS))
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
    if missing := BENCHMARKS[name].find_missing():
        print(f"{name}: {', '.join(missing)} not installed")
        return False
    module, system = BENCHMARKS[name].load(), results.describe_system(options.commit)
    options = complete_options(name, options)
    known = BENCHMARKS[name].list_settings(name, options.device, "quick" if options.quick else options.device)
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
        print(f"{name} {i + 1}/{len(settings)}: {setting}", *map(describe_row, rows), sep="\n  ", flush=True)
        bad |= any(row.note.startswith(("wrong", "failed")) for row in rows)
        gc.collect()
        torch.cuda.empty_cache()
    return bad


def measure_setting(module: Any, setting: Any, options: Namespace) -> list[results.Row]:
    """The lines of a setting, or one that says why there are none."""
    try:
        return list(getattr(module, "measure", partial(run.measure, module))(setting, options))
    except Exception as error:
        return [results.make_row("", "", "", [], results.describe_failure(error))]


def describe_row(row: results.Row) -> str:
    number = "" if row.median is None else f" {row.median:g} [{row.low:g}, {row.high:g}] {row.unit}"
    return f"{row.arm} {row.metric}{number} {row.note}".strip()


if __name__ == "__main__":
    sys.exit(main())
