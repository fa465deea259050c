"""docs/end-to-end.md from the result files."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import files
from benchmarks.end_to_end.frameworks import REGISTRY, Framework, Module, Setting
from benchmarks.pages import NOT_YET, describe_machine, describe_source, make_table

SMALL = 0.01
"""Below this share the page says that there is nothing to gain."""
CAPTION = "the bound of the advantage step and the measured speed-up with its quartiles"


def write_page(folder: Path) -> str:
    """The whole page."""
    sections = [
        write_framework(name, framework, load_results(folder, f"end_to_end_{name}"))
        for name, framework in REGISTRY.items()
    ]
    learning = [write_learning(folder)] * any(load_results(folder, "learning"))
    return "\n\n".join([HEAD.format(source=describe_source("make end-to-end")), *learning, *sections]) + "\n"


def load_results(folder: Path, name: str) -> list[files.Row]:
    """The result files of this name, of all machines, the CPU last."""
    paths = sorted(folder.glob(f"*/{name}.json"), key=lambda path: (path.parent.name == "cpu", path))
    return [files.read_result(path) for path in paths]


HEAD = """\
# End to end

{source} On a GPU: `python -m benchmarks.end_to_end FOLDER --budget 300`. [Read the end-to-end
numbers](reading-results.md) explains the columns.

How much faster does training get? The tables compare whole iterations of several frameworks, variant against variant in
one process. The single-file PPO and Stable-Baselines3 run their whole loop, environments included. **The synthetic
update, TorchRL and RLlib train on recorded experience and step no environment. In training, where collecting takes time
too, shares, bounds and speed-ups are lower than these sections say.**

Each variant trains its own agent. Variants take turns, one iteration each, in an order in which each takes every place
equally often. Before that, each must compute the same advantages as the framework's own code, to float32 rounding.

On a GPU, times lie between CUDA events. The device is waited for before and after an iteration, and not within.

* *Share* is what the advantage step takes of an iteration of the slower variant: the median over iterations.
* *Bound* is Amdahl's, 1 / (1 − share). No way to compute advantages makes an iteration faster than that.
* *Measured* is the ratio of the two variants' iterations, paired by rounds: the median, with the quartiles in brackets.
* *Iteration* and *advantages* are medians in milliseconds, slower variant → faster variant.

A setting reads: environments x steps, units of both layers, epochs x minibatches."""


def write_framework(name: str, framework: Framework, results: list[files.Row]) -> str:
    """A framework: what is timed, and on each machine what came of it."""
    module = framework.load()
    arms = "\n".join(f"* *{arm}*: {text}" for arm, text in module.ARMS.items())
    bodies = [write_machine(framework, module, result) for result in results] or [NOT_YET]
    figure = f"![{module.TITLE}: {CAPTION}](plots/end_to_end_{name}.svg)\n\n*{module.TITLE}: {CAPTION}*"
    drawn = [figure] * any(result["pairs"] for result in results)
    return "\n\n".join([f"## {module.TITLE}", module.ITERATION, arms, *bodies, *drawn])


def write_machine(framework: Framework, module: Module, result: files.Row) -> str:
    """One machine."""
    system, where = result["system"], f"### {'GPU' if result['device'] == 'cuda' else 'CPU'}"
    if result["unavailable"]:
        return f"{where}\n\n{describe_machine(system)} Not measured there: {result['unavailable']}."
    names = [name.replace("_", "-") for name in framework.needs]
    versions = "".join(f" {name} {system[name]}." for name in names if name in system)
    counts = sorted(row["iterations"] for row in result["arms"] if row["iterations"])
    counted = f" {counts[0]} to {counts[-1]} iterations of each variant." if counts else ""
    about = f"{describe_machine(system)}{versions} {result['threads']} threads on the CPU.{counted}"
    return "\n\n".join(x for x in (where, about, name_small_shares(module, result), compare_arms(result)) if x)


def name_small_shares(module: Module, result: files.Row) -> str:
    """Say plainly where there is nothing to gain."""
    own = [row for row in result["arms"] if row["arm"] == next(iter(module.ARMS)) and row["status"] == "ok"]
    small = [row for row in own if row["share"] < SMALL]
    if not small:
        return ""
    where = "In all settings" if len(small) == len(own) else f"In {len(small)} of {len(own)} settings"
    settings = "\n".join(f"* {read_setting(row)}: {format_percent(row['share'])}" for row in small)
    return (
        f"**{where} the advantage step takes less than {format_percent(SMALL)} of the framework's own iteration. "
        f"Training does not get noticeably faster, however it is computed:**\n\n{settings}"
    )


def compare_arms(result: files.Row) -> str:
    """Bound and measurement, arm against arm; with other parts that an arm replaces, and what was not timed."""
    named = [name for row in result["arms"] for name in row.get("quartiles", {})]
    parts = [name for name in dict.fromkeys(named) if name not in ("total", "rest")]
    lines = []
    for row in result["pairs"]:
        low, median, high = row["speed_up"]
        times = [format_times(result, row, part) for part in ("total", *parts)]
        bounds = [format_percent(row["share"]), f"{row['bound']:.3f}", f"{row['bound_of_all_parts']:.3f}"]
        measured = f"{median:.3f} [{low:.3f}, {high:.3f}]"
        lines.append([name_pair(row), *times, *(bounds if len(parts) > 1 else bounds[:2]), measured])
    head = ["", "iteration", *parts, "share", "bound", *["bound of all parts"] * (len(parts) > 1), "measured"]
    bad = [f"{row['arm']} ({read_setting(row)}): {row['status']}" for row in result["arms"] if row["status"] != "ok"]
    texts = [make_table(head, lines)] * bool(lines) + [f"Not timed: {'; '.join(bad)}."] * bool(bad)
    skipped = [f"Skipped for lack of time: {'; '.join(result['skipped'])}."] * bool(result["skipped"])
    return "\n\n".join([*texts, *skipped])


def name_pair(row: files.Row) -> str:
    """A setting and two arms."""
    device = " on the CPU" * (row["device"] == "cpu" and row["env"] != "")
    return f"{read_setting(row)}{device}: {row['slow']} → {row['fast']}"


def read_setting(row: files.Row) -> Setting:
    """What a row is about."""
    return Setting(*(row[name] for name in Setting._fields))


def format_times(result: files.Row, pair: files.Row, part: str) -> str:
    """Milliseconds of a part, slower arm → faster arm; a part inside a graph is not timed."""
    medians = {row["arm"]: row["quartiles"] for row in result["arms"] if read_setting(row) == read_setting(pair)}
    found = (medians[pair[arm]].get(part) for arm in ("slow", "fast"))
    return " → ".join("–" if x is None else f"{x[1] / 1e3:.3g}" for x in found)


# --- learning ---------------------------------------------------------------------------------------------------------

CURVES = "mean returns over steps with their 95 % confidence bands, and every run over seconds"


def write_learning(folder: Path) -> str:
    """Whether ours learns the same, and when it reaches a return."""
    results = load_results(folder, "learning")
    tables = [f"{describe_runs(result)}\n\n{list_tasks(result)}" for result in results]
    figure = f"![Learning: {CURVES}](plots/learning.svg)\n\n*Learning: {CURVES}*"
    return "\n\n".join([LEARNING, *tables, figure])


LEARNING = """\
## Learning

`PPO` of Stable-Baselines3 (*stock*) and `TritonPPO` (*ours*) are trained from the same seeds. Returns are means over
the last 100 episodes. *Last* is the mean over seeds after the last step, with its 95 % confidence interval. *Steps* and
*seconds* are the medians of when a run reaches the target; *runs* counts those that do."""


def describe_runs(result: files.Row) -> str:
    """The machine, and how runs shared it."""
    packages = f"stable-baselines3 {result['system']['stable-baselines3']}"
    return f"{describe_machine(result['system'])} {packages}. {result['jobs']} runs at a time, one thread each."


def list_tasks(result: files.Row) -> str:
    """A line for each task and arm."""
    lines = []
    for (task, target), arms in group_runs(result).items():
        for arm, rows in arms.items():
            mean, half = estimate_mean([row["returns"][-1] for row in rows])
            reached = [find_target(row) for row in rows if max(row["returns"]) >= target]
            steps, seconds = (
                (f"{statistics.median(x):.0f}" for x in zip(*reached, strict=True)) if reached else ("–", "–")
            )
            name = f"{task}, target {target:g}: {arm}"
            lines.append([name, f"{mean:.1f} ± {half:.1f}", steps, seconds, f"{len(reached)} of {len(rows)}"])
    return make_table(["task", "last", "steps", "seconds", "runs"], lines)


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


T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t at 97.5 %, for 2 values and more; the last serves all above, whose intervals are then too wide."""


def estimate_mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % confidence interval; 0 for a single value."""
    if len(values) == 1:
        return values[0], 0.0
    quantile = T_QUANTILES[min(len(values), len(T_QUANTILES) + 1) - 2]
    return statistics.fmean(values), quantile * statistics.stdev(values) / len(values) ** 0.5


def format_percent(share: float) -> str:
    """Two significant digits."""
    return f"{100 * share:.2g} %"
