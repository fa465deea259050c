"""The primitives of equations in Triton, and what makes a Triton function of an equation."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from rl_triton_core._internal.equations.compile import bind_names
from rl_triton_core._internal.equations.primitives import PRIMITIVES


@triton.jit
def select(condition, chosen, otherwise):
    """The primitive of equations."""
    return tl.where(condition, chosen, otherwise)


@triton.jit
def minimum(x, bound):
    """The primitive of equations; NaN stays."""
    return tl.where(x > bound, bound, x)


@triton.jit
def exp(x):
    """The primitive of equations, to one unit in the last place: errors of a faster one add up over the steps.

    exp(x) = 2ⁿ·exp(r), where n·ln 2 is subtracted in two parts and exp(r) is a polynomial (that of Cephes, expf).
    """
    x = tl.where(x > 89.0, 89.0, tl.where(x < -104.0, -104.0, x))
    n = tl.floor(x * 1.44269504 + 0.5)
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, x))
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(r, p, 8.3334519073e-3)
    p = tl.fma(r, p, 4.1665795894e-2)
    p = tl.fma(r, p, 1.6666665459e-1)
    p = tl.fma(r, p, 5.0000001201e-1)
    half = n.to(tl.int32) >> 1
    return (1.0 + tl.fma(r * r, p, r)) * power_of_2(half) * power_of_2(n.to(tl.int32) - half)


@triton.jit
def power_of_2(n):
    """2ⁿ for -127 < n < 128, from its bits."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


def compile_equation(function: Any) -> Any:
    """A plain function of primitives as a Triton function.

    The interpreter looks for `tl` in its module, the compiler for the names in annotations.
    """
    primitives = {name: globals()[name] for name in PRIMITIVES}
    return triton.jit(bind_names(function, **primitives, tl=tl, Any=tl.constexpr(Any)))
