"""What is compiled into a scan kernel, beyond an estimator's equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelConfig:
    """One constant argument of the kernel. Plain values: where Triton asks for a constant, annotate it as one."""

    BACKWARD: bool
    """Whether the scan runs against time."""
    INPUT_MASK: int
    """A bit for each input that is there; the others stand for nothing."""
    OUTPUT_MASK: int
    """A bit for each output that is wanted."""
    NUM_LOOKAHEAD: int
    """How many of the inputs are read at the next step too."""
    SKIP: bool
    """Whether masked steps are passed over; else they end episodes."""
    STARTS_AT: bool
    """Forward: whether flags say that a step starts an episode; else that it ends one."""
    DTYPE: Any
    """The arithmetic's type."""
    WIDE: bool
    """Whether offsets need 64 bits."""
    VECTOR: int
    """Divides all strides between lanes where steps lie side by side in memory; 0 where lanes do."""
    EVEN: bool
    """Whether tiles fill the rollout."""
    ACTIONS: int
    """The number of actions of an expectation, 0 where it is only known at run time."""
    ALIGNED: int
    """Divides all strides between the steps of an expectation."""
    ONE_TILE: bool
    """Whether one tile has all steps."""
    SEGMENTS: int
    """Room for the folds of so many segments; 1 where time is not split."""
    FOLD: bool
    """Whether this launch folds segments, for another one that scans them."""
    EXCLUSIVE: bool
    """Whether one scan finds what is before every chunk, in place of a scan and a shift; where both cross warps."""
    BLOCK_LANES: int
    CHUNKS: int
    LOG_UNROLL: int
    """A tile is [CHUNKS, BLOCK_LANES] chunks of 2^LOG_UNROLL steps."""
