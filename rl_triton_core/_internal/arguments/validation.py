"""Checks of arguments. Every message names the argument, what came and what is expected.

They look at types, shapes, dtypes and devices. Values are looked at where they are in host memory, and once for
calls that are alike on a GPU: see `can_read_values`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeGuard

import numpy as np
import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

REAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
BYTE_DTYPES = (torch.bool, torch.uint8)
FLAG_DTYPES = (torch.bool, *INTEGER_DTYPES, *REAL_DTYPES)
UNREAD = ("cuda", "meta")
"""Types of devices whose values are not read for checks: that would wait for a GPU, and meta tensors have none."""
MASK_MODES = ("skip", "reset")


@dataclass
class RolloutLayout:
    """The shape, device and time dimension that all per-step tensors of a call share."""

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
        """The name of the shape of one element per environment or sequence."""
        return "[num_envs]" if self.cu_seqlens is None else "[num_sequences]"

    def expand_over_time(self, edge: torch.Tensor) -> torch.Tensor:
        """Repeat what is given per environment or sequence, [num_envs, *features], for all steps."""
        size = [*edge.shape]
        size.insert(self.time_dim, self.num_steps)
        return edge.unsqueeze(self.time_dim).expand(size)


def check_layout(
    name: str, tensor: Any, time_dim: int, features: bool = False, integers: bool = False, cu_seqlens: Any = None
) -> RolloutLayout:
    """Check a call's first per-step tensor and return the layout that it sets.

    It is [num_envs, num_steps], or [num_steps, num_envs] with a `time_dim` of 0 or -2, perhaps with trailing dimensions
    of `features`, perhaps of `integers`; with `cu_seqlens`, where sequences of a packed row begin and end, [num_steps].
    """
    if not isinstance(time_dim, (int, np.integer)) or isinstance(time_dim, bool):
        raise TypeError(f"time_dim: got {time_dim!r}, expected an int")
    if time_dim not in (-2, -1, 0, 1):
        raise ValueError(f"time_dim: got {time_dim!r}, expected -1 or 1 ([num_envs, T]), 0 or -2 ([T, num_envs])")
    check_tensor(name, tensor, (*REAL_DTYPES, *INTEGER_DTYPES) if integers else REAL_DTYPES)
    if cu_seqlens is not None:
        return check_sequences(name, tensor, time_dim, cu_seqlens)
    if tensor.ndim < 2 or (tensor.ndim > 2 and not features):
        expected = "environments and steps" + (", then features" if features else " only")
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected the dimensions {expected}")
    return RolloutLayout(name, tensor.shape[:2], tensor.device, int(time_dim) % 2)


def check_sequences(name: str, tensor: torch.Tensor, time_dim: int, cu_seqlens: Any) -> RolloutLayout:
    """Check sequences that lie end to end in a flat tensor. Backends check offsets that are on a GPU."""
    if time_dim != -1:
        raise ValueError(f"time_dim: got {time_dim} together with cu_seqlens, expected it left out")
    if tensor.ndim != 1:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)} together with cu_seqlens, expected [num_steps]")
    check_tensor("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < (2 if tensor.numel() else 1):
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}, expected [num_sequences + 1]")
    check_device("cu_seqlens", cu_seqlens, tensor.device)
    if is_traced():
        assert_offsets(cu_seqlens, tensor.shape[0])
    elif cu_seqlens.device.type not in UNREAD:
        offsets = cu_seqlens.cpu()
        check_offsets(np.array([x.item() for x in offsets]) if is_transformed() else offsets.numpy(), tensor.shape[0])
    return RolloutLayout(name, tensor.shape, tensor.device, 1, cu_seqlens.contiguous())


def check_offsets(offsets: Any, num_steps: int) -> None:
    """Check that offsets in host memory rise from 0 to the number of steps."""
    (falls,) = (offsets[1:] < offsets[:-1]).nonzero()
    if offsets[0] == 0 and offsets[-1] == num_steps and not falls.size:
        return
    got = f"{offsets[falls[0]]} before {offsets[falls[0] + 1]}" if falls.size else f"{offsets[0]} to {offsets[-1]}"
    raise ValueError(f"cu_seqlens: got {got}, expected offsets from 0 to {num_steps}, the number of steps, rising")


def assert_offsets(offsets: torch.Tensor, num_steps: int) -> None:
    """Assert the same on the device, without waiting for it."""
    rises = (offsets[0] == 0) & (offsets[-1] == num_steps) & (offsets.diff() >= 0).all()
    torch._assert_async(rises, "cu_seqlens: expected offsets from 0 to the number of steps, rising")


def refuse(wrong: torch.Tensor, message: str) -> None:
    """Raise ValueError where something is wrong; on a GPU, or for torch.compile, assert there that nothing is."""
    if wrong.device.type in UNREAD or is_traced():
        torch._assert_async(~wrong.any(), message)
    elif wrong.any():
        raise ValueError(message)


def find_precision(arguments: Iterable[Any]) -> torch.dtype:
    """What arithmetic is done in: float64 if one of the arguments is a tensor of it, else float32."""
    is_wide = any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in arguments)
    return torch.float64 if is_wide else torch.float32


def check_tensor(name: str, tensor: Any, dtypes: Sequence[torch.dtype] = REAL_DTYPES) -> None:
    """Check that an argument is a dense tensor of one of these dtypes."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, expected one of {', '.join(map(str, dtypes))}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: got layout {tensor.layout}, expected a dense tensor (torch.strided)")
    if is_traced():
        return
    if computes_itself(tensor):
        raise TypeError(f"{name}: got a {type(tensor).__name__} within another argument, expected a plain torch.Tensor")
    if tensor.is_neg():
        raise ValueError(f"{name}: got a view with its negative bit set, expected its resolve_neg()")


def check_per_step(name: str, tensor: Any, layout: RolloutLayout, dtypes: Sequence[torch.dtype] = REAL_DTYPES) -> None:
    """Check that an argument is a tensor with one element per step."""
    check_tensor(name, tensor, dtypes)
    check_shape(name, tensor, layout.shape, f"that of {layout.name}", layout.device)


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int], meaning: str, device: torch.device) -> None:
    """Check a tensor's shape, whose meaning goes into the message, and its device."""
    if tensor.shape != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {tuple(shape)}, {meaning}")
    check_device(name, tensor, device)


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Check that a tensor is on the device of the first input."""
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, expected {device}, that of the first input")


def check_flags(name: str, flags: Any, layout: RolloutLayout) -> None:
    """Check that an argument is None or a flag per step."""
    if flags is not None:
        check_per_step(name, flags, layout, FLAG_DTYPES)


def narrow_flags(flags: torch.Tensor, dtypes: Sequence[torch.dtype] = BYTE_DTYPES) -> torch.Tensor:
    """Flags in one of these dtypes, in place if they are: what is nonzero is set, whatever its dtype."""
    return flags if flags.dtype in dtypes else flags != 0


def is_number(x: Any) -> bool:
    """Whether something is a number, such as Python's and NumPy's, and no bool."""
    return type(x) is float or (isinstance(x, Real) and not isinstance(x, bool))


def check_number(name: str, number: Any, low: float, high: float, or_infinity: bool = False) -> float:
    """Check that an argument is a finite number within [low, high], and return it as a float.

    While torch.compile traces, a tensor stays one, whose value is asserted where it is known.
    """
    if isinstance(number, torch.Tensor):
        number = read_number(name, number)
    elif not is_number(number):
        raise TypeError(f"{name}: got {type(number).__name__}, expected a float")
    if isinstance(number, torch.Tensor):
        valid = (low <= number) & (number <= high) & ((number.abs() < math.inf) | or_infinity)
        torch._assert_async(valid, f"{name}: expected a number {describe_bounds(low, high, or_infinity)}")
        return number  # type: ignore[return-value]
    value = float(number)
    if not (low <= value <= high and (or_infinity or -math.inf < value < math.inf)):
        # No call within the message: where torch.compile leaves its graph at one, it loses the text before it.
        bounds = describe_bounds(low, high, or_infinity)
        raise ValueError(f"{name}: got {number!r}, expected a number {bounds}")
    return value


def describe_bounds(low: float, high: float, or_infinity: bool) -> str:
    """What `check_number` expects, for its messages."""
    bounds = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f"finite and >= {low:g}"
    return f"{bounds} or infinite" if or_infinity else bounds


def read_number(name: str, number: torch.Tensor) -> float | torch.Tensor:
    """Read the one number of a tensor in host memory; while torch.compile traces, return it as float64."""
    check_tensor(name, number, (*REAL_DTYPES, *INTEGER_DTYPES))
    if number.ndim:
        raise TypeError(
            f"{name}: got a Tensor of shape {tuple(number.shape)}, expected a float or a tensor of one number"
        )
    if number.device.type != "cpu":
        expected = "expected a number or a tensor in host memory, since reading it waits for the device"
        raise ValueError(f"{name}: got a tensor on {number.device}, {expected}")
    check_detached(name, number)
    return number.double() if is_traced() else number.item()


def check_detached(name: str, x: torch.Tensor) -> None:
    """Check that a tensor asks for no gradient, which it would not get."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: got a tensor that requires grad, expected it detached: no gradient flows to it")


def spread_number(number: Any, layout: RolloutLayout) -> Any:
    """Spread the one number of a tensor that has a gradient, or cannot be read without waiting, over all steps."""
    if not isinstance(number, torch.Tensor) or number.ndim:
        return number
    is_plain = is_traced() or not is_transformed()
    if number.device.type == "cpu" and not number.requires_grad and is_plain:
        return number
    return number.to(layout.device, torch.promote_types(number.dtype, torch.float32)).expand(layout.shape)


def is_stream(x: Any) -> TypeGuard[torch.Tensor]:
    """Whether something is a tensor of one element per step: without dimensions it is a number."""
    return isinstance(x, torch.Tensor) and x.ndim > 0


def check_gamma(gamma: Any, layout: RolloutLayout) -> float | torch.Tensor:
    """Check that an argument is one discount or one per step."""
    gamma = spread_number(gamma, layout)
    if not is_stream(gamma):
        return check_number("gamma", gamma, 0.0, math.inf)
    check_per_step("gamma", gamma, layout)
    return gamma


def check_bool(name: str, value: Any) -> bool:
    """Check that an argument is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, expected a bool")
    return value


def read_switch(name: str, default: str = "1") -> bool:
    """Whether a variable of the environment is 1; the default where it is not set, or empty."""
    return check_choice(name, os.environ.get(name) or default, ("0", "1")) == "1"


def check_count(name: str, number: Any) -> int:
    """Check that an argument is an integer of at least 1."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"{name}: got {number!r}, expected an int")
    if number < 1:
        raise ValueError(f"{name}: got {number!r}, expected at least 1")
    return int(number)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Check that an argument is one of these words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(choices)}")
    return value


def check_clip(name: str, bar: Any) -> float:
    """Check that an argument is a clip of importance weights: >= 0, infinity for none."""
    return check_number(name, bar, 0.0, math.inf, or_infinity=True)


def check_log_ratios(log_ratios: Any, target: Any, behaviour: Any, layout: RolloutLayout) -> dict[str, Any]:
    """Check log importance ratios, given in one of two forms, and return them as inputs of a recurrence."""
    if log_ratios is not None and target is None and behaviour is None:
        check_per_step("log_ratios", log_ratios, layout)
        return {"target_log_probs": log_ratios}
    if log_ratios is None and target is not None and behaviour is not None:
        return {"target_log_probs": target, "behaviour_log_probs": behaviour}
    given = {"log_ratios": log_ratios, "target_log_probs": target, "behaviour_log_probs": behaviour}
    names = ", ".join(name for name, tensor in given.items() if tensor is not None) or "none of the three"
    raise ValueError(f"log_ratios: got {names}, expected log_ratios, or both target_log_probs and behaviour_log_probs")


def check_decay(decay: Any, x: torch.Tensor, layout: RolloutLayout) -> float | torch.Tensor:
    """Check a decay, and return a number or a tensor of the shape of `x` or of its steps."""
    decay = spread_number(decay, layout)
    if not is_stream(decay):
        return check_number("decay", decay, -math.inf, math.inf)
    check_tensor("decay", decay)
    check_device("decay", decay, x.device)
    per_feature, per_step = x.ndim > 2 and decay.shape == x.shape[2:], decay.shape == layout.shape
    ones = (1,) * (x.ndim - 2)
    if per_feature and per_step:
        raise ValueError(
            f"decay: got shape {tuple(decay.shape)}, that of the steps and that of the features, expected "
            f"{(*layout.shape, *ones)} for one per step or {(1, 1, *x.shape[2:])} for one per feature"
        )
    if per_feature or decay.shape in ((1, 1, *x.shape[2:]), (*layout.shape, *ones)):
        return decay.expand(x.shape)
    if decay.shape != x.shape and not per_step:
        raise ValueError(
            f"decay: got shape {tuple(decay.shape)}, expected that of x, {tuple(x.shape)}, of its steps, "
            f"{tuple(layout.shape)}, or of its features, {tuple(x.shape[2:])}"
        )
    return decay


def check_state(state: Any, x: torch.Tensor, layout: RolloutLayout) -> tuple[Any, Any]:
    """Check a `ScanState`, and return its parts, or twice None."""
    if state is None:
        return None, None
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"state: got {describe_type(state)}, expected a ScanState(value, done)")
    value, done = state
    check_tensor("state.value", value, REAL_DTYPES if x.is_floating_point() else INTEGER_DTYPES)
    features = x.shape[len(layout.shape) :]
    check_shape("state.value", value, (layout.num_envs, *features), f"{layout.per_env} and features", layout.device)
    check_tensor("state.done", done, FLAG_DTYPES)
    check_shape("state.done", done, (layout.num_envs,), layout.per_env, layout.device)
    return value, done


SEEN_ON_GPU: set[Hashable] = set()
"""The kinds of tensors on a GPU whose values have been looked at."""


def can_read_values(tensor: torch.Tensor, kind: Hashable) -> bool:
    """Whether to look at a tensor's values: in host memory always, on a GPU once for each kind, since that waits."""
    if is_traced() or is_transformed() or tensor.device.type == "meta":
        return False
    if tensor.device.type not in UNREAD:
        return True
    waits = not torch.cuda.is_current_stream_capturing() and torch.cuda.get_sync_debug_mode() == 0
    if not waits or kind in SEEN_ON_GPU:
        return False
    SEEN_ON_GPU.add(kind)
    return True


def check_values(
    call: Hashable, flags: Mapping[str, torch.Tensor | None], mask: torch.Tensor | None, gamma: Any = 1.0
) -> None:
    """Check that floating point flags are 0 or 1, and discounts >= 0, where not masked; `call` is a call's kind."""
    for name, tensor in {**flags, "mask": mask}.items():
        if tensor is not None and tensor.is_floating_point() and can_read_values(tensor, (call, name, tensor.dtype)):
            wrong = (tensor != 0) & (tensor != 1)
            refuse_cells(name, tensor, wrong, None if name == "mask" else mask, "flags: 0 or 1 if floating point")
    if isinstance(gamma, torch.Tensor) and can_read_values(gamma, (call, "gamma", gamma.dtype)):
        refuse_cells("gamma", gamma, gamma < 0, mask, "discounts >= 0")


def refuse_cells(
    name: str, tensor: torch.Tensor, wrong: torch.Tensor, mask: torch.Tensor | None, expected: str
) -> None:
    """Raise ValueError where a cell that is read is wrong."""
    if mask is not None:
        wrong = wrong & (mask != 0)
    if wrong.any():
        raise ValueError(f"{name}: got {tensor[wrong][0].item():g} among its values, expected {expected}")


class Traced(threading.local):
    """Whether a call of this thread has tensors whose classes compute with them, such as those of collectives."""

    is_on = False


TRACED = Traced()


def is_traced() -> bool:
    """Whether PyTorch follows every operation, or tensors' classes do: to them, a call is operations of PyTorch."""
    if torch.compiler.is_compiling() or TRACED.is_on:
        return True
    keys = torch._C._TorchDispatchModeKey  # of modes that make a graph, or shapes alone: `make_fx`, `FakeTensorMode`
    return torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, (keys.FAKE, keys.PROXY)))


def computes_itself(x: Any) -> bool:
    """Whether it is a tensor whose class computes with it, and which may have no memory of its own."""
    own = isinstance(x, torch.Tensor) and type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return own and x.device.type in ("cpu", "cuda")  # others' are copied


def is_transformed() -> bool:
    """Whether tensors may carry tangents or be those of a torch.func transformation, which only PyTorch can see."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def refuse_transforms(name: str) -> None:
    """Raise where something may be transformed that has no rules but those of `torch.autograd`."""
    if is_transformed():
        raise RuntimeError(f"{name}: got a call under torch.func or forward-mode differentiation, expected one without")


def describe_type(thing: Any) -> str:
    """A value's type, and its length if it has one."""
    has_length = hasattr(thing, "__len__") and getattr(thing, "shape", True) != ()
    return f"{type(thing).__name__} of {len(thing)}" if has_length else type(thing).__name__
