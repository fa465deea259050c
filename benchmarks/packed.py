"""Time sequences laid end to end (cu_seqlens) against the same ones padded and masked; write the times to a folder.

    python benchmarks/packed.py FOLDER [--commit HASH]

Runs on a GPU if there is one, else on the CPU. Both arms have the same real steps; before timing, their results must
agree. On the CPU the times are of full calls; on a GPU they are of the device, replaying a captured burst of calls.
Writes packed_BACKEND.json: medians in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rl_triton_core as ours
from rl_triton_core.system_info import system_info
from rl_triton_core.testing import assert_close

LENGTHS = {
    "1024 of 1-64": (1024, 1, 64),
    "256 of 64-1024": (256, 64, 1024),
    "64 of 1-8192": (64, 1, 8192),
    "32 of 512": (32, 512, 512),
    "8 of 131072": (8, 131072, 131072),
}
"""Number of sequences, and the bounds of their lengths."""

TURNS, BURST = 15, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", help="what to record where there is no git checkout")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = {"cuda": "triton", "cpu": "cpu"}[device]
    info = system_info()
    info["commit"] = options.commit or info["commit"]
    rows = [measure(name, estimator, device) for name in LENGTHS for estimator in ("gae", "vtrace", "lambda_returns")]
    result = {"system": info, "backend": backend, "turns": TURNS, "burst": BURST, "rows": rows}
    (options.folder / f"packed_{backend}.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(row)


def measure(name: str, estimator: str, device: str) -> dict[str, Any]:
    """One set of sequences and one estimator, packed and padded."""
    number, least, most = LENGTHS[name]
    lengths = np.random.default_rng(0).integers(least, most + 1, number)
    offsets = torch.tensor([0, *np.cumsum(lengths)], device=device)
    mask = torch.arange(int(lengths.max()), device=device) < torch.as_tensor(lengths, device=device)[:, None]
    rewards, values, log_ratios = torch.randn(3, int(lengths.sum()), device=device)
    ends = torch.rand(len(rewards), device=device) < 1e-3
    extra = {"log_ratios": 0.1 * log_ratios} if estimator == "vtrace" else {}
    function = getattr(ours, f"compute_{estimator}")
    flat = {"rewards": rewards, "values": values, "terminated": ends, **extra}
    padded = {key: torch.zeros(mask.shape, dtype=x.dtype, device=device) for key, x in flat.items()}
    for key, x in flat.items():
        padded[key][mask] = x
    arms: dict[str, Callable[[], Any]] = {
        "packed": lambda: function(**flat, cu_seqlens=offsets, bootstrap_values=0.0),
        "padded": lambda: function(**padded, mask=mask, bootstrap_values=0.0),
    }
    got, want = arms["packed"](), arms["padded"]()
    got, want = (x if isinstance(x, torch.Tensor) else x[0] for x in (got, want))
    assert_close(got.cpu(), want[mask].cpu().double())
    times = take_turns(arms, device)
    return {
        "sequences": name,
        "estimator": estimator,
        "steps": len(rewards),
        "padded_steps": mask.numel(),
        "microseconds": times,
        "padded_over_packed": round(times["padded"] / times["packed"], 3),
    }


def take_turns(arms: dict[str, Callable[[], Any]], device: str) -> dict[str, float]:
    """Microseconds per call, the median of bursts."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    clock = on_gpu if device == "cuda" else on_cpu
    for _ in range(TURNS):
        for name, arm in arms.items():
            times[name].append(clock(arm))
    return {name: round(statistics.median(x), 2) for name, x in times.items()}


def on_cpu(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(BURST):
        call()
    return (time.perf_counter() - start) / BURST * 1e6


def on_gpu(call: Callable[[], Any]) -> float:
    """From a graph of the burst, so that the host's time does not count."""
    if call not in GRAPHS:
        GRAPHS[call] = captured(call)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    GRAPHS[call].replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / BURST * 1e3


GRAPHS: dict[Callable[[], Any], torch.cuda.CUDAGraph] = {}


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(BURST):
            call()
    return graph


if __name__ == "__main__":
    main()
