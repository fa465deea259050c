"""The operations that equations may use beyond ``+ - *`` and comparisons, as PyTorch has them.

Compiled backends bind these names to their own; a backend that lacks one cannot run the equations that use it.
"""

from __future__ import annotations

from typing import Any

import torch

PRIMITIVES = ("select", "minimum", "exp")
"""Their names."""


def select(condition: Any, chosen: Any, otherwise: Any) -> Any:
    """`chosen` where the condition holds, else `otherwise`. What is not selected leaves no trace, NaN included."""
    return torch.where(condition, chosen, otherwise)


def minimum(x: Any, bound: Any) -> Any:
    """The smaller of a stream and a number; NaN where the stream is."""
    return torch.clamp(x, max=bound)


def exp(x: Any) -> Any:
    """The exponential function. Where it overflows its gradient is 0, not infinite: a clip hides the value, not 0·∞."""
    if not x.requires_grad:
        return torch.exp(x)
    over = torch.exp(x.detach()).isinf()
    return torch.where(over, torch.inf, torch.exp(torch.where(over, 0, x)))


def gated_product(factor: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The product, 0 where the factor is 0. Its derivative by the factor is the state, there too if that is finite."""
    return factor * torch.where((factor == 0) & ~state.isfinite(), 0, state)
