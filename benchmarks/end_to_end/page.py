"""What pages say of the result files of training loops: a section per framework, the shares, and learning."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import files
from benchmarks.end_to_end.frameworks import REGISTRY, Framework, Module, Setting
from benchmarks.end_to_end.run import find_bound, find_share
from benchmarks.end_to_end.stopwatch import ADVANTAGES, REST
from benchmarks.quartiles import Quartiles, find_quartiles, format_quartiles
from benchmarks.tables import NOT_YET, describe_machine, join_parts, make_table

SMALL = 0.01
"""Below this share the page says that there is nothing to gain."""
REPLACED = ("acting", "advantages", "update")
"""The parts of a whole iteration that ours replaces; the rest is the environments'."""
CAPTION = "the bound of the advantage step and the measured speed-up with its quartiles"


def load_results(folder: Path, name: str) -> list[files.Row]:
    """The result files of a framework, of all machines, GPUs first."""
    return sorted(files.read_results(f"*/end_to_end_{name}.json", folder), key=lambda result: result["device"] == "cpu")


def write_frameworks(folder: Path) -> str:
    """A section per framework."""
    return join_parts(write_framework(*item, load_results(folder, item[0])) for item in REGISTRY.items())


def write_framework(name: str, framework: Framework, results: list[files.Row]) -> str:
    """A framework: what is timed, and on each machine what came of it."""
    module = framework.load()
    arms = "\n".join(f"* *{arm}*: {text}" for arm, text in module.ARMS.items())
    bodies = [write_machine(framework, module, result) for result in results] or [NOT_YET]
    figure = f"![{module.TITLE}: {CAPTION}](plots/end_to_end_{name}.svg)\n\n*{module.TITLE}: {CAPTION}*"
    drawn = figure * any(result["pairs"] for result in results)
    return join_parts([f"## {module.TITLE}", module.ITERATION, arms, *bodies, drawn])


def write_machine(framework: Framework, module: Module, result: files.Row) -> str:
    """One machine."""
    system, where = result["system"], f"### {'GPU' if result['device'] == 'cuda' else 'CPU'}"
    if result["unavailable"]:
        return f"{where}\n\n{describe_machine(result)} Not measured there: {result['unavailable']}."
    names = [name.replace("_", "-") for name in framework.needs]
    versions = "".join(f" {name} {system[name]}." for name in names if name in system)
    counts = sorted(row["iterations"] for row in result["arms"] if row["iterations"])
    counted = f" {counts[0]} to {counts[-1]} iterations of each variant." if counts else ""
    about = f"{describe_machine(result)}{versions} {result['threads']} threads on the CPU.{counted}"
    tables = list_parts(result), compare_arms(result), list_calls(result)
    return join_parts([where, about, name_small_shares(module, result), *tables])


def name_small_shares(module: Module, result: files.Row) -> str:
    """Say plainly where there is nothing to gain."""
    own = [row for row in result["arms"] if row["arm"] == next(iter(module.ARMS)) and row["status"] == "ok"]
    small = [row for row in own if row["share"] < SMALL]
    if not small:
        return ""
    where = "In all settings" if len(small) == len(own) else f"In {len(small)} of {len(own)} settings"
    settings = "\n".join(f"* {Setting.of(row)}: {format_share(find_shares(row))}" for row in small)
    return (
        f"**{where} the advantage step takes less than {100 * SMALL:.2g} % of the framework's own iteration. "
        f"Training does not get noticeably faster, however it is computed:**\n\n{settings}"
    )


def list_parts(result: files.Row) -> str:
    """Where acting and updates are timed: what each part takes of the framework's own iteration, with its bound."""
    lines, named = [], (*REPLACED, REST)
    for row in result["arms"]:
        if row["arm"] == "stock" and {*REPLACED} < row.get("times", {}).keys():
            *shares, whole = (find_shares(row, x) for x in (*([part] for part in named), REPLACED))
            bounds = [format_bound(share, 2) for share in (*shares[:-1], whole)]
            lines.append([str(Setting.of(row)), *map(format_share, shares), *bounds])
    head = ["", *REPLACED, "environments and the rest", *(f"bound: {part}" for part in (*REPLACED, "all three"))]
    return make_table(head, lines) * bool(lines)


def compare_arms(result: files.Row) -> str:
    """Bound and measurement, arm against arm; with other parts that an arm replaces, and what was not timed."""
    named = [name for row in result["arms"] for name in row.get("quartiles", {})]
    parts = [name for name in dict.fromkeys(named) if name not in ("total", "rest")]
    lines, arms = [], {(Setting.of(row), row["arm"]): row for row in result["arms"]}
    for row in result["pairs"]:
        slow, fast = (arms.get((Setting.of(row), row[arm]), {}) for arm in ("slow", "fast"))
        times = [" → ".join(format_time(arm, part) for arm in (slow, fast)) for part in ("total", *parts)]
        share = find_shares(slow)
        measured = format_quartiles(row["speed_up"], "{:.3f}".format)
        lines.append([name_pair(row), *times, format_share(share), format_bound(share, 3), measured])
    head = ["", "iteration", *parts, "share", "bound", "measured"]
    bad = [f"{row['arm']} ({Setting.of(row)}): {row['status']}" for row in result["arms"] if row["status"] != "ok"]
    not_timed = f"Not timed: {'; '.join(bad)}." * bool(bad)
    skipped = f"Skipped for lack of time: {'; '.join(result['skipped'])}." * bool(result["skipped"])
    return join_parts([make_table(head, lines) * bool(lines), not_timed, skipped])


def list_calls(result: files.Row) -> str:
    """On a GPU, what an iteration of every arm asks of it, and the peak of its memory."""
    lines = []
    for row in result["arms"]:
        if "launches" in row:
            steps = row["epochs"] * row["minibatches"]
            counts = [f"{row[name]} ({row[name] / steps:.1f})" for name in ("launches", "reads")]
            milliseconds = format_time(row, "update" if "update" in row["quartiles"] else "total", steps)
            peak = f"{row['peak_bytes'] / 2**20:.0f}"
            lines.append([f"{Setting.of(row)}: {row['arm']}", milliseconds, *counts, peak])
    head = ["", "per minibatch", "launches", "reads", "peak"]
    return make_table(head, lines) * bool(lines)


def name_pair(row: files.Row) -> str:
    """A setting and two arms."""
    device = " on the CPU" * (row["device"] == "cpu" and row["env"] != "")
    return f"{Setting.of(row)}{device}: {row['slow']} → {row['fast']}"


def format_time(arm: files.Row, part: str, steps: int = 1) -> str:
    """Milliseconds of a part of an arm, or of each of its steps; a part inside a graph is not timed."""
    return format_quartiles(arm.get("quartiles", {}).get(part), lambda x: f"{x / 1e3 / steps:.3g}")


def find_shares(arm: files.Row, parts: Iterable[str] = (ADVANTAGES,)) -> Quartiles:
    """What some parts take of an arm's iteration."""
    times = [dict(zip(arm["times"], x, strict=True)) for x in zip(*arm["times"].values(), strict=True)]
    return find_share(times, parts)


def format_bound(share: Quartiles, digits: int) -> str:
    """How many times faster an iteration gets without what takes this share."""
    return format_quartiles([find_bound(x) for x in share], lambda x: f"{x:.{digits}f}")


# --- shares -----------------------------------------------------------------------------------------------------------


class Shares(NamedTuple):
    """A framework on a machine: its own arm against ours."""

    framework: str
    machine: dict[str, str]
    device: str
    pairs: list[files.Row]
    """Arms that replace the advantage step alone."""
    more: list[files.Row]
    """The arm that replaces all that can be replaced."""

    @property
    def name(self) -> str:
        """The framework and the device."""
        return f"{REGISTRY[self.framework].load().TITLE}, {'GPU' if self.device == 'cuda' else 'CPU'}"


def list_shares() -> str:
    """The share of the advantage step by framework and machine, its bound, and the measured speed-ups: medians."""
    lines = []
    for shares in select_shares():
        bounds = describe_ratios(x["bound"] for x in shares.pairs)
        measured = [describe_ratios(x["speed_up"][1] for x in pairs) for pairs in (shares.pairs, shares.more)]
        lines.append([shares.name, f"{describe_shares(shares.pairs)} %", bounds, *measured])
    return make_table(["", "share", "bound", "our advantages", "all that is replaced"], lines)


def select_shares() -> list[Shares]:
    """All frameworks and machines of which there are results."""
    found = []
    for name, framework in REGISTRY.items():
        module = framework.load()
        for result in load_results(files.RESULTS, name):
            pairs = [x for x in result["pairs"] if x["slow"] == "stock" and x["fast"] in module.OURS]
            last = max((x["fast"] for x in pairs if x["fast"] in module.MORE), key=module.MORE.index, default="")
            alone = [x for x in pairs if x["fast"] not in module.MORE]
            more = [x for x in pairs if x["fast"] == last]
            found.append(Shares(name, result["system"], result["device"], alone, more))
    return [shares for shares in found if shares.pairs]


TRAINING = {
    "Whole iterations of Stable-Baselines3 with `TritonPPO` and its siblings, environments included, are": ("sb3",),
    "Updates of RLlib's PPO, IMPALA and APPO with `enable_triton`, sampling excluded, are": ("rllib", "impala"),
}
"""What trains, and in which frameworks' files it is."""


def describe_training() -> str:
    """How much faster these train with all that is replaced."""
    lines, found = [], select_shares()
    for text, names in TRAINING.items():
        ratios: dict[str, list[float]] = {}
        for shares in found:
            if shares.framework in names and shares.more:
                where = f"{shares.machine['cpu_count']} cores of " * (shares.device == "cpu")
                where += f"an {files.name_processor(shares.machine, shares.device)}"
                ratios.setdefault(where, []).extend(x["speed_up"][1] for x in shares.more)
        ranges = ", ".join(f"{describe_ratios(x)} times as fast on {where}" for where, x in ratios.items())
        lines.append(f"* {text}, by median,\n  {ranges}.")
    return "\n".join(lines)


def describe_shares(pairs: list[files.Row]) -> str:
    """The shares in percent, from the smallest to the largest."""
    return describe_range([f"{100 * x:.2g}" for x in sorted(row["share"] for row in pairs)])


def describe_ratios(ratios: Iterable[float]) -> str:
    """From the smallest to the largest."""
    return describe_range([f"{x:.2f}" for x in sorted(ratios)])


def describe_range(values: list[str]) -> str:
    """The first and the last of sorted values, or the one that both are, or none."""
    return " to ".join(dict.fromkeys((values[0], values[-1]))) if values else "–"


def format_share(share: Quartiles) -> str:
    """Percent, in two significant digits."""
    return format_quartiles(share, lambda x: f"{100 * x:.2g}", " %")


# --- learning ---------------------------------------------------------------------------------------------------------


def list_tasks(result: files.Row) -> str:
    """Whether ours learns the same, and when it reaches a return: a line for each task and arm."""
    lines = []
    for (task, target), arms in group_runs(result).items():
        for arm, rows in arms.items():
            mean, half = estimate_mean([row["returns"][-1] for row in rows])
            reached = [find_target(row) for row in rows if max(row["returns"]) >= target]
            columns = [find_quartiles(x) for x in zip(*reached, strict=True)] or [None, None]
            stopped, gpus = sum(row.get("stopped", False) for row in rows), len({row.get("device") for row in rows})
            runs = f"{len(reached)} of {len(rows)}" + f", {stopped} stopped" * bool(stopped)
            jobs = f"{rows[0].get('jobs', result.get('jobs'))}" + f" on {gpus} GPUs" * (gpus > 1)
            name, spreads = f"{task}, target {target:g}: {arm}", (format_quartiles(x, "{:.0f}".format) for x in columns)
            lines.append([name, f"{mean:.1f} ± {half:.1f}", *spreads, runs, jobs])
    text = f"stable-baselines3 {result['system']['stable-baselines3']}."
    table = make_table(["task", "last", "steps", "seconds", "runs", "at a time"], lines)
    return join_parts([text, table, compare_bands(result)])


def compare_bands(result: files.Row) -> str:
    """At how many points the confidence bands of both arms overlap, by task."""
    found = []
    for (task, _), arms in group_runs(result).items():
        bands = [find_band(rows) for rows in arms.values()]
        if len(bands) == 2 and all(len(rows) > 1 for rows in arms.values()):
            pairs = [(bands[0][step], bands[1][step]) for step in bands[0] if step in bands[1]]
            near = sum(abs(x - y) <= half + other for (x, half), (y, other) in pairs)
            found.append(f"{task}, {near} of {len(pairs)}")
    return f"Points at which the 95 % bands of both overlap: {'; '.join(found)}." * bool(found)


def find_band(rows: Sequence[files.Row]) -> dict[int, tuple[float, float]]:
    """The mean return of several runs, and half of its confidence interval, after the steps that all of them made."""
    runs = [dict(zip(row["steps"], row["returns"], strict=True)) for row in rows]
    return {step: estimate_mean([run[step] for run in runs]) for step in runs[0] if all(step in run for run in runs)}


def group_runs(result: files.Row) -> dict[tuple[str, float], dict[str, list[files.Row]]]:
    """Runs by task, with its target, and arm."""
    tasks: dict[tuple[str, float], dict[str, list[files.Row]]] = {}
    for row in result["rows"]:
        tasks.setdefault((row["task"], row["target_return"]), {}).setdefault(row["arm"], []).append(row)
    return tasks


def find_target(row: files.Row) -> tuple[int, float]:
    """Steps and seconds after which a run reaches its target."""
    place = next(i for i, x in enumerate(row["returns"]) if x >= row["target_return"])
    return row["steps"][place], row["seconds"][place]


T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
)  # fmt: skip
"""Student's t at 97.5 %, for 2 values and more; the last serves all above, whose intervals are then too wide."""


def estimate_mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % confidence interval; 0 for a single value."""
    if len(values) == 1:
        return values[0], 0.0
    quantile = T_QUANTILES[min(len(values), len(T_QUANTILES) + 1) - 2]
    return statistics.fmean(values), quantile * statistics.stdev(values) / len(values) ** 0.5
