"""Measure training loops end to end, arm against arm, and write a result file per framework.

    python -m benchmarks.end_to_end FOLDER [--suite synthetic sb3 ...] [--device cuda] [--budget SECONDS] [--quick]

In every setting, all arms first compute the advantages of the same experience, which must agree with those of the first
arm. Then each trains an agent of its own, an iteration in turns. Writes end_to_end_FRAMEWORK.json: the times of all
iterations, and what follows from them; with why a framework or a setting is missing. With --only, what a file that is
there has of other settings stays in it.
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import NamedTuple

import torch

from benchmarks import files
from benchmarks.end_to_end.frameworks import REGISTRY, Arm, Module, Setting, list_arms
from benchmarks.end_to_end.stopwatch import ADVANTAGES, REST, TOTAL, Stopwatch, count_calls, watch_memory
from benchmarks.quartiles import Quartiles, compare_turns, find_quartiles, take_median
from rl_triton_core.testing import relative_error

TOLERANCE = 1e-5
"""The largest ‖x − stock‖ / ‖stock‖ of an arm that counts."""
Times = list[dict[str, float]]
"""The parts of every iteration of an arm, in the order of the rounds."""


class Plan(NamedTuple):
    """How often things are repeated."""

    warmups: int = 2
    rounds: int = 40
    seconds: float = 20.0
    """After so many no round begins, unless some arm has not had every place in the order twice."""


QUICK = Plan(warmups=1, rounds=2)


@dataclass
class Entry:
    """An arm in a setting, and what came of it."""

    name: str
    status: str = "ok"
    error: float | None = None
    arm: Arm | None = None
    times: Times = field(default_factory=list)
    about: dict[str, int] = field(default_factory=dict)
    """On a GPU: the peak of the memory that it reserves until it is warm, and the calls of an iteration."""

    def drop(self, reason: str | Exception) -> None:
        """Say why there are no times."""
        if isinstance(reason, Exception):
            reason = f"failed: {type(reason).__name__}: {next(iter(str(reason).splitlines()), '')[:200]}"
        self.arm, self.status = None, reason


# --- one setting ------------------------------------------------------------------------------------------------------


def measure_setting(module: Module, setting: Setting, plan: Plan, seconds: float = float("inf")) -> list[Entry]:
    """The arms with the times of their iterations; in about so many seconds, what precedes them included."""
    started, watch = time.perf_counter(), Stopwatch(setting.device)
    entries = prepare_arms(module, setting, watch, plan.warmups)
    running = [entry for entry in entries if entry.arm is not None]
    ends = min(started + seconds, time.perf_counter() + plan.seconds)
    for round_ in range(plan.rounds if running else 0):
        if round_ >= 2 * len(running) and time.perf_counter() > ends:
            break
        for entry in order_arms(running, round_):
            entry.times.append(time_iteration(entry.arm, watch))
    for entry in running if setting.device == "cuda" else ():
        entry.about |= count_calls(partial(time_iteration, entry.arm, watch))
    return entries


def prepare_arms(module: Module, setting: Setting, watch: Stopwatch, warmups: int) -> list[Entry]:
    """The arms, each compared with the first one and warm."""
    entries, expected = [Entry(name) for name in list_arms(module, setting)], None
    for entry in entries:
        try:
            with watch_memory(setting.device, entry.about):
                entry.arm = module.make_arm(entry.name, setting, watch)
                results = [torch.as_tensor(x).double() for x in entry.arm.results()]
                for _ in range(warmups):
                    time_iteration(entry.arm, watch)
        except Exception as error:
            entry.drop(error)
            continue
        expected = expected or results
        entry.error = float(max(relative_error(x, y) for x, y in zip(results, expected, strict=True)))
        if not entry.error <= TOLERANCE:
            entry.drop("wrong")
    return entries


def time_iteration(arm: Arm | None, watch: Stopwatch) -> dict[str, float]:
    """The times of an iteration by its parts."""
    assert arm is not None
    return watch.time(partial(arm.iteration, *arm.fresh()))


def order_arms(arms: Sequence[Entry], round_: int) -> list[Entry]:
    """The order in a round: rotated, and every second time backwards, so that each arm takes every place equally."""
    first = round_ // 2 % len(arms)
    order = [*arms[first:], *arms[:first]]
    return order[::-1] if round_ % 2 else order


# --- what follows from times ------------------------------------------------------------------------------------------


def find_share(times: Times, parts: Iterable[str] = (ADVANTAGES,)) -> Quartiles:
    """What some parts take of an iteration: quartiles over iterations."""
    chosen = list(parts)
    return find_quartiles((sum(found.get(part, 0.0) for part in chosen) / found[TOTAL] for found in times), 6)


def find_bound(share: float) -> float:
    """Amdahl: how many times faster an iteration gets without what takes this share of it."""
    return 1 / (1 - share)


def make_arm_row(setting: Setting, entry: Entry) -> files.Row:
    """A line per arm; times in microseconds."""
    error = None if entry.error is None else float(f"{entry.error:.3g}")
    about = {"arm": entry.name, "status": entry.status, "error": error, "iterations": len(entry.times)}
    row = {**setting._asdict(), **about, **entry.about}
    if entry.times:
        (_, share, _), parts = find_share(entry.times), list(entry.times[0])
        row |= {"share": share, "bound": round(find_bound(share), 4)}
        row["times"] = {part: [round(found.get(part, 0.0), 1) for found in entry.times] for part in parts}
        row["quartiles"] = {part: find_quartiles(numbers, 1) for part, numbers in row["times"].items()}
    return row


def make_pair_rows(module: Module, setting: Setting, entries: list[Entry]) -> Iterator[files.Row]:
    """A line for every two arms of which the first is not ours: the bound of its advantage step, and the speed-up."""
    for slow, fast in combinations([entry for entry in entries if entry.times], 2):
        if slow.name in module.OURS:
            continue
        chosen = (ADVANTAGES,), {*slow.times[0]} - {TOTAL, REST}
        share, around = (take_median(find_share(slow.times, parts)) for parts in chosen)
        totals = ([found[TOTAL] for found in arm.times] for arm in (slow, fast))
        yield {
            **setting._asdict(),
            **{"slow": slow.name, "fast": fast.name},
            **{"share": share, "bound": round(find_bound(share), 4)},
            **{"share_of_all_parts": around, "bound_of_all_parts": round(find_bound(around), 4)},
            "speed_up": compare_turns(*totals, digits=4),
        }


# --- frameworks -------------------------------------------------------------------------------------------------------


def run_framework(name: str, options: Namespace, budget: float) -> int:
    """One framework within so many seconds, written after every setting; how many arms were wrong or failed."""
    why, module, ends = REGISTRY[name].unavailable(), REGISTRY[name].load(), time.perf_counter() + budget
    plan = QUICK if options.quick else Plan(seconds=options.seconds)
    known = module.SETTINGS["quick" if options.quick else options.device]
    known = [x._replace(device=options.device) if options.quick else x for x in known]
    settings = [x for x in known if any(text in str(x) for text in options.only)]
    skipped: list[str] = []
    head = {"system": files.describe_system(options.commit), "framework": name, "device": options.device}
    head |= {"threads": torch.get_num_threads(), "protocol": plan._asdict(), "tolerance": TOLERANCE}
    head |= {"unavailable": why, "skipped": skipped}
    path = options.folder / f"end_to_end_{name}.json"
    others = known if len(settings) < len(known) else []
    before = files.continue_result(path, head, lambda row: Setting.of(row) in others, "arms", "pairs")
    tables = {key: before.get(key, []) for key in ("arms", "pairs")}
    files.write_result(path, head, **tables)
    for index, setting in enumerate(() if why else settings):
        left = ends - time.perf_counter()
        if left > 0:
            entries = measure_setting(module, setting, plan, left / (len(settings) - index))
            found = list(make_pair_rows(module, setting, entries))
            print(name, setting, *(f"{x['slow']} / {x['fast']}: {x['speed_up'][1]:.3f}" for x in found), sep="\n ")
            for key, rows in {"arms": [make_arm_row(setting, x) for x in entries], "pairs": found}.items():
                rows += [row for row in tables[key] if Setting.of(row) != setting]
                tables[key] = sorted(rows, key=lambda row: known.index(Setting.of(row)))
            del entries
            gc.collect()
            torch.cuda.empty_cache()
        else:
            skipped.append(str(setting))
        files.write_result(path, head, **tables)
    bad = sum(row["status"] != "ok" for row in tables["arms"])
    counts = f"{len(tables['arms'])} arms, {bad} not timed, {len(skipped)} settings skipped"
    print(f"wrote {path}: {why or counts}", flush=True)
    return bad


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; 1 if an arm was wrong or failed."""
    parser = files.make_parser(__doc__)
    parser.add_argument("--suite", nargs="+", choices=REGISTRY, default=list(REGISTRY), help="frameworks")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", default=[""], help="settings whose description has one of these")
    parser.add_argument("--quick", action="store_true", help="tiny settings, to see that everything runs")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which the rest is skipped")
    parser.add_argument("--seconds", type=float, default=Plan().seconds, help="about how long a setting is measured")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is false")
    ends, bad = time.perf_counter() + options.budget, 0
    for index, name in enumerate(options.suite):
        bad += run_framework(name, options, (ends - time.perf_counter()) / (len(options.suite) - index))
    return bool(bad)
