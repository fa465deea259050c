"""Time the advantage step of verl against ours, on CPU tensors as in verl's driver, and write the times to a folder.

    .venv-frameworks/bin/python -m benchmarks.verl_advantages FOLDER [--commit HASH] [--quick]

Writes verl_advantages.json: quartiles in milliseconds, and ratios. Results must agree before. The floor is what
GRPO cannot do without: each response's rewards are summed, and the sum times the mask is written to its tokens.
"""

import logging
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from advantages_verl import check_difference, make_batch, make_calls

from benchmarks import files, harness
from rl_triton_adapters.verl import install, uninstall
from rl_triton_core import set_num_threads

SHAPES = ((512, 1024), (512, 8192), (1024, 512))  # responses, tokens
TURNS, CALLS = 5, 4


def main() -> None:
    parser = files.make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one small shape, to see that it runs")
    options = parser.parse_args()
    logging.getLogger("rl_triton_adapters.verl").setLevel(logging.WARNING)
    settings = product(sorted({1, torch.get_num_threads()}), [(8, 32)] if options.quick else SHAPES)
    rows = [row for threads, shape in settings for row in measure_shape(*shape, threads)]
    files.save_rows(options, "verl_advantages.json", rows, turns=TURNS, calls=CALLS)


def measure_shape(batch_size: int, response_length: int, threads: int) -> list[files.Row]:
    """Every estimator, verl's function and ours in turn."""
    torch.set_num_threads(threads)
    set_num_threads(threads)
    batch, rows = make_batch(batch_size, response_length), []
    rewards, mask = batch["token_level_rewards"], batch["response_mask"]
    setting = {"batch_size": batch_size, "response_length": response_length, "threads": threads}
    for estimator, call in make_calls(batch).items():
        expected = call()
        install()
        check_difference(estimator, [call(), call()][1], expected, mask)
        arms = {"stock": call, "adapter": call, "floor": lambda: rewards.sum(-1, keepdim=True) * mask}
        times = harness.time_in_turns(arms, harness.Clock(), TURNS, CALLS, prepare=choose_arm)
        uninstall()
        speedup = harness.compare_with_stock(times)
        milliseconds = harness.summarize_calls(times, unit=1e3)
        rows.append({"estimator": estimator, **setting, "milliseconds": milliseconds, "speedup": speedup})
    return rows


def choose_arm(name: str) -> None:
    """Let verl call its own functions, or ours."""
    (uninstall if name == "stock" else install)()


if __name__ == "__main__":
    main()
