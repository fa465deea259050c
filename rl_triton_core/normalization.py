"""Normalisation of advantages to zero mean and unit variance, over one process or several."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from rl_triton_core._internal.arguments import validation as check
from rl_triton_core._internal.arguments.outputs import check_no_overlap, check_out_tensor
from rl_triton_core._internal.backend import choose_backend, copy_to_host, needs_host
from rl_triton_core._internal.launch.fast_path import with_fast_path
from rl_triton_core._internal.launch.launcher import mark_numbers
from rl_triton_core._internal.moments import rule as rules
from rl_triton_core._internal.moments.reference import normalize_values
from rl_triton_core._internal.moments.rule import Exchange, Rule, Task
from rl_triton_core._internal.scan.autograd import needs_graph


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
    r"""Subtract the mean from advantages and divide by their standard deviation, over all valid elements together.

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
        mask: Nonzero where an element is valid, shaped like `advantages`; bool, integer, or floating point 0 and 1.
            Masked elements do not count, whatever they hold, and yield 0. None: everywhere.
        correction: The variance's divisor is n minus this, a finite number >= 0: 1 for the unbiased variance, 0 for
            that of the population.
        epsilon: ε, a finite number >= 0.
        epsilon_mode: Where ε goes: ``"add"``, ``"floor"`` or ``"variance"``, as in the table.
        group: Take the statistics over all ranks of this process group, ``"world"`` for the default one; None for this
            process alone. Every rank of the group must call, even with an empty tensor; shapes may differ. One
            collective of three numbers per rank, merged in the order of ranks: on equal devices and backends all ranks
            use the same bits.
        out: Preallocated result, shaped like `advantages`, floating point, any strides. May be `advantages` itself (the
            call then works in place); must not overlap it otherwise, nor `mask`.
        backend: ``"triton"``, ``"cpu"``, ``"reference"``; None chooses by the tensors' device. Where `advantages`
            requires grad, and under torch.compile, the operations are PyTorch's, whatever the backend.

    Returns:
        The normalised advantages, float32 (float64 if `advantages` is). Differentiable, through μ and σ too, if
        `advantages` requires grad (without `group`).

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape, device or value is wrong, or `group` goes together with advantages that require grad.
        BackendUnavailableError: The backend asked for cannot run here.

    Example:
        >>> normalize_advantages(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[-1.,  0.,  1.]])
    """
    check.check_tensor("advantages", advantages)
    if mask is not None:
        check.check_tensor("mask", mask, check.FLAG_DTYPES)
        check.check_shape("mask", mask, advantages.shape, "that of advantages", advantages.device)
        check.check_values("normalize_advantages", {}, mask)
    rule = rules.check_rule(correction, epsilon, epsilon_mode)
    exchange = rules.make_exchange(group, needs_graph((advantages,)))
    if out is not None:
        check_out(out, advantages, mask)
    return normalize(advantages, mask, rule, exchange, out, backend)


def normalize(
    advantages: torch.Tensor,
    mask: torch.Tensor | None,
    rule: Rule,
    exchange: Exchange | None,
    out: torch.Tensor | None,
    backend: str | None,
) -> torch.Tensor:
    """Normalise checked advantages by the way that the call needs, into `out` where it is given."""
    traced, device = check.is_traced(), advantages.device
    chosen = None if traced else choose_backend(backend, device)
    if needs_host(device):
        result = normalize(copy_to_host(advantages), copy_to_host(mask), rule, exchange, None, backend).to(device)
        return result if out is None else out.copy_(result)
    dtype = check.find_precision((advantages,))
    if chosen is None or needs_graph((advantages,)):
        result = normalize_values(advantages, mask, rule, exchange).to(dtype)
        return result if out is None else out.copy_(result)
    rule, out = Rule(*mark_numbers(rule)), torch.empty_like(advantages, dtype=dtype) if out is None else out
    streams = [x for x in (advantages.detach(), mask, out) if x is not None]
    values, *flags, written = rules.view_as_matrices(streams) or [x.contiguous().view(1, -1) for x in streams]
    chosen.moments.run(Task(values, flags[0] if flags else None, written, rule), exchange)
    return out if written.data_ptr() == out.data_ptr() else out.copy_(written.view(out.shape))


def check_out(out: Any, advantages: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Check a tensor to write to: `advantages` itself, or memory apart from all arguments."""
    check_out_tensor("out", out, advantages)
    if check.is_traced():
        return
    same = (out.data_ptr(), out.stride(), out.dtype) == (advantages.data_ptr(), advantages.stride(), advantages.dtype)
    others = [x for x in (None if same else advantages, mask) if x is not None]
    check_no_overlap([("out", out)], others)
