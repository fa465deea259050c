"""Time the advantage step of verl against ours, on CPU tensors as in verl's driver, and write the times to a folder.

    .venv-frameworks/bin/python -m benchmarks.verl_advantages FOLDER [--commit HASH]

Writes verl_advantages.json: medians in milliseconds, and their ratios. Results must agree before. The floor is what
GRPO cannot do without: each response's rewards are summed, and the sum times the mask is written to its tokens.
"""

import logging
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from advantages_verl import check_difference, make_batch, make_calls

from benchmarks import files
from benchmarks.harness import CpuClock
from rl_triton_adapters.verl import install, uninstall
from rl_triton_core import set_num_threads

SHAPES = ((512, 1024), (512, 8192), (1024, 512))  # responses, tokens
TURNS, CALLS = 5, 4


def main() -> None:
    options = files.make_parser(__doc__).parse_args()
    logging.getLogger("rl_triton_adapters.verl").setLevel(logging.WARNING)
    settings = product(sorted({1, torch.get_num_threads()}), SHAPES)
    rows = [row for threads, shape in settings for row in measure_shape(*shape, threads)]
    files.save_rows(options, "verl_advantages.json", rows, turns=TURNS, calls=CALLS)


def measure_shape(batch_size: int, response_length: int, threads: int) -> list[files.Row]:
    """Every estimator, verl's function and ours in turn."""
    torch.set_num_threads(threads)
    set_num_threads(threads)
    batch, clock, rows = make_batch(batch_size, response_length), CpuClock(), []
    for estimator, call in make_calls(batch).items():
        expected = call()
        install()
        check_difference(estimator, [call(), call()][1], expected, batch["response_mask"])
        times: dict[str, list[float]] = {"stock": [], "adapter": [], "floor": []}
        for _ in range(TURNS):
            uninstall()
            times["stock"].append(clock.time(call))
            install()
            times["adapter"] += [clock.time(call) for _ in range(CALLS)]
            times["floor"] += [clock.time(lambda: write_sums(batch)) for _ in range(CALLS)]
        uninstall()
        ms = {name: round(statistics.median(values) / 1e3, 3) for name, values in times.items()}
        setting = {"batch_size": batch_size, "response_length": response_length, "threads": threads}
        speedup = round(ms["stock"] / ms["adapter"], 1)
        rows.append({"estimator": estimator, **setting, "milliseconds": ms, "speedup": speedup})
    return rows


def write_sums(batch: dict[str, Any]) -> torch.Tensor:
    """The floor of GRPO."""
    sums: torch.Tensor = batch["token_level_rewards"].sum(-1, keepdim=True)
    return sums * batch["response_mask"]


if __name__ == "__main__":
    main()
