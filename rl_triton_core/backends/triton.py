"""The Triton backend: CUDA and ROCm tensors, one fused kernel launch per call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from rl_triton_core.kernels import scan
from rl_triton_core.kernels.launch import Launch, settings
from rl_triton_core.recurrence import Problem, Recurrence, Stream

INTERPRETED = isinstance(scan.scan, InterpretedFunction)


def unavailable(device: torch.device) -> str | None:
    """It runs on CUDA and ROCm tensors, and on CPU tensors in Triton's interpreter."""
    if device.type == "cuda" or (device.type == "cpu" and INTERPRETED):
        return None
    hint = "; CPU tensors need TRITON_INTERPRET=1 in the environment" if device.type == "cpu" else ""
    return f"it runs on CUDA and ROCm tensors, got {device}{hint}"


def run(problem: Problem) -> None:
    """Fill the problem's outputs."""
    if problem.dtype == torch.float64:
        raise TypeError(
            "got dtype float64 among the inputs of the triton backend, expected float32, bfloat16 or float16 "
            "(the cpu and reference backends take float64)"
        )
    groups, steps, lanes = problem.shape
    length = steps if problem.cu_seqlens is None else triton.cdiv(steps, lanes)
    launch = settings(length, lanes, problem.strides(problem.like)[2] == 1)
    programs = groups * triton.cdiv(lanes, launch.block_lanes)
    with on(problem.like.device):
        scan.scan[(programs,)](*arguments(problem), **constants(problem, launch), **options(problem, launch))


def arguments(problem: Problem) -> tuple[Any, ...]:
    """A problem as kernel arguments: streams as (tensor, group stride, step stride, lane stride), None, or numbers."""

    def stream(x: Any) -> Any:
        return (x, *problem.strides(x)) if isinstance(x, torch.Tensor) else None

    def number(x: Any) -> Any:
        return 0 if isinstance(x, torch.Tensor) else x

    stand_in = (problem.like, 0, 0, 0)  # Triton 3.6 has trouble with None inside a tuple
    per_step = isinstance(problem.gamma, torch.Tensor)
    return (
        tuple(stream(x) or stand_in for x in problem.inputs),
        stream(problem.next_values),
        stream(problem.bootstrap),
        number(problem.bootstrap),
        stream(problem.terminated),
        stream(problem.truncated),
        stream(problem.mask),
        stream(problem.gamma),
        number(problem.gamma),
        problem.lambda_ if per_step else problem.gamma * problem.lambda_,
        problem.params,
        stream(problem.initial),
        stream(problem.departed),
        tuple(stream(x) or stand_in for x in problem.outputs),
        problem.cu_seqlens,
        problem.shape[1],
        problem.shape[2],
    )


def constants(problem: Problem, launch: Launch) -> dict[str, Any]:
    """What is compiled into the kernel."""
    recurrence = problem.recurrence
    coefficients, readout = compiled(recurrence)
    return {
        "COEFFICIENTS": coefficients,
        "READOUT": readout,
        "BACKWARD": recurrence.backward,
        "LOOKS_AHEAD": recurrence.looks_ahead,
        "INPUTS": len(problem.inputs),
        "GIVEN": present(problem.inputs),
        "OUTPUTS": len(problem.outputs),
        "WANTED": present(problem.outputs),
        "FOLLOWED": recurrence.followed,
        "SKIP": problem.skip,
        "STARTS_AT": problem.starts_at,
        "DTYPE": tl.float32 if problem.dtype.is_floating_point else tl.int64,
        "BLOCK_LANES": launch.block_lanes,
        "BLOCK_TIME": launch.block_time,
    }


def options(problem: Problem, launch: Launch) -> dict[str, Any]:
    """How it is compiled. With `debug`, the kernel asserts that offsets are in order."""
    checked = {"debug": True, "sanitize_overflow": False} if problem.cu_seqlens is not None else {}
    return {"num_warps": launch.num_warps, **checked}


def present(streams: Sequence[Stream]) -> int:
    """A bit for each stream that is there."""
    return sum(1 << i for i, stream in enumerate(streams) if stream is not None)


def on(device: torch.device) -> Any:
    """The context in which a kernel runs on this device."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@cache
def compiled(recurrence: Recurrence) -> tuple[Any, Any]:
    """An estimator's equations as Triton functions."""
    return scan.equation(recurrence.coefficients), scan.equation(recurrence.readout)
