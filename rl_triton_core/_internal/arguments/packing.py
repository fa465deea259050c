"""The arguments of the custom operators that torch.compile takes as they are: a checked call in types that it knows.

Numbers that may change from call to call, such as an annealed γ, are symbols or tensors while it traces. They cross an
operator as a tensor, so that one compilation serves all of their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

SCHEMA = (
    "(Tensor[] inputs, Tensor?[] tensors, float[] numbers, Tensor? symbols, SymInt[] integers, bool[] flags, "
    "str names, bool[] wanted, str backend) -> Tensor[]"
)
"""Of an operator that takes a `Packed`."""


class Packed(NamedTuple):
    """A call as an operator takes it."""

    inputs: Sequence[torch.Tensor]
    """What sets the shapes; through them flow gradients."""
    tensors: Sequence[torch.Tensor | None]
    numbers: Sequence[float]
    symbols: torch.Tensor | None
    """The numbers themselves, float64 on the CPU, where some may change; `numbers` are 0 then."""
    integers: Sequence[int]
    flags: Sequence[bool]
    names: str
    """Of equations, with commas between."""
    wanted: Sequence[bool]
    """Which of the results are."""
    backend: str

    def read_numbers(self) -> list[float]:
        """The numbers, whichever way they came."""
        return list(self.numbers if self.symbols is None else self.symbols.tolist())


def pack(
    inputs: Iterable[torch.Tensor],
    tensors: Iterable[torch.Tensor | None],
    numbers: Sequence[Any],
    integers: Iterable[int],
    flags: Iterable[bool],
    names: Iterable[str],
    wanted: Iterable[bool],
    backend: str | None,
) -> Packed:
    """What an operator takes of a call that torch.compile traces."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    symbolic = any(isinstance(x, torch.Tensor) or not has_static_value(x) for x in numbers)
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return Packed(
        [*inputs],
        [*tensors],
        [0.0 if symbolic else float(x) for x in numbers],
        torch.stack([one * x for x in numbers]) if symbolic else None,  # torch.compile makes products of a symbol
        [*integers],
        [*flags],
        ",".join(names),
        [*wanted],
        backend or "",
    )
