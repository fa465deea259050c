"""Time the advantage step of verl against ours, on CPU tensors as in verl's driver, and write the times to a folder.

    .venv-frameworks/bin/python benchmarks/verl_advantages.py FOLDER [--commit HASH]

Both compute the same responses, in turn: verl's functions as they are, and those that the adapter puts in their place.
Before timing, their results must agree at valid tokens. Writes verl_advantages.json: medians in milliseconds, and their
ratios.
"""

from __future__ import annotations

import logging
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "adapters"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from advantages_verl import TOLERANCE, compare, make_batch, make_calls

from benchmarks import files
from benchmarks.harness import CpuClock
from rl_triton_adapters.verl import install, uninstall
from rl_triton_core import set_num_threads

SHAPES = {(512, 1024): 20.0, (512, 8192): 20.0, (1024, 512): 20.0}
"""(batch_size, response_length), and how many times faster GAE should be."""

TURNS, CALLS = 5, 4


def main() -> None:
    options = files.parser(__doc__).parse_args()
    logging.getLogger("rl_triton_adapters.verl").setLevel(logging.WARNING)  # a line for each turn otherwise
    threads = sorted({1, torch.get_num_threads()})
    rows = [row for n in threads for shape, target in SHAPES.items() for row in measure(*shape, target, n)]
    head = {"system": files.system(options.commit), "turns": TURNS, "calls": CALLS}
    files.write(options.folder / "verl_advantages.json", head, rows=rows)
    for row in rows:
        print(row)


def measure(batch_size: int, response_length: int, target: float, threads: int) -> list[dict[str, Any]]:
    """One shape, all estimators."""
    torch.set_num_threads(threads)
    set_num_threads(threads)
    batch = make_batch(batch_size, response_length)
    rows = []
    for estimator, call in make_calls(batch).items():
        stock = call()
        install()
        if not compare(call(), stock, batch["response_mask"]) < TOLERANCE:
            raise SystemExit(f"{estimator} differs at ({batch_size}, {response_length})")
        call()  # a second call of a kind prepares its fast path
        uninstall()
        times = take_turns(call)
        medians = {name: statistics.median(values) / 1e3 for name, values in times.items()}
        rows.append(
            {
                "estimator": estimator,
                "batch_size": batch_size,
                "response_length": response_length,
                "threads": threads,
                "milliseconds": {name: round(value, 3) for name, value in medians.items()},
                "speedup": round(medians["stock"] / medians["adapter"], 1),
                "target": target if estimator == "gae" else None,
            }
        )
    return rows


def take_turns(call: Any) -> dict[str, list[float]]:
    """Microseconds of every call: of verl's function, once a turn, and of ours."""
    clock = CpuClock()
    times: dict[str, list[float]] = {"stock": [], "adapter": []}
    for _ in range(TURNS):
        times["stock"].append(clock.time(call))
        install()
        times["adapter"] += [clock.time(call) for _ in range(CALLS)]
        uninstall()
    return times


if __name__ == "__main__":
    main()
