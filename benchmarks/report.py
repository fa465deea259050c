"""Write the pages of docs/, and the paragraph of the README, that are made from result files in benchmarks/results/.

    python benchmarks/report.py

A page is a function that returns its text, and a line in PAGES. Every number on it is read from a result file. Where
matplotlib is installed, the figures are drawn too. benchmarks/notes.json says why a target is missed, by its key.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files, judge, plots, speed_page
from benchmarks.end_to_end import page as end_to_end_page
from benchmarks.end_to_end import plots as end_to_end_plots
from benchmarks.files import RESULTS, ROOT, Row
from benchmarks.markdown import among, generated, grouped, machine, number, table


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")
        print("wrote", name)
    if importlib.util.find_spec("matplotlib"):
        plots.main()
        end_to_end_plots.main()


# --- the accuracy page ------------------------------------------------------------------------------------------------


def accuracy() -> str:
    """docs/accuracy.md."""
    results = found("accuracy_*.json")
    return "\n\n".join([accuracy_head(results[0]), *map(accuracy_section, results)]) + "\n"


def accuracy_head(result: Row) -> str:
    """What is measured, and how."""
    rows, limits = result["float32"], result["limits"]
    return f"""\
# Accuracy

{generated("make accuracy")} On a GPU: `python benchmarks/accuracy.py FOLDER`.

An error is ‖x − exact‖ / ‖exact‖ in the Euclidean norm, where a float64 loop over the same inputs gives the exact
result. It is compared with that of a serial float32 loop in NumPy, which does the operations of the papers' equations
one after another. Discounts are rounded to float32 beforehand, so that the errors are those of arithmetic alone.

A ratio is the error over the loop's error, which counts as half a float32 epsilon ({number(limits["serial_floor"])}) at
least. The limit is {limits["ratio"]:g}.

Settings: γ {among(rows, "gamma")}; λ {among(rows, "lambda_")}; no end of an episode in the window, or one every
{among(rows, "episode")} steps on average."""


def accuracy_section(result: Row) -> str:
    """The tables of one backend."""
    return "\n\n".join(
        [
            f"## Backend `{result['backend']}`",
            machine(result["system"], on_gpu=result["backend"] == "triton"),
            float32_text(result["float32"]),
            float32_table(result["float32"]),
            half_text(result),
            half_table(result["half"]),
        ]
    )


def float32_text(rows: list[Row]) -> str:
    """What the table of float32 inputs shows."""
    worst = max(rows, key=ratio)
    return f"""\
float32 inputs; memory layouts: {among(rows, "layout")}. Each line is the setting, layout and result with the largest
ratio, or the largest error among equal ratios. Largest ratio of all: {worst["ratio"]:.2f}."""


def float32_table(rows: list[Row]) -> str:
    """Errors by estimator and length."""
    lines = []
    for (estimator,), found in grouped(rows, "estimator").items():
        for i, ((steps,), group) in enumerate(grouped(found, "steps").items()):
            worst = max(group, key=lambda row: (round(ratio(row), 2), row["error"]))
            errors = number(worst["error"]), number(worst["serial_error"])
            lines.append([f"`{estimator}`" if i == 0 else "", f"{steps}", *errors, f"{worst['ratio']:.2f}"])
    return table(["", "T", "error", "serial float32 loop", "ratio"], lines)


def half_text(result: Row) -> str:
    """What the table of half-precision inputs shows."""
    rows = result["half"]
    return f"""\
Half-precision inputs, computed with in float32 (T = {among(rows, "steps")}). The error counts from the inputs before
they were rounded, and is compared with what rounding them once does to the float64 loop. Shown are the setting with the
largest error, and the ratio farthest from 1, which may differ by {result["limits"]["rounding"]:g}. *Beyond rounding* is
the error against the float64 loop on the rounded inputs, and its ratio to that of the float32 loop on them.

The factors β of `linear_recurrence` are inputs too: those near 1 suffer most from rounding, up to becoming 1, and may
be float32 beside a half-precision α."""


def half_table(rows: list[Row]) -> str:
    """Errors by estimator and dtype."""
    lines = []
    for (estimator,), found in grouped(rows, "estimator").items():
        for i, ((dtype,), group) in enumerate(grouped(found, "dtype").items()):
            largest = max(group, key=lambda row: row["error"])
            farthest = max((row["ratio"] for row in group), key=lambda x: abs(x - 1))
            beyond = max((row["beyond_rounding"] for row in group), key=ratio)
            errors = number(largest["error"]), number(largest["rounding_error"]), f"{farthest:.4f}"
            lines.append(
                [f"`{estimator}`" if i == 0 else "", dtype, *errors, number(beyond["error"]), f"{beyond['ratio']:.2f}"]
            )
    return table(["", "inputs", "error", "rounding once", "ratio", "beyond rounding", "ratio"], lines)


def ratio(row: Row) -> float:
    """The ratio; NaN is the largest."""
    return math.inf if math.isnan(row["ratio"]) else float(row["ratio"])


# --- the speed page ---------------------------------------------------------------------------------------------------


def speed() -> str:
    """docs/speed.md."""
    parts = [speed_head(), sb3_section(read("cpu/sb3_advantages.json"))]
    parts += [section(result) for pattern, section in SPEED_FILES.items() for result in found(pattern)]
    return "\n\n".join(parts) + "\n"


def speed_head() -> str:
    """What is measured, and how."""
    return f"""\
# Speed

{generated("make speed")} On a GPU: `python benchmarks/packed.py FOLDER`.

Arms that are compared take turns in one process, on the same inputs, after their results were found to agree. Times are
medians in microseconds."""


def sb3_section(result: Row) -> str:
    """The advantage pass of Stable-Baselines3."""
    lines = []
    for row in result["rows"]:
        shape = f"({row['n_steps']}, {row['n_envs']}), {row['threads']}"
        times = (f"{row['microseconds'][name]:.0f}" for name in ("stock", "adapter", "core"))
        ratios = (f"{row[name]:.1f}" for name in ("speedup", "speedup_first_of_burst"))
        lines.append([shape, *times, f"{row['adapter_overhead_microseconds']:.0f}", *ratios, f"{row['target']:g}"])
    head = ["(n_steps, n_envs), threads", "stock", "adapter", "core", "adapter − core"]
    return f"""\
## The advantage pass of Stable-Baselines3

{machine(result["system"])}

*Stock* is the rollout buffer of Stable-Baselines3 (NumPy, one thread), *adapter* is our buffer in its place, *core* is
`compute_gae` on flags that are ready. Results are equal to the bit. Calls come in bursts of {result["burst"]}; the
first of a burst finds the caches as the other arms left them, as in training, and is counted apart.

{table([*head, "stock / adapter", "first of a burst", "aim"], lines)}"""


PACKED_ARMS = ("packed", "padded", "unmasked")
SLOWER_ON_A_GPU = """ A sequence begins anywhere: a
thread loads its steps one by one, not four at a time, and after its offsets. What is saved is the padding."""


def packed_section(result: Row) -> str:
    """Sequences end to end against padded ones."""
    lines = [
        [
            row["sequences"],
            f"`{row['estimator']}`",
            f"{row['steps']}",
            f"{row['padded_steps']}",
            *(packed_times(row, arm) for arm in PACKED_ARMS),
            f"{row['padded_over_packed']:.2f}",
        ]
        for row in result["rows"]
    ]
    on_cpu = result["backend"] == "cpu"
    timed = "full calls" if on_cpu else "the device"
    both = "full_microseconds" in result["rows"][0]
    what = "full calls" if on_cpu else "full call / " * both + "time on the device, replayed"
    head = ["sequences (length)", "", "steps", "padded steps", "packed", "masked", "without a mask", "masked / packed"]
    slower = sum(row["padded_over_packed"] < 1 for row in result["rows"])
    why = "" if on_cpu or not slower else SLOWER_ON_A_GPU
    return f"""\
## Sequences end to end, backend `{result["backend"]}`

{machine(result["system"])}

The same sequences with `cu_seqlens`, as padded rows under a mask, and where all are equally long without one; {what}.
The last column is of {timed}: packed takes longer in {slower} of {len(lines)} rows.{why}

{table(head, lines)}"""


def packed_times(row: Row, arm: str) -> str:
    """Those of an arm that there are: on a GPU of the full call and of the device."""
    kinds = [row["microseconds"]]
    if row.get("full_microseconds", row["microseconds"]) != row["microseconds"]:
        kinds.insert(0, row["full_microseconds"])
    return " / ".join(f"{times[arm]:.1f}" for times in kinds if arm in times) or "–"


def first_call_section(result: Row) -> str:
    """First calls with and without what another process compiled."""
    names = ("import", "compiled", "loaded", "second")
    lines = [[f"`{row['estimator']}`", *(f"{1e3 * row[name]:.1f}" for name in names)] for row in result["rows"]]
    return f"""\
## First calls, backend `cpu`

{machine(result["system"])}

Each combination of present arguments, layout and dtype is compiled when it is first met, and kept on disk: the next
process loads it. Calls on {" x ".join(map(str, result["shape"]))} (environments, steps), each the first of a process of
its own that has imported the backend and Numba; **milliseconds**.

{table(["", "import", "compiled", "loaded", "second call"], lines)}"""


SPEED_FILES = {"first_call.json": first_call_section, "packed_*.json": packed_section}


# --- the page of benchmarks/end_to_end --------------------------------------------------------------------------------


def end_to_end() -> str:
    """docs/end-to-end.md."""
    return end_to_end_page.page(RESULTS)


# --- the pages of benchmarks/run.py -----------------------------------------------------------------------------------


def benchmarks() -> str:
    """docs/benchmarks.md."""
    return speed_page.page(*speed_page.load(RESULTS), files.read(ROOT / "benchmarks" / "notes.json"))


def readme() -> str:
    """README.md."""
    machines, _, sb3 = speed_page.load(RESULTS)
    return speed_page.readme((ROOT / "README.md").read_text(encoding="utf-8"), machines, sb3)


def read(name: str) -> Row:
    """A result file."""
    return files.read(RESULTS / name)


def found(pattern: str) -> list[Row]:
    """The result files of all machines that are called so, the CPU's first."""
    return [files.read(path) for path in sorted(RESULTS.glob(f"*/{pattern}"))]


PAGES = {
    "docs/accuracy.md": accuracy,
    "docs/speed.md": speed,
    "docs/benchmarks.md": benchmarks,
    "docs/end-to-end.md": end_to_end,
    "docs/launches.md": judge.page,
    "README.md": readme,
}

if __name__ == "__main__":
    main()
