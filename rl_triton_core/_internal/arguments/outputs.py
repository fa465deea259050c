"""Checks of preallocated results: their shape and dtype, and that they share memory with nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rl_triton_core._internal.arguments import validation as check


def check_out(
    out: Any, names: Sequence[str], wanted: Sequence[bool], like: torch.Tensor, inputs: Sequence[Any]
) -> None:
    """Check preallocated results: as many as there are, each None or a writable tensor apart from every input."""
    if not isinstance(out, (tuple, list)) or len(out) != len(names):
        raise ValueError(f"out: got {check.describe_type(out)}, expected a tuple ({', '.join(names)})")
    for name, tensor, is_wanted in zip(names, out, wanted, strict=True):
        if tensor is None:
            continue
        if not is_wanted:
            raise ValueError(f"out: got a tensor for {name}, expected None since {name} are not computed")
        check_out_tensor(f"out ({name})", tensor, like)
    given = [(f"out ({name})", tensor) for name, tensor in zip(names, out, strict=True) if tensor is not None]
    if len(given) > 1 and given[0][1] is given[1][1]:
        raise ValueError("out: got the same tensor twice, expected one per result")
    if not check.is_traced():
        check_no_overlap(given, [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)])


def check_out_tensor(name: str, tensor: Any, like: torch.Tensor) -> None:
    """Check a tensor to write to."""
    check.check_tensor(name, tensor, check.REAL_DTYPES if like.is_floating_point() else (torch.int64,))
    check.check_shape(name, tensor, like.shape, "that of the inputs", like.device)
    if not tensor.is_contiguous() and overlaps_itself(tensor):
        raise ValueError(
            f"{name}: got strides {tensor.stride()}, by which elements share memory, expected distinct ones"
        )
    if not check.is_traced() and check.is_transformed():
        raise ValueError(f"{name}: got a tensor inside a torch.func or forward-mode transformation, expected None")
    if tensor.requires_grad:
        raise ValueError(f"{name}: got a tensor that requires grad, expected one that does not")


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may be the same: a dimension's stride is less than what the inner ones span."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span += (size - 1) * stride
    return False


def check_no_overlap(given: Sequence[tuple[str, torch.Tensor]], inputs: Sequence[torch.Tensor]) -> None:
    """Check that results share no element with each other or with an input, all on one device."""
    ranges = [(tensor, *find_memory_range(tensor)) for tensor in inputs]
    for name, tensor in given:
        first, end = find_memory_range(tensor)
        for other, other_first, other_end in ranges:
            may_overlap = first < other_end and other_first < end and tensor.device == other.device
            if may_overlap and np.shares_memory(*map(view_addresses, (tensor, other))):
                raise ValueError(f"{name}: got memory that it shares with another argument, expected memory of its own")
        ranges.append((tensor, first, end))


def view_addresses(tensor: torch.Tensor) -> Any:
    """A tensor as NumPy sees an array, on any device: nothing is read."""
    size = tensor.element_size()
    interface = {
        "data": (tensor.data_ptr(), True),
        "shape": tuple(tensor.shape),
        "strides": tuple(size * stride for stride in tensor.stride()),
        "typestr": f"|V{size}",
        "version": 3,
    }
    return SimpleNamespace(__array_interface__=interface)


def find_memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte."""
    first = tensor.data_ptr()
    return first, first + byte_span(tensor)


def byte_span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.numel() * tensor.element_size()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
