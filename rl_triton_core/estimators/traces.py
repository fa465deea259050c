"""Eligibility traces (Sutton & Barto 2018, chapter 12) and episodic prefix sums: the scans that run forward in time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from rl_triton_core._internal import validation as check
from rl_triton_core._internal.fast_path import with_fast_path
from rl_triton_core._internal.linear import readout
from rl_triton_core._internal.primitives import select
from rl_triton_core._internal.recurrence import Recurrence, Step
from rl_triton_core._internal.solve import solve_features

BOUNDARIES = ("ends_at", "starts_at")


class ScanState(NamedTuple):
    """What one window hands to the next."""

    value: torch.Tensor
    """The state after the last step, [num_envs, *features]."""
    done: torch.Tensor
    """Whether the episode ended there, so that the next step starts afresh, [num_envs]."""


def coefficients(step: Step) -> tuple[Any, Any]:
    """α = x,  β = the decay unless the step starts an episode."""
    (x,) = step.inputs
    return x, select(step.continues, step.decay, 0)


TRACE = Recurrence(
    name="trace",
    inputs=("x",),
    num_lookahead=0,
    outputs=("traces",),
    coefficients=coefficients,
    readout=readout,
    backward=False,
)


@with_fast_path
def compute_eligibility_traces(
    x: torch.Tensor,
    terminated: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    *,
    gamma: float = 0.99,
    lambda_: float = 0.95,
    decay: float | torch.Tensor | None = None,
    state: ScanState | None = None,
    return_state: bool = False,
    mask: torch.Tensor | None = None,
    mask_mode: str = "skip",
    time_dim: int = -1,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ScanState]:
    r"""Accumulating traces that start afresh with every episode.

        z[t] = x[t] + γλ·z[t-1]      without the last term where step t-1 ended its episode

    Windows stream: with the `state` of the window before, two windows in a row equal one long one, bit for bit on the
    ``cpu`` backend.

    Args:
        x: Features or gradients, [num_envs, num_steps, *features], or [num_steps, num_envs, *features] with
            ``time_dim=0``; floating point as in `compute_gae`.
        terminated: Departure flags, [num_envs, num_steps], as in `compute_gae`. Features share them.
        truncated: Likewise; here either kind ends a trace.
        gamma: Discount γ, finite and >= 0. One per step goes into `decay`, which acts on what enters step t, while the
            discounts of `compute_gae` act on what follows it.
        lambda_: λ in [0, 1].
        decay: Replaces γλ, and `gamma` and `lambda_` are not read: a number, one per feature (shaped like the
            features), one per step ([num_envs, num_steps]), or one for each (shaped like `x`). The first that fits is
            meant.
        state: What the window before handed over. None: z[-1] = 0.
        return_state: Whether to return this window's `ScanState` too.
        mask: Nonzero where a step is part of the trajectory, as in `compute_gae`.
        mask_mode: ``"skip"``, as if the masked steps were deleted; ``"reset"``, a masked step ends the trace.
        time_dim: Which of the two leading dimensions is time: -1 or 1, 0 or -2.
        out: Preallocated result, as in `compute_gae`.
        backend: As in `compute_gae`.

    Returns:
        z, shaped like `x`, or (z, ScanState) with `return_state`; dtype and gradient as in `compute_gae`.

    Raises:
        TypeError: As in `compute_gae`.
        ValueError: As in `compute_gae`.
        BackendUnavailableError: As in `compute_gae`.

    Example:
        >>> done = torch.tensor([[False, True, False, False]])
        >>> compute_eligibility_traces(torch.ones(1, 4), done, decay=0.5)
        tensor([[1.0000, 1.5000, 1.0000, 1.5000]])
    """
    layout = check.check_layout("x", x, time_dim, features=True)
    factors: tuple[Any, float]
    if decay is None:
        factors = check.check_number("gamma", gamma, 0.0, math.inf), check.check_number("lambda_", lambda_, 0.0, 1.0)
    else:
        factors = check.check_decay(decay, x, layout), 1.0
    flags = (("terminated", terminated), ("truncated", truncated))
    return scan_forward(x, layout, flags, factors, state, return_state, mask, mask_mode, out, backend, starts_at=False)


@with_fast_path
def compute_episodic_prefix_sum(
    x: torch.Tensor,
    dones: torch.Tensor | None = None,
    *,
    boundary: str = "ends_at",
    state: ScanState | None = None,
    return_state: bool = False,
    mask: torch.Tensor | None = None,
    mask_mode: str = "skip",
    cu_seqlens: torch.Tensor | None = None,
    time_dim: int = -1,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ScanState]:
    r"""Cumulative sums that start afresh with every episode.

        C[t] = x[t] + C[t-1]      without the last term where step t-1 ended an episode ("ends_at"),
                                  or where step t starts one ("starts_at")

    Args:
        x: What to sum, as in `compute_eligibility_traces`, or of an integer dtype.
        dones: Flags, [num_envs, num_steps], bool, uint8 or floating point.
        boundary: What they say: ``"ends_at"``, the step is the last of an episode; ``"starts_at"``, it is the first.
        state: As in `compute_eligibility_traces`.
        return_state: As in `compute_eligibility_traces`.
        mask: As in `compute_eligibility_traces`.
        mask_mode: As in `compute_eligibility_traces`.
        cu_seqlens: As in `compute_gae`; `x` has no features then.
        time_dim: As in `compute_eligibility_traces`.
        out: Preallocated result, as in `compute_gae`; int64 for integers.
        backend: As in `compute_gae`.

    Returns:
        C, shaped like `x`, or (C, ScanState) with `return_state`. int64, exact modulo 2⁶⁴, for integers; else as in
        `compute_gae`.

    Raises:
        TypeError: As in `compute_gae`.
        ValueError: As in `compute_gae`, or `boundary` is not one of the two.
        BackendUnavailableError: As in `compute_gae`.

    Example:
        >>> dones = torch.tensor([[False, True, False, False]])
        >>> compute_episodic_prefix_sum(torch.ones(1, 4, dtype=torch.int32), dones)
        tensor([[1, 2, 1, 2]])
    """
    if boundary not in BOUNDARIES:
        raise ValueError(f"boundary: got {boundary!r}, expected one of {', '.join(BOUNDARIES)}")
    layout = check.check_layout("x", x, time_dim, features=True, integers=True, cu_seqlens=cu_seqlens)
    one = 1.0 if x.is_floating_point() else 1
    flags, starts_at = (("dones", dones), ("truncated", None)), boundary == "starts_at"
    return scan_forward(x, layout, flags, (one, one), state, return_state, mask, mask_mode, out, backend, starts_at)


def scan_forward(
    x: torch.Tensor,
    layout: check.RolloutLayout,
    flags: tuple[tuple[str, Any], ...],
    factors: tuple[Any, Any],
    state: ScanState | None,
    return_state: bool,
    mask: Any,
    mask_mode: Any,
    out: Any,
    backend: str | None,
    starts_at: bool,
) -> torch.Tensor | tuple[torch.Tensor, ScanState]:
    """A forward scan of a validated `x`."""
    for name, tensor in (*flags, ("mask", mask)):
        check.check_flags(name, tensor, layout)
    value, done = check.check_state(state, x, layout)
    if return_state and isinstance(out, torch.Tensor) and out.dtype not in check.EXACT_DTYPES:
        raise ValueError(f"out: got dtype {out.dtype} together with return_state, expected one that rounds no state")
    skip = check.check_mask_mode(mask_mode)
    traces = solve_features(
        TRACE,
        (x,),
        layout,
        initial=value,
        gamma=factors[0],
        lambda_=factors[1],
        terminated=flags[0][1],
        truncated=flags[1][1],
        mask=mask,
        previous_done=None if done is None else layout.expand_over_time(done),
        skip=skip,
        starts_at=starts_at,
        out=out,
        backend=backend,
    )
    if not return_state:
        return traces
    ends = [] if starts_at else [flag for _, flag in flags if flag is not None]
    return traces, final_state(traces, ends, mask, skip, layout, start_state(value, done, traces, layout))


def start_state(value: Any, done: Any, traces: torch.Tensor, layout: check.RolloutLayout) -> ScanState:
    """The state before the window."""
    if value is None:
        value = traces.new_zeros((layout.num_envs, *traces.shape[len(layout.shape) :]))
        done = torch.zeros(layout.num_envs, dtype=torch.bool, device=traces.device)
    return ScanState(value.to(traces.dtype), done.ne(0))


def final_state(
    traces: torch.Tensor, ends: list[torch.Tensor], mask: Any, skip: bool, layout: check.RolloutLayout, start: ScanState
) -> ScanState:
    """The state after the last step that counts, and whether its episode ended there."""
    if not layout.num_steps:
        return start
    done = torch.zeros(layout.shape, dtype=torch.bool, device=traces.device)
    for flags in ends:
        done = done | flags.ne(0)
    valid = None if mask is None else mask.ne(0)
    last, some = last_steps(valid, layout)
    value, over, exists = pick(traces, last, layout), pick(done, last, layout), some
    if valid is not None and not skip:
        end, exists = last_steps(None, layout)
        over = over | ~pick(valid, end, layout)
    some = some.view(-1, *[1] * (value.ndim - 1))
    return ScanState(torch.where(some, value, start.value), torch.where(exists, over, start.done))


def last_steps(valid: torch.Tensor | None, layout: check.RolloutLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the last (valid) step of each environment or sequence is, and whether there is one, [num_envs] each."""
    if layout.cu_seqlens is None:
        index = check.last_step(valid, layout).squeeze(layout.time_dim)
        return index, torch.ones_like(index, dtype=torch.bool) if valid is None else valid.any(layout.time_dim)
    index = layout.cu_seqlens[1:] - 1
    if valid is not None:
        steps = torch.arange(layout.num_steps, device=layout.device)
        index = torch.where(valid, steps, -1).cummax(0).values[index.clamp(min=0)]
    return index.clamp(min=0), index >= layout.cu_seqlens[:-1]


def pick(x: torch.Tensor, index: torch.Tensor, layout: check.RolloutLayout) -> torch.Tensor:
    """One step of each environment or sequence."""
    if layout.cu_seqlens is not None:
        return x[index]
    envs = torch.arange(layout.num_envs, device=x.device)
    return x[envs, index] if layout.time_dim == 1 else x[index, envs]
