"""docs/end-to-end.md from the result files."""

from __future__ import annotations

from pathlib import Path

from benchmarks import files
from benchmarks.end_to_end import plots
from benchmarks.end_to_end.frameworks import REGISTRY, Framework, Module, Setting
from benchmarks.markdown import NOT_YET, generated, machine, table

SMALL = 0.01
"""Below this share a page says that there is nothing to gain."""


def page(folder: Path) -> str:
    """The whole page."""
    sections = [section(name, framework, load(folder, name)) for name, framework in REGISTRY.items()]
    return "\n\n".join([head(), *sections]) + "\n"


def load(folder: Path, name: str) -> list[files.Row]:
    """The result files of a framework, of all machines, the CPU last."""
    paths = sorted(folder.glob(f"*/end_to_end_{name}.json"), key=lambda path: (path.parent.name == "cpu", path))
    return [files.read(path) for path in paths]


def head() -> str:
    """What is measured, and how."""
    return f"""\
# End to end

{generated("make end-to-end")} On a GPU: `python -m benchmarks.end_to_end FOLDER --budget 300`.

How much faster does training get? Iterations of several frameworks, arm against arm in one process. The single-file PPO
and Stable-Baselines3 run their whole loop, environments included. **The synthetic update, TorchRL and RLlib train on
experience that is there already and step no environment: in training, where collecting it takes its time too, shares,
bounds and speed-ups are lower than what these sections say.**

The arms train each for itself, one iteration in turns, in an order in which each takes every place equally often.
Before that, each must compute the advantages of the same experience as the framework's own code, to float32 rounding.

On a GPU times lie between CUDA events; the device is waited for before and after an iteration, and not within. *Share*
is what the advantage step takes of an iteration of the slower arm, the median over iterations. *Bound* is Amdahl's,
1 / (1 − share): no way to compute advantages makes an iteration faster than that. *Measured* is the ratio of the two
arms' iterations, paired by rounds: the median, and the quartiles in brackets. *Beyond* is measured over bound: above 1
the arm gains elsewhere than in the advantage step, below 1 it falls short of the bound, or noise does. Iterations and
steps are medians, slower arm → faster arm, in milliseconds. Settings read environments x steps, units of both layers,
epochs x minibatches."""


def section(name: str, framework: Framework, results: list[files.Row]) -> str:
    """A framework: what is timed, and on each machine what came of it."""
    module = framework.load()
    arms = "\n".join(f"* *{arm}*: {text}" for arm, text in module.ARMS.items())
    bodies = [body(framework, module, result) for result in results] or [NOT_YET]
    drawn = [plots.link(name, module.TITLE)] if any(result["pairs"] for result in results) else []
    return "\n\n".join([f"## {module.TITLE}", module.ITERATION, arms, *bodies, *drawn])


def body(framework: Framework, module: Module, result: files.Row) -> str:
    """One machine."""
    system, where = result["system"], f"### {'GPU' if result['device'] == 'cuda' else 'CPU'}"
    if result["unavailable"]:
        return f"{where}\n\n{machine(system)} Not measured there: {result['unavailable']}."
    packages = [name.replace("_", "-") for name in framework.needs]
    versions = "".join(f" {name} {system[name]}." for name in packages if name in system)
    about = f"{machine(system)}{versions} {result['threads']} threads on the CPU.{iterations(result)}"
    texts = [where, about, small_shares(module, result), comparison(result), *around(result), not_timed(result)]
    return "\n\n".join(text for text in texts if text)


def iterations(result: files.Row) -> str:
    """How often an iteration was timed."""
    counts = {row["iterations"] for row in result["arms"] if row["iterations"]}
    return f" {' to '.join(map(str, sorted({min(counts), max(counts)})))} iterations of each arm." if counts else ""


def small_shares(module: Module, result: files.Row) -> str:
    """Says plainly where there is nothing to gain."""
    own = [row for row in result["arms"] if row["arm"] == next(iter(module.ARMS)) and row["status"] == "ok"]
    small = [row for row in own if row["share"] < SMALL]
    if not small:
        return ""
    where = "In all settings" if len(small) == len(own) else f"In {len(small)} of {len(own)} settings"
    named = "; ".join(f"{label(result, row)} ({percent(row['share'])})" for row in small)
    return (
        f"**{where} the advantage step takes less than {percent(SMALL)} of the framework's own iteration: "
        f"however it is computed, training does not get noticeably faster by it.** {named}."
    )


def comparison(result: files.Row) -> str:
    """Bound and measurement, arm against arm."""
    lines = [
        [
            versus(result, row),
            times(result, row, "total"),
            times(result, row, "advantages"),
            percent(row["share"]),
            f"{row['bound']:.3f}",
            measured(row),
            f"{row['beyond']:.3f}",
        ]
        for row in result["pairs"]
    ]
    return table(["", "iteration", "advantage step", "share", "bound", "measured", "beyond"], lines) if lines else ""


def around(result: files.Row) -> list[str]:
    """Other parts that an arm replaces, where there are any."""
    names = [name for row in result["arms"] if "quartiles" in row for name in row["quartiles"]]
    names = [name for name in dict.fromkeys(names) if name not in ("total", "rest", "advantages")]
    lines = [
        [
            versus(result, row),
            *(times(result, row, name) for name in names),
            percent(row["share_of_all_parts"]),
            f"{row['bound_of_all_parts']:.3f}",
            measured(row),
        ]
        for row in result["pairs"]
    ]
    if not names or not lines:
        return []
    parts = " and ".join(names)
    return [f"With the {parts}:", table(["", *names, "share of both", "bound of both", "measured"], lines)]


def not_timed(result: files.Row) -> str:
    """The arms that were wrong or failed, and the settings without time."""
    bad = [f"{row['arm']} ({label(result, row)}): {row['status']}" for row in result["arms"] if row["status"] != "ok"]
    texts = [f"Not timed: {'; '.join(bad)}."] if bad else []
    texts += [f"Skipped for lack of time: {'; '.join(result['skipped'])}."] if result["skipped"] else []
    return " ".join(texts)


# --- pieces -----------------------------------------------------------------------------------------------------------


def label(result: files.Row, row: files.Row) -> str:
    """A setting, and its device if that is not the one of the others."""
    return str(setting_of(row)) + f", policy on {row['device']}" * (row["device"] != result["device"])


def versus(result: files.Row, row: files.Row) -> str:
    """A setting and two arms."""
    return f"{label(result, row)}: {row['slow']} → {row['fast']}"


def setting_of(row: files.Row) -> Setting:
    """What a row is about."""
    return Setting(*(row[name] for name in Setting._fields))


def times(result: files.Row, pair: files.Row, part: str) -> str:
    """Milliseconds of a part, slower arm → faster arm."""
    medians = {row["arm"]: row["quartiles"] for row in result["arms"] if setting_of(row) == setting_of(pair)}
    return " → ".join(f"{medians[pair[arm]][part][1] / 1e3:.3g}" for arm in ("slow", "fast"))


def measured(row: files.Row) -> str:
    """The median and the quartiles."""
    low, median, high = row["speed_up"]
    return f"{median:.3f} [{low:.3f}, {high:.3f}]"


def percent(share: float) -> str:
    """Two significant digits."""
    return f"{100 * share:.2g} %"
