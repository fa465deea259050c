"""The figures of the pages, drawn from result files; benchmarks/pages.py calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from benchmarks import files
from benchmarks.measured import Machine, read_gpus
from benchmarks.workloads import ESTIMATORS, LAYOUTS, count_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = files.ROOT / "docs" / "plots"
ARMS = ("torch_add", "ours_out", "ours", "flat_triton", "compiled_scan")


def draw_all() -> None:
    """Draw what there are results for."""
    from benchmarks.end_to_end import plots

    set_style()
    for machine in read_gpus(files.RESULTS):
        for suite, draw in DRAWINGS.items():
            if suite in machine.heads:
                save_figure(draw(machine), FOLDER / f"{machine.name}_{suite}.svg")
    plots.draw_all()


def set_style() -> None:
    """The same drawing is the same file."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "rl-triton-core", "svg.fonttype": "none", "font.size": 8})


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    print("drew", path.name)


def make_panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure and its panels."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    return figure, list(panels.flat)


def draw_heat_map(panel: Axes, title: str, ratios: pd.Series) -> None:
    """Ratios over (num_envs, T), written into their cells, on a logarithmic scale about 1."""
    if not len(ratios):
        return
    index = pd.MultiIndex.from_tuples([(w.num_envs, w.num_steps) for w in ratios.index])
    grid = ratios.set_axis(index).unstack()
    panel.imshow(np.log2(grid.to_numpy()), cmap="RdYlGn", vmin=-3, vmax=3, aspect="auto", origin="lower")
    for (row, column), value in np.ndenumerate(grid.to_numpy()):
        if np.isfinite(value):
            color = "white" if abs(np.log2(value)) > 2 else "black"
            panel.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=6, color=color)
    panel.set(title=title, xlabel="T", ylabel="num_envs")
    panel.set_xticks(range(grid.shape[1]), [str(x) for x in grid.columns])
    panel.set_yticks(range(grid.shape[0]), [str(x) for x in grid.index])


def draw_sweep(machine: Machine) -> Figure:
    """Every estimator against the flat kernel and the compiled scan."""
    figure, panels = make_panels(len(ESTIMATORS), 2, 8, 2.1 * len(ESTIMATORS))
    for row, estimator in enumerate(ESTIMATORS):
        for column, other in enumerate(("flat_triton", "compiled_scan")):
            ratios = machine.find_ratios("sweep", other)
            plain = [w.estimator == estimator and w.layout == "env-major" and not w.truncated for w in ratios.index]
            draw_heat_map(panels[2 * row + column], f"{estimator} against {other}", ratios[plain])
    return figure


def draw_roofline(machine: Machine) -> Figure:
    """The percentage of the roofline against the bytes, by layout."""
    figure, panels = make_panels(1, 2, 9, 3.5)
    percent = pd.concat([machine.find_roofline(suite) for suite in ("sweep", "large")])
    for panel, layout in zip(panels, LAYOUTS, strict=True):
        for estimator in ESTIMATORS:
            wanted = [
                (w, x) for w, x in percent.items() if (w.estimator, w.layout, w.truncated) == (estimator, layout, False)
            ]
            if wanted:
                panel.plot([count_bytes(w) / 1e6 for w, _ in wanted], [x for _, x in wanted], ".", label=estimator)
        panel.axhline(100, color="grey", linewidth=0.5)
        panel.set(title=layout, xscale="log", xlabel="MB that must move", ylabel="% of the roofline", ylim=(0, None))
    panels[0].legend(fontsize=6)
    return figure


def draw_breakdown(machine: Machine) -> Figure:
    """Full calls at the headline shape: the device's share and the host's."""
    figure, panels = make_panels(1, len(ESTIMATORS), 12, 3)
    lines = machine.find_suite("headline")
    lines = lines[lines["provider"].isin(ARMS) & ~lines["truncated"].astype(bool)]
    for panel, estimator in zip(panels, ESTIMATORS, strict=True):
        times = (
            lines[lines["estimator"] == estimator].set_index("provider").reindex(ARMS)[["full", "device"]].astype(float)
        )
        host = (times["full"] - times["device"].fillna(0)).clip(lower=0)
        panel.bar(ARMS, times["device"].fillna(0), label="device")
        panel.bar(ARMS, host.fillna(0), bottom=times["device"].fillna(0), label="host")
        panel.set_title(estimator, fontsize=7)
        panel.tick_params("x", rotation=90)
    panels[0].set_ylabel("µs")
    panels[0].legend(fontsize=6)
    return figure


def draw_long_rows(machine: Machine) -> Figure:
    """Device time of GAE against T, and the floor of its bytes."""
    figure, panels = make_panels(1, 1, 6, 4)
    curves = {arm: machine.find_times("long", arm, "device") for arm in ("ours", "flat_triton")}
    curves["floor of the bytes"] = machine.find_floors("long")
    for label, times in curves.items():
        points = sorted((w.num_steps, x) for w, x in times.items() if w[:2] == ("gae", 16) and w.layout == "env-major")
        if points:
            panels[0].plot(*zip(*points, strict=True), marker=".", label=label)
    panels[0].set(xscale="log", yscale="log", xlabel="T", ylabel="µs on the device", title="GAE, 16 environments")
    panels[0].legend()
    return figure


DRAWINGS: dict[str, Callable[[Machine], Any]] = {
    "headline": draw_breakdown,
    "sweep": draw_sweep,
    "long": draw_long_rows,
    "large": draw_roofline,
}
