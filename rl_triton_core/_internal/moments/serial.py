"""Normalisation by moments in loops that Numba compiles: moments of a span of a matrix, and their application to it.

A span is a range of elements in the order of rows. Where `masked`, `mask` says which count, or if `weighted` how much.
"""

from __future__ import annotations

from functools import partial

from rl_triton_core._internal.equations.numba import compile_and_keep


@compile_and_keep
def find_first_valid(values, masked, mask, first, end):
    """The first element of a span that counts, 0 if none does."""
    columns = values.shape[1]
    for i in range(first, end):
        if not masked or mask[i // columns, i % columns]:
            return float(values[i // columns, i % columns])
    return 0.0


@partial(compile_and_keep, fastmath={"reassoc"})
def compute_moments(values, masked, weighted, mask, first, end, result):
    """Count, mean and M2 of a span, from differences to one of its elements.

    The difference of the sums loses at most a factor of `count` in precision, however large the mean is.
    """
    columns = values.shape[1]
    pivot = find_first_valid(values, masked, mask, first, end)
    count, total, squares = 0.0, 0.0, 0.0
    for row in range(first // columns, (end + columns - 1) // columns):
        left, right = max(first - row * columns, 0), min(end - row * columns, columns)
        x = values[row, left:right]
        if masked:
            counts = mask[row, left:right]
            for j in range(len(x)):
                deviation, weight = x[j] - pivot, float(counts[j])
                if not counts[j]:
                    deviation = 0.0
                elif not weighted:
                    weight = 1.0
                count += weight
                total += weight * deviation
                squares += weight * deviation * deviation
        else:
            count += len(x)
            for j in range(len(x)):
                deviation = x[j] - pivot
                total += deviation
                squares += deviation * deviation
    shift = total / count if count > 0 else 0.0
    result[0] = count
    result[1] = pivot + shift
    result[2] = max(squares - total * shift, 0.0)


@compile_and_keep
def standardize(values, masked, valid, first, end, out, subtracted, factor):
    """(value − subtracted)·factor in a span, 0 where masked."""
    columns = values.shape[1]
    for row in range(first // columns, (end + columns - 1) // columns):
        left, right = max(first - row * columns, 0), min(end - row * columns, columns)
        x, y = values[row, left:right], out[row, left:right]
        if masked:
            counts = valid[row, left:right]
            for j in range(len(x)):
                normalized = (x[j] - subtracted) * factor
                y[j] = normalized if counts[j] else 0.0
        else:
            for j in range(len(x)):
                y[j] = (x[j] - subtracted) * factor
