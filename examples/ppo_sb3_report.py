"""What examples/ppo_sb3.py prints and draws where it compares: what TritonPPO gains, and the advantages alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

LABELS = {"stock": "Stable-Baselines3", "triton": "rl_triton_core", "accelerated": "TritonPPO"}
PHASES = ("rollout", "advantages", "update", "rest")
GREY, ORANGE, BLUE, GREEN = "#b9bec6", "#e4572e", "#33658a", "#76b041"
COLOURS = {"stock": GREY, "triton": ORANGE, "accelerated": BLUE}


def compare(runs: dict[str, list[Any]]) -> dict[str, Any]:
    """Agents and times side by side.

    The first runs of stock and of our advantages do the same rollouts and the same updates: whatever these differ by is
    noise, be it the difference of their sums or twice the standard error of the differences per iteration.
    """
    stock, ours = (runs[name][0] for name in ("stock", "triton"))
    totals = {name: [run.total for run in turns] for name, turns in runs.items()}
    differences = np.subtract(stock.iterations, ours.iterations)
    saved = stock.seconds["advantages"] - ours.seconds["advantages"]
    noise = max(abs(differences.sum()), 2 * differences.std() * len(differences) ** 0.5)
    return {
        "bitwise_equal": len({run.digest for name in ("stock", "triton") for run in runs[name]}) == 1,
        "total_seconds": totals,
        "accelerated_ratios": np.divide(totals["stock"], totals["accelerated"]).tolist(),
        "advantage_speedup": stock.seconds["advantages"] / ours.seconds["advantages"],
        "amdahl_bound": 1 / (1 - stock.share["advantages"]),
        "end_to_end_ratio": stock.total / ours.total,
        "seconds_saved_by_advantages": saved,
        "seconds_of_noise": noise,
        "within_noise": bool(saved <= noise),
    }


def describe_spread(numbers: Sequence[float], digits: int, unit: str = "") -> str:
    """The median, from the least to the most."""
    low, median, high = (f"{x:.{digits}f}" for x in (min(numbers), np.median(numbers), max(numbers)))
    return f"{median}{unit} ({low} to {high})"


def describe_gain(result: dict[str, Any]) -> str:
    """How long the same training takes with TritonPPO and without."""
    ours, stock = (describe_spread(result["total_seconds"][name], 1, " s") for name in ("accelerated", "stock"))
    ratio = describe_spread(result["accelerated_ratios"], 2, "x")
    return f"TritonPPO trained the same task in {ours} instead of {stock}: {ratio} as fast"


def print_comparison(runs: dict[str, list[Any]], result: dict[str, Any]) -> None:
    """Print what is gained, then what the advantage step does, then where the time goes."""
    stock, ours = (runs[name][0].milliseconds_per_call for name in ("stock", "triton"))
    verdict = "within noise: no gain to claim" if result["within_noise"] else "the part saved exceeds the noise"
    print(f"""
{describe_gain(result)}
                 (the median of {len(result["accelerated_ratios"])} turns, from the least to the most;
                 not counted: {result["compile_seconds"]["updates"]:.1f} s to compile updates, once per machine)
advantage step:  {stock:.3f} ms against {ours:.3f} ms per call, {result["advantage_speedup"]:.1f}x as fast
                 (not counted: {result["compile_seconds"]["advantages"]:.1f} s to compile it, once per machine)
that step alone: {result["end_to_end_ratio"]:.4f}x end to end, {verdict}
                 ({result["seconds_saved_by_advantages"]:.2f} s saved; noise {result["seconds_of_noise"]:.2f} s;
                 {result["amdahl_bound"]:.4f}x if it took no time, which is Amdahl's law)
""")
    print(f"{'seconds, first turn':<20}" + "".join(f"{phase:>12}" for phase in (*PHASES, "total")))
    for name, (run, *_) in runs.items():
        print(f"{LABELS[name]:<20}", *(f"{run.seconds[phase]:>11.2f}" for phase in PHASES), f"{run.total:>11.2f}")


def draw_curves(axes: Any, runs: dict[str, list[Any]], result: dict[str, Any], solved: float) -> None:
    """Returns over seconds, of every turn with and without TritonPPO."""
    axes.axhline(solved, color=GREEN, linestyle=":", linewidth=1.5)
    axes.text(0, solved + 6, f"solved ({solved:.0f})", color=GREEN, va="bottom")
    for name in ("stock", "accelerated"):
        for turn, run in enumerate(runs[name]):
            label = f"{LABELS[name]} (evaluation: {run.evaluation:.0f})" if turn == 0 else None
            _, seconds, returns = zip(*run.curve, strict=True)
            axes.plot(seconds, returns, color=COLOURS[name], linewidth=2, label=label)
    axes.set(xlabel="seconds", ylabel="mean return of the last 100 episodes", ylim=(0, 525))
    axes.set_title(f"The same task, {describe_spread(result['accelerated_ratios'], 2, 'x')} as fast")
    axes.legend(loc="lower right", frameon=False, fontsize=10, handlelength=1.6, borderaxespad=0)


def draw_seconds(axes: Any, runs: dict[str, list[Any]], result: dict[str, Any]) -> None:
    """Where the seconds of the first turn go, and the totals of all turns."""
    longest = max(run.total for turns in runs.values() for run in turns)
    for row, (name, (run, *_)) in enumerate(runs.items()):
        left = 0.0
        for phase, colour in zip(PHASES, (BLUE, ORANGE, "#86bbd8", GREY), strict=True):
            width = run.seconds[phase]
            axes.barh(row, width, left=left, color=colour, height=0.5)
            if width > 0.1 * longest:
                text = {"color": "white" if phase == "rollout" else "black", "ha": "center", "va": "center"}
                axes.text(left + width / 2, row, f"{phase}\n{width:.1f} s", **text)
            left += width
        totals = result["total_seconds"][name]
        axes.plot(totals, [row + 0.33] * len(totals), "|", color="black", markersize=9)
    axes.set(xlabel="seconds of training", ylim=(len(runs) - 0.4, -0.5))
    axes.set_yticks(range(len(runs)), [LABELS[name] for name in runs])
    axes.set_title("Where the time goes (ticks: each turn)")


def draw_figure(runs: dict[str, list[Any]], result: dict[str, Any], solved: float, path: Path) -> None:
    """Draw three panels into a file."""
    plt.switch_backend("Agg")
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (curves, seconds, step) = plt.subplots(1, 3, figsize=(15, 4.8), width_ratios=[1.25, 1.25, 0.95], dpi=130)
    draw_curves(curves, runs, result, solved)
    draw_seconds(seconds, runs, result)
    heights = {name: runs[name][0].milliseconds_per_call for name in ("stock", "triton")}
    colours, names = [COLOURS[name] for name in heights], [LABELS[name] for name in heights]
    step.bar_label(step.bar(names, heights.values(), color=colours, width=0.55), fmt="%.3f ms", padding=3)
    step.set(ylabel="milliseconds per call", ylim=(0, 1.12 * max(heights.values())))
    step.set_title(f"The advantage step: {result['advantage_speedup']:.1f}x as fast")
    figure.tight_layout(w_pad=2.5)
    figure.savefig(path)
