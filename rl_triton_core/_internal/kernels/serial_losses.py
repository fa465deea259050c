"""The losses in loops that Numba compiles, in three steps for a span of elements.

`evaluate_heads` turns what the network gives into log-probability, entropy and KL; `evaluate_terms` these into terms
and derivatives; `write_gradients` these into gradients. Between them, numbers are in scratch memory, a row for each
kind. The cpu backend binds the equations. What is absent is an array of size 0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rl_triton_core._internal.loss_equations import stand_in

OLD, ADVANTAGE, REFERENCE, VALUE, TARGET, OLD_VALUE, WEIGHT, LOG_PROB, ENTROPY, KL = range(10)
BY_LOG_PROB, BY_ENTROPY, BY_KL, BY_VALUE, RATIO = range(10, 15)
ROWS, STATES = 15, 7
"""The rows of scratch memory."""
PEAK, OLD_PEAK = 5, 6
"""Rows of a distribution's state, after its sums."""
WEIGHT_SUM, MOMENTS, LEAST, LARGEST, TOTALS = 8, 9, 13, 14, 15
"""Of a span's results: sums of the terms come first, then of the weights and of four moments, then extremes."""

compute_terms = sums = readout = slopes = kl_sums = kl = kl_slopes = multiply_or_zero = stand_in
action_at = action_exists = peak_of = stand_in


@intrinsic
def float_of_bits(context: Any, bits: Any) -> Any:
    """The float32 that has these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(context: Any, number: Any) -> Any:
    """The bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


def select(condition, chosen, otherwise):
    """The primitive of equations."""
    return chosen if condition else otherwise


def exp_float32(x):
    """The primitive of equations, in operations that vector instructions have (Cephes, expf)."""
    bounded = 89.0 if x > 89.0 else (x if x > -104.0 else -104.0)
    n = (bounded * 1.44269504 + 12582912.0) - 12582912.0
    r = (bounded - n * 0.693359375) + n * 2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * (r * r) + r + 1.0
    whole = np.int32(n)
    half = whole >> 1
    result = p * float_of_bits(np.int32((half + 127) << 23)) * float_of_bits(np.int32((whole - half + 127) << 23))
    return result if x == x else x


def log_float32(x):
    """The primitive of equations for numbers of at least 1, likewise (Cephes, logf)."""
    bits = bits_of_float(x)
    above = np.int32((bits & 0x7FFFFF) > 0x3504F3)  # the mantissa is more than √2
    n = np.float32((bits >> 23) - 127 + above)
    f = float_of_bits(np.int32((bits & 0x7FFFFF) + ((127 - above) << 23))) - 1.0
    p = 7.0376836292e-2 * f - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    square = f * f
    result = f + (p * f * square + (n * -2.12194440e-4 - 0.5 * square)) + n * 0.693359375
    return result if x < 3.4e38 else x


def exp_float64(x):
    """The primitive of equations."""
    return math.exp(x)


def log_float64(x):
    """The primitive of equations."""
    return math.log(x)


def weighted_moments(values, flags, weights):
    """Sum of the weights, and mean and M2 of the values, from differences to one of them."""
    count, total, squares, pivot = 0.0, 0.0, 0.0, 0.0
    for i in range(len(values)):
        if weight_of(flags, weights, i) != 0:
            pivot = values[i]
            break
    for i in range(len(values)):
        weight = weight_of(flags, weights, i)
        count += weight
        total += weight * (values[i] - pivot) if weight != 0 else 0.0
    shift = total / count if count > 0 else 0.0
    for i in range(len(values)):
        weight = weight_of(flags, weights, i)
        deviation = values[i] - pivot - shift
        squares += weight * deviation * deviation if weight != 0 else 0.0
    return count, pivot + shift, squares


def weight_of(flags, weights, i):
    """How much an element counts."""
    if len(weights):
        return weights[i]
    return 0.0 if len(flags) and flags[i] == 0 else 1.0


def read_streams(streams, sequences, scaling, first, count, scratch):
    """Read what there is one of per element: 0 if absent. A masked element has weight 0."""
    old, advantages, reference, values, targets, old_values, flags, weights = streams
    offsets, scale, length, per_sequence = sequences
    subtracted, factor = scaling
    read_stream(old, first, count, scratch[OLD])
    read_stream(reference, first, count, scratch[REFERENCE])
    read_stream(values, first, count, scratch[VALUE])
    read_stream(targets, first, count, scratch[TARGET])
    read_stream(old_values, first, count, scratch[OLD_VALUE])
    for i in range(count):
        scratch[WEIGHT, i] = weight_of(flags, weights, first + i)
    if per_sequence or len(advantages) == 0:
        scratch[ADVANTAGE, :count] = 0.0
    else:
        for i in range(count):
            scratch[ADVANTAGE, i] = (advantages[first + i] - subtracted) * factor
    if per_sequence or len(scale):
        sequence = np.searchsorted(offsets, first, side="right") - 1 if len(offsets) else first // length
        for i in range(count):
            while first + i >= (offsets[sequence + 1] if len(offsets) else (sequence + 1) * length):
                sequence += 1
            if per_sequence:
                scratch[ADVANTAGE, i] = advantages[sequence]
            if len(scale):
                scratch[WEIGHT, i] *= scale[sequence]


def read_stream(stream, first, count, row):
    """Read one stream."""
    if len(stream):
        for i in range(count):
            row[i] = stream[first + i]
    else:
        row[:count] = 0.0


def evaluate_heads(network, old_network, actions, streams, sequences, scaling, first, count, scratch, state):
    """Log-probability, entropy and KL of each element, over distributions side by side."""
    xs, y = network
    old_xs, old_y = old_network
    read_streams(streams, sequences, scaling, first, count, scratch)
    scratch[LOG_PROB : KL + 1, :count] = 0.0
    for part in range(len(xs)):
        x, old_x = xs[part], old_xs[part]
        width = x.shape[1]
        for i in range(count):
            if scratch[WEIGHT, i] == 0:
                continue
            row, old_row = x[first + i], old_x[first + i]
            row_y, old_row_y = row_of(y, first + i, row), row_of(old_y, first + i, old_row)
            peak, old_peak = peak_of(row), peak_of(old_row)
            a, b, c, d, e = 0.0, 0.0, 0.0, 0.0, 0.0
            for j in range(width):
                s = sums(row[j], row_y[j], action_at(actions, first + i, part, j), peak)
                t = kl_sums(row[j], row_y[j], old_row[j], old_row_y[j], peak, old_peak)
                a, b, c, d, e = a + s[0], b + s[1], c + s[2], d + t[0], e + t[1]
            state[part, 0, i], state[part, 1, i], state[part, 2, i] = a, b, c
            state[part, 3, i], state[part, 4, i] = d, e
            state[part, PEAK, i], state[part, OLD_PEAK, i] = peak, old_peak
            log_prob, entropy = readout((a, b, c))
            scratch[LOG_PROB, i] += log_prob if action_exists(actions, first + i, part, width) else np.nan
            scratch[ENTROPY, i] += entropy
            scratch[KL, i] += kl((a, b, c), (d, e))


def largest_of(row):
    """The largest of some numbers."""
    peak = row[0]
    for j in range(1, len(row)):
        peak = max(peak, row[j])
    return peak


def zero_of(row):
    """A zero of their type."""
    return row.dtype.type(0)


def is_chosen(actions, i, part, j):
    """Whether an action is this one."""
    return actions[i, part] == j


def is_in_range(actions, i, part, width):
    """Whether an action is one of those that there are."""
    return 0 <= actions[i, part] < width


def read_action(actions, i, part, j):
    """The action in this dimension."""
    return actions[i, j]


def is_any(actions, i, part, width):
    """An action that is no index always exists."""
    return True


def no_kl_sums(x, y, old_x, old_y, peak, old_peak):
    """Without an old network."""
    return 0.0, 0.0


def no_kl(total, kl_total):
    """Without an old network."""
    return 0.0


def no_kl_slopes(x, y, old_x, old_y, peak, old_peak, total, kl_total):
    """Without an old network."""
    return 0.0, 0.0


def evaluate_terms(scratch, count, coefficients, share, totals):
    """Terms of each element, added up, and derivatives of the loss."""
    a0, a1, a2, a3, a4, a5 = np.float64(0), np.float64(0), np.float64(0), np.float64(0), np.float64(0), np.float64(0)
    a6, a7, a8, a9, a10 = np.float64(0), np.float64(0), np.float64(0), np.float64(0), np.float64(0)
    a11, a12 = np.float64(0), np.float64(0)
    for i in range(count):
        weight = scratch[WEIGHT, i]
        valid = weight != 0
        w = np.float64(weight)
        target = np.float64(scratch[TARGET, i])
        error = target - np.float64(scratch[VALUE, i])
        terms, slopes = compute_terms(
            (scratch[LOG_PROB, i], scratch[ENTROPY, i], scratch[KL, i]),
            scratch[OLD, i],
            scratch[ADVANTAGE, i],
            scratch[REFERENCE, i],
            scratch[VALUE, i],
            scratch[TARGET, i],
            scratch[OLD_VALUE, i],
            coefficients,
        )
        a0 += w * terms[0] if valid else np.float64(0)
        a1 += w * terms[1] if valid else np.float64(0)
        a2 += w * terms[2] if valid else np.float64(0)
        a3 += w * terms[3] if valid else np.float64(0)
        a4 += w * terms[4] if valid else np.float64(0)
        a5 += w * terms[5] if valid else np.float64(0)
        a6 += w * terms[6] if valid else np.float64(0)
        a7 += w * terms[7] if valid else np.float64(0)
        a8 += w
        a9 += w * target if valid else np.float64(0)
        a10 += w * target * target if valid else np.float64(0)
        a11 += w * error if valid else np.float64(0)
        a12 += w * error * error if valid else np.float64(0)
        scale = weight * share
        scratch[BY_LOG_PROB, i] = scale * slopes[0] if valid else 0.0
        scratch[BY_ENTROPY, i] = scale * slopes[1] if valid else 0.0
        scratch[BY_KL, i] = scale * slopes[2] if valid else 0.0
        scratch[BY_VALUE, i] = scale * slopes[3] if valid else 0.0
        scratch[RATIO, i] = terms[7]
    find_extremes(scratch, count, totals)
    totals[0] = a0
    totals[1] = a1
    totals[2] = a2
    totals[3] = a3
    totals[4] = a4
    totals[5] = a5
    totals[6] = a6
    totals[7] = a7
    totals[8] = a8
    totals[9] = a9
    totals[10] = a10
    totals[11] = a11
    totals[12] = a12


def row_of(y, i, x):
    """An element's row of y, which may have one for all; that of x if there is no y."""
    return x if len(y) == 0 else y[i if len(y) > 1 else 0]


def find_extremes(scratch, count, totals):
    """The least and the largest ratio of elements that count."""
    totals[LEAST], totals[LARGEST] = np.inf, -np.inf
    for i in range(count):
        if scratch[WEIGHT, i] != 0:
            totals[LEAST] = min(totals[LEAST], scratch[RATIO, i])
            totals[LARGEST] = max(totals[LARGEST], scratch[RATIO, i])


def write_gradients(network, old_network, actions, first, count, scratch, state, gradients, sum_by_y):
    """Derivatives by what the network gave, 0 where masked; and those by y summed, where elements share it."""
    xs, y = network
    old_xs, old_y = old_network
    by_xs, by_y, by_values = gradients
    for i in range(count if len(by_values) else 0):
        by_values[first + i] = scratch[BY_VALUE, i]
    for part in range(len(by_xs)):
        x, old_x, by_x = xs[part], old_xs[part], by_xs[part]
        width = x.shape[1]
        for i in range(count):
            row, old_row = x[first + i], old_x[first + i]
            row_y, old_row_y = row_of(y, first + i, row), row_of(old_y, first + i, old_row)
            by_log_prob, by_entropy, by_kl = scratch[BY_LOG_PROB, i], scratch[BY_ENTROPY, i], scratch[BY_KL, i]
            total = state[part, 0, i], state[part, 1, i], state[part, 2, i]
            kl_total = state[part, 3, i], state[part, 4, i]
            peak, old_peak = state[part, PEAK, i], state[part, OLD_PEAK, i]
            valid = scratch[WEIGHT, i] != 0
            for j in range(width):
                action = action_at(actions, first + i, part, j)
                slope = slopes(row[j], row_y[j], action, peak, total, by_log_prob, by_entropy)
                k = kl_slopes(row[j], row_y[j], old_row[j], old_row_y[j], peak, old_peak, total, kl_total)
                if len(by_x):
                    by_x[first + i, j] = slope[0] + multiply_or_zero(by_kl, k[0]) if valid else 0.0
                if len(by_y):
                    by_y[first + i, j] = slope[1] + multiply_or_zero(by_kl, k[1]) if valid else 0.0
                if len(sum_by_y):
                    sum_by_y[j] += slope[1] + multiply_or_zero(by_kl, k[1]) if valid else 0.0
