"""Write the parts of docs/ and README.md that are made from result files in benchmarks/results/, and draw the figures.

    python benchmarks/pages.py

A part stands between two marks with its name, and is what a line of PARTS returns. Every number in it is read from a
result file. The rest of a page is written by hand. Figures are drawn where matplotlib is installed.
"""

from __future__ import annotations

import importlib.util
import math
import re
import string
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files
from benchmarks.end_to_end import aims, page
from benchmarks.files import RESULTS, ROOT, Row
from benchmarks.measured import Machine, list_medians, read_gpus, read_machine, select_workloads
from benchmarks.quartiles import MISSING, find_quartiles, format_quartiles, take_median
from benchmarks.suites import HEADLINE, SWEEP, SWEEP_SHAPES
from benchmarks.tables import (
    NOT_YET,
    describe_machine,
    format_bandwidth,
    format_percent,
    format_ratio,
    format_time,
    format_times,
    join_parts,
    make_table,
)
from benchmarks.workloads import ESTIMATORS, LAYOUTS, Workload

PAGES = (
    "docs/accuracy.md",
    "docs/benchmarks.md",
    "docs/end-to-end.md",
    "docs/index.md",
    "docs/install.md",
    "docs/multi-gpu.md",
    "docs/rllib.md",
    "README.md",
)
MARKED = re.compile(r"(<!-- (\w+): written by make report -->)\n.*?\n(<!-- /\2 -->)", re.DOTALL)


def main() -> None:
    """Write every page, and draw the figures."""
    for name in PAGES:
        (ROOT / name).write_text(fill_page(name), encoding="utf-8")
        print("wrote", name)
    if importlib.util.find_spec("matplotlib"):
        from benchmarks import plots

        plots.draw_all()


def fill_page(name: str) -> str:
    """A page with its parts between their marks."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return MARKED.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]() or NOT_YET}\n{found[3]}", text)


def write_results(name: str, write_result: Callable[[Row], str]) -> str:
    """The machine, and what there is to say, of every result file of this name; the CPU's first."""
    results = files.read_results(f"*/{name}.json", RESULTS)
    parts = ((f"{describe_machine(x)} {describe_protocol(x)}".strip(), write_result(x)) for x in results)
    return join_parts(part for pair in parts for part in pair)


def describe_protocol(result: Row) -> str:
    """What a file says of how it was measured."""
    names = ("shape", "threads", "turns", "calls", "burst", "pairs")
    return "".join(f"{name.capitalize()}: {result[name]}. " for name in names if name in result)


# --- benchmarks/run.py ------------------------------------------------------------------------------------------------

ARMS = {
    "ours": "ours", "ours_out": "ours with `out=`", "ours_normal_path": "ours, normal path", "loop": "loop",
    "compiled_scan": "compiled scan", "flat_triton": "flat Triton", "blocks_triton": "in blocks",
    "cuda_rows": "CUDA rows", "numpy": "NumPy", "numba": "Numba", "sb3": "SB3", "torchrl": "TorchRL", "rlax": "rlax",
}  # fmt: skip
SECTIONS = {
    "headline": ("4096 environments, 128 steps", ("compiled_scan", "flat_triton", "loop")),
    "rows": ("Advantages against the CUDA kernel with a thread per row", ("cuda_rows",)),
    "retrace_long": ("Retrace on longer rows", ("flat_triton", "compiled_scan")),
    "long": ("Long rows", ("flat_triton", "blocks_triton")),
    "large": ("Large rollouts", ()),
    "flags": ("Flags of other types", ("flat_triton",)),
    "bf16": ("bfloat16 inputs", ()),
    "variants": ("GAE without its value targets, and with a mask", ("flat_triton",)),
    "huge": ("More than 2³¹ elements", ()),
}
"""Suites, their titles, and the variants whose times are divided by ours."""
FIGURES = ("headline", "large", "long")
HEADLINE_ARMS = {"loop": "the Python loop", "compiled_scan": "a compiled scan", "flat_triton": "a flat Triton kernel"}


def write_gpus() -> str:
    """A section per GPU."""
    parts = []
    for gpu in read_gpus(RESULTS):
        parts += [f"## {gpu.hardware}", describe_gpu_speed(gpu), write_sweep(gpu) if "sweep" in gpu.heads else ""]
        parts += [write_suite(gpu, suite, *about) for suite, about in SECTIONS.items() if suite in gpu.heads]
    return join_parts(parts)


def write_cpu() -> str:
    """The suite of the CPU."""
    cpu = read_machine(RESULTS / "cpu")
    return write_suite(cpu, "cpu", "Full calls", ()) if "cpu" in cpu.heads else NOT_YET


def describe_suite(machine: Machine, suite: str, title: str) -> str:
    """A suite's title, and what it was measured on."""
    head, lines = machine.heads[suite], machine.find_suite(suite)
    text = f"{describe_machine(head)} Copy bandwidth {format_bandwidth(head['copy_bandwidth_gb_per_s'])}."
    if head["skipped"]:
        text += f" {len(head['skipped'])} workloads were skipped for lack of time."
    bad = lines[lines["status"] != "ok"].itertuples()
    failed = "; ".join(f"{ARMS.get(row.provider, row.provider)} on {row.workload}: {row.status}" for row in bad)
    return f"### {title}\n\n{text}" + f" Not timed: {failed}." * bool(failed)


def write_suite(machine: Machine, suite: str, title: str, others: Sequence[str]) -> str:
    """A table with a line per workload: every arm's times, ours against the roofline, and the others over ours."""
    lines = machine.find_suite(suite)
    kinds = ("full", "device") if suite != "cpu" else ("full",)
    arms = [arm for arm in ARMS if arm in set(lines["provider"])]
    times = {arm: [machine.find_times(suite, arm, kind) for kind in kinds] for arm in arms}
    ours = "ours" if "ours" in arms else "ours_out"
    roofline = machine.find_roofline(suite)
    ratios = [machine.find_ratios(suite, other, ours) for other in others]
    rows = []
    for w in dict.fromkeys(lines["workload"]):
        row = [f"`{w.estimator}` {str(w).partition(' ')[2]}".removesuffix(" float32")]
        row += [format_times(*(x.get(w) for x in times[arm])) for arm in arms]
        row += [format_percent(roofline.get(w))] * (len(roofline) > 0)
        rows.append(row + [format_ratio(ratio.get(w)) for ratio in ratios])
    head = ["", *(ARMS[arm] for arm in arms), *["roofline"] * (len(roofline) > 0), *(f"× {ARMS[x]}" for x in others)]
    smallest = min(lines["workload"], key=lambda w: w.cells)
    null, add = (format_time(machine.find_times(suite, name).get(smallest)) for name in ("null", "torch_add"))
    text = f"On the smallest shape an empty call takes {null} in the same run, and `torch.add` {add}."
    figure = f"![{title}](plots/{machine.name}_{suite}.svg)" * (suite in FIGURES)
    return join_parts([describe_suite(machine, suite, title), text, make_table(head, rows), figure])


def write_sweep(machine: Machine) -> str:
    """A table per estimator on the paper's shapes, in both layouts, plain and truncated."""
    title = "The paper's shapes"
    return join_parts(
        [
            f"![How many times faster compute_gae is than other ways](plots/{machine.name}_speed_up.svg)",
            describe_suite(machine, "sweep", title),
            f"![{title}](plots/{machine.name}_sweep.svg)",
            *(f"#### `{estimator}`\n\n{list_sweep(machine, estimator)}" for estimator in ESTIMATORS),
        ]
    )


def list_sweep(machine: Machine, estimator: str) -> str:
    """The table of one estimator."""
    full, device = (machine.find_times("sweep", kind=kind) for kind in ("full", "device"))
    roofline = machine.find_roofline("sweep")
    flat, compiled = (machine.find_ratios("sweep", other) for other in ("flat_triton", "compiled_scan"))
    variants = [*product(LAYOUTS, (False, True)[: 1 + ESTIMATORS[estimator].truncates])]
    head = [x for layout, cut in variants for x in (layout + ", truncated" * cut, "roofline", "× flat Triton")]
    rows = []
    for shape in SWEEP_SHAPES:
        row = ["x".join(map(str, shape))]
        for variant in variants:
            w = Workload(estimator, *shape, *variant)
            row += [
                format_times(full.get(w), device.get(w)),
                format_percent(roofline.get(w)),
                format_ratio(flat.get(w)),
            ]
        rows.append([*row, format_ratio(compiled.get(Workload(estimator, *shape)))])
    return make_table(["N x T", *head, "× compiled scan"], rows)


def describe_gpu_speed(gpu: Machine) -> str:
    """The headline, and the mean over the sweep."""
    w = Workload("gae", *HEADLINE)
    full, device = (gpu.find_times("headline", kind=kind).get(w) for kind in ("full", "device"))
    if full is None or device is None:
        return ""
    faster = {text: format_ratio(gpu.find_ratios("headline", arm).get(w)) for arm, text in HEADLINE_ARMS.items()}
    ratios = ", ".join(ratio.replace("×", f"×~faster~than {text}") for text, ratio in faster.items())
    every = select_workloads(list_medians(gpu.find_ratios("sweep", "flat_triton")), SWEEP).dropna()
    low, _, high = find_quartiles(every) if len(every) else [math.nan] * 3
    mean = f"{np.exp(np.log(every).mean()):.2f}×~faster" if len(every) else NOT_YET
    text = (
        f"On one {gpu.hardware}, `compute_gae` over {w.num_envs} environments and {w.num_steps} steps takes "
        f"{format_time(full)} µs per call, {format_time(device)} µs on the device. That is {ratios}: medians, with "
        f"quartiles in brackets. Over all estimators in {len(every)} settings, a call is {mean} than that kernel's "
        f"[{low:.2f}, {high:.2f}], the geometric mean of medians."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False).replace("~", " ")


# --- the other scripts that measure -----------------------------------------------------------------------------------


COLUMNS = {
    "sb3_advantages": {
        "(n_steps, n_envs), threads": "({n_steps}, {n_envs}), {threads}", "busy neighbours": "{busy_neighbours}",
        "stock": "{microseconds[stock]:.0f}", "adapter": "{microseconds[adapter]:.0f}",
        "core": "{microseconds[core]:.0f}", "stock / adapter": "{speedup:.1f}",
        "first of a burst": "{speedup_first_of_burst:.1f}",
    },
    "verl_advantages": {
        "estimator": "`{estimator}`",
        "(responses, tokens), threads": "({batch_size}, {response_length}), {threads}",
        "stock": "{milliseconds[stock]:.2f}", "adapter": "{milliseconds[adapter]:.2f}",
        "floor": "{milliseconds[floor]:.2f}", "stock / adapter": "{speedup:.1f}",
    },
    "robotics": {
        "package": "`{package}`", "step": "{step}", "(steps, environments)": "({num_steps}, {num_envs})",
        "stock": "{milliseconds[stock]:.2f}", "adapter": "{milliseconds[adapter]:.2f}",
        "stock / adapter": "{speedup:.1f}",
    },
    "multi_gpu": {
        "setting": "{setting}", "processes": "{processes}", "eager": "{milliseconds[eager]:.2f}",
        "captured": "{milliseconds[captured]:.2f}", "eager / captured": "{speedup:.2f}",
    },
    "varying_batches": {
        "algorithm": "{algorithm}", "steps of a batch": "{batch_size}", "updates": "{ours[updates]}",
        "sizes": "{ours[sizes]}", "replayed": "{ours[replayed]:.1%}", "stock, update": "{stock[update_ms]:.2f}",
        "ours, update": "{ours[update_ms]:.2f}", "stock, first 50": "{stock[first_ms]:.0f}",
        "ours, first 50": "{ours[first_ms]:.0f}",
    },
    "regimes_*": {
        "estimator": "`{estimator}`", "layout": "{layout}", "calls": "{regime}", "full": "{full:.0f}",
        "host": "{host:.0f}", "host, highest decile": "{host_highest_decile:.0f}",
        "that compiled": "{compiling_calls}", "kernels": "{kernels}",
    },
    "first_call": {
        "": "`{estimator}`", "import": "{import:.4f}", "compiled": "{compiled:.4f}", "loaded": "{loaded:.4f}",
        "second call": "{second:.4f}",
    },
}  # fmt: skip
"""Result files whose table has a line per row, and how the cells are made of the row's fields."""


def list_rows(columns: dict[str, str], result: Row) -> str:
    """The table of a result file."""
    return make_table([*columns], ([fill_cell(cell, row) for cell in columns.values()] for row in result["rows"]))


class Cells(string.Formatter):
    """Writes quartiles as well as numbers."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        """A field of a cell."""
        if isinstance(value, list | dict):
            return format_quartiles(value, lambda x: format(x, format_spec))
        return super().format_field(value, format_spec)


def fill_cell(cell: str, row: Row) -> str:
    """A cell of a row, which may not have the field."""
    try:
        return Cells().vformat(cell, (), row)
    except KeyError:
        return MISSING


def list_packed(result: Row) -> str:
    """Sequences end to end against padded ones."""
    kinds = ("microseconds",) if result["backend"] == "cpu" else ("full_microseconds", "microseconds")
    lines = []
    for row in result["rows"]:
        times = [format_times(*(row[kind].get(arm) for kind in kinds)) for arm in ("packed", "padded", "unmasked")]
        about = [row["sequences"], f"`{row['estimator']}`", f"{row['steps']}", f"{row['padded_steps']}"]
        lines.append([*about, *times, fill_cell("{padded_over_packed:.2f}", row)])
    slower = sum(take_median(row["padded_over_packed"]) < 1 for row in result["rows"])
    head = ["sequences (length)", "", "steps", "padded steps", "packed", "masked", "without a mask", "masked / packed"]
    return f"Packed takes longer in {slower} of {len(lines)} rows.\n\n{make_table(head, lines)}"


def list_losses(result: Row) -> str:
    """The losses against PyTorch's operations; where the device's own time was measured, with that and the floor."""
    arms, bandwidth = ("eager", "compiled", "ours"), result.get("copy_bandwidth_gb_per_s")
    pairs: dict[tuple[Any, ...], list[Row]] = {}
    for row in result["rows"]:
        setting = f"`{row['head']}`", f"{row['width']}", f"{row['elements']}"
        pairs.setdefault(setting, []).append(row)
    head = ["head", "actions", "elements", *arms, "eager / ours", "compiled / ours"]
    about = f"PyTorch and ours use {result['threads']} thread(s)." * (result["backend"] == "cpu")
    if bandwidth:
        head += [f"{arm}, device" for arm in arms[1:]] + ["floor"]
        about = f"The floor is the time in which a copy moves the call's bytes, at {format_bandwidth(bandwidth)}."
    lines = []
    for setting, rows in pairs.items():
        times = [row["microseconds"] for row in rows]
        cells = [format_times(*(x[arm] for x in times)) for arm in arms]
        cells += [" / ".join(format_ratio(find_ratio(row, arm)) for row in rows) for arm in arms[:2]]
        if bandwidth:
            cells += [format_times(*(x[arm]["device"] for x in times)) for arm in arms[1:]]
            cells.append(format_times(*(row["bytes"] / (take_median(bandwidth) * 1e3) for row in rows)))
        lines.append([*setting, *cells])
    return join_parts([about, make_table(head, lines)])


def find_ratio(row: Row, arm: str) -> Any:
    """How many times faster a loss of ours is than an arm: over turns, or by the medians of files without these."""
    times = row["microseconds"]
    return row.get("times_faster", {}).get(arm, take_median(times[arm]) / take_median(times["ours"]))


def write_accuracy() -> str:
    """The settings of the first backend, which are those of all, and a section per backend."""
    results = files.read_results("*/accuracy_*.json", RESULTS)
    rows, limits = results[0]["float32"], results[0]["limits"]
    gamma, lambda_, episode, layout = (
        ", ".join(dict.fromkeys(str(row[name]) for row in rows if row.get(name) is not None))
        for name in ("gamma", "lambda_", "episode", "layout")
    )
    settings = f"""\
Settings: γ {gamma}; λ {lambda_}; no episode ends, or one every {episode} steps on average. Layouts: {layout}. The ratio
may be {limits["ratio"]:g} at most, that of half-precision inputs may differ from 1 by {limits["rounding"]:g}."""
    sections = ((f"## Backend `{x['backend']}`", describe_machine(x), list_errors(x)) for x in results)
    return join_parts([settings, *(part for section in sections for part in section)])


def list_errors(result: Row) -> str:
    """The rounding errors of one backend, where they are worst."""
    full, half = (pd.DataFrame(result[name]).fillna({"ratio": np.inf}) for name in ("float32", "half"))
    lines, half_lines = [], []
    for _, group in full.groupby(["estimator", "steps"], sort=False):
        x = group.loc[group["ratio"].idxmax()]
        lines.append([f"`{x.estimator}`", f"{x.steps}", f"{x.error:.1e}", f"{x.serial_error:.1e}", f"{x.ratio:.2f}"])
    for _, group in half.groupby(["estimator", "dtype"], sort=False):
        x, farthest = group.loc[group["error"].idxmax()], group.loc[(group["ratio"] - 1).abs().idxmax()]
        beyond = max(group["beyond_rounding"], key=lambda found: found["ratio"])
        numbers = f"{x.error:.1e}", f"{x.rounding_error:.1e}", f"{farthest.ratio:.4f}", f"{beyond['error']:.1e}"
        half_lines.append([f"`{x.estimator}`", x["dtype"], *numbers, f"{beyond['ratio']:.2f}"])
    half_head = ["", "inputs", "error", "rounding once", "ratio", "beyond rounding", "ratio"]
    tables = make_table(["", "T", "error", "serial float32 loop", "ratio"], lines), make_table(half_head, half_lines)
    return join_parts(tables)


# --- docs/install.md --------------------------------------------------------------------------------------------------

FRAMEWORKS = {
    "stable-baselines3": "", "sb3-contrib": "", "ray": r"\[rllib\]", "torchrl": "", "gymnasium": "",
}  # fmt: skip
"""Packages of frameworks, and their extras in pyproject.toml."""


def list_versions() -> str:
    """The oldest versions, those that the tests without a GPU install, and those of the tests on a GPU."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    systems = [result["system"] for result in files.read_results("*/gpu_tests.json")]
    lines = [["Python", *re.findall(r'requires-python = ">=(.*)"', project), *re.findall(r"on Python (3.\d+)", pinned)]]
    for name, extra in {**dict.fromkeys(("torch", "triton", "numba", "numpy"), ""), **FRAMEWORKS}.items():
        oldest, newest = re.findall(rf'"{name}{extra}>=([\d.]+)', project), re.findall(rf"^{name}==(\S+)", pinned, re.M)
        lines.append([name, oldest[0], newest[0].removesuffix(";")])
    table = [[*line, *(system[line[0].lower()] for system in systems)] for line in lines]
    table.append(["CUDA", "that of PyTorch", "–", *(system["cuda"] for system in systems)])
    table.append(["ROCm", "that of PyTorch", "kernels compiled, not run", *("–" for _ in systems)])
    tested = [f"tests on an {system['gpu'].partition(',')[0]}" for system in systems]
    return make_table(["", "oldest supported", "tests on a CPU", *tested], table)


# --- README.md --------------------------------------------------------------------------------------------------------


def write_verbs() -> str:
    """How long the verbs take that one runs first."""
    (result,) = files.read_results("cpu/verbs.json") or [{"rows": []}]
    times = {row["verb"]: describe_duration(row["seconds"]) for row in result["rows"]}
    if not times.keys() >= {"demo", "test"}:
        return ""
    where = f"{result['system']['cpu_count']} cores of an {files.name_processor(result['system'], 'cpu')}"
    return f"`make demo` takes {times['demo']} and `make test` {times['test']} on {where}, once packages are installed."


def describe_duration(seconds: float) -> str:
    """A time as one says it."""
    for unit, length in {"hour": 3600, "minute": 60}.items():
        if seconds > 1.5 * length:
            return f"about {seconds / length:.0f} {unit}s"
        if seconds > 0.75 * length:
            return f"about {'an' if unit == 'hour' else 'a'} {unit}"
    return f"about {10 * max(1, round(seconds / 10))} seconds"


PARTS: dict[str, Callable[[], str]] = {
    "verbs": write_verbs,
    "gpus": write_gpus,
    "cpu": write_cpu,
    "speed": lambda: join_parts(map(describe_gpu_speed, read_gpus(RESULTS))),
    **{name.removesuffix("_*"): partial(write_results, name, partial(list_rows, x)) for name, x in COLUMNS.items()},
    "packed": partial(write_results, "packed_*", list_packed),
    "losses": partial(write_results, "losses_*", list_losses),
    "accuracy": write_accuracy,
    "aims": aims.list_aims,
    "learning": partial(write_results, "learning", page.list_tasks),
    "frameworks": lambda: page.write_frameworks(RESULTS),
    "training": page.describe_training,
    "shares": page.list_shares,
    "versions": list_versions,
}

if __name__ == "__main__":
    main()
