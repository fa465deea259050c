"""Time sequences laid end to end (cu_seqlens) against the same ones padded; write the times to a folder.

    python benchmarks/packed.py FOLDER [--commit HASH] [--quick]

Runs on a GPU if there is one, else on the CPU. All arms have the same real steps; padded rows have a mask, and where
all sequences are equally long there is an arm without. Before timing, results must agree. Times are of full calls, and
on a GPU of the device too (benchmarks/harness.py says how).
Writes packed_BACKEND.json: quartiles in microseconds.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rl_triton_core as ours
from benchmarks import files, harness
from benchmarks.harness import Call, Plan
from benchmarks.quartiles import compare_turns, find_quartiles
from benchmarks.run import list_tensors
from benchmarks.workloads import ESTIMATORS, draw_sequences
from rl_triton_core.testing import assert_close

LENGTHS = {
    "1024 of 1-64": (1024, 1, 64),
    "256 of 64-1024": (256, 64, 1024),
    "64 of 1-8192": (64, 1, 8192),
    "32 of 512": (32, 512, 512),
    "8 of 131072": (8, 131072, 131072),
}
"""Number of sequences, and the bounds of their lengths."""
PACKABLE = ("gae", "vtrace", "retrace", "lambda_returns", "discounted_returns", "prefix_sum")


def main(arguments: list[str] | None = None) -> None:
    """Measure all sequences with all estimators that take them end to end."""
    parser = files.make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, to see that everything runs")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = {"cuda": "triton", "cpu": "cpu"}[device]
    plan = harness.QUICK if options.quick else harness.PLANS[device]
    rows = [measure_sequences(*choice, device, plan) for choice in product(LENGTHS, PACKABLE)]
    files.save_rows(options, f"packed_{backend}.json", rows, backend=backend, protocol=plan._asdict())


def measure_sequences(name: str, estimator: str, device: str, plan: Plan) -> files.Row:
    """One set of sequences and one estimator, packed and padded."""
    number, least, most = LENGTHS[name]
    lengths = np.random.default_rng(0).integers(least, most + 1, number)
    mask = torch.arange(int(lengths.max()), device=device) < torch.as_tensor(lengths, device=device)[:, None]
    arms = make_calls(estimator, lengths, mask)
    got, *others = (list_tensors(call())[0] for call in arms.values())
    for want in others:
        assert_close(got.cpu(), want[mask].cpu().double())
    times = harness.measure_calls(arms, harness.make_clock(device), plan)
    full, on_device = ({arm: getattr(x, kind) for arm, x in times.items()} for kind in ("full", "device"))
    turns = on_device if device == "cuda" else full
    return {
        **{"sequences": name, "estimator": estimator, "steps": int(lengths.sum()), "padded_steps": mask.numel()},
        "microseconds": {arm: find_quartiles(x) for arm, x in turns.items()},
        "full_microseconds": {arm: find_quartiles(x) for arm, x in full.items()},
        "padded_over_packed": compare_turns(turns["padded"], turns["packed"]),
    }


def make_calls(estimator: str, lengths: Any, mask: torch.Tensor) -> dict[str, Call]:
    """The arms: the same sequences end to end, as rows under a mask, and without one where they are equally long."""
    packed = draw_sequences(estimator, lengths, mask.device.type)
    per_step = {name: x for name, x in packed.items() if name not in ("bootstrap_values", "cu_seqlens")}
    rows = {name: x for name, x in packed.items() if name == "bootstrap_values"}
    for name, x in per_step.items():
        rows[name] = x.new_zeros((*mask.shape, *x.shape[1:]))
        rows[name][mask] = x
    function = getattr(ours, ESTIMATORS[estimator].function)
    arms = {"packed": partial(function, **packed), "padded": partial(function, **rows, mask=mask)}
    return arms | ({"unmasked": partial(function, **rows)} if mask.all() else {})


if __name__ == "__main__":
    main()
