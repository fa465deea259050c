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


HALF, REAL, VECTOR = WIDTH // 2, ir.FloatType(), ir.VectorType(ir.FloatType(), WIDTH)
ORDERS = [0] * WIDTH, *([k + r // 2 + r % 2 * WIDTH for r in range(WIDTH)] for k in (0, HALF))
SPREAD, *IN_TURNS = (ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), x) for x in ORDERS)
"""Orders of numbers: the first one everywhere; those of two vectors in turns, of their first and second halves."""


def find(builder: Any, start: Any, *terms: tuple[Any, Any], kind: Any = VECTOR) -> Any:
    """A pointer to what is behind an address by these products."""
    for pair in terms:
        x, y = (ir.Constant(start.type, z) if isinstance(z, int) else z for z in pair)
        start = builder.add(start, builder.mul(x, y))
    return builder.inttoptr(start, kind.as_pointer())


@intrinsic
def transpose(context: Any, source: Any, stride: Any, target: Any, target_stride: Any) -> Any:
    """Transpose a block of as many rows as a vector has numbers; strides are those of rows in bytes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, stride, target, target_stride = values
        rows = [builder.load(find(builder, source, (stride, r)), align=4) for r in range(WIDTH)]
        for _ in range(HALF.bit_length()):
            pairs = zip(rows[:HALF], rows[HALF:], strict=True)
            rows = [builder.shuffle_vector(*pair, order) for pair in pairs for order in IN_TURNS]
        for r, x in enumerate(rows):
            builder.store(x, find(builder, target, (target_stride, r)), align=4)

    return types.void(*[types.int64] * 4), generate


def make_multiply(vectors: int) -> Any:
    """A function that adds a·b to four rows and so many vectors of c, which stay in registers meanwhile.

    It takes the addresses of a, b and c, strides of a's rows and columns in numbers, and of b's and c's rows in bytes.
    """
    nothing, places = ir.Constant(VECTOR, ir.Undefined), [(r, v) for r in range(4) for v in range(vectors)]

    @intrinsic
    def multiply(
        context: Any, a: Any, row: Any, column: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, n: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            a, row, column, b, b_stride, c, c_stride, n = values
            targets = [find(builder, c, (c_stride, r), (4 * WIDTH, v)) for r, v in places]
            sums = [cgutils.alloca_once_value(builder, builder.load(x, align=4)) for x in targets]
            kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
            add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{WIDTH}f32")
            with cgutils.for_range(builder, n, intp=n.type) as loop:
                k, step = loop.index, builder.mul(column, ir.Constant(n.type, 4))
                given = [builder.load(find(builder, b, (b_stride, k), (4 * WIDTH, v)), align=4) for v in range(vectors)]
                numbers = [builder.load(find(builder, a, (row, 4 * r), (step, k), kind=REAL)) for r in range(4)]
                one = [builder.insert_element(nothing, x, ir.Constant(ir.IntType(32), 0)) for x in numbers]
                spread = [builder.shuffle_vector(x, nothing, SPREAD) for x in one]
                for (r, v), x in zip(places, sums, strict=True):
                    builder.store(builder.call(add, [spread[r], given[v], builder.load(x)]), x)
            for x, target in zip(sums, targets, strict=True):
                builder.store(builder.load(x), target, align=4)

        return types.void(*[types.int64] * 8), generate

    return multiply


MOST = 4 if WIDTH == 16 else 2
"""Vectors of a block, for which there are registers."""
large_block, small_block, narrow_block = map(make_multiply, (MOST, 2, 1))
