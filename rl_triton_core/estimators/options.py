"""What type checkers are told of functions whose results depend on a flag: their other options, and the fewer results.

Where the flag is not written out, a result is one of two kinds: of `GAEOutput | AdvantagesOnly`, `returns` may be None.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch

from rl_triton_core.boundaries import FinalValues


class AdvantagesOnly(NamedTuple):
    """A `GAEOutput` with ``compute_returns=False``."""

    advantages: torch.Tensor
    returns: None


class TargetsOnly(NamedTuple):
    """A `VTraceOutput` or `RetraceOutput` with ``compute_advantages=False``."""

    targets: torch.Tensor
    advantages: None


class ScanOptions(TypedDict, total=False):
    """Options that all have."""

    mask: torch.Tensor | None
    mask_mode: str
    time_dim: int
    backend: str | None


class BackwardOptions(ScanOptions, total=False):
    """Of advantages and targets."""

    gamma: float | torch.Tensor
    lambda_: float
    cu_seqlens: torch.Tensor | None
    out: tuple[torch.Tensor | None, torch.Tensor | None] | None


class GAEOptions(BackwardOptions, total=False):
    """Of what starts from values."""

    bootstrap_values: float | torch.Tensor | FinalValues | None
    next_values: torch.Tensor | None


class RatioOptions(BackwardOptions, total=False):
    """Of what weighs by the ratio of two policies."""

    log_ratios: torch.Tensor | None
    target_log_probs: torch.Tensor | None
    behaviour_log_probs: torch.Tensor | None
    rho_bar: float
    c_bar: float


class VTraceOptions(GAEOptions, RatioOptions, total=False):
    """Of V-Trace."""

    rho_bar_pg: float | None


class RetraceOptions(RatioOptions, total=False):
    """Of Retrace(λ)."""

    expected_next_q: torch.Tensor | None
    next_action_probs: torch.Tensor | None
    next_q_values: torch.Tensor | None
