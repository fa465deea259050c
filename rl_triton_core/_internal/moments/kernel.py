"""Normalisation by moments, for Triton: moments of each program's tiles, then the merge of all and their application.

Statistics are float64. What crosses programs is (count, mean, M2) in memory of its own; sums have one order per
compiled kernel, and nothing is atomic: equal inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_triton_core._internal.equations.compile import compile_equation
from rl_triton_core._internal.equations.triton import TRITON
from rl_triton_core._internal.moments import rule

at_least, compute_standardizer = (compile_equation(x, TRITON) for x in (rule.at_least, rule.compute_standardizer))


@triton.jit
def locate_tile(tile, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Rows and columns of a tile's elements, and which of them there are."""
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    row = (tile // across).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = (tile % across).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def load_weights(mask, mask_row, mask_column, row, column, inside, WEIGHTED: tl.constexpr):
    """How much a tile's elements count: whether they do, or with `WEIGHTED` as often as floating point masks say."""
    if mask is None:
        return inside
    else:
        weight = tl.load(mask + row * mask_row + column * mask_column, mask=inside, other=0)
        return weight.to(tl.float64) if WEIGHTED and weight.dtype.is_floating() else weight != 0


@triton.jit
def load_elements(values, values_row, values_column, row, column, inside):
    """A tile's elements in float64; 0 where there are none."""
    if values is None:
        return tl.where(inside, 0.0, 0.0).to(tl.float64)
    else:
        x = tl.load(values + row * values_row + column * values_column, mask=inside, other=0)
        return x.to(tl.float32).to(tl.float64)


@triton.jit(do_not_specialize=["tiles"])
def moments(
    values, values_row, values_column, mask, mask_row, mask_column, rows, columns, tiles, parts,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Count, mean and M2 of every program's tiles, from differences to one of their elements, as `serial` has them."""
    count = tl.full([], 0, tl.float64)
    pivot = tl.full([], 0, tl.float64)
    total = tl.full([], 0, tl.float64)
    squares = tl.full([], 0, tl.float64)
    tile = tl.program_id(0)
    while tile < tiles:
        row, column, inside = locate_tile(tile, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
        weight = load_weights(mask, mask_row, mask_column, row, column, inside, WEIGHTED)  # [BLOCK_ROWS, BLOCK_COLUMNS]
        x = load_elements(values, values_row, values_column, row, column, inside)
        if count == 0:
            pivot = tl.max(tl.where(weight != 0, x, float("-inf")))
        deviation = tl.where(weight != 0, x - pivot, 0)
        if weight.dtype.is_floating():
            count += tl.sum(weight)
            total += tl.sum(weight * deviation)
            squares += tl.sum(weight * deviation * deviation)
        else:
            count += tl.sum(weight.to(tl.int32))
            total += tl.sum(deviation)
            squares += tl.sum(deviation * deviation)
        tile += tl.num_programs(0)
    shift = total / tl.where(count > 0, count, 1)
    part = parts + tl.program_id(0) * 3
    tl.store(part, count)
    tl.store(part + 1, tl.where(count > 0, pivot + shift, 0))
    tl.store(part + 2, at_least(0, squares - total * shift))


@triton.jit
def merge_moments(count, mean, m2):
    """Count, mean and M2 of parts taken together, from differences to one of the means; a part may be one element."""
    total = tl.sum(count)
    pivot = tl.max(tl.where(count > 0, mean, float("-inf")))
    deviation = tl.where(count > 0, mean - pivot, 0)
    shift = tl.sum(count * deviation) / tl.where(total > 0, total, 1)
    m2 += tl.where(count > 0, count * (deviation - shift) * (deviation - shift), 0)
    return total, tl.where(total > 0, pivot + shift, 0), tl.sum(m2)


@triton.jit
def merge_parts(parts, num_parts, PARTS: tl.constexpr):
    """Count, mean and M2 of all parts together."""
    part = tl.arange(0, PARTS)  # [PARTS]
    inside = part < num_parts
    count = tl.load(parts + 3 * part, mask=inside, other=0)
    mean = tl.load(parts + 3 * part + 1, mask=inside, other=0)
    m2 = tl.load(parts + 3 * part + 2, mask=inside, other=0)
    return merge_moments(count, mean, m2)


@triton.jit
def merge(parts, num_parts, result, PARTS: tl.constexpr):
    """Count, mean and M2 of all parts together, as one part."""
    count, mean, m2 = merge_parts(parts, num_parts, PARTS)
    tl.store(result, count)
    tl.store(result + 1, mean)
    tl.store(result + 2, m2)


@triton.jit(do_not_specialize=["tiles", "num_parts"])
def standardize(
    values, values_row, values_column, mask, mask_row, mask_column, out, out_row, out_column,
    rows, columns, tiles, parts, num_parts, correction, added, floor, inside_root,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge all parts, and normalise every tile by them: 0 where masked."""
    count, mean, m2 = merge_parts(parts, num_parts, PARTS)
    subtracted, factor = compute_standardizer(count, mean, m2, correction, added, floor, inside_root)
    tile = tl.program_id(0)
    while tile < tiles:
        row, column, inside = locate_tile(tile, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
        valid = load_weights(mask, mask_row, mask_column, row, column, inside, False)
        x = load_elements(values, values_row, values_column, row, column, inside)
        y = tl.where(valid, (x - subtracted) * factor, 0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
        tl.store(out + row * out_row + column * out_column, y, mask=inside)
        tile += tl.num_programs(0)
