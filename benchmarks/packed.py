"""Time sequences laid end to end (cu_seqlens) against the same ones padded and masked; write the times to a folder.

    python benchmarks/packed.py FOLDER [--commit HASH]

Runs on a GPU if there is one, else on the CPU. Both arms have the same real steps; before timing, their results must
agree. On the CPU the times are of full calls; on a GPU they are of the device (benchmarks/harness.py says how).
Writes packed_BACKEND.json: the minimum of medians in microseconds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rl_triton_core as ours
from benchmarks import files, harness
from benchmarks.harness import Call
from rl_triton_core.testing import assert_close

LENGTHS = {
    "1024 of 1-64": (1024, 1, 64),
    "256 of 64-1024": (256, 64, 1024),
    "64 of 1-8192": (64, 1, 8192),
    "32 of 512": (32, 512, 512),
    "8 of 131072": (8, 131072, 131072),
}
"""Number of sequences, and the bounds of their lengths."""


def main() -> None:
    options = files.parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = {"cuda": "triton", "cpu": "cpu"}[device]
    rows = [measure(name, estimator, device) for name in LENGTHS for estimator in ("gae", "vtrace", "lambda_returns")]
    head = {"system": files.system(options.commit), "backend": backend, "protocol": harness.PLANS[device]._asdict()}
    files.write(options.folder / f"packed_{backend}.json", head, rows=rows)
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
    arms: dict[str, Call] = {
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


def take_turns(arms: dict[str, Call], device: str) -> dict[str, float]:
    """Microseconds per call: of the device on a GPU, in full on a CPU."""
    times = harness.measure(arms, harness.clock_for(device), harness.PLANS[device])
    return {name: round(min(found.device or found.full), 2) for name, found in times.items()}


if __name__ == "__main__":
    main()
