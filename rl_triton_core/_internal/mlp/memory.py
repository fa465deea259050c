"""Memory by addresses in compiled code: arrays, and slices of them, take Numba long to compile."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
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


WIDTH = 16 if get_host_cpu_features().get("avx512f") else 8
"""Numbers of a vector."""


def make_multiply(rows: int, vectors: int) -> Any:
    """A function that adds a·b to so many rows and vectors of c, which stay in registers meanwhile.

    It takes the addresses of a, b and c, strides of a's rows and columns in numbers, and of b's and c's rows in bytes.
    """
    real, vector = ir.FloatType(), ir.VectorType(ir.FloatType(), WIDTH)
    first, nothing = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH), ir.Constant(vector, ir.Undefined)
    places = [(r, v) for r in range(rows) for v in range(vectors)]

    @intrinsic
    def multiply(
        context: Any, a: Any, row: Any, column: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, n: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            a, row, column, b, b_stride, c, c_stride, n = values
            integer = n.type

            def find(start: Any, kind: Any, *terms: tuple[Any, Any]) -> Any:
                for pair in terms:
                    x, y = (ir.Constant(integer, z) if isinstance(z, int) else z for z in pair)
                    start = builder.add(start, builder.mul(x, y))
                return builder.inttoptr(start, kind.as_pointer())

            targets = [find(c, vector, (c_stride, r), (4 * WIDTH, v)) for r, v in places]
            sums = [cgutils.alloca_once_value(builder, builder.load(x, align=4)) for x in targets]
            kind = ir.FunctionType(vector, [vector] * 3)
            add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{WIDTH}f32")
            with cgutils.for_range(builder, n, intp=integer) as loop:
                k, step = loop.index, builder.mul(column, ir.Constant(integer, 4))
                given = [builder.load(find(b, vector, (b_stride, k), (4 * WIDTH, v)), align=4) for v in range(vectors)]
                numbers = [builder.load(find(a, real, (row, 4 * r), (step, k))) for r in range(rows)]
                one = [builder.insert_element(nothing, x, ir.Constant(ir.IntType(32), 0)) for x in numbers]
                spread = [builder.shuffle_vector(x, nothing, first) for x in one]
                for (r, v), x in zip(places, sums, strict=True):
                    builder.store(builder.call(add, [spread[r], given[v], builder.load(x)]), x)
            for x, target in zip(sums, targets, strict=True):
                builder.store(builder.load(x), target, align=4)

        return types.void(*[types.int64] * 8), generate

    return multiply


MOST = 4 if WIDTH == 16 else 2
"""Vectors of a block, for which there are registers."""
large_block, small_block, narrow_block = make_multiply(4, MOST), make_multiply(4, 2), make_multiply(4, 1)
long_row, short_row = make_multiply(1, MOST), make_multiply(1, 1)
