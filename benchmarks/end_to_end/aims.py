"""What whole iterations and updates are to reach, and whether result files show it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd

from benchmarks import files
from benchmarks.end_to_end import cleanrl, rllib, sb3
from benchmarks.end_to_end.frameworks import Setting
from benchmarks.tables import join_parts, make_table
from benchmarks.targets import Target


def compare_arms(
    name: str,
    settings: Sequence[Setting],
    machine: str,
    fast: Sequence[str] = ("captured",),
    slow: str = "stock",
    part: str = "total",
) -> pd.Series:
    """How many times faster arms are than another one, by setting: the median over iterations, paired by rounds."""
    times: dict[tuple[Setting, str], list[float]] = {}
    for result in files.read_results(f"{machine}/end_to_end_{name}.json"):
        times |= {(Setting.of(row), row["arm"]): row.get("times", {}).get(part, []) for row in result["arms"]}
    ratios = {}
    for setting, arm in itertools.product(settings, fast):
        pairs = zip(times.get((setting, slow), []), times.get((setting, arm), []), strict=False)
        ratios[f"{setting}: {arm}"] = np.median([a / b for a, b in pairs] or [math.nan])
    return pd.Series(ratios)


def compare_losses(other: str, machine: str) -> pd.Series:
    """How many times faster a loss with its gradients is than another arm, by head, width and size."""
    ratios = {}
    for row in itertools.chain(*(x["rows"] for x in files.read_results(f"{machine}/losses_*.json"))):
        if row["kind"] != "forward":
            times = {name: x["median"] for name, x in row["microseconds"].items()}
            ratios[f"{row['head']}, width {row['width']}, {row['elements']} elements"] = times[other] / times["ours"]
    return pd.Series(ratios, dtype=float)


def select_minibatches(*sizes: int) -> list[Setting]:
    """The settings of CartPole with minibatches of these sizes."""
    return [x for x in sb3.SETTINGS["cuda"] if x.env == sb3.SEVERAL.env and x.num_envs > 1 and x.batch_size in sizes]


SB3 = sb3.SETTINGS["cuda"]
SMALL = [x for x in SB3 if x.batch_size == 64 and x.num_envs > 1 and x.env in ("CartPole-v1", "Pendulum-v1")]
AIMS = {
    "losses_eager": Target("losses with gradients against eager PyTorch", partial(compare_losses, "eager"), 3.0),
    "losses_compiled": Target(
        "losses with gradients against `torch.compile`", partial(compare_losses, "compiled"), 1.0
    ),
    "step_small": Target(
        "Stable-Baselines3, update, minibatches of 64 and 256",
        partial(compare_arms, "sb3", select_minibatches(64, 256), part="update"),
        8.0,
    ),
    "step_2048": Target(
        "Stable-Baselines3, update, minibatches of 2048",
        partial(compare_arms, "sb3", select_minibatches(2048), part="update"),
        5.0,
    ),
    "step_32768": Target(
        "Stable-Baselines3, update, minibatches of 32768",
        partial(compare_arms, "sb3", select_minibatches(32768), part="update"),
        3.0,
    ),
    "sb3_small": Target("Stable-Baselines3, iteration, minibatches of 64", partial(compare_arms, "sb3", SMALL), 5.0),
    "sb3_wide": Target("Stable-Baselines3, iteration, 64 environments", partial(compare_arms, "sb3", [sb3.WIDE]), 2.0),
    "sb3_drawn": Target(
        "Stable-Baselines3, iteration, pixels",
        partial(compare_arms, "sb3", [x for x in SB3 if x.env == sb3.DRAWN]),
        1.5,
    ),
    "sb3_all": Target(
        "Stable-Baselines3, iteration, all of ours", partial(compare_arms, "sb3", SB3, fast=sb3.OURS), 1.0
    ),
    "rllib_8": Target("RLlib, update", partial(compare_arms, "rllib", rllib.SETTINGS["cuda"][:1]), 5.0),
    "rllib_64": Target("RLlib, update", partial(compare_arms, "rllib", rllib.SETTINGS["cuda"][1:2]), 3.0),
    "single_4096": Target(
        "single-file PPO, captured over eager",
        partial(compare_arms, "cleanrl", cleanrl.SETTINGS["cuda"][:1], slow="ours"),
        3.0,
    ),
    "single_16384": Target(
        "single-file PPO, captured over eager",
        partial(compare_arms, "cleanrl", cleanrl.SETTINGS["cuda"][1:2], slow="ours"),
        1.5,
    ),
}
AIMS_ON_CPU = {
    "cpu_sb3": Target(
        "Stable-Baselines3, iteration, CartPole",
        partial(compare_arms, "sb3", [sb3.DEFAULTS._replace(device="cpu")]),
        1.3,
    ),
    "cpu_all": Target(
        "Stable-Baselines3, iteration, all of ours",
        partial(compare_arms, "sb3", sb3.SETTINGS["cpu"], fast=sb3.OURS),
        1.0,
    ),
}


def list_aims() -> str:
    """Every aim on an H200 and on the CPU, and the reason where one is missed."""
    notes = files.read_result(files.ROOT / "benchmarks" / "notes.json")
    lines, reasons = [], []
    for machine, aims in {"h200": AIMS, "cpu": AIMS_ON_CPU}.items():
        for key, aim in aims.items():
            status, found = aim.judge(machine)
            what = f"{machine.upper()}: {aim.what}"
            lines.append([what, f"≥ {aim.limit:g}×", status, found])
            reasons += [f"*{what}*: {notes.get(key, 'no evidence yet')}"] * (status == "missed")
    return join_parts([make_table(["", "aim", "", "measured"], lines), *reasons])
