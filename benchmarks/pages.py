"""Write the pages of docs/, and the paragraph of the README, that are made from result files in benchmarks/results/.

    python benchmarks/pages.py

A page is a function that returns its text, and a line in PAGES. Every number on it is read from a result file. Where
matplotlib is installed, the figures are drawn too.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import files
from benchmarks.files import RESULTS, ROOT, Row
from benchmarks.measured import Machine, read_gpus, read_machine
from benchmarks.suites import HEADLINE, SUITES
from benchmarks.workloads import ESTIMATORS, Workload

NOT_YET = "*not measured yet*"
MARK = "<!-- {}: written by make report -->", "<!-- /{} -->"


def main() -> None:
    """Write every page, and draw the figures."""
    for name, write_page in PAGES.items():
        (ROOT / name).write_text(write_page(), encoding="utf-8")
        print("wrote", name)
    if importlib.util.find_spec("matplotlib"):
        from benchmarks import pictures, plots

        plots.draw_all()
        pictures.draw_all()


# --- pieces -----------------------------------------------------------------------------------------------------------


def describe_source(command: str) -> str:
    """Says that a page is generated, and by what."""
    return f"""\
This page is generated from `benchmarks/results/` by `make report`: change `benchmarks/pages.py`, not the page.
`{command}` measures again."""


def describe_machine(system: Row, on_gpu: bool = True) -> str:
    """What a result was measured on: its GPU if it has one that took part."""
    names = ("python", "torch", "triton", "numba", "numpy", "cuda", "rocm")
    packages = (f"{name} {system[name]}" for name in names if system[name] != "none")
    hardware = system["gpu"] if on_gpu and system["gpu"] != "none" else system["cpu"]
    commits = ", ".join(f"`{name[:7]}{'-dirty' * name.endswith('-dirty')}`" for name in system["commit"].split(", "))
    return f"{hardware}; {', '.join(packages)}; commit {commits}."


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text, and the others numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def list_values(rows: Iterable[Row], name: str) -> str:
    """The values of a field, in order of appearance."""
    return ", ".join(dict.fromkeys(str(row[name]) for row in rows if row.get(name) is not None))


def format_time(time: float | None) -> str:
    """Microseconds with the digits worth reading."""
    return "–" if time is None or math.isnan(time) else f"{time:.1f}" if time < 100 else f"{time:.0f}"


def format_ratio(ratio: float | None) -> str:
    """How many times faster."""
    return "–" if ratio is None or math.isnan(ratio) else f"{ratio:.2f}×" if ratio < 20 else f"{ratio:.0f}×"


def format_percent(share: float | None) -> str:
    """A percentage."""
    return "–" if share is None or math.isnan(share) else f"{share:.0f} %"


# --- docs/benchmarks.md -----------------------------------------------------------------------------------------------

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


def write_benchmarks() -> str:
    """docs/benchmarks.md."""
    parts = [BENCHMARKS_HEAD.format(source=describe_source("make bench"))]
    for gpu in read_gpus(RESULTS):
        parts += [f"## {describe_hardware(gpu)}", show_speed_up(gpu), write_sweep(gpu)]
        parts += [write_suite(gpu, suite, *about) for suite, about in SECTIONS.items() if suite in gpu.heads]
    parts += [write_regimes(result) for result in read_results("*/regimes_*.json")]
    cpu = read_machine(RESULTS / "cpu")
    parts += ["## On a CPU", write_suite(cpu, "cpu", "Full calls", ()) if "cpu" in cpu.heads else NOT_YET]
    parts += [write_sb3_pass(result) for result in read_results("cpu/sb3_advantages.json")]
    parts += [write_verl_step(result) for result in read_results("cpu/verl_advantages.json")]
    parts += [write_robotics_steps(result) for result in read_results("*/robotics.json")]
    parts += [write_first_calls(result) for result in read_results("cpu/first_call.json")]
    parts += [write_packed(result) for result in read_results("*/packed_*.json")]
    parts += [write_losses(result) for result in read_results("*/losses_*.json")]
    return "\n\n".join(part for part in parts if part) + "\n"


def show_speed_up(gpu: Machine) -> str:
    """The picture of all shapes, and the sentence of the headline."""
    picture = f"![How many times faster compute_gae is than other ways](plots/{gpu.name}_speed_up.svg)"
    return "\n\n".join([describe_gpu_speed(gpu), picture * ("sweep" in gpu.heads)]).strip()


BENCHMARKS_HEAD = """\
# Benchmarks

{source} On a GPU: `python scripts/gpu_benchmarks.py FOLDER`.

## How it is measured

Times are microseconds, written *full call / device*.

* **Full call**: one call with tensors in and tensors out, between two CUDA events. The GPU is synchronised before and
  after. The time is the minimum of five medians of 50 calls, after 20 warm-up calls. Slower calls are repeated less
  often; the files say how often.
* **Device**: the call is captured 20 times in a CUDA graph. The time is that of a replay, divided by 20.
* **Roofline**: the time in which the bytes could be copied, over the device time. Every input counts as read once and
  every output as written once. The bandwidth is that of a large elementwise copy in the same run. Small rollouts stay
  in the cache and may beat it. So may rollouts with bootstrap values, of which only those at cuts are read.

Variants take turns. Each must agree with a float64 loop on the same inputs before it is timed. In rollouts of more
than 2²⁶ steps, some environments are compared.

Calls have default arguments: GAE with advantages and returns, V-Trace and Retrace with both results. Retrace starts
from log-probabilities, and from the probabilities and values of four actions. Inputs are float32, flags bool.
*Truncated*: with truncation flags, and one bootstrap value per step where the estimator takes any. *Normal path*: the
call is validated and launched without the fast path, like a first call.

| variant | what it is |
|---|---|
| loop | a Python loop over PyTorch tensors |
| compiled scan | `torch.compile` of a doubling scan |
| flat Triton | a Triton program per row, in one associative scan; time-major rollouts are transposed for it |
| in blocks | a Triton program per row that scans block after block |
| CUDA rows | a serial thread per row in CUDA C++, into a preallocated output |

Multiples say how many times faster ours is."""


def describe_hardware(machine: Machine) -> str:
    """The name of a machine's GPU."""
    return str(next(iter(machine.heads.values()))["system"]["gpu"])


def describe_suite(machine: Machine, suite: str, title: str) -> str:
    """A suite's title, and what it was measured on."""
    head = machine.heads[suite]
    text = (
        f"### {title}\n\n{describe_machine(head['system'])} Copy bandwidth {head['copy_bandwidth_gb_per_s']:.0f} GB/s."
    )
    skipped = f" {len(head['skipped'])} workloads were skipped for lack of time." if head["skipped"] else ""
    bad = machine.find_suite(suite)
    bad = bad[bad["status"] != "ok"] if len(bad) else bad
    failed = "; ".join(
        f"{ARMS.get(row.provider, row.provider)} on {row.workload}: {row.status}" for row in bad.itertuples()
    )
    return text + skipped + (f" Not timed: {failed}." if failed else "")


def write_suite(machine: Machine, suite: str, title: str, others: Sequence[str]) -> str:
    """A table with a line per workload: every arm's times, ours against the roofline, and the others over ours."""
    lines = machine.find_suite(suite)
    arms = [arm for arm in ARMS if (lines["provider"] == arm).any()]
    cells = {
        (row.workload, row.provider): format_time(row.full) + f" / {format_time(row.device)}" * (suite != "cpu")
        for row in lines.itertuples()
    }
    roofline = machine.find_roofline(suite) if "ours" in arms and suite != "cpu" else pd.Series(dtype=float)
    ours = "ours" if "ours" in arms else "ours_out"
    ratios = [dict(machine.find_ratios(suite, other, ours).items()) for other in others]
    percent = dict(roofline.items())
    rows = []
    for workload in dict.fromkeys(lines["workload"]):
        row = [f"`{workload.estimator}` {str(workload).partition(' ')[2]}".removesuffix(" float32")]
        row += [cells.get((workload, arm), "–") for arm in arms]
        row += [format_percent(percent.get(workload))] * bool(len(roofline))
        rows.append(row + [format_ratio(ratio.get(workload)) for ratio in ratios])
    head = ["", *(ARMS[arm] for arm in arms), *["roofline"] * bool(len(roofline)), *(f"× {ARMS[x]}" for x in others)]
    floors = (machine.find_times(suite, name) for name in ("null", "torch_add"))
    null, add = (format_time(float(x.min())) if len(x) else "–" for x in floors)
    text = f"In the same run an empty call takes {null}, and `torch.add` on the smallest shape {add}."
    figure = f"![{title}](plots/{machine.name}_{suite}.svg)" if suite in FIGURES else ""
    return "\n\n".join(x for x in (describe_suite(machine, suite, title), text, make_table(head, rows), figure) if x)


FIGURES = ("headline", "sweep", "large", "long")


def write_sweep(machine: Machine) -> str:
    """A table per estimator on the paper's shapes, in both layouts, plain and truncated."""
    if "sweep" not in machine.heads:
        return ""
    times = {kind: dict(machine.find_times("sweep", kind=kind).items()) for kind in ("full", "device")}
    roofline = dict(machine.find_roofline("sweep").items())
    ratios = {x: dict(machine.find_ratios("sweep", x).items()) for x in ("flat_triton", "compiled_scan")}
    parts = [
        describe_suite(machine, "sweep", "The paper's shapes"),
        f"![The paper's shapes](plots/{machine.name}_sweep.svg)",
    ]
    for estimator, spec in ESTIMATORS.items():
        variants = [
            (layout, cut) for layout in ("env-major", "time-major") for cut in (False, True)[: 1 + spec.truncates]
        ]
        head = ["N x T"]
        for layout, cut in variants:
            head += [layout + ", truncated" * cut, "roofline", "× flat Triton"]
        rows = []
        for shape in dict.fromkeys((w.num_envs, w.num_steps) for w in SUITES["sweep"].workloads):
            row = ["x".join(map(str, shape))]
            for layout, cut in variants:
                w = Workload(estimator, *shape, layout, cut)
                row.append(" / ".join(format_time(times[kind].get(w)) for kind in times))
                row += [format_percent(roofline.get(w)), format_ratio(ratios["flat_triton"].get(w))]
            rows.append([*row, format_ratio(ratios["compiled_scan"].get(Workload(estimator, *shape)))])
        parts.append(f"#### `{estimator}`\n\n{make_table([*head, '× compiled scan'], rows)}")
    return "\n\n".join(parts)


def write_sb3_pass(result: Row) -> str:
    """The advantage pass of Stable-Baselines3."""
    lines = []
    for row in result["rows"]:
        times = (f"{row['microseconds'][name]:.0f}" for name in ("stock", "adapter", "core"))
        ratios = (f"{row[name]:.1f}" for name in ("speedup", "speedup_first_of_burst"))
        setting = f"({row['n_steps']}, {row['n_envs']}), {row['threads']}"
        lines.append([setting + ", busy neighbour" * row.get("busy_neighbours", 0), *times, *ratios])
    head = ["(n_steps, n_envs), threads", "stock", "adapter", "core", "stock / adapter", "first of a burst"]
    return f"""\
### The advantage step of Stable-Baselines3

{describe_machine(result["system"])}

*Stock* is the rollout buffer of Stable-Baselines3 (NumPy, one thread), *adapter* is our buffer in its place, *core*
is `compute_gae` on flags that are ready; medians in microseconds. Results are equal to the bit. Calls come in bursts
of {result["burst"]}. The first of a burst finds the caches as the other variants left them, as in training. A *busy
neighbour* is a process that keeps one of the cores busy meanwhile.

{make_table(head, lines)}"""


def write_regimes(result: Row) -> str:
    """Calls whose shapes or numbers change."""
    lines = []
    for row in result["rows"]:
        times = [f"{row[name]:.0f}" if name in row else "–" for name in ("full", "host", "host_highest_decile")]
        about = f"`{row['estimator']}`, {row['layout']}" if "estimator" in row else "–"
        lines.append([about, row["regime"], *times, str(row.get("kernels", row.get("compiling_calls", "–")))])
    head = ["estimator, layout", "calls", "full", "host", "host, highest decile", "kernels"]
    return f"""\
## Shapes and numbers that change

{describe_machine(result["system"])}

Repeated calls are of 4096 environments and 128 steps. *Host* is the call by the host's clock, the GPU idle before it;
medians in microseconds, calls that compile a kernel left out. *Kernels*: how many were compiled.

{make_table(head, lines)}"""


def write_verl_step(result: Row) -> str:
    """The advantage step of verl."""
    lines = []
    for row in result["rows"]:
        setting = f"({row['batch_size']}, {row['response_length']}), {row['threads']}"
        times = (f"{row['milliseconds'][name]:.2f}" for name in ("stock", "adapter", "floor"))
        lines.append([f"`{row['estimator']}`", setting, *times, f"{row['speedup']:.1f}"])
    return f"""\
## The advantage step of verl

{describe_machine(result["system"])}

*Stock* is verl's function, *adapter* what `rl_triton_adapters.verl` puts in its place, on float32 tensors and an int64
mask in host memory, as in verl's driver; medians in **milliseconds**. Ray gives that process one thread. *Floor* is
what GRPO cannot do without: to sum the rewards of each response, and to write the sum times the mask to its tokens.

{make_table(["estimator", "(responses, tokens), threads", "stock", "adapter", "floor", "stock / adapter"], lines)}"""


def write_robotics_steps(result: Row) -> str:
    """The advantage steps of RSL-RL, RL-Games and skrl, and RSL-RL's update."""
    lines = []
    for row in result["rows"]:
        times = (f"{row['milliseconds'][name]:.2f}" for name in ("stock", "adapter"))
        setting = f"({row['num_steps']}, {row['num_envs']})"
        lines.append([f"`{row['package']}`", row["step"], setting, *times, f"{row['speedup']:.1f}"])
    return f"""\
## RSL-RL, RL-Games and skrl

{describe_machine(result["system"])}

*Stock* is the package's own step, *adapter* that of `rl_triton_adapters`; medians in **milliseconds**
(threads of PyTorch on the CPU: {result["threads"]}). The advantages of `rsl_rl` include their normalisation and the
values of a critic of eight units, those of `skrl` their normalisation. The update is RSL-RL's: 5 epochs of 4
minibatches, networks of three layers of 256.

{make_table(["package", "step", "(steps, environments)", "stock", "adapter", "stock / adapter"], lines)}"""


def write_first_calls(result: Row) -> str:
    """First calls with and without what another process compiled."""
    names = ("import", "compiled", "loaded", "second")
    lines = [[f"`{row['estimator']}`", *(f"{1e3 * row[name]:.1f}" for name in names)] for row in result["rows"]]
    return f"""\
### First calls, backend `cpu`

{describe_machine(result["system"])}

Each combination of present arguments, layout and dtype is compiled when it is first used, and kept on disk: the next
process loads it. Calls on {" x ".join(map(str, result["shape"]))} (environments x steps), in **milliseconds**. Each is
the first call of its own process, after the backend and Numba are imported.

{make_table(["", "import", "compiled", "loaded", "second call"], lines)}"""


def write_packed(result: Row) -> str:
    """Sequences end to end against padded ones."""
    arms, on_cpu = ("packed", "padded", "unmasked"), result["backend"] == "cpu"
    lines = []
    for row in result["rows"]:
        kinds = [row["microseconds"]] if on_cpu else [row["full_microseconds"], row["microseconds"]]
        times = [" / ".join(format_time(kind[arm]) for kind in kinds if arm in kind) or "–" for arm in arms]
        sizes = [f"{row['steps']}", f"{row['padded_steps']}"]
        lines.append([row["sequences"], f"`{row['estimator']}`", *sizes, *times, f"{row['padded_over_packed']:.2f}"])
    slower = sum(row["padded_over_packed"] < 1 for row in result["rows"])
    head = ["sequences (length)", "", "steps", "padded steps", "packed", "masked", "without a mask", "masked / packed"]
    return f"""\
### Packed sequences, backend `{result["backend"]}`

{describe_machine(result["system"])}

*Packed*: the sequences end to end with `cu_seqlens`. *Masked*: the same sequences as padded rows with a mask.
*Without a mask*: the padded rows, if all sequences are equally long.
Times are {"full calls" if on_cpu else "full call / device"}. Packed takes longer in {slower} of {len(lines)} rows.

{make_table(head, lines)}"""


def write_losses(result: Row) -> str:
    """The losses against PyTorch's operations."""
    arms = ("eager", "compiled", "ours")
    pairs: dict[tuple[Any, ...], list[Row]] = {}
    for row in result["rows"]:
        setting = f"`{row['head']}`", f"{row['width']}", f"{row['elements']}"
        pairs.setdefault(setting, []).append({arm: row["microseconds"][arm]["median"] for arm in arms})
    lines = []
    for setting, times in pairs.items():
        cells = [" / ".join(format_time(x[arm]) for x in times) for arm in arms]
        ratios = [" / ".join(f"{x[arm] / x['ours']:.2f}" for x in times) for arm in arms[:2]]
        lines.append([*setting, *cells, *ratios])
    threads = f" PyTorch and ours use {result['threads']} thread(s)." if result["backend"] == "cpu" else ""
    head = ["head", "actions", "elements", *arms, "eager / ours", "compiled / ours"]
    return f"""\
### Losses, backend `{result["backend"]}`

{describe_machine(result["system"], on_gpu=result["backend"] == "triton")}

*Eager*: the loss in PyTorch's operations, as frameworks write it. *Compiled*: the same by `torch.compile`. *Ours*:
`rl_triton_core.losses`. Full calls, *forward / forward and backward*; medians of calls in turns.{threads}

{make_table(head, lines)}"""


# --- docs/accuracy.md -------------------------------------------------------------------------------------------------


def write_accuracy() -> str:
    """docs/accuracy.md."""
    results = read_results("*/accuracy_*.json")
    rows, limits = results[0]["float32"], results[0]["limits"]
    head = f"""\
# Accuracy

{describe_source("make accuracy")} On a GPU: `python benchmarks/accuracy.py FOLDER`.

An error is ‖x − exact‖ / ‖exact‖ in the Euclidean norm. The exact result is that of a serial float64 loop over the
same inputs. The error is compared with that of the same loop in float32. Discounts are rounded to float32 beforehand,
so that the errors are those of arithmetic alone. A ratio is the error over the loop's error, which counts as at least
half a float32 epsilon ({limits["serial_floor"]:.1e}). The limit is {limits["ratio"]:g}.

Settings: γ {list_values(rows, "gamma")}; λ {list_values(rows, "lambda_")}; no episode ends, or one every
{list_values(rows, "episode")} steps on average. Layouts: {list_values(rows, "layout")}. Each line has the setting,
layout and result with the largest ratio.

Half-precision inputs are converted to float32. Their error is that against the inputs before rounding. It is compared
with what rounding the inputs once does to the float64 loop; the ratio may differ from 1 by {limits["rounding"]:g}.
*Beyond rounding* is the error against the float64 loop on the rounded inputs. The factors β of `linear_recurrence` are
inputs too. Those near 1 suffer most from rounding, so β may be float32 with a half-precision α."""
    return "\n\n".join([head, *map(write_accuracy_of, results)]) + "\n"


def write_accuracy_of(result: Row) -> str:
    """The tables of one backend."""
    full, half = (pd.DataFrame(result[name]).fillna({"ratio": math.inf}) for name in ("float32", "half"))
    worst = full.loc[full.groupby(["estimator", "steps"], sort=False)["ratio"].idxmax()]
    lines = [
        [f"`{x.estimator}`", f"{x.steps}", f"{x.error:.1e}", f"{x.serial_error:.1e}", f"{x.ratio:.2f}"]
        for x in worst.itertuples()
    ]
    largest = half.loc[half.groupby(["estimator", "dtype"], sort=False)["error"].idxmax()]
    half_lines = []
    for x in largest.itertuples():
        group = half[(half["estimator"] == x.estimator) & (half["dtype"] == x.dtype)]
        farthest = group["ratio"].iloc[(group["ratio"] - 1).abs().argmax()]
        beyond = max(group["beyond_rounding"], key=lambda found: found["ratio"])
        numbers = f"{x.error:.1e}", f"{x.rounding_error:.1e}", f"{farthest:.4f}", f"{beyond['error']:.1e}"
        half_lines.append([f"`{x.estimator}`", x.dtype, *numbers, f"{beyond['ratio']:.2f}"])
    head = ["", "inputs", "error", "rounding once", "ratio", "beyond rounding", "ratio"]
    return "\n\n".join(
        [
            f"## Backend `{result['backend']}`",
            describe_machine(result["system"], on_gpu=result["backend"] == "triton"),
            make_table(["", "T", "error", "serial float32 loop", "ratio"], lines),
            make_table(head, half_lines),
        ]
    )


# --- README.md, docs/index.md, docs/install.md ------------------------------------------------------------------------


def fill_page(name: str) -> str:
    """A page with its generated parts between their marks."""
    text = (ROOT / name).read_text(encoding="utf-8")
    speed = "\n\n".join(sentence for sentence in map(describe_gpu_speed, read_gpus(RESULTS)) if sentence)
    for mark, part in {"speed": speed or NOT_YET, "shares": list_shares(), "versions": list_versions()}.items():
        first, last = (x.format(mark) for x in MARK)
        before, found, rest = text.partition(first)
        if found:
            text = f"{before}{first}\n{part}\n{last}{rest.partition(last)[2]}"
    return text


def list_versions() -> str:
    """The oldest versions, those that the tests without a GPU install, and those of the tests on a GPU."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    systems = [result["system"] for result in read_results("*/gpu_tests.json")]
    lines = [["Python", *re.findall(r'requires-python = ">=(.*)"', project), *re.findall(r"on Python (3.\d+)", pinned)]]
    for name, extra in {**dict.fromkeys(("torch", "triton", "numba", "numpy"), ""), **FRAMEWORKS}.items():
        oldest, newest = re.findall(rf'"{name}{extra}>=([\d.]+)', project), re.findall(rf"^{name}==(\S+)", pinned, re.M)
        lines.append([name, oldest[0], newest[0].removesuffix(";")])
    table = [[*line, *(system[line[0].lower()] for system in systems)] for line in lines]
    table.append(["CUDA", "that of PyTorch", "–", *(system["cuda"] for system in systems)])
    table.append(["ROCm", "that of PyTorch", "kernels compiled, not run", *("–" for _ in systems)])
    tested = [f"tests on an {system['gpu'].partition(',')[0]}" for system in systems]
    return make_table(["", "oldest supported", "tests on a CPU", *tested], table)


FRAMEWORKS = {
    "stable-baselines3": "", "sb3-contrib": "", "ray": r"\[rllib\]", "torchrl": "", "gymnasium": "",
}  # fmt: skip
"""Packages of frameworks, and their extras in pyproject.toml."""


def list_shares() -> str:
    """The share of the advantage step by framework and machine, its bound, and the measured speed-up."""
    lines = [[name, *describe_shares(pairs)] for name, pairs in select_shares()]
    return make_table(["", "share", "bound", "measured speed-up"], lines)


def select_shares(more: bool = True) -> list[tuple[str, list[Row]]]:
    """Ours against the framework's own, by framework and machine; what replaces `more` than the advantages is apart."""
    from benchmarks.end_to_end.frameworks import REGISTRY

    found = []
    for name, framework in REGISTRY.items():
        for result in read_results(f"*/end_to_end_{name}.json"):
            module = framework.load()
            where = f"{module.TITLE}, {'GPU' if result['device'] == 'cuda' else 'CPU'}"
            pairs = [x for x in result["pairs"] if x["slow"] == "stock" and x["fast"] in module.OURS]
            found.append((where, [x for x in pairs if x["fast"] not in module.MORE]))
            for arm, text in module.MORE.items() if more else ():
                found.append((f"{where}, {text}", [x for x in pairs if x["fast"] == arm]))
    return [(name, pairs) for name, pairs in found if pairs]


def describe_shares(pairs: list[Row]) -> list[str]:
    """The numbers of a line of that table."""
    columns = [sorted(x["bound"] for x in pairs), sorted(x["speed_up"][1] for x in pairs)]
    ends = [describe_range([f"{value:.2f}" for value in column]) for column in columns]
    return [f"{describe_range(format_shares(pairs))} %", *ends]


def format_shares(pairs: list[Row]) -> list[str]:
    """The shares in percent, the smallest first."""
    return [f"{100 * x['share']:.2g}" for x in sorted(pairs, key=lambda x: float(x["share"]))]


def describe_range(values: list[str]) -> str:
    """The first and the last of sorted values, or the one that both are."""
    return " to ".join(dict.fromkeys((values[0], values[-1])))


def describe_gpu_speed(gpu: Machine) -> str:
    """The headline, and the mean over the sweep."""
    from benchmarks.targets import TARGETS

    w = Workload("gae", *HEADLINE)
    times = [dict(gpu.find_times("headline", kind=kind).items()).get(w) for kind in ("full", "device")]
    if None in times:
        return ""
    arms = {"loop": "the Python loop", "compiled_scan": "a compiled scan", "flat_triton": "a flat Triton kernel"}
    faster = {text: dict(gpu.find_ratios("headline", arm).items()).get(w) for arm, text in arms.items()}
    ratios = ", ".join(f"{format_ratio(ratio)} faster than {text}" for text, ratio in faster.items())
    every = TARGETS["flat_mean"].find(gpu).dropna()
    mean = f"{np.exp(np.log(every).mean()):.2f}×" if len(every) else NOT_YET
    return (
        f"On one {describe_hardware(gpu)}, `compute_gae` over {w.num_envs} environments and {w.num_steps} steps takes\n"
        f"{format_time(times[0])} µs per call ({format_time(times[1])} µs on the device). That is\n{ratios}.\n"
        f"Over all estimators in {len(every)} settings, a call is {mean} faster than that kernel's (geometric mean)."
    )


def write_end_to_end() -> str:
    """docs/end-to-end.md."""
    from benchmarks.end_to_end import page

    return page.write_page(RESULTS)


def read_results(pattern: str) -> list[Any]:
    """The result files of all machines that are called so, the CPU's first."""
    return [files.read_result(path) for path in sorted(RESULTS.glob(pattern))]


PAGES = {
    "docs/accuracy.md": write_accuracy,
    "docs/benchmarks.md": write_benchmarks,
    "docs/end-to-end.md": write_end_to_end,
    **{name: partial(fill_page, name) for name in ("docs/index.md", "docs/install.md", "README.md")},
}

if __name__ == "__main__":
    main()
