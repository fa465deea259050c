"""Normalisation on the CPU: two compiled passes without temporaries, in spans that threads share.

Spans are those of the shape, and are merged in their order: results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rl_triton_core._internal.arguments.validation import narrow_flags
from rl_triton_core._internal.equations.compile import PYTHON, compile_equation
from rl_triton_core._internal.launch.threads import run_chunks
from rl_triton_core._internal.moments.rule import Exchange, Task, compute_standardizer
from rl_triton_core._internal.moments.serial import compute_moments, standardize

SPAN = 1 << 18
"""Elements of a span: enough to pay for handing it to a thread."""
NATIVE = (torch.float32, torch.float64)
NO_MASK = np.zeros((1, 1), np.uint8)

scalar_standardizer = compile_equation(compute_standardizer, PYTHON)


def run(task: Task, exchange: Exchange | None) -> None:
    """Fill the output."""
    out = task.out if task.out.dtype in NATIVE else torch.empty_like(task.out, dtype=torch.float32)
    values: Any = (task.values if task.values.dtype in NATIVE else task.values.float()).numpy()
    masked = task.mask is not None
    mask: Any = NO_MASK if task.mask is None else narrow_flags(task.mask).numpy().view(np.uint8)
    size = task.values.numel()
    spans = [(first, min(first + SPAN, size)) for first in range(0, size, SPAN)]
    parts = np.empty((len(spans), 3))
    run_chunks(lambda span: compute_moments(values, masked, False, mask, *span, parts[span[0] // SPAN]), spans)
    shift_and_factor = find_standardizer(merge_moments(parts.tolist()), task.rule, exchange)
    run_chunks(lambda span: standardize(values, masked, mask, *span, out.numpy(), *shift_and_factor), spans)
    if out is not task.out:
        task.out.copy_(out)


def find_standardizer(moments: Sequence[float], rule: Sequence[float], exchange: Exchange | None) -> Any:
    """What to subtract and to multiply with, by the moments of this rank, or of all."""
    if exchange is not None:
        moments = merge_moments(exchange(torch.tensor([moments], dtype=torch.float64, device="cpu")).tolist())
    return scalar_standardizer(*moments, *rule)


def merge_moments(parts: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Count, mean and M2 of parts taken together, one after the other (Chan, Golub and LeVeque 1979)."""
    count, mean, m2 = 0.0, 0.0, 0.0
    for n, part_mean, part_m2 in parts:
        if n > 0:
            share = n / (count + n)
            deviation = part_mean - mean
            m2 += part_m2 + deviation * deviation * count * share
            mean += deviation * share
            count += n
    return count, mean, m2
