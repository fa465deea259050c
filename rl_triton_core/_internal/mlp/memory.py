"""Memory by addresses in compiled code: arrays, and slices of them, take Numba long to compile."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rl_triton_core._internal.equations.numba import make_load, make_store

load, load_double, load_integer = map(make_load, (types.float32, types.float64, types.int64))
store = make_store(types.float32)


@intrinsic
def call(context: Any, address: Any, arguments: Any) -> Any:
    """Call a compiled function of integers: what is linked instead is compiled again wherever it is called."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        integers = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(integers))
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), integers)

    return types.void(types.int64, arguments), generate
