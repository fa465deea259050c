"""Memory by addresses in compiled code: arrays, and slices of them, take Numba long to compile."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def make_load(kind: Any, memory: Any) -> Any:
    """A function of an address and an index that reads a number there."""

    @intrinsic
    def load(context: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], memory.as_pointer())
            return builder.load(builder.gep(pointer, [arguments[1]]), align=kind.bitwidth // 8)

        return kind(types.int64, types.int64), generate

    return load


load = make_load(types.float32, ir.FloatType())
load_double = make_load(types.float64, ir.DoubleType())
load_integer = make_load(types.int64, ir.IntType(64))


@intrinsic
def store(context: Any, address: Any, index: Any, number: Any) -> Any:
    """Write a float32 number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.FloatType().as_pointer())
        builder.store(arguments[2], builder.gep(pointer, [arguments[1]]), align=4)

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def call(context: Any, address: Any, arguments: Any) -> Any:
    """Call a compiled function of integers: what is linked instead is compiled again wherever it is called."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        integers = cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(integers))
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), integers)

    return types.void(types.int64, arguments), generate
