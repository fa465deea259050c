"""What whole iterations and updates are to reach, and whether result files show it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd

from benchmarks import files
from benchmarks.end_to_end import cleanrl, rllib, sb3
from benchmarks.end_to_end.frameworks import REGISTRY, Setting
from benchmarks.quartiles import take_median
from benchmarks.tables import join_parts, make_table
from benchmarks.targets import Target, list_targets, read_notes


def compare_arms(
    name: str,
    settings: Sequence[Setting],
    machine: str,
    fast: Sequence[str] = ("captured",),
    slow: str = "stock",
    part: str = "total",
) -> pd.Series:
    """How many times faster arms are than another one, by setting: the median over iterations, paired by rounds."""
    times = {key: row.get("times", {}).get(part, []) for key, row in read_arms(name, machine).items()}
    ratios = {}
    for setting, arm in itertools.product(settings, fast):
        pairs = zip(times.get((setting, slow), []), times.get((setting, arm), []), strict=False)
        ratios[f"{setting}: {arm}"] = np.median([a / b for a, b in pairs] or [math.nan])
    return pd.Series(ratios)


def read_arms(name: str, machine: str) -> dict[tuple[Setting, str], files.Row]:
    """The lines of a framework's result file by setting and arm."""
    results = files.read_results(f"{machine}/end_to_end_{name}.json")
    return {(Setting.of(row), row["arm"]): row for result in results for row in result["arms"]}


def compare_peaks(
    name: str, settings: Sequence[Setting], machine: str, fast: Sequence[str] = ("captured",)
) -> pd.Series:
    """MiB that are reserved beyond the framework's own peak and a minibatch, by setting: the most of these arms."""
    peaks = {key: row["peak_bytes"] for key, row in read_arms(name, machine).items() if "peak_bytes" in row}
    module, found = REGISTRY[name].load(), {}
    for setting in settings:
        ours = max((peaks[setting, arm] for arm in fast if (setting, arm) in peaks), default=math.nan)
        allowed = peaks.get((setting, "stock"), math.nan) + module.count_minibatch_bytes(setting)
        found[str(setting)] = (ours - allowed) / 2**20
    return pd.Series(found, dtype=float)


def compare_losses(other: str, machine: str) -> pd.Series:
    """How many times faster a loss with its gradients is than another arm, by head, width and size."""
    times = {name: row["microseconds"] for name, row, _ in list_losses(machine)}
    return pd.Series({name: take_median(x[other]) / take_median(x["ours"]) for name, x in times.items()}, dtype=float)


def compare_losses_floor(machine: str) -> pd.Series:
    """How many times longer they take on the device than a copy of their bytes, from a million elements on."""
    ratios = {
        name: take_median(row["microseconds"]["ours"]["device"]) * 1e3 * bandwidth / row["bytes"]
        for name, row, bandwidth in list_losses(machine)
        if row["elements"] >= 1_000_000
    }
    return pd.Series(ratios, dtype=float)


def list_losses(machine: str) -> Iterator[tuple[str, files.Row, float]]:
    """Losses with their gradients: what they are called, and the copy's gigabytes per second in the same run."""
    for result in files.read_results(f"{machine}/losses_*.json"):
        for row in result["rows"]:
            if row["kind"] != "forward":
                name = f"{row['head']}, width {row['width']}, {row['elements']} elements"
                yield name, row, take_median(result.get("copy_bandwidth_gb_per_s", math.nan))


SB3 = sb3.SETTINGS["cuda"]


def select_minibatches(*sizes: int, envs: Sequence[str] = ("CartPole-v1",)) -> list[Setting]:
    """The settings of Stable-Baselines3 with several environments and minibatches of these sizes."""
    return [x for x in SB3 if x.env in envs and x.num_envs > 1 and x.batch_size in sizes]


LOSSES = "losses with gradients"
UPDATE, compare_updates = "Stable-Baselines3, update, minibatches of", partial(compare_arms, "sb3", part="update")
ITERATION, compare_iterations = "Stable-Baselines3, iteration,", partial(compare_arms, "sb3")
SINGLE, compare_single = "single-file PPO, captured over eager", partial(compare_arms, "cleanrl", slow="ours")
SMALL = select_minibatches(64, envs=("CartPole-v1", "Pendulum-v1"))
DRAWN = [x for x in SB3 if x.env == sb3.DRAWN]
WHOLE = [arm for arm in sb3.OURS if arm not in sb3.EAGER]
"""What users of Stable-Baselines3 choose from."""
CAPTURED = [x for x in SB3 if "update" in sb3.list_arms(x)]
MEMORY = "peak of captured steps beyond the framework's and a minibatch"
AIMS = {
    "losses_eager": Target(f"{LOSSES} against eager PyTorch", partial(compare_losses, "eager"), 3.0),
    "losses_compiled": Target(f"{LOSSES} against `torch.compile`", partial(compare_losses, "compiled"), 1.0),
    "losses_floor": Target(f"{LOSSES}, device, against a copy of their bytes", compare_losses_floor, 1.3, False),
    "step_small": Target(f"{UPDATE} 64 and 256", partial(compare_updates, select_minibatches(64, 256)), 8.0),
    "step_2048": Target(f"{UPDATE} 2048", partial(compare_updates, select_minibatches(2048)), 5.0),
    "step_32768": Target(f"{UPDATE} 32768", partial(compare_updates, select_minibatches(32768)), 3.0),
    "sb3_small": Target(f"{ITERATION} minibatches of 64", partial(compare_iterations, SMALL), 5.0),
    "sb3_wide": Target(f"{ITERATION} 64 environments", partial(compare_iterations, [sb3.WIDE]), 2.0),
    "sb3_drawn": Target(f"{ITERATION} pixels", partial(compare_iterations, DRAWN), 1.5),
    "sb3_all": Target(f"{ITERATION} all of ours", partial(compare_iterations, SB3, fast=WHOLE), 1.0),
    "sb3_memory": Target(
        f"Stable-Baselines3, {MEMORY}", partial(compare_peaks, "sb3", CAPTURED, fast=("update", "captured")), 0.0,
        False, " MiB",
    ),
    "rllib_memory": Target(
        f"RLlib, {MEMORY}", partial(compare_peaks, "rllib", rllib.SETTINGS["cuda"][:2]), 0.0, False, " MiB"
    ),
    "rllib_8": Target("RLlib, update", partial(compare_arms, "rllib", rllib.SETTINGS["cuda"][:1]), 5.0),
    "rllib_64": Target("RLlib, update", partial(compare_arms, "rllib", rllib.SETTINGS["cuda"][1:2]), 3.0),
    "single_4096": Target(SINGLE, partial(compare_single, cleanrl.SETTINGS["cuda"][:1]), 3.0),
    "single_16384": Target(SINGLE, partial(compare_single, cleanrl.SETTINGS["cuda"][1:2]), 1.5),
}  # fmt: skip
ON_CPU = sb3.DEFAULTS._replace(device="cpu")
AIMS_ON_CPU = {
    "cpu_sb3": Target(f"{ITERATION} CartPole", partial(compare_iterations, [ON_CPU]), 1.3),
    "cpu_all": Target(f"{ITERATION} all of ours", partial(compare_iterations, sb3.SETTINGS["cpu"], fast=WHOLE), 1.0),
}


def list_aims() -> str:
    """Every aim on an H200 and on the CPU, and the reason where one is missed."""
    lines, reasons = [], []
    for machine, aims in {"h200": AIMS, "cpu": AIMS_ON_CPU}.items():
        named = {key: aim._replace(what=f"{machine.upper()}: {aim.what}") for key, aim in aims.items()}
        own_lines, own_reasons = list_targets(named, machine, read_notes())
        lines += own_lines
        reasons += own_reasons
    return join_parts([make_table(["", "aim", "", "measured"], lines), *reasons])
