"""A figure per framework: Amdahl's bound and the measured speed-up, setting by setting."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import files
from benchmarks.plots import FOLDER, axes, save, set_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAPTION = "the bound of the advantage step and the measured speed-up with its quartiles"


def main(folder: Path = files.RESULTS, drawings: Path = FOLDER) -> None:
    """Draw what there are results for."""
    from benchmarks.end_to_end.frameworks import REGISTRY
    from benchmarks.end_to_end.page import load

    set_up()
    for name in REGISTRY:
        results = [result for result in load(folder, name) if result["pairs"]]
        if results:
            draw(results, drawings / f"{file_of(name)}.svg")


def file_of(name: str) -> str:
    """What the figure of a framework is called."""
    return f"end_to_end_{name}"


def link(name: str, title: str) -> str:
    """A figure on the page."""
    return f"![{title}: {CAPTION}](plots/{file_of(name)}.svg)\n\n*{title}: {CAPTION}*"


def draw(results: list[files.Row], path: Path) -> None:
    """A panel per machine, one above the other, with a line per pair of arms."""
    heights = [len(result["pairs"]) for result in results]
    figure, panels = axes(len(results), 1, 8, 0.8 * len(results) + 0.2 * sum(heights))
    panels[0].get_gridspec().set_height_ratios(heights)
    for panel, result in zip(panels, results, strict=True):
        compare(panel, result)
    save(figure, path)


def compare(panel: Axes, result: files.Row) -> None:
    """Bounds as ticks, measurements as points with their quartiles."""
    from benchmarks.end_to_end.page import versus

    pairs = result["pairs"][::-1]
    places = range(len(pairs))
    low, median, high = zip(*(row["speed_up"] for row in pairs), strict=True)
    below, above = ([abs(a - b) for a, b in zip(edge, median, strict=True)] for edge in (low, high))
    panel.axvline(1, color="grey", linewidth=0.5)
    panel.plot([row["bound"] for row in pairs], places, "|", color="black", markersize=10, label="bound")
    panel.errorbar(median, places, xerr=[below, above], fmt="o", markersize=3, capsize=2, label="measured")
    panel.set_yticks(places, [versus(result, row) for row in pairs])
    panel.set(title=result["system"]["gpu" if result["device"] == "cuda" else "cpu"], xlabel="times faster")
    panel.legend(fontsize=6)
