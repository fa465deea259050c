"""The figure of examples/ppo_sb3.py: learning curves, shares of time, and the advantage step."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

LABELS = {"stock": "Stable-Baselines3", "triton": "rl_triton_core", "accelerated": "TritonPPO"}
PHASES = ("rollout", "advantages", "update", "rest")
GREY, ORANGE, BLUE, GREEN = "#b9bec6", "#e4572e", "#33658a", "#76b041"


def draw_curves(axes: Any, runs: dict[str, Any], result: dict[str, Any], solved: float) -> None:
    axes.axhline(solved, color=GREEN, linestyle=":", linewidth=1.5)
    axes.text(0, solved + 6, f"solved ({solved:.0f})", color=GREEN, va="bottom")
    styles: tuple[dict[str, Any], ...] = (
        {"color": GREY, "linewidth": 6},
        {"color": ORANGE, "linewidth": 1.8, "linestyle": "--"},
        {"color": BLUE, "linewidth": 1.2},
    )
    for (name, run), style in zip(runs.items(), styles, strict=True):
        steps, returns = zip(*run.curve, strict=True)
        axes.plot(np.divide(steps, 1000), returns, label=f"{LABELS[name]} (evaluation: {run.evaluation:.0f})", **style)
    axes.set(xlabel="environment steps, thousands", ylabel="mean return of the last 100 episodes", ylim=(0, 525))
    axes.set_title(f"One seed; the first two are {'equal in every bit' if result['bitwise_equal'] else 'not equal'}")
    axes.legend(loc="lower right", frameon=False, fontsize=10, handlelength=1.6, borderaxespad=0)


def draw_shares(axes: Any, runs: dict[str, Any], result: dict[str, Any]) -> None:
    for row, run in enumerate(runs.values()):
        left = 0.0
        for phase, colour in zip(PHASES, (BLUE, ORANGE, "#86bbd8", GREY), strict=True):
            width = 100 * run.share[phase]
            middle = left + width / 2
            axes.barh(row, width, left=left, color=colour, height=0.5)
            if phase == "advantages":
                line = {"arrowstyle": "-", "color": ORANGE}
                at = {"xy": (middle, row - 0.25), "xytext": (middle, row - 0.42), "arrowprops": line}
                axes.annotate(f"advantages {width:.2f} %", **at, color=ORANGE, ha="center", va="center")
            elif width > 8:
                text = {"color": "white" if phase == "rollout" else "black", "ha": "center", "va": "center"}
                axes.text(middle, row, f"{phase}\n{width:.1f} %", **text)
            left += width
    axes.set(xlabel="share of training time, %", xlim=(0, 100), ylim=(len(runs) - 0.5, -0.6))
    axes.set_yticks(range(len(runs)), [f"{LABELS[name]}\n{run.total:.1f} s" for name, run in runs.items()])
    axes.set_title(f"Where the time goes (TritonPPO: {result['accelerated_ratio']:.2f}x as fast)")


def draw_figure(runs: dict[str, Any], result: dict[str, Any], solved: float, path: Path) -> None:
    """Draw three panels into a file."""
    plt.switch_backend("Agg")
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (curves, shares, step) = plt.subplots(1, 3, figsize=(15, 4.8), width_ratios=[1.25, 1.25, 0.95], dpi=130)
    draw_curves(curves, runs, result, solved)
    draw_shares(shares, runs, result)
    compared = ("stock", "triton")
    names, heights = [LABELS[name] for name in compared], [runs[name].milliseconds_per_call for name in compared]
    step.bar_label(step.bar(names, heights, color=[GREY, ORANGE], width=0.55), fmt="%.3f ms", padding=3)
    step.set(ylabel="milliseconds per call", ylim=(0, 1.12 * max(heights)))
    step.set_title(f"The advantage step: {result['advantage_speedup']:.1f}x as fast")
    figure.tight_layout(w_pad=2.5)
    figure.savefig(path)
