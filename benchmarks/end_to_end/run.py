"""Measure training loops end to end, arm against arm, and write a result file per framework.

    python -m benchmarks.end_to_end FOLDER [--suite synthetic sb3 ...] [--device cuda] [--budget SECONDS] [--quick]

In every setting, all arms first compute the advantages of the same experience, which must agree with those of the first
arm. Then they train, each for itself, an iteration in turns. Writes end_to_end_FRAMEWORK.json when a framework is done:
the times of all iterations, and what follows from them. A framework that is not installed is skipped, which its file
says, and so are the settings that the budget did not allow.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import files
from benchmarks.end_to_end import arithmetic
from benchmarks.end_to_end.arithmetic import Times
from benchmarks.end_to_end.frameworks import REGISTRY, Arm, Module, Setting
from benchmarks.end_to_end.stopwatch import ADVANTAGES, Stopwatch
from rl_triton_core.testing import relative_error

TOLERANCE = 1e-5
"""The largest ‖x − stock‖ / ‖stock‖ of an arm that counts."""


class Plan(NamedTuple):
    """How often things are repeated."""

    warmups: int = 2
    rounds: int = 40
    seconds: float = 20.0
    """After so many no round begins, unless some arm has not had every place in the order twice."""


QUICK = Plan(warmups=1, rounds=2)


@dataclass
class Session:
    """What all frameworks of one run share."""

    folder: Path
    device: str
    plan: Plan
    quick: bool = False
    commit: str | None = None
    seconds: float = float("inf")
    started: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.seconds - (time.perf_counter() - self.started)

    def settings(self, module: Module) -> tuple[Setting, ...]:
        """What is measured of a framework."""
        if self.quick:
            return tuple(setting._replace(device=self.device) for setting in module.SETTINGS["quick"])
        return module.SETTINGS[self.device]


# --- one setting ------------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """An arm in a setting, and what came of it."""

    name: str
    status: str = "ok"
    error: float | None = None
    arm: Arm | None = None
    times: Times = field(default_factory=list)

    def drop(self, status: str) -> None:
        """Say why there are no times."""
        self.arm, self.status = None, status

    def failed(self, error: Exception) -> None:
        """Say what happened."""
        first = next(iter(str(error).splitlines()), "")
        self.drop(f"failed: {type(error).__name__}: {first[:200]}")


def enter_arms(module: Module, setting: Setting, watch: Stopwatch) -> list[Entry]:
    """The arms, verified against the first one."""
    entries, expected = [Entry(name) for name in module.ARMS], None
    for entry in entries:
        try:
            entry.arm = module.make_arm(entry.name, setting, watch)
            results = [torch.as_tensor(x).double() for x in entry.arm.results()]
        except Exception as error:
            entry.failed(error)
            continue
        expected = expected or results
        entry.error = float(max(relative_error(x, y) for x, y in zip(results, expected, strict=True)))
        if not entry.error <= TOLERANCE:
            entry.drop("wrong")
    return entries


def warm_up(entry: Entry, watch: Stopwatch, times: int) -> None:
    """Some iterations that do not count."""
    try:
        for _ in range(times):
            if entry.arm is not None:
                time_iteration(entry.arm, watch)
    except Exception as error:
        entry.failed(error)


def time_iteration(arm: Arm, watch: Stopwatch) -> dict[str, float]:
    """The times of an iteration by its parts."""
    return watch.time(partial(arm.iteration, *arm.fresh()))


def measure(module: Module, setting: Setting, plan: Plan, seconds: float = float("inf")) -> list[Entry]:
    """The arms with the times of their iterations; in about so many seconds, what precedes them included."""
    started, watch = time.perf_counter(), Stopwatch(setting.device)
    entries = enter_arms(module, setting, watch)
    for entry in entries:
        warm_up(entry, watch, plan.warmups)
    arms = {entry.name: (entry, entry.arm) for entry in entries if entry.arm is not None}
    ends = min(started + seconds, time.perf_counter() + plan.seconds)
    for round_ in range(plan.rounds if arms else 0):
        if round_ >= 2 * len(arms) and time.perf_counter() > ends:
            break
        for name in arithmetic.order_arms(list(arms), round_):
            entry, arm = arms[name]
            entry.times.append(time_iteration(arm, watch))
    return entries


def make_arm_row(setting: Setting, entry: Entry) -> files.Row:
    """A line per arm; times in microseconds."""
    row = {
        **setting._asdict(),
        "arm": entry.name,
        "status": entry.status,
        "error": None,
        "iterations": len(entry.times),
    }
    if entry.error is not None:
        row["error"] = float(f"{entry.error:.3g}")
    if entry.times:
        taken = arithmetic.find_share(entry.times)
        quartiles = {
            name: round_numbers(found, 1) for name, found in arithmetic.find_part_quartiles(entry.times).items()
        }
        row |= {"share": round(taken, 6), "bound": round(arithmetic.find_bound(taken), 4), "quartiles": quartiles}
        row["times"] = {name: round_numbers([found.get(name, 0.0) for found in entry.times], 1) for name in quartiles}
    return row


def make_pair_rows(module: Module, setting: Setting, entries: list[Entry]) -> Iterator[files.Row]:
    """A line for every two arms of which the first is not ours: the bound of its advantage step, and the speed-up."""
    for slow, fast in combinations([entry for entry in entries if entry.times], 2):
        if slow.name in module.OURS:
            continue
        taken, around = (
            arithmetic.find_share(slow.times, parts) for parts in ((ADVANTAGES,), arithmetic.list_parts(slow.times))
        )
        speed_up = arithmetic.find_speed_up(slow.times, fast.times)
        yield {
            **setting._asdict(),
            "slow": slow.name,
            "fast": fast.name,
            "share": round(taken, 6),
            "bound": round(arithmetic.find_bound(taken), 4),
            "share_of_all_parts": round(around, 6),
            "bound_of_all_parts": round(arithmetic.find_bound(around), 4),
            "speed_up": round_numbers(speed_up, 4),
            "beyond": round(speed_up.median / arithmetic.find_bound(taken), 4),
        }


def round_numbers(numbers: Any, digits: int) -> list[float]:
    """To some digits."""
    return [round(x, digits) for x in numbers]


# --- frameworks -------------------------------------------------------------------------------------------------------


def run_all(names: list[str], session: Session) -> int:
    """All frameworks, each written when it is done; how many arms were wrong or failed."""
    ahead = {name: len(session.settings(REGISTRY[name].load())) for name in names if not REGISTRY[name].unavailable()}
    bad = 0
    for name in names:
        bad += run_framework(name, session, sum(ahead.values()))
        ahead.pop(name, None)
    return bad


def run_framework(name: str, session: Session, ahead: int) -> int:
    """One framework; `ahead` settings share the budget that is left."""
    why, module = REGISTRY[name].unavailable(), REGISTRY[name].load()
    arms: list[files.Row] = []
    pairs: list[files.Row] = []
    skipped: list[str] = []
    for index, setting in enumerate(() if why else session.settings(module)):
        if session.left <= 0:
            skipped.append(str(setting))
            continue
        entries = measure(module, setting, session.plan, session.left / (ahead - index))
        found = [make_arm_row(setting, entry) for entry in entries], list(make_pair_rows(module, setting, entries))
        print_setting(name, setting, *found)
        arms, pairs = arms + found[0], pairs + found[1]
        del entries
        free_memory()
    path = session.folder / f"end_to_end_{name}.json"
    files.write(path, make_head(name, session, why, skipped), arms=arms, pairs=pairs)
    bad = sum(row["status"] != "ok" for row in arms)
    print(f"wrote {path}: {why or f'{len(arms)} arms, {bad} not timed, {len(skipped)} settings skipped'}", flush=True)
    return bad


def free_memory() -> None:
    """Give memory back."""
    gc.collect()
    torch.cuda.empty_cache()


def make_head(name: str, session: Session, why: str, skipped: list[str]) -> files.Row:
    """What was measured on what, and what was not."""
    return {
        "system": files.system(session.commit),
        "framework": name,
        "device": session.device,
        "threads": torch.get_num_threads(),
        "protocol": session.plan._asdict(),
        "tolerance": TOLERANCE,
        "unavailable": why,
        "skipped": skipped,
    }


def print_setting(name: str, setting: Setting, arms: list[files.Row], pairs: list[files.Row]) -> None:
    """Print what came of a setting."""
    print(f"{name}: {setting} on {setting.device}")
    for row in arms:
        if row["status"] != "ok":
            print(f"  {row['arm']}: {row['status']} {row['error'] or ''}")
            continue
        milliseconds = row["quartiles"]["total"][1] / 1e3
        print(f"  {row['arm']}: {milliseconds:.2f} ms, {row['share']:.2%} advantages, {row['iterations']} iterations")
    for row in pairs:
        low, median, high = row["speed_up"]
        print(f"  {row['slow']} / {row['fast']}: {median:.3f} [{low:.3f}, {high:.3f}], bound {row['bound']:.3f}")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 1 if an arm was wrong or failed."""
    parser = files.parser(__doc__)
    parser.add_argument("--suite", nargs="+", choices=REGISTRY, default=list(REGISTRY), help="frameworks")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny settings, to see that everything runs")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which the rest is skipped")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is false")
    plan = QUICK if options.quick else Plan()
    session = Session(options.folder, options.device, plan, options.quick, options.commit, options.budget)
    return bool(run_all(options.suite, session))
