"""The advantage pass of Stable-Baselines3's buffer, ours in its place, and `compute_gae` on flags that are ready.

Results are equal to the bit. Calls come in bursts; the first of a burst finds the caches as the other arms left them,
which is how a training loop calls it. A busy neighbour is a process that keeps a core busy, as environments in
subprocesses do.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from benchmarks import harness
from benchmarks.results import Row, make_row
from rl_triton_adapters.sb3 import TritonRolloutBuffer
from rl_triton_core import compute_gae, set_num_threads


class Setting(NamedTuple):
    """A shape, the threads of PyTorch and of this library, and whether a core is kept busy."""

    n_steps: int
    n_envs: int
    threads: int
    busy_neighbour: bool = False


THREADS = sorted({1, torch.get_num_threads()})
ALL = [Setting(*shape, n) for n in THREADS for shape in ((2048, 1), (2048, 8), (128, 4096))]
SETTINGS = {
    "cpu": [*ALL, *(Setting(128, 4096, n, True) for n in THREADS)],
    "cuda": [],
    "quick": [Setting(16, 2, 1), Setting(16, 2, 1, True)],
}
TURNS, BURST = 25, 8


def measure(setting: Setting, options: Namespace) -> Iterator[Row]:
    """All arms, by the calls of a burst and by the first of them."""
    torch.set_num_threads(setting.threads)
    set_num_threads(setting.threads)
    with keep_a_core_busy(setting.busy_neighbour):
        turns = 2 if options.quick else TURNS
        times = harness.time_in_turns(make_arms(setting), "cpu", turns=turns, burst=BURST, warm_up=False)
    yield from harness.list_times({name: [burst[1:] for burst in bursts] for name, bursts in times.items()})
    for name, bursts in times.items():
        yield make_row(name, "first of a burst", "µs", [burst[0] for burst in bursts])


def make_arms(setting: Setting) -> dict[str, harness.Call]:
    """The same rollout in two buffers, and as tensors; raises unless results are the same."""
    stock, ours = (fill_buffer(kind, setting.n_steps, setting.n_envs) for kind in (RolloutBuffer, TritonRolloutBuffer))
    last_values, dones = torch.linspace(-1, 1, setting.n_envs), np.arange(setting.n_envs) % 3 == 0
    flags = torch.from_numpy(np.concatenate([stock.episode_starts[1:], dones[None]]) != 0)
    rewards, values = torch.from_numpy(stock.rewards), torch.from_numpy(stock.values)
    known: dict[str, Any] = {"gamma": stock.gamma, "lambda_": stock.gae_lambda, "time_dim": 0}
    known["out"] = (torch.empty_like(rewards), torch.empty_like(rewards))
    arms = {
        "stock": lambda: stock.compute_returns_and_advantage(last_values, dones),
        "ours": lambda: ours.compute_returns_and_advantage(last_values, dones),
        "core": lambda: compute_gae(rewards, values, flags, bootstrap_values=last_values, **known),
    }
    for call in arms.values():
        call()
    for name, core in zip(("advantages", "returns"), known["out"], strict=True):
        if not getattr(stock, name).tobytes() == getattr(ours, name).tobytes() == core.numpy().tobytes():
            raise AssertionError(f"wrong: {name} differ")
    return arms


@contextmanager
def keep_a_core_busy(is_busy: bool) -> Iterator[None]:
    """Another process, which computes for as long as this lasts."""
    if not is_busy:
        yield
        return
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def fill_buffer(kind: type[RolloutBuffer], n_steps: int, n_envs: int) -> RolloutBuffer:
    """A buffer that holds a rollout."""
    buffer = kind(n_steps, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), n_envs=n_envs)
    rng = np.random.default_rng(0)
    buffer.rewards[:], buffer.values[:] = rng.normal(size=(2, n_steps, n_envs))
    buffer.episode_starts[:] = rng.random((n_steps, n_envs)) < 0.02
    return buffer
