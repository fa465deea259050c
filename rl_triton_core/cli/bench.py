"""`rl-triton bench`: time GAE on this machine, beside a loop, a compiled scan and the frameworks that are installed.

A provider is a function that takes a rollout and returns a call without arguments, which returns the advantages,
[num_steps, num_envs]; and a line in `PROVIDERS`. It raises ImportError where it is not installed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_triton_core import compute_gae
from rl_triton_core._internal.backend import BACKENDS, check_backend
from rl_triton_core.cli.output import Report, Table, track_progress
from rl_triton_core.system_info import system_info
from rl_triton_core.testing import random_rollout, relative_error

HELP = "time GAE on this machine, beside a loop, a compiled scan and the installed frameworks"
GAMMA, LAMBDA = 0.99, 0.95
SHAPES = {"cpu": ("8x2048", "64x128", "1024x128"), "cuda": ("64x128", "4096x128", "512x2048")}
"""Environments by steps, by device."""
MAX_ENVS_CHECKED = 64
MAX_ERROR = 1e-5
"""Relative, of float32 against the oracle in float64."""
SECONDS, SECONDS_PER_SAMPLE, MIN_SAMPLES, MAX_SAMPLES = 0.5, 0.002, 5, 100


class Rollout(NamedTuple):
    """What all providers compute from, [num_steps, num_envs]."""

    rewards: Tensor
    values: Tensor
    terminated: Tensor
    last_value: Tensor
    """V after the last step, [num_envs]."""


Call = Callable[[], Tensor]


class Measurement(NamedTuple):
    """The time of a provider, in microseconds per call."""

    shape: str
    provider: str
    median: float | None = None
    lower_quartile: float | None = None
    upper_quartile: float | None = None
    note: str = ""
    """Why there is no time."""
    is_wrong: bool = False


def make_ours(backend: str, rollout: Rollout) -> Call:
    """Call `compute_gae` on a backend."""
    check_backend(backend, rollout.rewards.device)
    rewards, values, terminated, last_value = rollout

    def call() -> Tensor:
        return compute_gae(
            *(rewards, values, terminated),
            gamma=GAMMA,
            lambda_=LAMBDA,
            bootstrap_values=last_value,
            compute_returns=False,
            time_dim=0,
            backend=backend,
        ).advantages

    return call


def make_loop(rollout: Rollout) -> Call:
    """Loop over time as CleanRL's scripts do."""
    rewards, values, terminated, last_value = rollout

    def call() -> Tensor:
        advantages, advantage, next_value = torch.zeros_like(rewards), torch.zeros_like(last_value), last_value
        for t in reversed(range(len(rewards))):
            not_done = 1.0 - terminated[t].float()
            delta = rewards[t] + GAMMA * next_value * not_done - values[t]
            advantages[t] = advantage = delta + GAMMA * LAMBDA * not_done * advantage
            next_value = values[t]
        return advantages

    return call


def make_compiled_scan(rollout: Rollout) -> Call:
    """Compile a scan by doubling with torch.compile, for one shape."""
    torch._dynamo.reset()
    return partial(torch.compile(scan_by_doubling, dynamic=False, fullgraph=True), *rollout)


def scan_by_doubling(rewards: Tensor, values: Tensor, terminated: Tensor, last_value: Tensor) -> Tensor:
    """Combine every step with the one 1, 2, 4, ... steps later."""
    not_done = 1.0 - terminated.float()
    sums = rewards + GAMMA * torch.cat([values[1:], last_value[None]]) * not_done - values
    decays, shift = GAMMA * LAMBDA * not_done, 1
    while shift < len(rewards):
        sums = torch.cat([sums[:-shift] + decays[:-shift] * sums[shift:], sums[-shift:]])
        decays = torch.cat([decays[:-shift] * decays[shift:], torch.zeros_like(decays[-shift:])])
        shift *= 2
    return sums


def make_sb3(rollout: Rollout) -> Call:
    """Fill the rollout buffer of Stable-Baselines3, which computes in NumPy."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import RolloutBuffer

    if rollout.rewards.device.type != "cpu":
        raise ImportError("it computes on the CPU")
    num_steps, num_envs = rollout.rewards.shape
    space = spaces.Box(-1, 1, (1,))
    buffer: Any = RolloutBuffer(num_steps, space, spaces.Discrete(2), gamma=GAMMA, gae_lambda=LAMBDA, n_envs=num_envs)
    buffer.rewards[:], buffer.values[:] = rollout.rewards.numpy(), rollout.values.numpy()
    dones = rollout.terminated.numpy()
    buffer.episode_starts[1:] = dones[:-1]

    def call() -> Tensor:
        buffer.compute_returns_and_advantage(rollout.last_value, dones[-1])
        return torch.from_numpy(buffer.advantages)

    return call


def make_torchrl(rollout: Rollout) -> Call:
    """Call TorchRL's vectorised GAE on its own layout, [num_envs, num_steps, 1]."""
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    next_values = torch.cat([rollout.values[1:], rollout.last_value[None]])
    tensors = (rollout.values, next_values, rollout.rewards, rollout.terminated, rollout.terminated)
    placed = [x.t().unsqueeze(-1).contiguous() for x in tensors]
    return lambda: vec_generalized_advantage_estimate(GAMMA, LAMBDA, *placed)[0].squeeze(-1).t()


PROVIDERS: dict[str, Callable[[Rollout], Call]] = {
    **{f"ours ({backend})": partial(make_ours, backend) for backend in BACKENDS if backend != "reference"},
    "Python loop": make_loop,
    "compiled scan": make_compiled_scan,
    "Stable-Baselines3": make_sb3,
    "TorchRL": make_torchrl,
}
OURS = "ours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to measure."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of the tensors")
    shapes = f"environments x steps; by default {' '.join(SHAPES['cpu'])}, on a GPU {' '.join(SHAPES['cuda'])}"
    parser.add_argument("--shapes", nargs="+", metavar="NxT", help=shapes)
    parser.add_argument("--skip", nargs="+", choices=PROVIDERS, default=(), help="what not to measure")
    parser.add_argument("--output", type=Path, default=Path("rl-triton-bench.png"), help="where the picture goes")


def run(options: argparse.Namespace) -> Report:
    """Measure all providers on all shapes, and draw the picture."""
    shapes = options.shapes or SHAPES.get(torch.device(options.device).type, SHAPES["cpu"])
    rollouts = {shape: draw_rollout(parse_shape(shape), options.device) for shape in shapes}
    pairs = [(shape, name) for shape in shapes for name in PROVIDERS if name not in options.skip]
    tracked = track_progress(pairs, "measuring", len(pairs))
    measurements = [measure_provider(shape, name, rollouts[shape]) for shape, name in tracked]
    picture = draw_picture(measurements, options.output)
    data = {
        "system": system_info(),
        "threads": torch.get_num_threads(),
        "device": options.device,
        "measurements": [x._asdict() for x in measurements],
    }
    notes = dict.fromkeys(f"{x.provider}: {x.note}" for x in measurements if x.note)
    title = f"GAE, microseconds per call on {options.device}: median (quartiles)"
    table = Table(title, ("environments x steps", "provider", "time", "beside ours"), list(format_rows(measurements)))
    failed = any(x.is_wrong and x.provider.startswith(OURS) for x in measurements)
    return Report(data, [table, "", *notes, picture], int(failed))


def parse_shape(text: str) -> tuple[int, int]:
    """Read environments x steps."""
    parts = text.split("x")
    if len(parts) != 2 or not all(x.isdecimal() and int(x) for x in parts):
        raise ValueError(f"--shapes: got {text!r}, expected environments x steps, such as 64x128")
    return int(parts[0]), int(parts[1])


def draw_rollout(shape: tuple[int, int], device: str) -> Rollout:
    """Draw random experience, the same for all providers."""
    rollout = random_rollout(*shape, terminated_prob=0.02, truncated_prob=0.0, time_dim=0, device=device)
    return Rollout(rollout.rewards, rollout.values, rollout.terminated, rollout.bootstrap_values[-1].contiguous())


def measure_provider(shape: str, name: str, rollout: Rollout) -> Measurement:
    """Check the result of a provider, then time it."""
    try:
        call = PROVIDERS[name](rollout)
        error = relative_error(*select_envs(call(), rollout))
    except ImportError as missing:
        return Measurement(shape, name, note=f"not installed: {missing}")
    except Exception as failed:  # a compiler that is missing, a backend that cannot run: the others go on
        return Measurement(shape, name, note=f"not available: {str(failed).partition(chr(10))[0]}")
    if not error <= MAX_ERROR:
        return Measurement(shape, name, note=f"not timed: its relative error is {error:.1e}", is_wrong=True)
    samples = sorted(collect_samples(call, rollout.rewards.device))
    lower, median, upper = (1e6 * x for x in statistics.quantiles(samples, n=4))
    return Measurement(shape, name, round(median, 2), round(lower, 2), round(upper, 2))


def select_envs(advantages: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Take some environments of a result, and what the reference backend says of them."""
    some = slice(None, MAX_ENVS_CHECKED)
    rewards, values, terminated = (x[:, some].cpu() for x in rollout[:3])
    expected, _ = compute_gae(
        rewards,
        values,
        terminated,
        gamma=GAMMA,
        lambda_=LAMBDA,
        bootstrap_values=rollout.last_value[some].cpu(),
        time_dim=0,
        backend="reference",
    )
    return advantages[:, some].cpu(), expected


def collect_samples(call: Call, device: torch.device) -> Iterator[float]:
    """Time groups of calls, each long enough for the clock; seconds per call."""
    for _ in range(3):
        call()
    first = time_calls(call, 1, device)
    number = max(1, int(SECONDS_PER_SAMPLE / max(first, 1e-7)))
    num_samples = min(MAX_SAMPLES, max(MIN_SAMPLES, int(SECONDS / (first * number))))
    return (time_calls(call, number, device) / number for _ in range(num_samples))


def time_calls(call: Call, number: int, device: torch.device) -> float:
    """Time some calls, until the device is done with them."""
    wait_for_device(device)
    start = time.perf_counter()
    for _ in range(number):
        call()
    wait_for_device(device)
    return time.perf_counter() - start


def wait_for_device(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def format_rows(measurements: Sequence[Measurement]) -> Iterator[tuple[str, str, str, str]]:
    """Write times beside the quickest of ours on the same shape."""
    for x in measurements:
        own = [y.median for y in measurements if y.shape == x.shape and y.median and y.provider.startswith(OURS)]
        if x.median is not None:
            quartiles = f"{x.median:.1f} ({x.lower_quartile:.1f} to {x.upper_quartile:.1f})"
            yield x.shape, x.provider, quartiles, f"{x.median / min(own):.2f}" if own else ""


def draw_picture(measurements: Sequence[Measurement], path: Path) -> str:
    """Draw the medians with their quartiles, and say where the picture is."""
    measured = [x for x in measurements if x.median is not None]
    if find_spec("matplotlib") is None:
        return 'no picture: matplotlib is not installed (pip install "rl-triton-core[cli]")'
    if not measured:
        return "no picture: nothing was measured"
    from matplotlib.figure import Figure

    shapes, names = (list(dict.fromkeys(x)) for x in zip(*((y.shape, y.provider) for y in measured), strict=True))
    figure = Figure(figsize=(1.5 + 2.2 * len(shapes), 4), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(names):
        own = [x for x in measured if x.provider == name]
        places = [shapes.index(x.shape) + (i - (len(names) - 1) / 2) * 0.8 / len(names) for x in own]
        medians = [x.median or 0.0 for x in own]
        below = [(x.median or 0.0) - (x.lower_quartile or 0.0) for x in own]
        above = [(x.upper_quartile or 0.0) - (x.median or 0.0) for x in own]
        axes.bar(places, medians, 0.8 / len(names), yerr=[below, above], label=name, capsize=2)
    axes.set(yscale="log", ylabel="µs per call", xlabel="environments x steps", title="GAE")
    axes.set_xticks(range(len(shapes)), shapes)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return f"picture: {path}"
