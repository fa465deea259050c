"""The one check of arguments. Every message names the argument, what came and what is expected.

Looks at types, shapes, dtypes and devices only: nothing here waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_triton_core._internal.recurrence import Expectation
from rl_triton_core.boundaries import FinalValues

REAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLAG_DTYPES = (torch.bool, torch.uint8, *REAL_DTYPES)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
EXACT_DTYPES = (torch.float32, torch.float64, torch.int64)
MASK_MODES = ("skip", "reset")


class RolloutLayout(NamedTuple):
    """The frame all per-step tensors of a call share."""

    name: str
    """The argument that set it."""
    shape: torch.Size
    device: torch.device
    time_dim: int
    cu_seqlens: torch.Tensor | None = None
    """Where the sequences of a flat row start, and the row's end; None where there is a dimension of environments."""

    @property
    def num_envs(self) -> int:
        """Number of environments, or of sequences."""
        return self.shape[1 - self.time_dim] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def num_steps(self) -> int:
        """Number of steps T, or of all sequences together."""
        return self.shape[self.time_dim if self.cu_seqlens is None else 0]

    @property
    def per_env(self) -> str:
        """How the shape of one element per environment or sequence is called."""
        return "[num_envs]" if self.cu_seqlens is None else "[num_sequences]"

    def expand_over_time(self, edge: torch.Tensor) -> torch.Tensor:
        """What is given per environment or sequence, [num_envs, *features], repeated for all steps."""
        size = [*edge.shape]
        size.insert(self.time_dim, self.num_steps)
        return edge.unsqueeze(self.time_dim).expand(size)


def check_layout(
    name: str, tensor: Any, time_dim: int, features: bool = False, integers: bool = False, cu_seqlens: Any = None
) -> RolloutLayout:
    """The frame set by a call's first per-step tensor, which may have trailing dimensions of features."""
    if not isinstance(time_dim, int) or isinstance(time_dim, bool):
        raise TypeError(f"time_dim: got {time_dim!r}, expected an int")
    if time_dim not in (-2, -1, 0, 1):
        raise ValueError(f"time_dim: got {time_dim!r}, expected -1 or 1 ([num_envs, T]), 0 or -2 ([T, num_envs])")
    check_tensor(name, tensor, (*REAL_DTYPES, *INTEGER_DTYPES) if integers else REAL_DTYPES)
    if cu_seqlens is not None:
        return check_sequences(name, tensor, time_dim, cu_seqlens)
    if tensor.ndim < 2 or (tensor.ndim > 2 and not features):
        expected = "environments and steps" + (", then features" if features else " only")
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected the dimensions {expected}")
    return RolloutLayout(name, tensor.shape[:2], tensor.device, time_dim % 2)


def check_sequences(name: str, tensor: torch.Tensor, time_dim: int, cu_seqlens: Any) -> RolloutLayout:
    """The frame of sequences that lie end to end in a flat tensor. Backends check offsets that are on a GPU."""
    if time_dim != -1:
        raise ValueError(f"time_dim: got {time_dim} together with cu_seqlens, expected it left out")
    if tensor.ndim != 1:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)} together with cu_seqlens, expected [num_steps]")
    check_tensor("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < (2 if tensor.numel() else 1):
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}, expected [num_sequences + 1]")
    check_device("cu_seqlens", cu_seqlens, tensor.device)
    if torch.compiler.is_compiling():
        assert_offsets(cu_seqlens, tensor.shape[0])
    elif cu_seqlens.device.type == "cpu":
        check_offsets(cu_seqlens.numpy(), tensor.shape[0])
    return RolloutLayout(name, tensor.shape, tensor.device, 1, cu_seqlens.contiguous())


def check_offsets(offsets: Any, num_steps: int) -> None:
    """Offsets in host memory that rise from 0 to the number of steps."""
    (falls,) = (offsets[1:] < offsets[:-1]).nonzero()
    if offsets[0] == 0 and offsets[-1] == num_steps and not falls.size:
        return
    got = f"{offsets[falls[0]]} before {offsets[falls[0] + 1]}" if falls.size else f"{offsets[0]} to {offsets[-1]}"
    raise ValueError(f"cu_seqlens: got {got}, expected offsets from 0 to {num_steps}, the number of steps, rising")


def assert_offsets(offsets: torch.Tensor, num_steps: int) -> None:
    """The same without waiting for a device."""
    rises = (offsets[0] == 0) & (offsets[-1] == num_steps) & (offsets.diff() >= 0).all()
    torch._assert_async(rises, f"cu_seqlens: expected offsets from 0 to {num_steps}, the number of steps, rising")


def check_tensor(name: str, tensor: Any, dtypes: Sequence[torch.dtype]) -> None:
    """A tensor of one of these dtypes."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, expected one of {', '.join(map(str, dtypes))}")


def check_per_step(name: str, tensor: Any, layout: RolloutLayout, dtypes: Sequence[torch.dtype] = REAL_DTYPES) -> None:
    """A tensor with one element per step of the window."""
    check_tensor(name, tensor, dtypes)
    check_shape(name, tensor, layout.shape, f"that of {layout.name}", layout)


def check_shape(
    name: str, tensor: torch.Tensor, shape: Sequence[int], why: str, layout: RolloutLayout | torch.Tensor
) -> None:
    """A tensor of this shape on the window's device."""
    if tensor.shape != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {tuple(shape)}, {why}")
    check_device(name, tensor, layout.device)


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """A tensor on the window's device."""
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, expected {device}, that of the first input")


def check_flags(name: str, flags: Any, layout: RolloutLayout) -> None:
    """Flags, or None."""
    if flags is not None:
        check_per_step(name, flags, layout, FLAG_DTYPES)


def check_number(name: str, number: Any, low: float, high: float) -> float:
    """A finite number within [low, high]."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{name}: got {type(number).__name__}, expected a float")
    value = float(number)
    if not (low <= value <= high and math.isfinite(value)):
        bounds = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f"finite and >= {low:g}"
        raise ValueError(f"{name}: got {number!r}, expected a number {bounds}")
    return value


def check_gamma(gamma: Any, layout: RolloutLayout) -> float | torch.Tensor:
    """One discount, or one per step."""
    if not isinstance(gamma, torch.Tensor):
        return check_number("gamma", gamma, 0.0, math.inf)
    check_per_step("gamma", gamma, layout)
    return gamma


def check_clip(name: str, bar: Any) -> float:
    """A clip of importance weights, >= 0; infinity for none."""
    return math.inf if bar == math.inf else check_number(name, bar, 0.0, math.inf)


def check_log_ratios(log_ratios: Any, target: Any, behaviour: Any, layout: RolloutLayout) -> dict[str, Any]:
    """Log importance ratios in one of two forms, as target and perhaps behaviour log-probabilities."""
    if log_ratios is not None and target is None and behaviour is None:
        check_per_step("log_ratios", log_ratios, layout)
        return {"target_log_probs": log_ratios}
    if log_ratios is None and target is not None and behaviour is not None:
        return {"target_log_probs": target, "behaviour_log_probs": behaviour}
    given = {"log_ratios": log_ratios, "target_log_probs": target, "behaviour_log_probs": behaviour}
    names = ", ".join(name for name, tensor in given.items() if tensor is not None) or "none of the three"
    raise ValueError(f"log_ratios: got {names}, expected log_ratios, or both target_log_probs and behaviour_log_probs")


def check_same_shape(name: str, tensor: torch.Tensor, like: torch.Tensor, like_name: str = "rewards") -> None:
    """A tensor of the shape and on the device of another."""
    check_shape(name, tensor, like.shape, f"that of {like_name}", like)


def check_decay(decay: Any, x: torch.Tensor, layout: RolloutLayout) -> float | torch.Tensor:
    """A decay: a number, or a tensor per feature, per step, or like `x`, as one that broadcasts over features."""
    if not isinstance(decay, torch.Tensor):
        return check_number("decay", decay, -math.inf, math.inf)
    check_tensor("decay", decay, REAL_DTYPES)
    check_device("decay", decay, x.device)
    if x.ndim > 2 and decay.shape == x.shape[2:]:
        return decay.expand(x.shape)
    if decay.shape not in (x.shape, layout.shape):
        raise ValueError(
            f"decay: got shape {tuple(decay.shape)}, expected that of x, {tuple(x.shape)}, of its steps, "
            f"{tuple(layout.shape)}, or of its features, {tuple(x.shape[2:])}"
        )
    return decay


def check_state(state: Any, x: torch.Tensor, layout: RolloutLayout) -> tuple[Any, Any]:
    """The parts of a `ScanState`, or two times None."""
    if state is None:
        return None, None
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"state: got {describe(state)}, expected a ScanState(value, done)")
    value, done = state
    check_tensor("state.value", value, REAL_DTYPES if x.is_floating_point() else INTEGER_DTYPES)
    features = x.shape[len(layout.shape) :]
    check_shape("state.value", value, (layout.num_envs, *features), f"{layout.per_env} and features", layout)
    check_tensor("state.done", done, FLAG_DTYPES)
    check_shape("state.done", done, (layout.num_envs,), layout.per_env, layout)
    return value, done


def flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor with its features as one dimension over the same memory, if its strides allow that."""
    if tensor.ndim <= 3:
        return tensor
    if torch.compiler.is_compiling():
        return None
    flat = tensor.flatten(2)
    return flat if flat.data_ptr() == tensor.data_ptr() else None


def check_mask_mode(mask_mode: Any) -> bool:
    """Whether masked steps are skipped."""
    if mask_mode not in MASK_MODES:
        raise ValueError(f"mask_mode: got {mask_mode!r}, expected one of {', '.join(MASK_MODES)}")
    return bool(mask_mode == "skip")


def check_continuation(
    bootstrap: Any, next_values: Any, truncated: Any, mask: torch.Tensor | None, layout: RolloutLayout
) -> float | torch.Tensor:
    """The bootstrap values as a float, [num_envs] or per step. They or `next_values` have to be there.

    `mask` is that of the steps to skip, if any.
    """
    if next_values is not None:
        if bootstrap is not None:
            raise ValueError("bootstrap_values: got both it and next_values, expected one of the two")
        if not isinstance(next_values, Expectation):
            check_per_step("next_values", next_values, layout)
        return 0.0
    if bootstrap is None:
        raise ValueError(
            "bootstrap_values: got None, expected the values V(s_{t+1}) at truncations and at the window's end, "
            "or 0.0 if every row ends in a terminal state or a finite horizon is meant"
        )
    if isinstance(bootstrap, FinalValues):
        if layout.cu_seqlens is not None:
            raise ValueError("bootstrap_values: got FinalValues together with cu_seqlens, expected a float or a tensor")
        return scatter_final_values(bootstrap, mask, layout)
    if isinstance(bootstrap, torch.Tensor):
        return check_bootstrap_tensor(bootstrap, truncated, layout)
    if isinstance(bootstrap, bool) or not isinstance(bootstrap, Real):
        raise TypeError(
            f"bootstrap_values: got {type(bootstrap).__name__}, expected a float, a torch.Tensor or FinalValues"
        )
    return float(bootstrap)


def check_bootstrap_tensor(bootstrap: torch.Tensor, truncated: Any, layout: RolloutLayout) -> torch.Tensor:
    """Bootstrap values: one number, one per environment or sequence, or one per step."""
    check_tensor("bootstrap_values", bootstrap, REAL_DTYPES)
    if bootstrap.ndim == 0:
        return bootstrap.expand(layout.shape)
    per_step = bootstrap.shape == layout.shape if layout.cu_seqlens is not None else bootstrap.ndim == 2
    if not per_step and bootstrap.ndim == 1 and truncated is not None:
        raise ValueError(
            f"bootstrap_values: got shape {tuple(bootstrap.shape)} together with truncated, expected a value for every "
            f"truncated step: shape {tuple(layout.shape)}, FinalValues, or a float"
        )
    shape = layout.shape if per_step else (layout.num_envs,)
    check_shape("bootstrap_values", bootstrap, shape, f"{layout.per_env}, or that of {layout.name}", layout)
    return bootstrap if per_step else layout.expand_over_time(bootstrap)


def scatter_final_values(final: FinalValues, mask: torch.Tensor | None, layout: RolloutLayout) -> torch.Tensor:
    """Sparse bootstrap values as per-step ones; NaN where there are none. The edge is at the last step not skipped."""
    value = as_tensor("bootstrap_values.value", final.value, layout.device)
    if value.numel() == 0 and not isinstance(final.value, torch.Tensor):
        value = value.to(torch.float32)
    check_tensor("bootstrap_values.value", value, REAL_DTYPES)
    env = check_index("bootstrap_values.env", final.env, layout.num_envs, value, layout)
    time = check_index("bootstrap_values.time", final.time, layout.num_steps, value, layout)
    dense = torch.full(layout.shape, math.nan, dtype=value.dtype, device=layout.device)
    if final.edge is not None and dense.numel():
        edge = check_edge(final.edge, value, layout).unsqueeze(layout.time_dim)
        dense = dense.scatter(layout.time_dim, last_step(mask, layout), edge)
    return dense.index_put((env, time) if layout.time_dim == 1 else (time, env), value)


def last_step(mask: torch.Tensor | None, layout: RolloutLayout) -> torch.Tensor:
    """Index of each environment's last step that is not skipped, with the time dimension kept at size 1."""
    if mask is None:
        size = (layout.num_envs, 1) if layout.time_dim == 1 else (1, layout.num_envs)
        return torch.full(size, layout.num_steps - 1, device=layout.device)
    return layout.num_steps - 1 - (mask != 0).flip(layout.time_dim).byte().argmax(layout.time_dim, keepdim=True)


def check_edge(edge: Any, value: torch.Tensor, layout: RolloutLayout) -> torch.Tensor:
    """Values at the window's end as [num_envs]."""
    if not isinstance(edge, torch.Tensor):
        number = check_number("bootstrap_values.edge", edge, -math.inf, math.inf)
        return torch.full((layout.num_envs,), number, dtype=value.dtype, device=layout.device)
    check_tensor("bootstrap_values.edge", edge, REAL_DTYPES)
    check_shape("bootstrap_values.edge", edge, (layout.num_envs,), "[num_envs]", layout)
    return edge.to(value.dtype)


def as_tensor(name: str, values: Any, device: torch.device | None = None) -> torch.Tensor:
    """A tensor of numbers, which may be a sequence or an array."""
    try:
        return torch.as_tensor(values, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: got {describe(values)}, expected a torch.Tensor or a sequence of numbers") from error


def check_index(name: str, indices: Any, size: int, value: torch.Tensor, layout: RolloutLayout) -> torch.Tensor:
    """Integer indices in [0, size), as many as values. Those already on a GPU are asserted there, without waiting."""
    index = as_tensor(name, indices)
    if index.numel() == 0 and not index.is_floating_point():
        index = index.to(torch.int64)
    if (index.is_floating_point() and index.numel()) or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(f"{name}: got dtype {index.dtype}, expected integers")
    if index.ndim != 1 or index.shape != value.shape:
        raise ValueError(f"{name}: got shape {tuple(index.shape)}, expected [num_values], {tuple(value.shape)}")
    outside = (index < 0) | (index >= size)
    if index.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(~outside.any(), f"{name}: an index is out of range, expected [0, {size})")
    elif outside.any():
        raise ValueError(f"{name}: got index {index[outside][0].item()}, expected indices in [0, {size})")
    return index.to(device=layout.device, dtype=torch.int64)


def check_out(
    out: Any, names: Sequence[str], wanted: Sequence[bool], like: torch.Tensor, inputs: Sequence[Any]
) -> None:
    """Preallocated results: as many as there are results, each None or a writable tensor apart from every input."""
    if not isinstance(out, tuple | list) or len(out) != len(names):
        raise ValueError(f"out: got {describe(out)}, expected a tuple ({', '.join(names)})")
    for name, tensor, is_wanted in zip(names, out, wanted, strict=True):
        if tensor is None:
            continue
        if not is_wanted:
            raise ValueError(f"out: got a tensor for {name}, expected None since {name} are not computed")
        check_out_tensor(f"out ({name})", tensor, like)
    given = [(f"out ({name})", tensor) for name, tensor in zip(names, out, strict=True) if tensor is not None]
    if len(given) > 1 and given[0][1] is given[1][1]:
        raise ValueError("out: got the same tensor twice, expected one per result")
    if not torch.compiler.is_compiling():
        check_apart(given, [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)])


def check_out_tensor(name: str, tensor: Any, like: torch.Tensor) -> None:
    """A tensor to write to."""
    check_tensor(name, tensor, REAL_DTYPES if like.is_floating_point() else (torch.int64,))
    check_shape(name, tensor, like.shape, "that of the inputs", like)
    if not tensor.is_contiguous() and overlaps_itself(tensor):
        raise ValueError(
            f"{name}: got strides {tensor.stride()}, by which elements share memory, expected distinct ones"
        )
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


def check_apart(given: Sequence[tuple[str, torch.Tensor]], inputs: Sequence[torch.Tensor]) -> None:
    """Results that share no element with each other or with an input, all on one device."""
    ranges = [(tensor, *memory_range(tensor)) for tensor in inputs]
    for name, tensor in given:
        first, end = memory_range(tensor)
        for other, other_first, other_end in ranges:
            if first < other_end and other_first < end and share_elements(tensor, other):
                raise ValueError(f"{name}: got memory that it shares with another argument, expected memory of its own")
        ranges.append((tensor, first, end))


def share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors have memory in common, by their addresses."""
    return a.device == b.device and np.shares_memory(Addresses(a), Addresses(b))


class Addresses:
    """A tensor as NumPy sees an array, on any device: nothing is read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Tell NumPy where the elements lie."""
        size = tensor.element_size()
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }


def memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte."""
    first, size = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous() or not tensor.numel():
        return first, first + tensor.numel() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * size


def describe(thing: Any) -> str:
    """A value's type, and its length if it has one."""
    return f"{type(thing).__name__} of {len(thing)}" if hasattr(thing, "__len__") else type(thing).__name__
