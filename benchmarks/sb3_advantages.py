"""Time the advantage pass of Stable-Baselines3 against ours, in one process, and write the times to a folder.

    python benchmarks/sb3_advantages.py FOLDER [--commit HASH] [--quick]

Three arms take turns on the same rollout: the buffer of Stable-Baselines3, our buffer in its place (the adapter), and
`compute_gae` alone on flags that are ready. A turn is a burst of calls; the first of a burst finds the caches as the
other arms left them, which is how a training loop calls it. Before timing, both buffers must agree in every bit.
The largest rollout is timed once more beside a process that keeps a core busy, as environments in subprocesses do.
Writes sb3_advantages.json: quartiles in microseconds, and ratios.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "adapters"))

from benchmarks import files, harness
from rl_triton_adapters.sb3 import TritonRolloutBuffer
from rl_triton_core import compute_gae, set_num_threads

SHAPES = {(2048, 1): 50.0, (2048, 8): 50.0, (128, 4096): 1.5}
"""(n_steps, n_envs), and how many times faster ours should be."""
TURNS, BURST = 25, 8


def main() -> None:
    parser = files.make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn, to see that it runs")
    options = parser.parse_args()
    turns = 1 if options.quick else TURNS
    threads = sorted({1, torch.get_num_threads()})
    rows = [measure_shape(*shape, n, turns) for n in threads for shape in SHAPES]
    with keep_a_core_busy():
        rows += [measure_shape(*max(SHAPES, key=math.prod), n, turns, busy_neighbours=1) for n in threads]
    files.save_rows(options, "sb3_advantages.json", rows, turns=turns, burst=BURST)


@contextmanager
def keep_a_core_busy() -> Iterator[None]:
    """Another process, which computes for as long as this lasts."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def measure_shape(n_steps: int, n_envs: int, threads: int, turns: int, busy_neighbours: int = 0) -> files.Row:
    """One shape, all arms."""
    torch.set_num_threads(threads)
    set_num_threads(threads)
    stock, ours = (fill_buffer(kind, n_steps, n_envs) for kind in (RolloutBuffer, TritonRolloutBuffer))
    last_values, dones = torch.linspace(-1, 1, n_envs), np.arange(n_envs) % 3 == 0
    flags = torch.from_numpy(np.concatenate([stock.episode_starts[1:], dones[None]]) != 0)
    rewards, values = torch.from_numpy(stock.rewards), torch.from_numpy(stock.values)
    out = (torch.empty_like(rewards), torch.empty_like(rewards))
    known = {"gamma": stock.gamma, "lambda_": stock.gae_lambda, "time_dim": 0, "out": out}
    arms = {
        "stock": lambda: stock.compute_returns_and_advantage(last_values, dones),
        "adapter": lambda: ours.compute_returns_and_advantage(last_values, dones),
        "core": lambda: compute_gae(rewards, values, flags, bootstrap_values=last_values, **known),
    }
    for arm in arms.values():
        arm()
    for name, mine in (("advantages", out[0]), ("returns", out[1])):
        if not getattr(stock, name).tobytes() == getattr(ours, name).tobytes() == mine.numpy().tobytes():
            raise SystemExit(f"{name} differ at ({n_steps}, {n_envs})")
    times = harness.time_in_turns(arms, harness.Clock(), turns, BURST)
    warm, first = (
        {name: [burst[chosen] for burst in bursts] for name, bursts in times.items()}
        for chosen in (slice(1, None), slice(1))
    )
    return {
        **{"n_steps": n_steps, "n_envs": n_envs, "threads": threads, "busy_neighbours": busy_neighbours},
        "microseconds": harness.summarize_calls(warm),
        "microseconds_first_of_burst": harness.summarize_calls(first),
        "speedup": harness.compare_with_stock(warm),
        "speedup_first_of_burst": harness.compare_with_stock(first),
        "target": SHAPES[n_steps, n_envs],
    }


def fill_buffer(kind: type[RolloutBuffer], n_steps: int, n_envs: int) -> RolloutBuffer:
    """A buffer that holds a rollout."""
    buffer = kind(n_steps, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), n_envs=n_envs)
    rng = np.random.default_rng(0)
    buffer.rewards[:], buffer.values[:] = rng.normal(size=(2, n_steps, n_envs))
    buffer.episode_starts[:] = rng.random((n_steps, n_envs)) < 0.02
    return buffer


if __name__ == "__main__":
    main()
