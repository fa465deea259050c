"""Write the parts of docs/ and README.md that are made from result files, and draw the figures.

    python -m benchmarks.report

A part stands between two marks with its name, and is what a line of PARTS returns. Every number in it is read from a
result file: a median, with its quartiles in brackets where there are several values. The rest of a page is written by
hand. Figures are drawn where matplotlib is installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.calls import HEADLINE
from benchmarks.end_to_end import Setting
from benchmarks.results import RESULTS, ROOT, Result, Row, read_machines, read_setting, select_rows
from benchmarks.settings import TABLE
from rl_triton_core.system_info import TESTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORDS, ARMS, GAINS = (json.loads((ROOT / f"benchmarks/{x}.json").read_text()) for x in ("words", "arms", "gains"))
"""What pages call parts of settings, and arms. A line of a table of gains has a title, a benchmark, what its setting
has, and in the first table the device."""
MARKED = re.compile(r"(<!-- (\w+): written by make report -->)\n.*?\n(<!-- /\2 -->)", re.DOTALL)
FIGURES, PUBLISHED = ROOT / "docs" / "plots", ROOT / "benchmarks" / "published"


def main() -> None:
    for name in list_pages():
        (ROOT / name).write_text(fill_page(name), encoding="utf-8")
        print("wrote", name)
    if importlib.util.find_spec("matplotlib"):
        for name, figure in draw_figures().items():
            figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
            print("drew", name)


def list_pages() -> list[str]:
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in paths if MARKED.search(path.read_text(encoding="utf-8"))]


def fill_page(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    return MARKED.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]() or '*not measured yet*'}\n{found[3]}", text)


# --- tables -----------------------------------------------------------------------------------------------------------


def make_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text, and the others numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def list_rows(rows: Sequence[Row], columns: Sequence[Sequence[str]] = (), words: str = "") -> str:
    """A line for each setting, of which what all have in common is left out, with these columns, or all.

    With `words` for a setting, a table fits on a phone.
    """
    rows = [row._replace(setting=words.format_map(row.read_setting()) or row.setting) for row in rows]
    rows = [row for row in rows if not columns or [row.arm, row.metric] in columns]
    cells = {(row.setting, row.arm, row.metric): row for row in rows}
    settings = {row.setting: row.read_setting() for row in rows}
    names = list(dict.fromkeys(name for setting in settings.values() for name in setting))
    varied = [name for name in names if len({setting.get(name) for setting in settings.values()}) > 1] or names[:1]
    found = {(row.arm, row.metric): row.unit for row in rows if row.median is not None}
    columns = [column for column in map(tuple, columns or found) if column in found]
    tables, room = [], max(2, MANY_COLUMNS - len(varied))
    for part in (columns[i : i + room] for i in range(0, len(columns), room)):
        head = [*(name.replace("_", " ") for name in varied), *(name_column(x, columns, found[x]) for x in part)]
        lines = []
        for setting, values in settings.items():
            line = [WORDS.get(x, x) or "defaults" for x in (values.get(name, "–") for name in varied)]
            numbers = [format_row(cells.get((setting, *column))) for column in part]
            lines += [line + numbers] * (set(numbers) != {"–"} or part == columns)
        tables.append(make_table(head, lines))
    unmeasured = [row for row in rows if row.note and row.median is None]
    names = [", ".join(filter(None, (name_arm(x.arm), x.metric))) for x in unmeasured]
    notes = dict.fromkeys(f"{name}{': ' * bool(name)}{x.note}" for name, x in zip(names, unmeasured, strict=True))
    return join_parts([*tables, f"Not measured: {'; '.join(notes)}." * bool(notes)])


def name_column(column: Sequence[str], columns: Sequence[Sequence[str]], unit: str) -> str:
    arm, metric = column
    if metric == "over ours":
        return f"times as fast as {name_arm(arm)}"
    if metric.startswith("over "):
        return f"{name_arm(arm)}, times as long as {name_arm(metric[5:])}"
    parts = [name_arm(arm)] * (len({x[0] for x in columns}) > 1) + [metric] * (len({x[1] for x in columns}) > 1)
    return ", ".join(parts or [metric]) + f" ({unit})" * bool(unit)


def name_arm(arm: str) -> str:
    return ARMS.get(arm, arm)


def format_row(row: Row | None) -> str:
    """A median, with quartiles that differ."""
    if row is None or row.median is None:
        return "–"
    quartiles = f" [{format_number(row.low)}, {format_number(row.high)}]" if row.low != row.high else ""
    return format_number(row.median) + quartiles


def format_number(x: float | None) -> str:
    """The digits worth reading."""
    if x is None:
        return "–"
    return f"{x:,.0f}" if abs(x) >= 1000 or x.is_integer() else f"{x:#.3g}".rstrip(".")


def join_parts(parts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, parts))


def describe_machine(machine: str, result: Result) -> str:
    """What a result was measured on: its GPU, or the CPU in that folder."""
    packages = ("python", "torch", "triton", "numba", "numpy", "cuda", "rocm")
    versions = [f"{name} {x}" for name in packages if (x := result.system.get(name, "none")) != "none"]
    gpus = 0 if machine == "cpu" else len(result.system["gpu"].split(", "))
    about = f"{f'{gpus} x ' * (gpus > 1)}{name_processor(machine, result)}; {', '.join(versions)}"
    return f"{about}; {name_commits(result.rows)}."


def name_commits(rows: Iterable[Row]) -> str:
    commits = dict.fromkeys(x for row in rows for x in row.commit.split(", "))
    names = [f"`{name[:7]}{'-dirty' * name.endswith('-dirty')}`" for name in commits]
    return f"commit {', '.join(names)}"


def name_processor(machine: str, result: Result) -> str:
    return result.system["cpu"] if machine == "cpu" else result.system["gpu"].split(", ")[0]


MANY_LINES, MANY_COLUMNS = 12, 8  # a longer table is folded, a wider one becomes several


def fold(text: str) -> str:
    """A table, behind a line to click on if it is long."""
    lines = sum(line.startswith("|") for line in text.splitlines()) - 2 * text.count("| --- |")
    if lines <= MANY_LINES:
        return text
    return f"<details markdown><summary>Table, {lines} lines</summary>\n\n{text}\n\n</details>"


def name_place(machine: str, result: Result) -> str:
    """The cores of a machine's CPU, or its GPU, as sentences have it."""
    return f"{result.system['cpu_count']} cores of " * (machine == "cpu") + f"an {name_processor(machine, result)}"


def write_benchmark(name: str, make: Callable[[Sequence[Row]], str], title: str = "") -> str:
    """The machine, and a table, of every result file of a benchmark; its title may name the device."""
    parts = []
    for x in read_machines(name).items():
        parts += [title.format("CPU" if x[0] == "cpu" else "GPU"), describe_machine(*x), fold(make(x[1].rows))]
    return join_parts(parts)


def list_arms(rows: Sequence[Row]) -> str:
    """A line for each setting and arm, with a column for each metric."""
    named = [x._replace(setting=f"{x.setting}; variant={name_arm(x.arm)}", arm="") for x in rows if x.arm]
    return list_rows(named)


# --- calls ------------------------------------------------------------------------------------------------------------


def describe_speed(machine: str) -> str:
    """The headline, and the mean over the sweep."""
    result, (num_envs, num_steps) = read_machines("calls_headline")[machine], HEADLINE
    rows = select_rows(result.rows, estimator="gae", truncated=False)
    ours, device = (select_rows(rows, "ours", metric)[0] for metric in ("full", "device"))
    others = {"loop": "the Python loop", "compiled_scan": "a compiled scan", "flat_triton": "a flat Triton kernel"}
    ratios = {text: select_rows(rows, arm, "over ours")[0] for arm, text in others.items()}
    faster = [f"{format_row(row).replace(' [', f'×~faster~than {text} [')}" for text, row in ratios.items()]
    text = (
        f"On one {name_processor(machine, result)}, `compute_gae` of commit `{ours.commit[:7]}` over {num_envs} "
        f"environments and {num_steps} steps takes {format_row(ours)} µs per call, {format_row(device)} µs on the "
        f"device. That is {', '.join(faster)}: "
        f"medians, with quartiles in brackets. {describe_sweep(machine)}"
    )
    return textwrap.fill(text, 120, break_on_hyphens=False).replace("~", " ")


def describe_sweep(machine: str) -> str:
    """How much faster calls are over all settings of the sweep; empty where that was not measured."""
    if machine not in read_machines("calls_sweep"):
        return ""
    sweep = find_ratios(machine, "flat_triton", layout="env-major")
    low, _, high = map(format_number, statistics.quantiles(sweep.values(), n=4, method="inclusive"))
    mean = format_number(statistics.geometric_mean(sweep.values()))
    return (
        f"Over all estimators in {len(sweep)} settings, a call is {mean}×~faster than that kernel's [{low}, {high}], "
        "the geometric mean of medians."
    )


def find_ratios(machine: str, other: str, **setting: Any) -> dict[str, float]:
    """How many times faster a full call of the sweep is than another arm's, by setting."""
    rows = select_rows(read_machines("calls_sweep")[machine].rows, other, "over ours", **setting)
    return {row.setting: row.median for row in rows if row.median is not None}


# --- training loops ---------------------------------------------------------------------------------------------------

LOOPS = [name for name, table in TABLE.items() if table.get("module", "").startswith("end_to_end")]


def list_loop(rows: Sequence[Row]) -> str:
    """As `list_arms`, with settings in words."""
    read = ({name: WORDS.get(x, x) for name, x in row.read_setting().items()} for row in rows)
    settings = (Setting(**x | {"recompute": x["recompute"] == "yes"}) for x in read)
    return list_arms([row._replace(setting=f"setting={x}") for row, x in zip(rows, settings, strict=True)])


def describe_range(rows: Sequence[Row]) -> str:
    medians = sorted(row.median for row in rows if row.median is not None)
    return " to ".join(dict.fromkeys(map(format_number, (medians[0], medians[-1])))) if medians else "–"


RLLIB = {
    "Whole iterations of RLlib's PPO, environments included,": ("rllib_training", "ours"),
    "Updates of RLlib's PPO alone": ("rllib", "captured"),
    "Updates of RLlib's IMPALA and APPO alone": ("impala", "captured"),
}


def describe_rllib() -> Iterator[str]:
    """How much faster RLlib's algorithms are with all that is replaced, on every machine."""
    for what, (name, arm) in RLLIB.items():
        gains = {name_place(*x): select_rows(x[1].rows, arm, "speed-up") for x in read_machines(name).items()}
        yield f"{what} are, by median, {describe_gains(gains)}."


def describe_training() -> str:
    """How much faster whole training with Stable-Baselines3 is, and updates of other frameworks."""
    gains: dict[str, list[Row]] = {}
    for place, on_cpu in itertools.product(GAINS["expected"].values(), (True, False)):
        rows = select_rows(find_expected(*place, on_cpu)[2], metric="speed-up")
        gains.setdefault("a CPU" if on_cpu else "a GPU", []).extend(rows[-1:])
    whole = "Whole training with Stable-Baselines3, environments included, is, by median,"
    where = f"by algorithm and task. It was measured {list_gains('expected')[1]}"
    texts = [f"{whole} {describe_gains(gains)}, {where}", *describe_rllib()]
    gains = {f"an {gpu}": select_rows(x, "stock", "over ours") for gpu, x in select_robotics(**PLAIN).items()}
    plain = "Updates of RSL-RL, RL-Games and skrl with 4096 environments, one GPU and the packages' defaults"
    return make_list([*texts, f"{plain} are, by median, {describe_gains(gains)}."])


def describe_gains(gains: dict[str, list[Row]]) -> str:
    return ", ".join(f"{describe_range(rows)} times as fast on {where}" for where, rows in gains.items())


def make_list(texts: Iterable[str]) -> str:
    options: Any = {"initial_indent": "* ", "subsequent_indent": "  ", "break_on_hyphens": False}
    return "\n".join(textwrap.fill(text, 120, **options) for text in texts)


ROBOTICS, PLAIN = {"num_steps": 24, "step": "update"}, {"num_envs": 4096, "variant": "", "processes": 1}


def select_robotics(**setting: Any) -> dict[str, list[Row]]:
    """The whole updates of robotics packages with 24 steps, by GPU."""
    gpus = (x for x in read_machines("robotics").items() if x[0] != "cpu")
    return {name_processor(*x): select_rows(x[1].rows, **ROBOTICS | setting) for x in gpus}


def write_robotics(package: str) -> str:
    """The updates of a robotics package on GPUs, in each way that was measured."""
    columns = [["stock", "full"], ["ours", "full"], ["stock", "over ours"]]
    found = select_robotics(package=package).items()
    return join_parts(
        f"Whole updates, {name_sizes(rows)} environments and 24 steps, {gpu}, {name_commits(rows)}:\n\n"
        f"{list_rows(rows, columns)}"
        for gpu, rows in found
    )


def name_sizes(rows: Sequence[Row]) -> str:
    return " or ".join(sorted({row.read_setting()["num_envs"] for row in rows}, key=int))


def list_learning(rows: Sequence[Row]) -> str:
    """Whether both arms learn the same, and when they reach the target: without the points of the curves."""
    return list_arms([row for row in rows if "steps" not in row.read_setting()])


def list_versions() -> str:
    """The oldest versions, those that the tests without a GPU install, and those of the tests on a GPU."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    systems = [json.loads(path.read_text())["system"] for path in sorted(RESULTS.glob("*/gpu_tests.json"))]
    lines = [["Python", *re.findall(r'requires-python = ">=(.*)"', project), *re.findall(r"on Python (3.\d+)", pinned)]]
    frameworks = {"stable-baselines3": "", "sb3-contrib": "", "ray": r"\[rllib\]", "torchrl": "", "gymnasium": ""}
    for name, extra in {**dict.fromkeys(("torch", "triton", "numba", "numpy"), ""), **frameworks}.items():
        oldest, newest = re.findall(rf'"{name}{extra}>=([\d.]+)', project), re.findall(rf"^{name}==(\S+)", pinned, re.M)
        lines.append([name, oldest[0], newest[0].removesuffix(";")])
    table = [[*line, TESTED.get(line[0], "–"), *(system[line[0].lower()] for system in systems)] for line in lines]
    table.append(["CUDA", "that of PyTorch", "–", "–", *(system["cuda"] for system in systems)])
    table.append(["ROCm", "that of PyTorch", "kernels compiled, not run", "–", *("–" for _ in systems)])
    tested = [f"tests on an {system['gpu'].partition(',')[0]}" for system in systems]
    return make_table(["", "oldest supported", "tests on a CPU", "newest tried", *tested], table)


def list_adapter_versions() -> str:
    """The versions of frameworks that `make test-versions` tests, and which of them adapters refuse."""
    rows = json.loads((ROOT / "scripts" / "versions.json").read_text(encoding="utf-8"))
    names, table = dict.fromkeys(row["package"] for row in rows), []
    sort = partial(sorted, key=lambda version: [*map(int, version.split("."))])
    for name in names:
        kinds: list[list[str]] = [[], [], []]
        for row in rows:
            if row["package"] == name:
                kinds[2 if "refused" in row else "recipe" in row] += row["versions"]
        table.append([name, *(", ".join(sort(versions)) or "–" for versions in kinds)])
    return make_table(["", "the adapter", "a recipe", "refused, ImportError"], table)


def describe_sizes() -> str:
    """What pip downloads on Linux, by the sizes of wheels on the package indexes."""
    wheels = json.loads((PUBLISHED / "wheels.json").read_text(encoding="utf-8"))
    sums = {x: sum(wheel["megabytes"] for wheel in wheels if wheel["build"] in (x, "both")) for x in ("cpu", "cuda")}
    sizes = "{cpu:.1f} GB on a CPU, {cuda:.1f} GB on a GPU".format_map({x: y / 1000 for x, y in sums.items()})
    return f"Downloads with PyTorch {wheels[0]['version'].partition('+')[0]} on Linux: {sizes}, plus your framework."


def describe_suite() -> str:
    """What came of Stable-Baselines3's own tests with the classes of this package."""
    found = json.loads((RESULTS / "cpu" / "sb3_suite.json").read_text(encoding="utf-8"))
    passed, skipped, failed = found["passed"], found["skipped"], found["failed"]
    lines = [f"* `{test}`: {reason}." for test, reason in failed.items()]
    head = (
        f"Of {passed + skipped + len(failed)} tests of Stable-Baselines3's own suite, {passed} pass with these classes "
    )
    return f"{head}(commit `{found['commit'][:7]}`), {skipped} are skipped, {len(failed)} fail:\n\n" + "\n".join(lines)


def describe_verl() -> str:
    """What verl's other estimators take beside one pass over the logits."""
    own = select_rows(
        read_machines("verl_advantages")["cpu"].rows, "stock", "full", threads=1, responses=512, tokens=8192
    )
    plus, grpo = (select_rows(own, estimator=name)[0] for name in ("reinforce_plus_plus", "grpo"))
    setting = {"vocabulary": 151936, "tokens": 16384, "dtype": "bfloat16", "kind": "forward and backward"}
    ((gpu, result),) = [x for x in read_machines("token_log_probs").items() if x[0] != "cpu"]
    logits, ours = (select_rows(result.rows, arm, "full", **setting)[0] for arm in ("verl", "ours"))
    rows = read_machines("linear_token_log_probs")[gpu].rows
    hidden = []
    for arm, name in {"verl": "verl's fused kernels take", "ours": "those of this package"}.items():
        time, peak = (select_rows(rows, arm, x, tokens=4096)[0].median or 0 for x in ("full", "peak"))
        hidden.append(f"{name} {time / 1000:.1f} ms and {peak:,.0f} MiB")
    text = (
        f"For 512 responses of 8192 tokens, `reinforce_plus_plus` of verl takes {format_number(plus.median)} ms, and "
        f"`grpo`, which like `rloo` and `opo` loops over responses, {format_number(grpo.median)} ms. The logits of "
        f"16384 of these 4194304 tokens, with a vocabulary of 151936, take verl's functions in PyTorch "
        f"{(logits.median or 0) / 1000:.0f} ms, and those of this package {(ours.median or 0) / 1000:.1f} ms, forward "
        f"and backward, on an {name_processor(gpu, result)} ({name_commits([plus, logits])}). From 4096 hidden "
        f"states of width 1536, {' and '.join(hidden)}."
    )
    return textwrap.fill(text, 120)


def write_isaac_lab() -> str:
    factors, table = estimate_isaac_lab()
    heads = [f"with an update {factor:.1f} times as fast" for factor in factors]
    return make_table(["task", "share of the update", *heads, "with an update that takes no time"], table)


def estimate_isaac_lab() -> tuple[list[float], list[list[str]]]:
    """What a faster update makes of whole iterations, by the shares that Isaac Lab publishes: Amdahl's law.

    Steps per second with and without training give the update's share. Our factor is that of RSL-RL's update, with TF32
    in matrix products, which Isaac Lab's script allows.
    """
    rows = [row for found in select_robotics(num_envs=4096, package="rsl_rl", variant="tf32").values() for row in found]
    factors = [row.median for row in select_rows(rows, "stock", "over ours") if row.median]
    table = []
    for task in json.loads((PUBLISHED / "isaac_lab.json").read_text(encoding="utf-8")):
        share = 1 - task["training"] / task["inference"]
        whole = [1 / (1 - share + share / factor) for factor in (*factors, math.inf)]
        table.append([task["task"], f"{share:.0%}", *(f"{x:.2f}×" for x in whole)])
    return factors, table


# --- README.md --------------------------------------------------------------------------------------------------------


def list_first() -> str:
    """A row for each kind of user, and how much faster an update makes training where simulation takes time too."""
    lines, where = list_gains("first")
    wholes = [float(line[2].rstrip("×")) for line in estimate_isaac_lab()[1]]
    table = make_table(["what trains, and where", "steps/s, before → with this package", "times as fast"], lines)
    texts = [
        "Whole training, environments included; of RSL-RL the update alone, with TF32 as in Isaac Lab's script.",
        "From it, and the shares that Isaac Lab publishes, whole training with 4096 environments is *estimated* to be",
        f"{min(wholes)} to {max(wholes)} times as fast in {len(wholes)} of its tasks.",
        "Factors are medians of pairs of runs, with quartiles, and so no quotients of the two speeds.",
        f"Measured {where}",
    ]
    return f"{table}\n\n{' '.join(texts)}"


def list_expected(name: str) -> str:
    """Steps of environments per second in whole training, on a CPU and on a GPU."""
    lines, where = list_gains(name)
    heads = [f"{device}, {head}" for device in ("CPU", "GPU") for head in ("steps/s", "times as fast")]
    table = make_table(["algorithm, task", *heads], lines)
    return f"{table}\n\nMedians, with quartiles, {where} Factors are those of runs in pairs, no ratios of speeds."


def list_gains(name: str) -> tuple[list[list[str]], str]:
    """A line for each title, and the machines and commits of all."""
    lines, places, used = list[list[str]](), dict[str, None](), list[Row]()
    for title, (benchmark, setting, *devices) in GAINS[name].items():
        lines.append([", ".join([title, *devices])])
        for device in devices or ("CPU", "GPU"):
            machine, result, rows = find_expected(benchmark, setting, device == "CPU")
            lines[-1] += list_gain(rows)
            places |= {name_place(machine, result): None} if rows else {}
            used += rows
    return lines, f"on {', '.join(places)}; {name_commits(used)}."


def find_expected(benchmark: str, setting: dict[str, Any], on_cpu: bool) -> tuple[str, Result, list[Row]]:
    """The largest machine that a setting was measured on, its results, and those of the setting."""
    read = [(x, result, select_rows(result.rows, **setting)) for x, result in read_machines(benchmark).items()]
    found = [x for x in read if (x[0] == "cpu") == on_cpu and x[2]]
    return found[-1] if found else ("", Result({}, []), [])


def list_gain(rows: Sequence[Row]) -> list[str]:
    """Steps per second of stock and ours, and the ratio with its quartiles; dashes if they were not measured."""
    gains = [row for row in rows if row.median and (row.metric == "speed-up" or row[1:3] == ("stock", "over ours"))]
    if not gains:
        return ["–", "–"]
    rates = [count_steps(rows, arm) for arm in ("stock", gains[-1].arm.replace("stock", "ours"))]
    return [" → ".join(map(format_number, rates)), format_row(gains[-1])]


def count_steps(rows: Sequence[Row], arm: str) -> float | None:
    for row in select_rows(rows, arm):
        if row.metric == "steps":
            return row.median
        if row.metric in ("iteration", "full") and row.median:
            x = row.read_setting()
            return int(x.get("train_batch_size") or int(x["num_envs"]) * int(x["num_steps"])) / row.median * 1000
    return None


PARTS: dict[str, Callable[[], str]] = {
    **{x: partial(write_benchmark, x, partial(list_rows, **y.get("page", {}))) for x, y in TABLE.items()},
    "speed": lambda: describe_speed(next(iter(read_machines("calls_headline")))),
    **{x: partial(write_benchmark, x, list_learning) for x in ("learning", "same_learning", "same_learning_rllib")},
    **{name: partial(write_benchmark, name, list_loop, f"### {name_arm(name)}: {{}}") for name in LOOPS},
    "recipes": partial(write_benchmark, "recipes", list_rows),
    "training": describe_training,
    "rllib_gain": lambda: make_list(describe_rllib()),
    **{name: partial(list_expected, name) for name in GAINS},
    **{f"{name}_gain": partial(write_robotics, name) for name in ("rsl_rl", "rl_games", "skrl")},
    "versions": list_versions,
    "sizes": describe_sizes,
    "sb3_suite": describe_suite,
    "verl_share": describe_verl,
    "adapter_versions": list_adapter_versions,
    "isaac_lab": write_isaac_lab,
    "first": list_first,
}

# --- figures ----------------------------------------------------------------------------------------------------------

INK, PALE, ACCENT, GREEN, RED = "#24292f", "#b0b6bd55", "#3949ab", "#2e7d32", "#c62828"
"""Each with a contrast of at least 4.5 on the white background that figures have on pages of any color."""


def draw_figures() -> dict[str, Figure]:
    import matplotlib as mpl

    mpl.use("Agg")
    style = {"svg.hashsalt": "rl-triton-core", "svg.fonttype": "none", "font.size": 9}
    colored = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    mpl.rcParams.update(style | {"legend.framealpha": 0} | dict.fromkeys(colored, INK))
    figures = {f"{machine}_speed_up": draw_speed_up(machine) for machine in read_machines("calls_sweep")}
    figures["training"] = draw_expected()
    if found := read_machines("learning"):
        figures["learning"] = draw_learning(found)
    return figures


def make_panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    return figure, list(panels.flat)


def draw_speed_up(machine: str) -> Figure:
    """A line per shape: how many times faster a full call of GAE is than other ways to compute it."""
    figure, (panel,) = make_panels(1, 1, 4.4, 4)
    others = {"loop": ("o", RED), "compiled_scan": ("s", ACCENT), "flat_triton": ("D", GREEN)}
    shapes: dict[str, None] = {}
    for arm, (marker, color) in others.items():
        ratios = find_ratios(machine, arm, estimator="gae", layout="env-major", truncated=False)
        named = {"{num_envs} x {num_steps}".format_map(read_setting(x)): y for x, y in ratios.items()}
        shapes |= dict.fromkeys(named)
        panel.plot([*named.values()], [*named], marker, color=color, markersize=5, label=f"over a {name_arm(arm)}")
    panel.axvline(1, color=INK, linewidth=0.6)
    panel.set(xscale="log", xlabel="times faster, full call", ylabel="environments x steps")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_title(f"compute_gae on an {name_processor(machine, read_machines('calls_sweep')[machine])}", fontsize=9)
    panel.grid(axis="x", color=PALE, linewidth=0.5)
    figure.legend(loc="outside lower center")
    return figure


def draw_expected() -> Figure:
    """How many times faster whole training is: a bar for each device, narrow enough for a phone."""
    figure, (panel,) = make_panels(1, 1, 4.4, 0.52 * len(GAINS["expected"]))
    panel.axvline(1, color=PALE, linewidth=0.8)
    height = 0.0
    for title, place in GAINS["expected"].items():
        panel.text(0.05, height, title.replace("`", ""), va="center")
        for on_cpu, color in ((True, ACCENT), (False, GREEN)):
            for row in select_rows(find_expected(*place, on_cpu)[2], metric="speed-up")[-1:]:
                height += 0.3
                bar = panel.barh(height, row.median or 0, height=0.27, color=color)
                panel.bar_label(bar, [f"{format_number(row.median)}× {'CPU' if on_cpu else 'GPU'}"], padding=3)
        height += 0.36
    panel.set(xlim=(0, 11.5), ylim=(height, -0.3), yticks=[])
    panel.set_xlabel("times as fast as Stable-Baselines3, whole training")
    panel.spines[["top", "right"]].set_visible(False)
    return figure


def draw_learning(found: dict[str, Result]) -> Figure:
    """A row for each machine and task: returns over steps, and over seconds; medians over seeds, with quartiles."""
    curves: dict[tuple[str, str], list[Row]] = {}
    for machine, result in found.items():
        for row in select_rows(result.rows, metric="return"):
            setting = row.read_setting()
            task = WORDS.get(setting["task"], setting["task"])
            curves.setdefault((machine, f"{setting.get('algorithm', 'PPO')}, {task}"), []).append(row)
    figure, panels = make_panels(len(curves), 2, 4.6, 1.7 * len(curves))
    for ((machine, task), rows), *pair in zip(curves.items(), panels[::2], panels[1::2], strict=True):
        for arm, color in zip(dict.fromkeys(row.arm for row in rows), (RED, ACCENT), strict=False):
            own = select_rows(rows, arm)
            seconds = {row.setting: row.median for row in select_rows(found[machine].rows, arm, "time")}
            steps = [int(row.read_setting()["steps"]) / 1000 for row in own]
            for panel, places in zip(pair, (steps, [seconds[row.setting] for row in own]), strict=True):
                panel.plot(places, [row.median for row in own], color=color, label=arm)
                panel.fill_between(places, [x.low for x in own], [x.high for x in own], color=color, alpha=0.15)
        for panel, unit in zip(pair, ("steps, thousands", "seconds"), strict=True):
            panel.axhline(float(rows[0].read_setting()["target_return"]), color=INK, linewidth=0.5)
            panel.set(xlabel=unit)
            panel.locator_params(nbins=4)
        pair[0].set_title(f"{task}, {name_processor(machine, found[machine])}", loc="left", fontsize=9)
        pair[0].set_ylabel("return")
        pair[1].legend()
    return figure


if __name__ == "__main__":
    main()
