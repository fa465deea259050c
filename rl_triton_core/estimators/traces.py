"""Eligibility traces (Sutton & Barto 2018, chapter 12) and episodic prefix sums: the scans that run forward in time."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.scan.bootstrap import find_last_step
from rl_triton_core.extending import Recurrence, Step, read_state, select, solve_features, with_fast_path

BOUNDARIES = ("ends_at", "starts_at")


class ScanState(NamedTuple):
    """What one rollout hands to the next."""

    value: torch.Tensor
    """The state after the last step, [num_envs, *features]."""
    done: torch.Tensor
    """Whether the episode ended there, so that the next step starts from zero, [num_envs]."""


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
    readout=read_state,
    backward=False,
)


@overload
def compute_eligibility_traces(
    x: Tensor, terminated: Tensor | None = None, truncated: Tensor | None = None,
    *, return_state: Literal[False] = False, **options: Any
) -> Tensor: ...  # fmt: skip


@overload
def compute_eligibility_traces(
    x: Tensor, terminated: Tensor | None = None, truncated: Tensor | None = None,
    *, return_state: Literal[True], **options: Any
) -> tuple[Tensor, ScanState]: ...  # fmt: skip


@with_fast_path  # type: ignore[misc]  # `options` are the other arguments
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
    r"""Compute accumulating eligibility traces, which start from zero with every episode.

        z[t] = x[t] + γλ·z[t-1]      without the last term where step t-1 ended its episode

    Rollouts stream: with the `state` of the rollout before, two in a row equal one long one, bit for bit on the ``cpu``
    backend.

    Args:
        x: Features or gradients, [num_envs, num_steps, *features], or [num_steps, num_envs, *features] with
            ``time_dim=0``; float32, bfloat16, float16, or float64 (not on the triton backend). Any strides.
        terminated: Flags of steps that ended in a terminal state, as of `compute_gae`, [num_envs, num_steps], shared by
            all features.
        truncated: Flags of steps whose episode was cut (a time limit), which ends a trace too; like `terminated`.
        gamma: Discount γ, a finite number >= 0. A discount per step goes into `decay`, which weighs what enters step t.
        lambda_: λ, a number in [0, 1].
        decay: Replaces γλ; `gamma` and `lambda_` are not read then. A number, one per feature (shaped like the
            features), one per step ([num_envs, num_steps]), or one for each (shaped like `x`). Where the first two
            have one shape, [1, 1, *features] or [num_envs, num_steps, 1, ...].
        state: The `ScanState` that the previous rollout returned. None: z[-1] = 0.
        return_state: Whether to return this rollout's `ScanState` as well.
        mask: Flags of the steps that count, as of `compute_gae`, [num_envs, num_steps].
        mask_mode: ``"skip"``: as if the masked steps were deleted. ``"reset"``: a masked step ends the trace.
        time_dim: Which of the two leading dimensions is time: -1 or 1, 0 or -2.
        out: Preallocated result, shaped like `x`, floating point, any strides, apart from every input.
        backend: ``"triton"``, ``"cpu"`` or ``"reference"``; None chooses by the tensors' device.

    Returns:
        z, shaped like `x` and in its unit, float32 (float64 if an input is); or (z, ScanState) with ``return_state``.
        Differentiable with respect to `x`, `decay` and the state's value.

    Raises:
        ValueError: A shape, device or value is wrong; other errors are those of `compute_gae`.

    Source:
        Sutton & Barto 2018, section 12.2, http://incompleteideas.net/book/the-book-2nd.html

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
    flags = {"terminated": terminated, "truncated": truncated}
    options: dict[str, Any] = {"state": state, "return_state": return_state, "mask": mask, "mask_mode": mask_mode}
    return solve_forward(x, layout, flags, factors, out=out, backend=backend, **options)


@overload
def compute_episodic_prefix_sum(
    x: Tensor, dones: Tensor | None = None,
    *, return_state: Literal[False] = False, **options: Any
) -> Tensor: ...  # fmt: skip


@overload
def compute_episodic_prefix_sum(
    x: Tensor, dones: Tensor | None = None,
    *, return_state: Literal[True], **options: Any
) -> tuple[Tensor, ScanState]: ...  # fmt: skip


@with_fast_path  # type: ignore[misc]  # `options` are the other arguments
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
    r"""Compute cumulative sums that start from zero with every episode.

        C[t] = x[t] + C[t-1]      without the last term where step t-1 ended an episode ("ends_at"),
                                  or where step t starts one ("starts_at")

    Args:
        x: What to sum, [num_envs, num_steps, *features], or [num_steps, num_envs, *features] with ``time_dim=0``;
            floating point (float64 not on the triton backend) or integer. Any strides.
        dones: Flags of episodes, as of `compute_gae`, [num_envs, num_steps], shared by all features. None: nowhere.
        boundary: What the flags say: ``"ends_at"``, a step is an episode's last; ``"starts_at"``, it is its first.
        state: The `ScanState` that the previous rollout returned. None: C[-1] = 0.
        return_state: Whether to return this rollout's `ScanState` as well.
        mask: Flags of the steps that count, as of `compute_gae`, [num_envs, num_steps].
        mask_mode: ``"skip"``: as if the masked steps were deleted. ``"reset"``: a masked step ends the sum.
        cu_seqlens: For packed rows, without features: where sequences start and end, as of `compute_gae`.
        time_dim: Which of the two leading dimensions is time: -1 or 1, 0 or -2.
        out: Preallocated result, shaped like `x`, floating point (int64 for integers), any strides, apart from every
            input.
        backend: ``"triton"``, ``"cpu"`` or ``"reference"``; None chooses by the tensors' device.

    Returns:
        C, shaped like `x` and in its unit; or (C, ScanState) with ``return_state``. int64, exact modulo 2⁶⁴, for
        integers; else float32 (float64 if an input is), and differentiable with respect to `x` and the state's value.

    Raises:
        ValueError: `boundary` is not one of the two; other errors are those of `compute_gae`.

    Source:
        Blelloch 1990, section 1.5 (segmented scans), https://www.cs.cmu.edu/~guyb/papers/Ble93.pdf

    Example:
        >>> dones = torch.tensor([[False, True, False, False]])
        >>> compute_episodic_prefix_sum(torch.ones(1, 4, dtype=torch.int32), dones)
        tensor([[1, 2, 1, 2]])
    """
    layout = check.check_layout("x", x, time_dim, features=True, integers=True, cu_seqlens=cu_seqlens)
    one = 1.0 if x.is_floating_point() else 1
    options: dict[str, Any] = {"state": state, "return_state": return_state, "mask": mask, "mask_mode": mask_mode}
    options["starts_at"] = check.check_choice("boundary", boundary, BOUNDARIES) == "starts_at"
    return solve_forward(x, layout, {"dones": dones}, (one, one), out=out, backend=backend, **options)


def solve_forward(
    x: torch.Tensor,
    layout: check.RolloutLayout,
    flags: dict[str, torch.Tensor | None],
    factors: tuple[float | torch.Tensor, float],
    *,
    state: ScanState | None,
    return_state: bool,
    mask: torch.Tensor | None,
    mask_mode: str,
    out: torch.Tensor | None,
    backend: str | None,
    starts_at: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ScanState]:
    """Compute a forward scan whose decay is the product of `factors`, and perhaps the state after it."""
    for name, tensor in flags.items():
        check.check_flags(name, tensor, layout)
    check.check_flags("mask", mask, layout)
    check.check_values(tuple(flags), flags, mask)
    value, done = check.check_state(state, x, layout)
    if check.check_bool("return_state", return_state) and isinstance(out, torch.Tensor):
        exact = check.find_precision((x, value, *factors)) if x.is_floating_point() else x.dtype
        if torch.promote_types(out.dtype, exact) != out.dtype:
            got = f"got dtype {out.dtype} together with return_state"
            raise ValueError(f"out: {got}, expected one that rounds no state")
    skip = check.check_choice("mask_mode", mask_mode, check.MASK_MODES) == "skip"
    terminated, truncated = (*flags.values(), None)[:2]
    traces = solve_features(
        TRACE,
        (x,),
        layout,
        initial=value,
        gamma=factors[0],
        lambda_=factors[1],
        terminated=terminated,
        truncated=truncated,
        mask=mask,
        previous_done=None if done is None else layout.expand_over_time(done),
        skip=skip,
        starts_at=starts_at,
        out=out,
        backend=backend,
    )
    if not return_state:
        return traces
    if value is None or done is None:  # the state before the rollout is zero
        value = traces.new_zeros((layout.num_envs, *traces.shape[len(layout.shape) :]))
        done = torch.zeros(layout.num_envs, dtype=torch.bool, device=traces.device)
    start = ScanState(value.to(traces.dtype), done.ne(0))
    ends = [] if starts_at else [flag for flag in flags.values() if flag is not None]
    return traces, build_final_state(traces, ends, mask, skip, layout, start)


def build_final_state(
    traces: torch.Tensor,
    ends: list[torch.Tensor],
    mask: torch.Tensor | None,
    skip: bool,
    layout: check.RolloutLayout,
    start: ScanState,
) -> ScanState:
    """The state after the last step that counts, and whether its episode ended there; `start` where none counts."""
    if not layout.num_steps:
        return start
    done = torch.zeros(layout.shape, dtype=torch.bool, device=traces.device)
    for flags in ends:
        done = done | flags.ne(0)
    valid = None if mask is None else mask.ne(0)
    last, has_value = find_last_steps(valid, layout)
    value, is_done, has_done = take_steps(traces, last, layout), take_steps(done, last, layout), has_value
    if valid is not None and not skip:  # a masked last step ends the episode
        last, has_done = find_last_steps(None, layout)
        is_done = is_done | ~take_steps(valid, last, layout)
    has_value = has_value.view(-1, *[1] * (value.ndim - 1))
    return ScanState(torch.where(has_value, value, start.value), torch.where(has_done, is_done, start.done))


def find_last_steps(valid: torch.Tensor | None, layout: check.RolloutLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the last (valid) step of each environment or sequence, and whether there is one, [num_envs] each."""
    if layout.cu_seqlens is None:
        index = find_last_step(valid, layout).squeeze(layout.time_dim)
        return index, torch.ones_like(index, dtype=torch.bool) if valid is None else valid.any(layout.time_dim)
    starts, ends = layout.cu_seqlens[:-1], layout.cu_seqlens[1:]
    index = (ends - 1).clamp(min=0)
    if valid is not None:
        steps = torch.arange(layout.num_steps, device=layout.device)
        index = torch.where(valid, steps, -1).cummax(0).values[index]
    return index.clamp(min=0), (index >= starts) & (ends > starts)


def take_steps(x: torch.Tensor, index: torch.Tensor, layout: check.RolloutLayout) -> torch.Tensor:
    """The step at `index` of each environment or sequence."""
    if layout.cu_seqlens is not None:
        return x[index]
    envs = torch.arange(layout.num_envs, device=x.device)
    return x[envs, index] if layout.time_dim == 1 else x[index, envs]
