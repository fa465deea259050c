"""docs/benchmarks.md and the README's paragraph, from the result files of benchmarks/run.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks import files, plots
from benchmarks.markdown import NOT_YET, generated, machine, table
from benchmarks.measured import Results, gpus
from benchmarks.suites import (
    ENV_MAJOR,
    HEADLINE,
    LARGE_SHAPES,
    LONGER_ROWS,
    SHORT_ROWS,
    SUITES,
    SWEEP_SHAPES,
    Shape,
    workloads,
)
from benchmarks.targets import TARGETS
from benchmarks.workloads import ESTIMATORS, Workload, bytes_moved

NO_EVIDENCE = "*no evidence yet*"
MARKS = "<!-- speed: written by make report -->", "<!-- /speed -->"


def page(machines: Sequence[Results], cpu: Results, sb3: files.Row | None, notes: dict[str, str]) -> str:
    """The whole page."""
    parts = [head()]
    for gpu in machines:
        parts += on_gpu(gpu, sb3, notes, f", {gpu.name}" * (len(machines) > 1))
    parts += [section(cpu, "cpu", "On the CPU", lambda: on_cpu(cpu)), not_timed(*machines, cpu)]
    return "\n\n".join(part for part in parts if part) + "\n"


def on_gpu(gpu: Results, sb3: files.Row | None, notes: dict[str, str], where: str) -> list[str]:
    """The targets, and a section for every suite of a machine."""
    sections: list[tuple[str, str, Callable[[], str]]] = [
        ("headline", "4096 environments, 128 steps", lambda: headline(gpu)),
        ("sweep", "The sweep", lambda: sweep(gpu)),
        ("rows", "Against the CUDA kernel with a thread per row", lambda: rows(gpu)),
        ("retrace_long", "Retrace on longer rows", lambda: retrace(gpu)),
        ("long", "Long rows", lambda: long_rows(gpu)),
        ("large", "Large windows", lambda: large(gpu)),
        ("bf16", "bfloat16 inputs", lambda: other(gpu, "bf16")),
        ("variants", "GAE with value targets, and with a mask", lambda: other(gpu, "variants")),
        ("huge", "More than 2³¹ elements", lambda: other(gpu, "huge")),
    ]
    return [
        f"## Targets{where}\n\n" + targets(gpu, sb3, notes),
        *(section(gpu, name, title + where, body, notes.get(name, "")) for name, title, body in sections),
    ]


def head() -> str:
    """What is measured, and how."""
    return f"""\
# Benchmarks

{generated("make bench")} On a GPU: `python scripts/gpu_benchmarks.py FOLDER`.

Times are microseconds, *full call / device*. **Full call**: one call with tensors in and tensors out between two CUDA
events, the GPU synchronised before and after: the minimum of five medians of 50 calls after 20 warm-up calls.
**Device**: the call captured 20 times in a CUDA graph, a replay / 20. Calls too slow for that are repeated less, which
the files say. Arms take turns, and each must agree with a float64 loop on the same inputs before it is timed (in
windows of more than 2²⁶ steps, that of some environments).
*Roofline* is the time in which the bytes (every input read once, every output written once) could be copied, over the
device time; the bandwidth is that of a large elementwise copy in the same run. Small windows stay in the cache and may
beat it, and so may bootstrap values, of which only those at cuts need to be read.

Inputs are float32 with flags as bool; GAE without its value targets unless it says so; V-Trace with both results;
Retrace with both, from log-probabilities and four actions' probabilities and values. *Truncated*: with truncation
flags, and where values are bootstrapped one bootstrap value per step. *Not replayed*: validated and built anew, as the
first of like calls is.

Arms: *loop*, a Python loop over PyTorch tensors; *compiled scan*, `torch.compile` of a doubling scan; *flat Triton*, a
program per row with the whole row in one associative scan, launched the ordinary way (a time-major window is
transposed for it); *in blocks*, a program per row that scans block after block; *CUDA rows*, a serial thread per row
in CUDA C++ into a preallocated output. Multiples say how many times faster ours is."""


def section(results: Results, suite: str, title: str, body: Callable[[], str], note: str = "") -> str:
    """A section, with what it was measured on, and a note; or that it was not measured."""
    if suite not in results.heads:
        return f"## {title}\n\n{NOT_YET}"
    about = results.heads[suite]
    protocol, skipped = about["protocol"], about["skipped"]
    text = [f"## {title}", machine(about["system"])]
    text[-1] += f" Copy bandwidth {about['copy_bandwidth_gb_per_s']:.0f} GB/s."
    if protocol["medians"] < 5:
        text[-1] += f" Only {protocol['medians']} medians of {protocol['calls']} calls."
    if skipped:
        text[-1] += f" {len(skipped)} workloads were skipped for lack of time."
    shown = [plots.link(results, name) for name in plots.drawn(results) if plots.FIGURES[name].suite == suite]
    return "\n\n".join(part for part in (*text, body(), note, *shown) if part)


# --- targets ----------------------------------------------------------------------------------------------------------


def targets(results: Results, sb3: files.Row | None, notes: dict[str, str]) -> str:
    """Every target, and the reason where one is missed."""
    lines, reasons = [], []
    for key, target in TARGETS.items():
        status, found = target.judge(results, sb3)
        bound = ("≥ " if target.at_least else "≤ ") + f"{target.limit:g}{target.unit}"
        mark = f"**{status}**" if status == "missed" else status
        lines.append([target.what, bound, mark, found])
        if status == "missed":
            reasons.append(f"*{target.what}* — {notes.get(key, NO_EVIDENCE)}")
    return "\n\n".join([table(["", "target", "", "measured"], lines), *reasons])


# --- tables -----------------------------------------------------------------------------------------------------------


def times(results: Results, suite: str, workload: Workload, provider: str = "ours") -> str:
    """Full call / device."""
    found = (results.time(suite, workload, provider, kind) for kind in ("full", "device"))
    return " / ".join("–" if time is None else short(time) for time in found)


def short(time: float) -> str:
    """Microseconds with the digits worth reading."""
    return f"{time:.1f}" if time < 100 else f"{time:.0f}"


def multiple(
    results: Results, suite: str, workload: Workload, other: str, ours: str = "ours", kind: str = "full"
) -> str:
    """How many times faster."""
    ratio = results.ratio(suite, workload, other, ours, kind)
    return "–" if ratio is None else f"{ratio:.2f}×" if ratio < 20 else f"{ratio:.0f}×"


def roofline(results: Results, suite: str, workload: Workload) -> str:
    """The percentage."""
    ratio = results.over_floor(suite, workload)
    return "–" if ratio is None else f"{100 / ratio:.0f} %"


def name(workload: Workload) -> str:
    """A shape."""
    return f"{workload.num_envs}x{workload.num_steps}"


def headline(results: Results) -> str:
    """Every arm at the paper's shape, plain and truncated."""
    arms = ("loop", "compiled_scan", "flat_triton")
    lines = [
        [
            f"`{w.estimator}`" + ", truncated" * w.truncated,
            *(times(results, "headline", w, arm) for arm in ("ours", "ours_out", "ours_whole", *arms)),
            *(multiple(results, "headline", w, arm) for arm in arms),
        ]
        for w in SUITES["headline"].workloads
    ]
    others = ("loop", "compiled scan", "flat Triton")
    columns = ["", "ours", "ours with `out=`", "ours, not replayed", *others, *("× " + arm for arm in others)]
    first = SUITES["headline"].workloads[0]
    floors = (
        f"In the same run an empty call takes {times(results, 'headline', first, 'null').split(' /')[0]} and "
        f"`torch.add` on the same shape {times(results, 'headline', first, 'torch_add')}."
    )
    return floors + "\n\n" + table(columns, lines)


def sweep(results: Results) -> str:
    """A table per estimator."""
    return "\n\n".join(f"### `{estimator}`\n\n{sweep_table(results, estimator)}" for estimator in ESTIMATORS)


def sweep_table(results: Results, estimator: str) -> str:
    """One estimator on the paper's shapes, in both layouts, plain and truncated; plain and env-major, further arms."""
    others = {"compiled_scan": "compiled scan", "loop": "loop", "torchrl": "TorchRL"}
    further = {arm: title for arm, title in others.items() if estimator == "gae" or arm == "compiled_scan"}
    variants = [(layout, cut) for layout in ("env-major", "time-major") for cut in (False, True)]
    variants = [(layout, cut) for layout, cut in variants if not cut or ESTIMATORS[estimator].truncates]
    columns = ["N x T"]
    for layout, cut in variants:
        columns += [layout + ", truncated" * cut, "roofline", "× flat Triton"]
        columns += [f"× {title}" for title in further.values() if (layout, cut) == variants[0]]
    lines = []
    for shape in SWEEP_SHAPES:
        line = ["x".join(map(str, shape))]
        for layout, cut in variants:
            w = Workload(estimator, *shape, layout, cut)
            line += [
                times(results, "sweep", w),
                roofline(results, "sweep", w),
                multiple(results, "sweep", w, "flat_triton"),
            ]
            line += [multiple(results, "sweep", w, arm) for arm in further if (layout, cut) == variants[0]]
        lines.append(line)
    return table(columns, lines)


def rows(results: Results) -> str:
    """GAE with out= and the CUDA kernel, two grids."""
    return "\n\n".join(rows_table(results, shapes) for shapes in (SHORT_ROWS, LONGER_ROWS))


def rows_table(results: Results, shapes: Iterable[Shape]) -> str:
    """Full calls, ours / theirs, by steps and environments."""
    chosen = list(shapes)
    envs, steps = (list(dict.fromkeys(shape[i] for shape in chosen)) for i in (0, 1))

    def cell(workload: Workload) -> str:
        found = [results.time("rows", workload, arm, "full") for arm in ("ours_out", "cuda_rows")]
        return " / ".join("–" if time is None else short(time) for time in found)

    lines = [[f"{t}", *(cell(Workload("gae", n, t)) for n in envs)] for t in steps]
    return "Full calls, ours with `out=` / CUDA rows.\n\n" + table(["T", *(f"N = {n}" for n in envs)], lines)


def retrace(results: Results) -> str:
    """Retrace against T."""
    lines = [
        [
            name(w),
            times(results, "retrace_long", w),
            roofline(results, "retrace_long", w),
            *(multiple(results, "retrace_long", w, arm) for arm in ("flat_triton", "compiled_scan")),
        ]
        for w in SUITES["retrace_long"].workloads
    ]
    return table(["N x T", "ours", "roofline", "× flat Triton", "× compiled scan"], lines)


def long_rows(results: Results) -> str:
    """Few environments with long rows."""
    others = {"flat_triton": "flat Triton", "blocks_triton": "in blocks"}
    lines = [
        [
            f"`{w.estimator}` {name(w)}" + ", time-major" * (w.layout == "time-major"),
            *(times(results, "long", w, arm) for arm in ("ours", *others, "cuda_rows")),
            roofline(results, "long", w),
            *(multiple(results, "long", w, arm, kind="device") for arm in others),
        ]
        for w in SUITES["long"].workloads
    ]
    ratios = (f"× {arm}, device" for arm in others.values())
    return table(["", "ours", *others.values(), "CUDA rows", "roofline", *ratios], lines)


def large(results: Results) -> str:
    """Roofline in both layouts."""
    lines = []
    for w in workloads(LARGE_SHAPES, layouts=ENV_MAJOR):
        line = [f"`{w.estimator}` {name(w)}", f"{bytes_moved(w) / 1e6:.0f}"]
        for layout in ("env-major", "time-major"):
            line += [
                times(results, "large", w._replace(layout=layout)),
                roofline(results, "large", w._replace(layout=layout)),
            ]
        lines.append(line)
    return table(["", "MB", "env-major", "roofline", "time-major", "roofline"], lines)


def other(results: Results, suite: str) -> str:
    """Ours alone."""
    lines = [
        [f"`{w.estimator}` {name(w)} {w.layout}", w.dtype, times(results, suite, w), roofline(results, suite, w)]
        for w in SUITES[suite].workloads
    ]
    return table(["", "inputs", "ours", "roofline"], lines)


def on_cpu(results: Results) -> str:
    """Full calls of every arm on the CPU."""
    arms = [arm for arm in SUITES["cpu"].providers if any(provider == arm for _, provider, _ in results.suite("cpu"))]
    lines = []
    for w in SUITES["cpu"].workloads:
        found = (results.time("cpu", w, arm, "full") for arm in arms)
        label = f"`{w.estimator}` {name(w)} {w.layout}" + ", truncated" * w.truncated
        lines.append([label, *("–" if time is None else short(time) for time in found)])
    threads = results.heads["cpu"]["threads"]
    return f"Full calls; PyTorch and ours may use {threads} threads.\n\n" + table(["", *arms], lines)


def not_timed(*machines: Results) -> str:
    """The arms that were wrong, failed, or were not compiled in time."""
    lines = [
        [f"`{provider}` on {workload}", row["status"], "" if row["error"] is None else f"{row['error']:.1e}"]
        for results in machines
        for (_, workload, provider), row in results.rows.items()
        if row["status"] != "ok"
    ]
    return "## Arms that were not timed\n\n" + table(["", "why", "error"], lines) if lines else ""


# --- the README -------------------------------------------------------------------------------------------------------


def readme(text: str, machines: Sequence[Results], sb3: files.Row | None) -> str:
    """The README with its paragraph between the marks."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{paragraph(machines, sb3)}\n{MARKS[1]}{after}"


def paragraph(machines: Sequence[Results], sb3: files.Row | None) -> str:
    """What a reader wants to know first."""
    w = Workload("gae", *HEADLINE)
    texts = [text for gpu in machines for text in (gpu_sentence(gpu, w), sweep_sentence(gpu))]
    texts.append(cpu_sentence(sb3))
    return "\n".join(text for text in texts if text) or NOT_YET


def gpu_sentence(gpu: Results, w: Workload) -> str:
    """The headline."""
    if gpu.time("headline", w, "ours", "full") is None:
        return ""
    arms = {"loop": "the Python loop", "compiled_scan": "a compiled scan", "flat_triton": "a flat Triton kernel"}
    found = [f"{multiple(gpu, 'headline', w, arm)} faster than {text}" for arm, text in arms.items()]
    full, device = times(gpu, "headline", w).split(" / ")
    machine_name = gpu.heads["headline"]["system"]["gpu"]
    return (
        f"On one {machine_name}, GAE over {w.num_envs} environments and {w.num_steps} steps takes "
        f"{full} µs per call\n({device} µs on the device):\n{', '.join(found)}."
    )


def sweep_sentence(gpu: Results) -> str:
    """The mean."""
    found = [point.value for point in TARGETS["flat_mean"].points(gpu, None) if point.value is not None]
    if not found:
        return ""
    return (
        f"Over all estimators and the paper's shapes, plain and with truncations ({len(found)} measurements), a call\n"
        f"is {statistics.geometric_mean(found):.2f}× faster than the flat kernel's (geometric mean)."
    )


def cpu_sentence(sb3: files.Row | None) -> str:
    """The pass of Stable-Baselines3."""
    if sb3 is None:
        return ""
    found = {(row["n_steps"], row["n_envs"]): row for row in sb3["rows"] if row["threads"] == 1}
    pieces = [f"{row['speedup']:.1f}× at {shape}" for shape, row in found.items()]
    return f"On one CPU core our pass is faster than that of Stable-Baselines3:\n{', '.join(pieces)} (n_steps, n_envs)."


def load(folder: Path) -> tuple[list[Results], Results, files.Row | None]:
    """The results of every GPU, if only of none; of the CPU; and of the pass of Stable-Baselines3."""
    sb3 = folder / "cpu" / "sb3_advantages.json"
    cpu = Results(folder / "cpu")
    return gpus(folder) or [Results(folder / "none")], cpu, files.read(sb3) if sb3.exists() else None
