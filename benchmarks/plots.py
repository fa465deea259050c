"""Draw the figures of docs/benchmarks.md from result files.

python benchmarks/plots.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files
from benchmarks.measured import Results, gpus
from benchmarks.suites import LENGTHENING, SUITES
from benchmarks.workloads import ESTIMATORS, LAYOUTS, Workload, bytes_moved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = files.ROOT / "docs" / "plots"
ARMS = {"ours": "ours", "flat_triton": "flat Triton", "cuda_rows": "CUDA rows"}


class Plot(NamedTuple):
    """A figure, the suite whose section shows it, and what it says."""

    suite: str
    caption: str
    draw: Callable[[Results], Figure]

    def has(self, results: Results) -> bool:
        """Whether there is anything to draw."""
        return any(row["full"] is not None for _, _, row in results.suite(self.suite))


def main() -> None:
    """Draw what there are results for."""
    set_up()
    for results in gpus(files.RESULTS):
        for name in drawn(results):
            save(FIGURES[name].draw(results), FOLDER / file_of(results, name))


def drawn(results: Results) -> list[str]:
    """The figures for which there are results."""
    return [name for name, figure in FIGURES.items() if figure.has(results)]


def file_of(results: Results, name: str) -> str:
    """What a machine's figure is called."""
    return f"{results.name}_{name}.svg"


def link(results: Results, name: str) -> str:
    """A figure on a page."""
    return f"![{FIGURES[name].caption}](plots/{file_of(results, name)})\n\n*{FIGURES[name].caption}*"


def set_up() -> None:
    """The same drawing is the same file."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "rl-triton-core", "svg.fonttype": "none", "font.size": 8})


def save(figure: Figure, path: Path) -> None:
    """Write a figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    print("drew", path.name)


def axes(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure and its panels."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    return figure, list(panels.flat)


def heat_map(panel: Axes, title: str, values: dict[tuple[int, int], float]) -> Any:
    """Ratios over (num_envs, T), written into their cells, on a logarithmic scale about 1."""
    import numpy as np

    envs, steps = (sorted({shape[i] for shape in values}) for i in (0, 1))
    grid = np.full((len(envs), len(steps)), np.nan)
    for (n, t), value in values.items():
        grid[envs.index(n), steps.index(t)] = np.log2(value)
        panel.text(steps.index(t), envs.index(n), f"{value:.1f}", ha="center", va="center", fontsize=6)
    image = panel.imshow(grid, cmap="RdYlGn", vmin=-3, vmax=3, aspect="auto", origin="lower")
    panel.set(title=title, xlabel="T", ylabel="num_envs")
    panel.set_xticks(range(len(steps)), [str(t) for t in steps])
    panel.set_yticks(range(len(envs)), [str(n) for n in envs])
    return image


def speed_ups(
    results: Results, suite: str, chosen: Iterable[Workload], other: str, ours: str
) -> dict[tuple[int, int], float]:
    """Full-call ratios by shape."""
    found = {(w.num_envs, w.num_steps): results.ratio(suite, w, other, ours) for w in chosen}
    return {shape: ratio for shape, ratio in found.items() if ratio is not None}


def sweep_map(results: Results) -> Figure:
    """Every estimator against the flat kernel and the compiled scan."""
    figure, panels = axes(len(ESTIMATORS), 2, 8, 2.1 * len(ESTIMATORS))
    for row, estimator in enumerate(ESTIMATORS):
        chosen = [w for w in SUITES["sweep"].workloads if w.estimator == estimator]
        plain = [w for w in chosen if w.layout == "env-major" and not w.truncated]
        for column, other in enumerate(("flat_triton", "compiled_scan")):
            values = speed_ups(results, "sweep", plain, other, "ours")
            heat_map(panels[2 * row + column], f"{estimator} against {other}", values)
    return figure


def rows_map(results: Results) -> Figure:
    """GAE against the CUDA kernel."""
    figure, panels = axes(1, 1, 7, 3.5)
    heat_map(panels[0], "gae", speed_ups(results, "rows", SUITES["rows"].workloads, "cuda_rows", "ours_out"))
    return figure


def roofline(results: Results) -> Figure:
    """The percentage of the roofline against the bytes, by layout."""
    figure, panels = axes(1, 2, 9, 3.5)
    for panel, layout in zip(panels, LAYOUTS, strict=True):
        for estimator in ESTIMATORS:
            points = []
            for suite in ("sweep", "large"):
                for w in SUITES[suite].workloads:
                    ratio = results.over_floor(suite, w)
                    if ratio is not None and (w.estimator, w.layout, w.truncated) == (estimator, layout, False):
                        points.append((bytes_moved(w) / 1e6, 100 / ratio))
            if points:
                panel.plot(*zip(*points, strict=True), marker=".", linestyle="none", label=estimator)
        panel.axhline(100, color="grey", linewidth=0.5)
        panel.set(title=layout, xscale="log", xlabel="MB that must move", ylabel="% of the roofline", ylim=(0, None))
    panels[0].legend(fontsize=6)
    return figure


def breakdown(results: Results) -> Figure:
    """Full calls at the headline shape: the device's share and the rest."""
    figure, panels = axes(1, len(ESTIMATORS), 12, 3)
    arms = ("torch_add", "ours_out", "ours", "flat_triton", "compiled_scan")
    for panel, estimator in zip(panels, ESTIMATORS, strict=True):
        w = next(w for w in SUITES["headline"].workloads if w.estimator == estimator)
        shown = [arm for arm in arms if results.time("headline", w, arm, "full") is not None]
        device = [results.time("headline", w, arm, "device") or 0.0 for arm in shown]
        full = [results.time("headline", w, arm, "full") or 0.0 for arm in shown]
        panel.bar(shown, device, label="device")
        panel.bar(shown, [max(0.0, a - b) for a, b in zip(full, device, strict=True)], bottom=device, label="host")
        panel.set_title(estimator, fontsize=7)
        panel.tick_params("x", rotation=90)
    panels[0].set_ylabel("µs")
    panels[0].legend(fontsize=6)
    return figure


def long_rows(results: Results) -> Figure:
    """Device time of GAE against T, and the floor."""
    figure, panels = axes(1, 1, 6, 4)
    chosen = [Workload("gae", *shape) for shape in LENGTHENING]
    curves = {label: [results.time("long", w, arm, "device") for w in chosen] for arm, label in ARMS.items()}
    curves["the bytes' floor"] = [results.floor("long", w) for w in chosen]
    for label, values in curves.items():
        points = [(w.num_steps, value) for w, value in zip(chosen, values, strict=True) if value is not None]
        if points:
            panels[0].plot(*zip(*points, strict=True), marker=".", label=label)
    panels[0].set(xscale="log", yscale="log", xlabel="T", ylabel="µs on the device", title="16 environments")
    panels[0].legend()
    return figure


FIGURES = {
    "breakdown": Plot("headline", "Full call at 4096x128: what the device takes, and the host's rest", breakdown),
    "sweep": Plot("sweep", "Full call: how many times faster, by num_envs and T", sweep_map),
    "rows": Plot("rows", "Full call with out= against the CUDA kernel with a thread per row", rows_map),
    "long": Plot("long", "GAE on long rows", long_rows),
    "roofline": Plot("large", "Device time: percentage of the roofline", roofline),
}

if __name__ == "__main__":
    main()
