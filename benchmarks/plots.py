"""The figures of the pages, drawn from result files; benchmarks/pages.py calls it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from benchmarks import files
from benchmarks.end_to_end import page
from benchmarks.end_to_end.frameworks import REGISTRY
from benchmarks.measured import Found, Machine, read_gpus
from benchmarks.quartiles import Quartiles
from benchmarks.suites import HEADLINE, SWEEP_SHAPES
from benchmarks.workloads import ESTIMATORS, LAYOUTS, Workload, count_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = files.ROOT / "docs" / "plots"
INK, PALE, ACCENT, LIGHT, GREEN, RED = "#263238", "#cfd8dc", "#3949ab", "#9fa8da", "#2e7d32", "#c62828"


def draw_all(drawings: Path = FOLDER) -> None:
    """Draw what there are results for."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "rl-triton-core", "svg.fonttype": "none", "font.size": 8})
    figures = {"boundary_rule": draw_boundary_rule(), "iteration_shares": draw_shares()}
    for machine in read_gpus():
        for suite, name, draw in DRAWINGS:
            if suite in machine.heads:
                figures[f"{machine.name}_{name}"] = draw(machine)
    for name in REGISTRY:
        if results := [result for result in page.load_results(files.RESULTS, name) if result["pairs"]]:
            figures[f"end_to_end_{name}"] = draw_framework(results)
    if results := files.read_results("*/learning.json"):
        figures["learning"] = draw_learning(results)
    drawings.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(drawings / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    print("drew", *figures)


def make_panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure and its panels."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    return figure, list(panels.flat)


def split_quartiles(found: Iterable[Quartiles]) -> tuple[Any, Any]:
    """Medians, and how far the quartiles are from them."""
    low, medians, high = np.transpose([*found])
    return medians, [medians - low, high - medians]


def hide_frame(panel: Axes) -> None:
    """No lines around a panel but the axis below it."""
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)


# --- calls on a GPU ---------------------------------------------------------------------------------------------------

ARMS = ("torch_add", "ours_out", "ours", "flat_triton", "compiled_scan")
OTHERS = {
    "loop": ("Python loop", "o", RED),
    "compiled_scan": ("compiled scan", "s", ACCENT),
    "flat_triton": ("flat Triton kernel", "D", GREEN),
}


def draw_speed_up(machine: Machine) -> Figure:
    """How many times faster a full call of GAE is than other ways to compute it, by shape of the rollout."""
    figure, (panel,) = make_panels(1, 1, 6.4, 3.4)
    panel.set_xscale("log")
    shapes = sorted(SWEEP_SHAPES, key=lambda shape: (shape[1], shape[0]), reverse=True)
    for provider, (label, marker, color) in OTHERS.items():
        ratios = machine.find_ratios("sweep", provider)
        found = {place: ratios.get(Workload("gae", *shape)) for place, shape in enumerate(shapes)}
        found = {place: ratio for place, ratio in found.items() if ratio}
        medians, errors = split_quartiles(found.values())
        style = {"fmt": marker, "color": color, "markersize": 5, "capsize": 2, "label": f"over a {label}"}
        panel.errorbar(medians, list(found), xerr=errors, **style)
    panel.axvline(1, color=INK, linewidth=0.6)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_yticks(range(len(shapes)), [f"{num_envs} x {num_steps}" for num_envs, num_steps in shapes])
    panel.set(xlabel="times faster, full call: median and quartiles", ylabel="environments x steps")
    panel.set_title(f"compute_gae on an {machine.hardware}", fontsize=9)
    panel.grid(axis="x", color=PALE, linewidth=0.5)
    panel.legend(fontsize=7, loc="lower right")
    hide_frame(panel)
    return figure


def draw_sweep(machine: Machine) -> Figure:
    """Every estimator against the flat kernel and the compiled scan."""
    figure, panels = make_panels(len(ESTIMATORS), 2, 8, 2.1 * len(ESTIMATORS))
    for row, estimator in enumerate(ESTIMATORS):
        for column, other in enumerate(("flat_triton", "compiled_scan")):
            ratios = machine.find_ratios("sweep", other)
            plain = [w for w in ratios if w.estimator == estimator and w.layout == "env-major" and not w.truncated]
            draw_heat_map(panels[2 * row + column], f"{estimator} against {other}", {w: ratios[w] for w in plain})
    return figure


def draw_heat_map(panel: Axes, title: str, ratios: Found) -> None:
    """Ratios over (num_envs, T), written into their cells with quartiles, on a logarithmic scale about 1."""
    if not ratios:
        return
    cells = {(w.num_envs, w.num_steps): ratio for w, ratio in ratios.items()}
    grid = pd.Series({cell: ratio[1] for cell, ratio in cells.items()}).unstack()
    panel.imshow(np.log2(grid.to_numpy()), cmap="RdYlGn", vmin=-3, vmax=3, aspect="auto", origin="lower")
    for (row, column), value in np.ndenumerate(grid.to_numpy()):
        if np.isfinite(value):
            low, median, high = cells[grid.index[row], grid.columns[column]]
            style = {"ha": "center", "fontsize": 6, "color": "white" if abs(np.log2(value)) > 2 else "black"}
            panel.text(column, row, f"{median:.1f}", va="bottom", **style)
            panel.text(column, row, f"{low:.1f} to {high:.1f}", va="top", **{**style, "fontsize": 4})
    panel.set(title=title, xlabel="T", ylabel="num_envs")
    panel.set_xticks(range(grid.shape[1]), [str(x) for x in grid.columns])
    panel.set_yticks(range(grid.shape[0]), [str(x) for x in grid.index])


def draw_roofline(machine: Machine) -> Figure:
    """The percentage of the roofline against the bytes, by layout."""
    figure, panels = make_panels(1, 2, 9, 3.5)
    percent = {w: x for suite in ("sweep", "large") for w, x in machine.find_roofline(suite).items()}
    for panel, layout in zip(panels, LAYOUTS, strict=True):
        for estimator in ESTIMATORS:
            plain = [w for w in percent if (w.estimator, w.layout, w.truncated) == (estimator, layout, False)]
            if plain:
                medians, errors = split_quartiles(percent[w] for w in plain)
                megabytes = [count_bytes(w) / 1e6 for w in plain]
                panel.errorbar(megabytes, medians, yerr=errors, fmt=".", linewidth=0.5, label=estimator)
        panel.axhline(100, color="grey", linewidth=0.5)
        panel.set(title=layout, xscale="log", xlabel="MB that must move", ylabel="% of the roofline", ylim=(0, None))
    panels[0].legend(fontsize=6)
    return figure


def draw_breakdown(machine: Machine) -> Figure:
    """Full calls at the headline shape: the device's share and the host's."""
    figure, panels = make_panels(1, len(ESTIMATORS), 12, 3)
    times = {(arm, kind): machine.find_times("headline", arm, kind) for arm in ARMS for kind in ("full", "device")}
    for panel, estimator in zip(panels, ESTIMATORS, strict=True):
        w = Workload(estimator, *HEADLINE)
        found = ([times[arm, kind].get(w, [0.0] * 3) for arm in ARMS] for kind in ("full", "device"))
        (full, errors), (device, _) = map(split_quartiles, found)
        panel.bar(ARMS, device, label="device")
        host = [max(0, x - y) for x, y in zip(full, device, strict=True)]
        panel.bar(ARMS, host, bottom=device, yerr=errors, capsize=2, label="host")
        panel.set_title(estimator, fontsize=7)
        panel.tick_params("x", rotation=90)
    panels[0].set_ylabel("µs")
    panels[0].legend(fontsize=6)
    return figure


def draw_long_rows(machine: Machine) -> Figure:
    """Device time of GAE against T, and the floor of its bytes."""
    figure, (panel,) = make_panels(1, 1, 6, 4)
    curves = {arm: machine.find_times("long", arm, "device") for arm in ("ours", "flat_triton")}
    curves["floor of the bytes"] = {w: [x] * 3 for w, x in machine.find_floors("long").items()}
    for label, times in curves.items():
        chosen = [w for w in times if w[:2] == ("gae_advantages", 16) and w.layout == "env-major"]
        chosen.sort(key=lambda w: w.num_steps)
        if chosen:
            medians, errors = split_quartiles(times[w] for w in chosen)
            panel.errorbar([w.num_steps for w in chosen], medians, yerr=errors, marker=".", label=label)
    panel.set(xscale="log", yscale="log", xlabel="T", ylabel="µs on the device", title="GAE, 16 environments")
    panel.legend()
    return figure


DRAWINGS = (
    ("headline", "headline", draw_breakdown),
    ("sweep", "sweep", draw_sweep),
    ("sweep", "speed_up", draw_speed_up),
    ("long", "long", draw_long_rows),
    ("large", "large", draw_roofline),
)
"""Suites, the figures made from them, and what draws them."""


# --- training ---------------------------------------------------------------------------------------------------------


def draw_shares() -> Figure:
    """A bar per framework and machine: what the advantage step takes of an iteration, from the least to the most."""
    rows = page.select_shares()[::-1]
    figure, (panel,) = make_panels(1, 1, 6.4, 0.3 * len(rows) + 0.7)
    for place, row in enumerate(rows):
        shares = sorted(100 * pair["share"] for pair in row.pairs)
        panel.barh(place, 100, color=PALE, height=0.62)
        panel.barh(place, shares[-1], color=LIGHT, height=0.62)
        panel.barh(place, shares[0], color=ACCENT, height=0.62)
        panel.text(101, place, f"{page.describe_shares(row.pairs)} %", va="center")
        panel.text(-1, place, row.name, ha="right", va="center")
    panel.set(xlim=(0, 100), yticks=[], xlabel="% of an iteration that the framework's own advantage step takes")
    title = "dark: in the setting with the smallest share; light: up to the largest; grey: all else"
    panel.set_title(title, fontsize=8)
    hide_frame(panel)
    return figure


def draw_framework(results: list[files.Row]) -> Figure:
    """A panel per machine: bounds as ticks, measured speed-ups as points with their quartiles."""
    heights = [len(result["pairs"]) for result in results]
    figure, panels = make_panels(len(results), 1, 8, 0.8 * len(results) + 0.2 * sum(heights))
    panels[0].get_gridspec().set_height_ratios(heights)
    for panel, result in zip(panels, results, strict=True):
        pairs = result["pairs"][::-1]
        places = range(len(pairs))
        medians, errors = split_quartiles(row["speed_up"] for row in pairs)
        panel.axvline(1, color="grey", linewidth=0.5)
        panel.plot([row["bound"] for row in pairs], places, "|", color="black", markersize=10, label="bound")
        panel.errorbar(medians, places, xerr=errors, fmt="o", markersize=3, capsize=2, label="measured")
        panel.set_yticks(places, [page.name_pair(row) for row in pairs])
        panel.set(title=files.name_processor(result["system"], result["device"]), xlabel="times faster")
        panel.legend(fontsize=6)
    return figure


def draw_learning(results: list[files.Row]) -> Figure:
    """A row for each machine and task: returns over steps, and over seconds."""
    tasks = [(result, *task) for result in results for task in page.group_runs(result).items()]
    figure, panels = make_panels(len(tasks), 2, 8, 2.2 * len(tasks))
    for (result, (name, target), arms), *pair in zip(tasks, panels[::2], panels[1::2], strict=True):
        over_steps, over_seconds = pair
        for (arm, rows), color in zip(arms.items(), (RED, ACCENT), strict=False):
            band = page.find_band(rows)
            means, halves = np.transpose([*band.values()])
            steps = [step / 1000 for step in band]
            over_steps.plot(steps, means, color=color, label=arm)
            over_steps.fill_between(steps, means - halves, means + halves, color=color, alpha=0.15)
            for row in rows:
                over_seconds.plot(row["seconds"], row["returns"], color=color, linewidth=0.7)
        for panel, unit in zip(pair, ("steps, thousands", "seconds"), strict=True):
            panel.axhline(target, color="grey", linewidth=0.5)
            panel.set(xlabel=unit, ylabel="return")
        over_steps.set_title(f"{name}, {result['system']['gpu' if result['device'] == 'cuda' else 'cpu']}")
        over_steps.legend(fontsize=6)
    return figure


# --- the boundary rule ------------------------------------------------------------------------------------------------

STEPS = (
    ("going on", "NV = V[t+1]", INK),
    ("terminated", "NV = 0", RED),
    ("going on", "NV = V[t+1]", INK),
    ("truncated", "NV = bootstrap value", ACCENT),
    ("going on", "NV = V[t+1]", INK),
    ("end of the rollout", "NV = bootstrap value", ACCENT),
)
"""What a step of the figure is, the value after it, and its colour."""


def draw_boundary_rule() -> Figure:
    """A rollout of three episodes: which value follows a step, and where credit flows."""
    figure, (panel,) = make_panels(1, 1, 7, 2.1)
    arrow = {"arrowstyle": "->", "color": GREEN, "linewidth": 1.6}
    for t, (kind, value, color) in enumerate(STEPS):
        panel.plot([t], [0], "o", markersize=19, color=color)
        panel.text(t, 0, f"t={t}", color="white", ha="center", va="center", fontsize=7)
        panel.text(t, 0.52, kind, ha="center", color=color, fontweight="bold")
        panel.text(t, -0.62, value, ha="center", color=color)
        if color == INK:
            panel.annotate("", (t + 0.16, 0.06), (t + 0.84, 0.06), arrowprops=arrow)
            panel.text(t + 0.5, 0.17, "credit", ha="center", color=GREEN, fontsize=7)
        elif t < len(STEPS) - 1:
            panel.plot([t + 0.5] * 2, [-0.36, 0.36], "--", color=INK, linewidth=1)
            panel.text(t + 0.5, -0.46, "reset", ha="center", color=INK, fontsize=7)
    panel.text(-0.45, 0.92, "one environment, one rollout, three episodes: nothing crosses a reset", color=INK)
    panel.set(xlim=(-0.5, len(STEPS) - 0.5), ylim=(-0.85, 1.1))
    panel.axis("off")
    return figure
