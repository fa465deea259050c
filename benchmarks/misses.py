"""Goals of the project that result files miss: by how much, and why."""

from __future__ import annotations

import statistics
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from benchmarks.calls import LONG_SHAPES
from benchmarks.results import format_setting, read_machines, read_setting, select_rows

Numbers = dict[str, float]
"""By setting."""


class Goal(NamedTuple):
    """A limit for numbers of a machine, of each or of their geometric mean; why it is missed."""

    text: str
    limit: float
    find: Callable[[], Numbers]
    reason: str
    at_least: bool = True
    unit: str = "×"
    mean: bool = False

    def describe(self) -> str:
        """A paragraph that says by how much the goal is missed and why; empty if it is reached."""
        found = self.find()
        if self.mean:
            found = {"": statistics.geometric_mean(found.values())}
        kept = [x >= self.limit if self.at_least else x <= self.limit for x in found.values()]
        if all(kept):
            return ""
        worst = (min if self.at_least else max)(found, key=lambda setting: found[setting])
        measured = f"{'the mean' if self.mean else 'it'} is {found[worst]:.2f}{self.unit}"
        if len(found) > 1:
            measured = f"{sum(kept)} of {len(kept)} reach it"
            measured += f", {found[worst]:.2f}{self.unit} at the worst, {describe_varied(worst, list(found))}"
        sign = "≥" if self.at_least else "≤"
        text = f"* **{self.text}, {sign} {self.limit:g}{self.unit}**: {measured}. {self.reason}"
        return textwrap.fill(
            " ".join(text.split()), 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )


def describe_varied(setting: str, settings: list[str]) -> str:
    """A setting without what all have in common."""
    every = [read_setting(x) for x in settings]
    own = read_setting(setting)
    return "`" + ", ".join(f"{k}={x}" for k, x in own.items() if len({y.get(k) for y in every}) > 1) + "`"


# --- numbers ----------------------------------------------------------------------------------------------------------


def find(benchmark: str, arm: str, metric: str, machine: str = "h200", **setting: Any) -> Numbers:
    """What a result file has."""
    rows = select_rows(read_machines(benchmark)[machine].rows, arm, metric, **setting)
    return {row.setting: row.median for row in rows if row.median is not None}


def find_device(benchmark: str, arm: str = "ours", **setting: Any) -> Numbers:
    """Times on the device."""
    return find(benchmark, arm, "device", **setting)


def divide(numbers: Numbers, others: Numbers, **change: Any) -> Numbers:
    """Ratios, of those that have another one whose setting differs by this change."""
    found = {}
    for setting, x in numbers.items():
        other = format_setting({**read_setting(setting), **change})
        if other in others:
            found[setting] = x / others[other]
    return found


def tag(numbers: Numbers, variant: str) -> Numbers:
    """The numbers of settings that say of which variant they are."""
    return {f"{setting}; variant={variant}": x for setting, x in numbers.items()}


def compare_rows() -> Numbers:
    """The CUDA kernels over ours."""
    ours, plain, by_four = (find_device("calls_rows", x) for x in ("ours_out", "cuda_rows", "cuda_rows_by_four"))
    return divide(plain, ours) | tag(divide(by_four, ours), "16-byte reads")


def compare_flat() -> Numbers:
    """The flat kernel over ours."""
    return divide(find_device("calls_sweep", "flat_triton", layout="env-major"), find_device("calls_sweep"))


def compare_flags() -> Numbers:
    """Times per byte, over those with bool."""
    per_byte = divide(find_device("calls_flags"), find_device("calls_flags", "copy"))
    return {k: x for k, x in divide(per_byte, per_byte, flags="bool").items() if "flags=bool" not in k}


def find_overhead() -> Numbers:
    """Full calls without that of `torch.add`."""
    ours, add = (find("calls_headline", arm, "full", truncated=False) for arm in ("ours", "torch_add"))
    return {setting: x - add[setting] for setting, x in ours.items()}


HEAVY = ("vtrace", "retrace")


def find_rooflines(heavy: bool) -> Numbers:
    """Percentages of the bandwidth from 8 million steps on, of the estimators with many inputs or of the others."""
    found = {}
    for setting, x in divide(find_device("calls_large", "copy"), find_device("calls_large")).items():
        values = read_setting(setting)
        is_large = int(values["num_envs"]) * int(values["num_steps"]) >= 8_000_000
        if is_large and (values["estimator"] in HEAVY) == heavy:
            found[setting] = 100 * x
    return found


def compare_layouts() -> Numbers:
    """Time-major over env-major."""
    times = {**find_device("calls_sweep", truncated=False), **find_device("calls_large", truncated=False)}
    return {k: x for k, x in divide(times, times, layout="env-major").items() if "time-major" in k}


def compare_long() -> Numbers:
    """The flat kernel over ours, or the one that goes in blocks where rows are longer than that one holds."""
    others = {**find_device("calls_long", "blocks_triton"), **find_device("calls_long", "flat_triton")}
    ratios = divide(others, find_device("calls_long"))
    return {k: x for k, x in ratios.items() if int(read_setting(k)["num_steps"]) >= LONG_SHAPES[0][1]}


def compare_truncated() -> Numbers:
    """Times less the copies of the bytes that are more, over those without truncations."""
    times, copies = find_device("calls_sweep"), find_device("calls_sweep", "copy")
    plain = {k.replace("truncated=False", "truncated=True"): k for k in times if "truncated=False" in k}
    return {k: (x - copies[k] + copies[plain[k]]) / times[plain[k]] for k, x in times.items() if k in plain}


def find_peaks(name: str) -> Numbers:
    """MiB beyond the framework's own peak, of captured steps."""
    stock = find(name, "stock", "peak")
    update, captured = (find(name, arm, "peak") for arm in ("update", "captured"))
    return {k: max(update.get(k, 0.0), captured.get(k, 0.0)) - stock[k] for k in {**update, **captured}}


def find_iterations(machine: str) -> Numbers:
    """How many times faster an iteration of Stable-Baselines3 is with what its users choose from."""
    arms = ("ours", "device", "captured")
    found = (tag(find("sb3", arm, "speed-up", machine), arm) for arm in arms)
    return dict(sorted(ChainMap(*found).items()))


def find_off_policy(algorithm: str, gradient_steps: int = 1) -> Numbers:
    """How many times faster whole training is off policy, with gradient steps after every step."""
    setting = {"algorithm": algorithm, "gradient_steps": gradient_steps, "train_freq": 1}
    return find("off_policy", "ours", "speed-up", **setting)


def find_updates(variants: Iterable[str], processes: int = 1) -> Numbers:
    """How many times faster updates of robotics packages are."""
    setting = {"step": "update", "processes": processes}
    return dict(ChainMap(*(find("robotics", "stock", "over ours", variant=x, **setting) for x in variants)))


def compare_tokens(kind: str) -> Numbers:
    """Token log-probabilities over the time that memory takes at least."""
    return divide(find_device("token_log_probs", kind=kind), find_device("token_log_probs", "copy", kind=kind))


# --- goals ------------------------------------------------------------------------------------------------------------

LATENCY = """In small rollouts both kernels wait for the same chain of loads, scan and stores. The flat kernel has no
carried state, no exact products and no boundary rule beyond a flag, and so the shorter chain."""
BUFFER = """Slower is the buffer alone, whose advantage step is below 1 % of these iterations: the rest is the spread
between them, see the quartiles."""
HOST = """The rest of a step is Python: environment, loop and replay buffer of Stable-Baselines3, and the checks of this
package before each replay."""
STOCK_UPDATES = """Slower are the buffer alone and A2C with gSDE, where acting and update are stock's: only advantages
and terminal values are replaced, and the rest is the spread between iterations, see the quartiles."""
GOALS = [
    Goal("Kernel against the flat Triton kernel, geometric mean", 1.8, compare_flat, LATENCY, mean=True),
    Goal("Kernel against the flat Triton kernel", 1.0, compare_flat, "The same."),
    Goal(
        "Kernel with flags of other types over that with bool, per byte", 1.1, compare_flags,
        """Time-major, and in larger rollouts of either layout, the same flags keep the goal. It may be that the L2
        cache no longer holds inputs and results between calls. That was not measured.""", at_least=False,
    ),
    Goal(
        "Kernel against CUDA kernels with a thread per row", 1.0, compare_rows, "The reason is not known.",
    ),
    Goal(
        "Full call with `out=` against CUDA kernels with a thread per row", 1.0,
        lambda: find("calls_rows", "cuda_rows", "over ours_out") | tag(
            find("calls_rows", "cuda_rows_by_four", "over ours_out"), "16-byte reads"),
        """These are short rows. On the device this package is the quicker one in each of them. The difference is the
        host, a checked Python call here against a C++ function that checks nothing.""",
    ),
    Goal(
        "Full call beyond that of `torch.add`, 4096x128", 2.0, find_overhead,
        """The kernels read and write more numbers per step, most of all those of Retrace and V-Trace. The rest is the
        host: the call compares its arguments and enters Triton's launcher, where `torch.add` stays in C++. The host was
        shared with other benchmarks.""", at_least=False, unit=" µs",
    ),
    Goal(
        "Kernel from 8 million steps on, of the bandwidth", 85.0, lambda: find_rooflines(heavy=False),
        """No launch that `tune` timed is much quicker. Over 4096 environments time-major there are 128 programs of 32
        columns, fewer than an H200 has multiprocessors, so that each has the warps of one program to hide waiting with.
        Narrower programs read parts of what memory hands out at once, and splitting time reads everything twice. The
        cause of the other misses is not known.""", unit=" %",
    ),
    Goal(
        "Kernel from 8 million steps on, of the bandwidth, V-Trace and Retrace", 75.0,
        lambda: find_rooflines(heavy=True), "128 programs, as above.", unit=" %",
    ),
    Goal(
        "Kernel, time-major over env-major", 1.15, compare_layouts,
        """Where steps lie side by side a thread loads four of them at once, else each by itself. In small rollouts that
        wait is all there is. Where time is split, as in rollouts of 2048 steps and with Retrace in all of these,
        everything is read twice. Nothing is transposed.""", at_least=False,
    ),
    Goal(
        "Kernel against a Triton program per row, long rows", 12.0, compare_long,
        """The goal was set against a kernel that takes a row in one scan. For rows that it cannot hold, the other
        kernel walks over blocks, which is several times quicker. This package makes two launches, and the second reads
        the inputs again, from the L2 cache if they fit.""",
    ),
    Goal(
        "Kernel with truncations, less a copy of the further inputs, over that without", 1.25, compare_truncated,
        """The loads of a flag and a bootstrap value are waited for once more per tile. In small rollouts that is
        latency, not bytes. `tune` has timed truncated rollouts of V-Trace env-major, and none of the others.""",
        at_least=False,
    ),
    Goal(
        "Losses with gradients against eager PyTorch", 3.0,
        lambda: find("losses", "eager", "over ours", kind="forward and backward"),
        """The rest has one number per element and no distribution, so that eager PyTorch takes few operations. Most
        of the rest is autograd's backward pass, which costs as much for one operation as for many. Inside a captured
        step none of this is left, and `get_gradients` has the gradients without it.""",
    ),
    Goal(
        "Losses with gradients on the device over a copy of their bytes, two million elements", 1.3,
        lambda: divide(
            find_device("losses", elements=2097152, kind="forward and backward"), find_device("losses", "copy")
        ),
        """Advantages that are normalised are read twice, by one more launch, and the sums of all programs are added by
        another. Terms, weights and moments are summed in float64, which is more arithmetic than a copy hides. How much
        of the time is which was not measured.""", at_least=False,
    ),
    Goal(
        "Stable-Baselines3, iterations on an H200", 1.0, lambda: find_iterations("h200"),
        BUFFER + """ On the device, with few environments, a step's copies cost more than one copy of the whole rollout
        saves. With captured updates nothing is slower.""",
    ),
    Goal("Stable-Baselines3, iterations on a CPU", 1.0, lambda: find_iterations("cpu"), STOCK_UPDATES),
    Goal(
        "Stable-Baselines3, peak of captured steps beyond the framework's own", 0.0, lambda: find_peaks("sb3"),
        """PyTorch reserves blocks of 2 MiB and more. Once per process, cuBLAS keeps two more workspaces, for the
        streams of warm-ups and of captures: the first variant that captures has them. The rest is the pool of the
        graphs, which holds intermediate tensors of a step besides what eager steps keep in PyTorch's cache. How much of
        it is which was not measured.""", at_least=False, unit=" MiB",
    ),
    Goal(
        "RLlib, peak of captured steps beyond the framework's own", 0.0, lambda: find_peaks("rllib"),
        "As above, with the workspaces in both settings.", at_least=False, unit=" MiB",
    ),
    Goal("SAC of Stable-Baselines3", 6.4, lambda: find_off_policy("SAC"), HOST),
    Goal("SAC of Stable-Baselines3, 8 gradient steps", 13.0, lambda: find_off_policy("SAC", 8), HOST),
    Goal("TD3 of Stable-Baselines3", 3.8, lambda: find_off_policy("TD3"), HOST),
    Goal("DQN of Stable-Baselines3, a gradient step after each step", 4.5, lambda: find_off_policy("DQN"), HOST),
    Goal(
        "Updates of RSL-RL, RL-Games and skrl", 3.0,
        lambda: find_updates(["", "bf16", "tf32", "symmetry", "random network distillation"]),
        """In float32 the update waits for the device: three layers of 256 and 24576 rows are matrix products. With
        TF32 and in bf16 they take less.""",
    ),
    Goal("Recurrent updates of RSL-RL and RL-Games", 2.0, lambda: find_updates(["lstm"]), "The reason is not known."),
    Goal("Updates on two GPUs", 2.0, lambda: find_updates([""], 2), "The reason is not known."),
    Goal(
        "Token log-probabilities on the device over reading the logits once", 1.3, lambda: compare_tokens("forward"),
        "Of the shortest kernels, a part is the time in which they start and end.", at_least=False,
    ),
    Goal(
        "Token log-probabilities with gradients over reading twice and writing once", 1.3,
        lambda: compare_tokens("forward and backward"), "As above.", at_least=False,
    ),
]  # fmt: skip


def list_misses() -> str:
    """A paragraph for every goal that is missed."""
    return "\n".join(filter(None, (goal.describe() for goal in GOALS)))
