"""Time sequences laid end to end (cu_seqlens) against the same ones padded; write the times to a folder.

    python benchmarks/packed.py FOLDER [--commit HASH]

Runs on a GPU if there is one, else on the CPU. All arms have the same real steps; padded rows have a mask, and where
all sequences are equally long there is an arm without. Before timing, results must agree. Times are of full calls, and
on a GPU of the device too (benchmarks/harness.py says how).
Writes packed_BACKEND.json: minima of medians in microseconds.
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
from benchmarks.harness import Call
from benchmarks.run import list_tensors
from benchmarks.workloads import ESTIMATORS as WORKLOADS
from benchmarks.workloads import Workload, draw_inputs
from rl_triton_core.testing import assert_close

LENGTHS = {
    "1024 of 1-64": (1024, 1, 64),
    "256 of 64-1024": (256, 64, 1024),
    "64 of 1-8192": (64, 1, 8192),
    "32 of 512": (32, 512, 512),
    "8 of 131072": (8, 131072, 131072),
}
"""Number of sequences, and the bounds of their lengths."""


ESTIMATORS = ("gae", "vtrace", "retrace", "lambda_returns", "discounted_returns", "prefix_sum")


def main(arguments: list[str] | None = None) -> None:
    """Measure all sequences with all estimators that take them end to end."""
    options = files.make_parser(__doc__).parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = {"cuda": "triton", "cpu": "cpu"}[device]
    rows = [measure_sequences(*choice, device) for choice in product(LENGTHS, ESTIMATORS)]
    protocol = harness.PLANS[device]._asdict()
    files.save_rows(options, f"packed_{backend}.json", rows, backend=backend, protocol=protocol)


def measure_sequences(name: str, estimator: str, device: str) -> dict[str, Any]:
    """One set of sequences and one estimator, packed and padded."""
    number, least, most = LENGTHS[name]
    lengths = np.random.default_rng(0).integers(least, most + 1, number)
    mask = torch.arange(int(lengths.max()), device=device) < torch.as_tensor(lengths, device=device)[:, None]
    arms = make_calls(estimator, lengths, mask)
    got, *others = (list_tensors(call())[0] for call in arms.values())
    for want in others:
        assert_close(got.cpu(), want[mask].cpu().double())
    times = harness.measure_calls(arms, harness.make_clock(device), harness.PLANS[device])
    full, on_device = ({arm: x.find_smallest(kind) for arm, x in times.items()} for kind in ("full", "device"))
    microseconds = on_device if device == "cuda" else full
    sizes = {"steps": int(lengths.sum()), "padded_steps": mask.numel()}
    return {
        **{"sequences": name, "estimator": estimator, **sizes},
        "microseconds": microseconds,
        "full_microseconds": full,
        "padded_over_packed": round(microseconds["padded"] / microseconds["packed"], 3),
    }


def make_calls(estimator: str, lengths: Any, mask: torch.Tensor) -> dict[str, Call]:
    """The arms: the same sequences end to end, as rows under a mask, and without one where they are equally long."""
    spec = WORKLOADS[estimator]
    flat = {key: x[0] for key, x in draw_inputs(Workload(estimator, 1, int(lengths.sum())), mask.device.type).items()}
    if spec.bootstraps:
        flat["bootstrap_values"] = torch.zeros(len(lengths), device=mask.device)
    rows = {key: x if key == "bootstrap_values" else pad_rows(x, mask) for key, x in flat.items()}
    function = getattr(ours, spec.function)
    offsets = torch.tensor([0, *np.cumsum(lengths)], device=mask.device)
    arms = {"packed": partial(function, **flat, cu_seqlens=offsets), "padded": partial(function, **rows, mask=mask)}
    return arms | ({"unmasked": partial(function, **rows)} if mask.all() else {})


def pad_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Steps end to end as rows."""
    rows = x.new_zeros((*mask.shape, *x.shape[1:]))
    rows[mask] = x
    return rows


if __name__ == "__main__":
    main()
