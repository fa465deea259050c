"""Normalisation of advantages to zero mean and unit variance, over one process or several."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import distributed

from rl_triton_core._internal import validation as check
from rl_triton_core._internal.backends import Backend, choose
from rl_triton_core._internal.backends.reference_moments import evaluate
from rl_triton_core._internal.fast_path import with_fast_path
from rl_triton_core._internal.moments import Exchange, Rule, Task, as_matrices

EPSILON_MODES = ("add", "floor", "variance")

all_gather: Any = getattr(distributed, "all_gather_single", None) or getattr(
    distributed, "all_gather_into_tensor", None
)
"""Of one tensor per rank into one; torch 2.13 has renamed it."""


@with_fast_path
def normalize_advantages(
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    correction: float = 1,
    epsilon: float = 1e-8,
    epsilon_mode: str = "add",
    group: distributed.ProcessGroup | str | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    r"""Advantages minus their mean, divided by their standard deviation, over all valid elements together.

        n = number of valid elements,  μ = Σ A / n,  σ² = Σ (A − μ)² / (n − correction)

        epsilon_mode    result               as in
        "add"           (A − μ) / (σ + ε)        Stable-Baselines3, CleanRL (correction 1, ε = 1e-8)
        "floor"         (A − μ) / max(σ, ε)      RLlib (correction 0, ε = 1e-4), TorchRL (correction 1, ε = 1e-6)
        "variance"      (A − μ) / √(σ² + ε)      verl, TRL (correction 1, ε = 1e-8)

    The result is finite wherever the valid elements are:

    * Where σ is not defined (n <= correction: one element, with correction 1), elements are left as they are, as
      Stable-Baselines3 and TorchRL do.
    * Elements that are all equal yield 0, with ε = 0 too.
    * Without any valid element all are masked, and yield 0.

    A valid element that is NaN or infinite makes all valid ones NaN. Statistics and arithmetic are float64, taken from
    differences (Chan, Golub and LeVeque 1979, http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf):
    a mean far larger than the spread costs no precision.

    Args:
        advantages: A, of any shape, usually [num_envs, num_steps] or [num_steps, num_envs], and of any unit; float32,
            bfloat16, float16, or float64 (not on the triton backend). Any strides; copied only if neither dimensions
            nor memory order can be merged into two.
        mask: Nonzero where an element is valid, shaped like `advantages`; bool, uint8 or floating point. Masked
            elements do not count, whatever they hold, and yield 0.
        correction: What the variance's divisor is less than n, finite and >= 0: 1 unbiased, 0 of the population.
        epsilon: ε, finite and >= 0.
        epsilon_mode: Where ε goes, see above.
        group: Take the statistics over all ranks of this process group, ``"world"`` for the default one; None for this
            process alone. Every rank of the group must call, be its tensor empty; shapes may differ. One collective of
            three numbers per rank, merged in the order of ranks: on equal devices and backends all ranks use the same
            bits.
        out: Preallocated result, shaped like `advantages`, floating point, any strides. May be `advantages` itself (the
            call then works in place); must not overlap it otherwise, nor `mask`.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device. Where `advantages`
            requires grad, and under torch.compile, the operations are PyTorch's, whatever the backend.

    Returns:
        The normalised advantages, float32 (float64 if `advantages` is). Differentiable, through μ and σ too, if
        `advantages` requires grad (without `group`).

    Raises:
        TypeError: An argument's type or dtype is not one of the above.
        ValueError: A shape, device or value is not, or `group` goes together with advantages that require grad.
        BackendUnavailableError: The backend asked for cannot run here.

    Example:
        >>> normalize_advantages(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[-1.,  0.,  1.]])
    """
    check.check_tensor("advantages", advantages, check.REAL_DTYPES)
    if mask is not None:
        check.check_tensor("mask", mask, check.FLAG_DTYPES)
        check.check_same_shape("mask", mask, advantages, "advantages")
    rule = check_rule(correction, epsilon, epsilon_mode)
    differentiable = advantages.requires_grad and torch.is_grad_enabled()
    exchange = None if group is None else partial(gather, group=check_group(group, differentiable))
    if out is not None:
        check_out(out, advantages, mask)
    dtype = torch.float64 if advantages.dtype == torch.float64 else torch.float32
    compiling = torch.compiler.is_compiling()
    chosen = None if compiling else choose(backend, advantages.device)
    if chosen is None or differentiable:
        result = evaluate(advantages, mask, rule, exchange).to(dtype)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty_like(advantages, dtype=dtype)
    run(chosen, advantages.detach(), mask, out, rule, exchange)
    return out


def run(
    backend: Backend,
    advantages: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    rule: Rule,
    exchange: Exchange | None,
) -> None:
    """Fill `out` by a backend, which takes matrices."""
    streams = [advantages, out] if mask is None else [advantages, mask, out]
    values, *flags, result = as_matrices(streams) or [x.contiguous().view(1, -1) for x in streams]
    backend.normalize(Task(values, flags[0] if flags else None, result, rule), exchange)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result.view(out.shape))


def gather(own: torch.Tensor, group: Any) -> torch.Tensor:
    """The rows of all ranks, in their order."""
    every = own.new_empty((distributed.get_world_size(group), own.shape[1]))
    all_gather(every, own, group=group)
    return every


def check_rule(correction: Any, epsilon: Any, epsilon_mode: Any) -> Rule:
    """The rule by which elements are normalised."""
    if epsilon_mode not in EPSILON_MODES:
        raise ValueError(f"epsilon_mode: got {epsilon_mode!r}, expected one of {', '.join(EPSILON_MODES)}")
    number = check.check_number("epsilon", epsilon, 0.0, math.inf)
    added, floor, inside = (number if epsilon_mode == mode else 0.0 for mode in EPSILON_MODES)
    return Rule(check.check_number("correction", correction, 0.0, math.inf), added, floor, inside)


def check_group(group: Any, differentiable: bool) -> Any:
    """A process group of which this process is a member."""
    if differentiable:
        raise ValueError(
            "group: got one together with advantages that require grad, expected them detached, "
            "since no gradient crosses ranks"
        )
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError(f"group: got {group!r} without torch.distributed, expected it initialised, or None")
    if group == "world":
        return distributed.group.WORLD
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"group: got {group!r}, expected a torch.distributed.ProcessGroup with this process in it, 'world' or None"
        )
    return group


def check_out(out: Any, advantages: torch.Tensor, mask: torch.Tensor | None) -> None:
    """A tensor to write to: `advantages` itself, or memory apart from all arguments."""
    check.check_out_tensor("out", out, advantages)
    if torch.compiler.is_compiling():
        return
    same = (out.data_ptr(), out.stride(), out.dtype) == (advantages.data_ptr(), advantages.stride(), advantages.dtype)
    others = [x for x in (None if same else advantages, mask) if x is not None]
    check.check_apart([("out", out)], others)
