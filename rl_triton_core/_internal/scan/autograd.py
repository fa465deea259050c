"""Calls that are differentiated or transformed: the equations in PyTorch, the scan by a backend.

The scan is linear in its state, so all of its derivatives are scans: those of forward mode in the same direction,
those of reverse mode in the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from rl_triton_core._internal.arguments.validation import is_traced, is_transformed
from rl_triton_core._internal.equations.primitives import gated_product, read_primals
from rl_triton_core._internal.scan.problem import Problem, Results, run_backend
from rl_triton_core._internal.scan.recurrence import LINEAR_FORWARD
from rl_triton_core._internal.scan.reference import evaluate_recurrence, scan_serially


def needs_graph(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether results have derivatives, or a transformation of torch.func is at work."""
    if not is_traced() and is_transformed():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def solve_with_graph(problem: Problem, wanted: Sequence[bool], backend: str | None) -> Results:
    """Compute a problem's wanted results with a graph."""
    traced = is_traced()
    scan = partial(linear_scan, backend=backend or "") if traced else partial(differentiable_scan, backend=backend)
    results = evaluate_recurrence(problem, torch.float64 if backend == "reference" else problem.dtype, scan, True)
    return tuple(
        problem.restore_shape(result).to(problem.dtype) if want else None
        for result, want in zip(results, wanted, strict=True)
    )


def scan_by_backend(alpha: torch.Tensor, beta: torch.Tensor, backend: str | None) -> torch.Tensor:
    """A[t] = α[t] + β[t]·A[t-1] along dimension 1 of [groups, steps, lanes]."""
    out = torch.empty_like(alpha)
    run_backend(Problem(LINEAR_FORWARD, alpha, (alpha, beta), (out,), time_dim=1), backend or None)
    return out


def shift_steps(x: torch.Tensor, by: int) -> torch.Tensor:
    """x[t - by], 0 where there is none; `by` is 1 or -1."""
    zero = torch.zeros_like(x[:, :1])
    return torch.cat([zero, x[:, :-1]] if by > 0 else [x[:, 1:], zero], dim=1)


# -- for torch.compile ------------------------------------------------------------------------------------------------


@torch.library.custom_op("rl_triton_core::linear_scan", mutates_args=())
def linear_scan(alpha: torch.Tensor, beta: torch.Tensor, backend: str) -> torch.Tensor:
    """The scan as an operator, which torch.compile takes as it is."""
    return scan_by_backend(alpha, beta, backend)


@linear_scan.register_fake
def _(alpha: torch.Tensor, beta: torch.Tensor, backend: str) -> torch.Tensor:
    return torch.empty_like(alpha)


def keep_tensors(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keep what derivatives need: β and the states."""
    _, beta, ctx.backend = inputs
    ctx.save_for_backward(beta, output)
    ctx.save_for_forward(beta, output)


def compute_gradient(scan: Any, ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    """λ[t] = ∂L/∂A[t] + β[t+1]·λ[t+1];  ∂L/∂α = λ;  ∂L/∂β[t] = λ[t]·A[t-1]."""
    beta, state = ctx.saved_tensors
    alpha_grad = scan(grad.flip(1), shift_steps(beta, -1).flip(1), ctx.backend).flip(1)
    return alpha_grad, gated_product(alpha_grad, shift_steps(state, 1)), None


linear_scan.register_autograd(partial(compute_gradient, linear_scan), setup_context=keep_tensors)

# -- for everything else ----------------------------------------------------------------------------------------------


class DifferentiableScan(torch.autograd.Function):
    """The scan with its derivatives in both modes, and over a further dimension."""

    @staticmethod
    def forward(alpha: torch.Tensor, beta: torch.Tensor, backend: str | None) -> torch.Tensor:
        """Compute the states."""
        return scan_by_backend(alpha, beta, backend)

    setup_context = staticmethod(keep_tensors)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Compute the gradient."""
        return compute_gradient(differentiable_scan, ctx, grad)

    @staticmethod
    def jvp(ctx: Any, alpha: torch.Tensor, beta: torch.Tensor, _: None) -> torch.Tensor:
        """Ȧ[t] = α̇[t] + β̇[t]·A[t-1] + β[t]·Ȧ[t-1]."""
        with forward_ad._set_fwd_grad_enabled(True):
            factor, state = read_primals(ctx)
            return differentiable_scan(alpha + gated_product(beta, shift_steps(state, 1)), factor, ctx.backend)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], alpha: torch.Tensor, beta: torch.Tensor, backend: str | None) -> Any:
        """The further dimension becomes one of the groups."""
        alpha, beta = (
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip((alpha, beta), in_dims, strict=False)
        )
        return differentiable_scan(alpha.flatten(0, 1), beta.flatten(0, 1), backend).view(alpha.shape), 0


def differentiable_scan(alpha: torch.Tensor, beta: torch.Tensor, backend: str | None) -> torch.Tensor:
    """A[t] = α[t] + β[t]·A[t-1] along dimension 1 of [groups, steps, lanes]."""
    if is_legacy_batchedtensor(alpha):  # of gradients of a batch, which have no rules of a function's own
        return scan_serially(alpha, beta)
    states: torch.Tensor = DifferentiableScan.apply(alpha, beta, backend)  # type: ignore[no-untyped-call]
    return states
