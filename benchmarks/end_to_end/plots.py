"""A figure per framework: the bound of the advantage step, and the measured speed-ups."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import files
from benchmarks.end_to_end.frameworks import REGISTRY
from benchmarks.end_to_end.page import estimate_mean, group_runs, load_results, name_pair
from benchmarks.plots import FOLDER, make_panels, save_figure, set_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_all(folder: Path = files.RESULTS, drawings: Path = FOLDER) -> None:
    """Draw what there are results for, a panel per machine."""
    set_style()
    for name in REGISTRY:
        results = [result for result in load_results(folder, f"end_to_end_{name}") if result["pairs"]]
        if results:
            heights = [len(result["pairs"]) for result in results]
            figure, panels = make_panels(len(results), 1, 8, 0.8 * len(results) + 0.2 * sum(heights))
            panels[0].get_gridspec().set_height_ratios(heights)
            for panel, result in zip(panels, results, strict=True):
                draw_speed_ups(panel, result)
            save_figure(figure, drawings / f"end_to_end_{name}.svg")
    if results := load_results(folder, "learning"):
        save_figure(draw_learning(results), drawings / "learning.svg")


def draw_speed_ups(panel: Axes, result: files.Row) -> None:
    """Bounds as ticks, measurements as points with their quartiles."""
    pairs = result["pairs"][::-1]
    places = range(len(pairs))
    low, median, high = zip(*(row["speed_up"] for row in pairs), strict=True)
    below, above = ([abs(a - b) for a, b in zip(edge, median, strict=True)] for edge in (low, high))
    panel.axvline(1, color="grey", linewidth=0.5)
    panel.plot([row["bound"] for row in pairs], places, "|", color="black", markersize=10, label="bound")
    panel.errorbar(median, places, xerr=[below, above], fmt="o", markersize=3, capsize=2, label="measured")
    panel.set_yticks(places, [name_pair(row) for row in pairs])
    panel.set(title=result["system"]["gpu" if result["device"] == "cuda" else "cpu"], xlabel="times faster")
    panel.legend(fontsize=6)


COLORS = {"stock": "#c62828", "ours": "#3949ab"}


def draw_learning(results: list[files.Row]) -> Figure:
    """A row for each machine and task: returns over steps, and over seconds."""
    tasks = [(result, *task) for result in results for task in group_runs(result).items()]
    figure, panels = make_panels(len(tasks), 2, 8, 2.2 * len(tasks))
    for place, (result, (name, target), arms) in enumerate(tasks):
        over_steps, over_seconds = panels[2 * place : 2 * place + 2]
        for arm, rows in arms.items():
            points = [estimate_mean(returns) for returns in zip(*(row["returns"] for row in rows), strict=False)]
            means, halves = (list(x) for x in zip(*points, strict=True))
            steps = [x / 1000 for x in rows[0]["steps"][: len(means)]]
            low, high = ([m + sign * h for m, h in zip(means, halves, strict=True)] for sign in (-1, 1))
            over_steps.plot(steps, means, color=COLORS[arm], label=arm)
            over_steps.fill_between(steps, low, high, color=COLORS[arm], alpha=0.15)
            for row in rows:
                over_seconds.plot(row["seconds"], row["returns"], color=COLORS[arm], linewidth=0.7)
        for panel, unit in ((over_steps, "steps, thousands"), (over_seconds, "seconds")):
            panel.axhline(target, color="grey", linewidth=0.5)
            panel.set(xlabel=unit, ylabel="return")
        over_steps.set_title(f"{name}, {result['system']['gpu' if result['device'] == 'cuda' else 'cpu']}")
        over_steps.legend(fontsize=6)
    return figure
