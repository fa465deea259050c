"""The operations that equations may use beyond ``+ - * /`` and comparisons, as PyTorch has them.

Compiled backends have their own.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.autograd import forward_ad


def select(condition: Any, chosen: Any, otherwise: Any) -> Any:
    """`chosen` where the condition holds, else `otherwise`. What is not selected leaves no trace, NaN included."""
    return apply_to_tensors(select_elements, condition, chosen, otherwise)


def select_elements(condition: torch.Tensor, chosen: Any, otherwise: Any) -> torch.Tensor:
    """`select` of tensors and numbers. PyTorch would round two numbers to float32."""
    if not isinstance(chosen, torch.Tensor) and not isinstance(otherwise, torch.Tensor):
        chosen = torch.ones((), dtype=torch.float64, device=condition.device) * chosen
    return torch.where(condition, chosen, otherwise)


def minimum(x: Any, bound: Any) -> Any:
    """The smaller of a stream and a number; NaN where the stream is."""
    return select(x > bound, bound, x)


def multiply_or_zero(x: Any, y: Any) -> Any:
    """The product x·y, which is 0 where x is, even if y is infinite."""
    return select(x == 0.0, 0.0, x * y)


def exp(x: Any) -> Any:
    """The exponential function. Where it overflows its gradient is 0, not infinite: a clip hides the value, not 0·∞."""
    return apply_to_tensors(bounded_exp, x)


def bounded_exp(x: torch.Tensor) -> torch.Tensor:
    """`exp` of a tensor."""
    if not x.requires_grad:
        return torch.exp(x)
    over = torch.exp(x.detach()).isinf()
    return torch.where(over, torch.inf, torch.exp(torch.where(over, 0, x)))


def log(x: Any) -> Any:
    """The natural logarithm of numbers of at least 1."""
    return apply_to_tensors(torch.log, x)


def safe_sqrt(x: Any) -> Any:
    """√x, whose gradient at 0 is 0."""
    return torch.where(x == 0, 0, torch.sqrt(torch.where(x == 0, 1, x)))


PRIMITIVES = (select, exp, log, safe_sqrt)
"""What a backend has of its own; `minimum` and `multiply_or_zero` are made of these."""


def gated_product(factor: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The product, 0 where the factor is 0. Its derivative by the factor is the state, there too if that is finite."""
    return factor * torch.where((factor == 0) & ~state.isfinite(), 0, state)


# -- differentiated equations -----------------------------------------------------------------------------------------


class GatedProduct(torch.autograd.Function):
    """A product whose gradient by a factor is 0 where no gradient arrives, even if the other factor is NaN."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep both factors."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Multiply the gradient by the other factor."""
        x, y = ctx.saved_tensors
        return gated_product(grad, y), gated_product(grad, x)


def read_primals(ctx: Any) -> list[torch.Tensor]:
    """What was saved, without tangents of this level. Those of outer levels stay, where PyTorch is told to keep any."""
    return [forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]  # type: ignore[no-untyped-call]


class TransformableProduct(GatedProduct):
    """The same with what forward mode and vmap need, which torch.compile does not take."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep both factors, for both modes."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, x_tangent: torch.Tensor, y_tangent: torch.Tensor) -> torch.Tensor:
        """The product rule."""
        with forward_ad._set_fwd_grad_enabled(True):
            x, y = read_primals(ctx)
            return gated_product(x_tangent, y) + gated_product(y_tangent, x)


def multiply_tensors(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The product of two tensors, whose gradient is gated."""
    product: Any = GatedProduct if torch.compiler.is_compiling() else TransformableProduct
    result: torch.Tensor = product.apply(x, y)
    return result


def lift(function: Any) -> Any:
    """An operator of tensors as one of operands."""
    return lambda self, other: Operand(function(self.tensor, unwrap_operand(other)))


class Operand:
    """A tensor in an equation that is differentiated: products of two are gated."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __mul__(self, other: Any) -> Operand:
        if isinstance(other, Operand):
            return Operand(multiply_tensors(self.tensor, other.tensor))
        return Operand(self.tensor * other)

    def __neg__(self) -> Operand:
        return Operand(-self.tensor)

    __add__, __sub__, __truediv__ = map(lift, (operator.add, operator.sub, operator.truediv))
    __or__, __and__, __lt__, __le__ = map(lift, (operator.or_, operator.and_, operator.lt, operator.le))
    __gt__, __ge__, __eq__, __ne__ = map(lift, (operator.gt, operator.ge, operator.eq, operator.ne))
    __rsub__, __rtruediv__ = map(lift, (torch.rsub, lambda x, other: other / x))
    __radd__, __rmul__ = __add__, __mul__


def unwrap_operand(x: Any) -> Any:
    """The tensor of an operand; anything else as it is."""
    return x.tensor if isinstance(x, Operand) else x


def apply_to_tensors(function: Any, *arguments: Any) -> Any:
    """Call a function of tensors with operands too, and return an operand if there are any."""
    result = function(*map(unwrap_operand, arguments))
    return Operand(result) if any(isinstance(x, Operand) for x in arguments) else result
