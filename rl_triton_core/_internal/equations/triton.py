"""Equations as Triton functions."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from rl_triton_core._internal.equations import primitives
from rl_triton_core._internal.equations.compile import Language, bind_names


@triton.jit
def select(condition, chosen, otherwise):
    """The primitive of equations."""
    return tl.where(condition, chosen, otherwise)


@triton.jit
def safe_sqrt(x):
    """The primitive of equations."""
    return tl.sqrt(x)


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
def binary_exp(x):
    """2ˣ in one instruction of the device, to about two units in the last place."""
    return tl.exp2(x)


@triton.jit
def power_of_2(n):
    """2ⁿ for -127 < n < 128, from its bits."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def log(x):
    """The primitive of equations for numbers of at least 1, to one unit in the last place (Cephes, logf)."""
    bits = x.to(tl.int32, bitcast=True)
    above = ((bits & 0x7FFFFF) > 0x3504F3).to(tl.int32)  # the mantissa is more than √2
    n = ((bits >> 23) - 127 + above).to(tl.float32)
    f = ((bits & 0x7FFFFF) + ((127 - above) << 23)).to(tl.float32, bitcast=True) - 1.0
    p = tl.fma(f, 7.0376836292e-2, -1.1514610310e-1)
    p = tl.fma(p, f, 1.1676998740e-1)
    p = tl.fma(p, f, -1.2420140846e-1)
    p = tl.fma(p, f, 1.4249322787e-1)
    p = tl.fma(p, f, -1.6668057665e-1)
    p = tl.fma(p, f, 2.0000714765e-1)
    p = tl.fma(p, f, -2.4999993993e-1)
    p = tl.fma(p, f, 3.3333331174e-1)
    square = f * f
    result = f + (p * f * square + (n * -2.12194440e-4 - 0.5 * square)) + n * 0.693359375
    return tl.where(x < float("inf"), result, x)


def make_function(function: Any, names: dict[str, Any]) -> Any:
    """A Triton function. The interpreter looks for `tl` in its module, the compiler for the names in annotations."""
    return triton.jit(bind_names(function, **names, tl=tl, Any=tl.constexpr(Any)))


OWN = {primitives.select: select, primitives.exp: exp, primitives.log: log, primitives.safe_sqrt: safe_sqrt}
TRITON = Language(OWN, make_function)
"""Blocks of numbers, whose type literals take in Triton itself."""
BINARY_TRITON = Language(OWN | {primitives.exp: binary_exp}, make_function)
"""Powers of 2 in their place, where one is not the factor of others, and there are very many."""
