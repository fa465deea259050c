"""The pictures of the README and the site's first pages: the boundary rule, the share of an iteration, the speed-up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import files
from benchmarks.measured import Machine, read_gpus, select_workloads
from benchmarks.plots import FOLDER, make_panels, save_figure, set_style
from benchmarks.suites import SWEEP_SHAPES
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE, ACCENT, LIGHT, GREEN, RED = "#263238", "#cfd8dc", "#3949ab", "#9fa8da", "#2e7d32", "#c62828"


def draw_all(drawings: Path = FOLDER) -> None:
    """Draw what there are results for."""
    set_style()
    save_figure(draw_boundary_rule(), drawings / "boundary_rule.svg")
    save_figure(draw_shares(), drawings / "iteration_shares.svg")
    for machine in read_gpus(files.RESULTS):
        if "sweep" in machine.heads:
            save_figure(draw_speed_up(machine), drawings / f"{machine.name}_speed_up.svg")


# --- where the time of an iteration goes ------------------------------------------------------------------------------


def draw_shares() -> Figure:
    """A bar per framework and machine: what the advantage step takes of an iteration, from the least to the most."""
    from benchmarks.pages import describe_range, format_shares, select_shares

    rows = select_shares(more=False)[::-1]
    figure, (panel,) = make_panels(1, 1, 6.4, 0.3 * len(rows) + 0.7)
    for place, (name, pairs) in enumerate(rows):
        shares = sorted(100 * pair["share"] for pair in pairs)
        panel.barh(place, 100, color=PALE, height=0.62)
        panel.barh(place, shares[-1], color=LIGHT, height=0.62)
        panel.barh(place, shares[0], color=ACCENT, height=0.62)
        panel.text(101, place, f"{describe_range(format_shares(pairs))} %", va="center")
        panel.text(-1, place, name, ha="right", va="center")
    panel.set(xlim=(0, 100), yticks=[], xlabel="% of an iteration that the framework's own advantage step takes")
    panel.set_title(
        "dark: in the setting with the smallest share; light: up to the largest; grey: all else", fontsize=8
    )
    hide_frame(panel)
    return figure


def hide_frame(panel: Axes) -> None:
    """No lines around a panel but the axis below it."""
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)


# --- speed-up by shape ------------------------------------------------------------------------------------------------

OTHERS = {
    "loop": ("Python loop", "o", RED),
    "compiled_scan": ("compiled scan", "s", ACCENT),
    "flat_triton": ("flat Triton kernel", "D", GREEN),
}


def draw_speed_up(machine: Machine) -> Figure:
    """How many times faster a full call of GAE is than other ways to compute it, by shape of the rollout."""
    from benchmarks.pages import describe_hardware

    figure, (panel,) = make_panels(1, 1, 6.4, 3.4)
    panel.set_xscale("log")
    shapes = sorted(SWEEP_SHAPES, key=lambda shape: (shape[1], shape[0]), reverse=True)
    for provider, (label, marker, color) in OTHERS.items():
        wanted = {Workload("gae", *shape): place for place, shape in enumerate(shapes)}
        ratios = select_workloads(machine.find_ratios("sweep", provider), wanted).dropna()
        places = [wanted[workload] for workload in ratios.index]
        panel.plot(ratios.to_list(), places, marker, color=color, markersize=5, label=f"over a {label}")
    panel.axvline(1, color=INK, linewidth=0.6)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_yticks(range(len(shapes)), [f"{num_envs} x {num_steps}" for num_envs, num_steps in shapes])
    panel.set(xlabel="times faster, full call", ylabel="environments x steps")
    panel.set_title(f"compute_gae on an {describe_hardware(machine)}", fontsize=9)
    panel.grid(axis="x", color=PALE, linewidth=0.5)
    panel.legend(fontsize=7, loc="lower right")
    hide_frame(panel)
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
    for t, (kind, value, color) in enumerate(STEPS):
        panel.plot([t], [0], "o", markersize=19, color=color)
        panel.text(t, 0, f"t={t}", color="white", ha="center", va="center", fontsize=7)
        panel.text(t, 0.52, kind, ha="center", color=color, fontweight="bold")
        panel.text(t, -0.62, value, ha="center", color=color)
        if color == INK:
            panel.annotate(
                "",
                (t + 0.16, 0.06),
                (t + 0.84, 0.06),
                arrowprops={"arrowstyle": "->", "color": GREEN, "linewidth": 1.6},
            )
            panel.text(t + 0.5, 0.17, "credit", ha="center", color=GREEN, fontsize=7)
        elif t < len(STEPS) - 1:
            panel.plot([t + 0.5] * 2, [-0.36, 0.36], "--", color=INK, linewidth=1)
            panel.text(t + 0.5, -0.46, "reset", ha="center", color=INK, fontsize=7)
    panel.text(-0.45, 0.92, "one environment, one rollout, three episodes: nothing crosses a reset", color=INK)
    panel.set(xlim=(-0.5, len(STEPS) - 0.5), ylim=(-0.85, 1.1))
    panel.axis("off")
    return figure
