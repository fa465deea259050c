"""Schemas of the custom operators that torch.compile takes as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

import torch

SCHEMA_TYPES: dict[Any, str] = {
    str: "str",
    int: "int",
    bool: "bool",
    float | None: "float?",
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    Sequence[torch.Tensor]: "Tensor[]",
    Sequence[torch.Tensor | None]: "Tensor?[]",
    Sequence[float]: "float[]",
    Sequence[float] | None: "float[]?",
    Sequence[int]: "int[]",
    Sequence[bool]: "bool[]",
}


def describe_schema(packed: type) -> str:
    """The schema of an operator that takes the fields of a named tuple, and returns tensors."""
    fields = ", ".join(f"{SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(packed).items())
    return f"({fields}) -> Tensor[]"
