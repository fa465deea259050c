"""The losses in loops that Numba compiles, in three steps for a span of elements.

`evaluate_heads` turns network outputs into log-probability, entropy and KL; `evaluate_terms` these into terms
and derivatives; `write_gradients` these into gradients. Between them, numbers are in scratch memory, a row for each
kind. The cpu backend binds the equations. What is absent is an array of size 0.
"""

from __future__ import annotations

import numpy as np

from rl_triton_core._internal.equations.compile import unbound
from rl_triton_core._internal.loss.equations import TERMS, Coefficients

OLD, ADVANTAGE, REFERENCE, VALUE, TARGET, OLD_VALUE, WEIGHT, LOG_PROB, ENTROPY, KL = range(10)
BY_LOG_PROB, BY_ENTROPY, BY_KL, BY_VALUE, RATIO = range(10, 15)
X, Y, ACTION, OLD_X, OLD_Y, BY_X, BY_Y = range(15, 22)
ROWS, STATES = 22, 7
"""The rows of scratch memory. From X on, those of the first tile serve all: what a head takes of one action."""
PEAK, OLD_PEAK = 5, 6
"""Rows of a distribution's state, after its sums."""
TILE = 256
"""Elements of a row of scratch memory."""
HAS_OLD = False
"""Whether there is an old network."""
WEIGHT_SUM = len(TERMS)
MOMENTS = WEIGHT_SUM + 1
LEAST, LARGEST, TOTALS = range(MOMENTS + 4, MOMENTS + 7)
"""Of a span's results: sums of the terms come first, then of the weights and of four moments, then extremes."""

compute_terms = sums = readout = slopes = kl_sums = kl = kl_slopes = multiply_or_zero = unbound
read_actions = action_exists = find_peaks = unbound


def weight_of(flags, weights, i):
    """How much an element counts."""
    if len(weights):
        return weights[i]
    return 0.0 if len(flags) and flags[i] == 0 else 1.0


def fill_zero(rows):
    """Fill rows with zeros."""
    for k in range(len(rows)):
        for i in range(rows.shape[1]):
            rows[k, i] = 0.0


def read_streams(streams, sequences, scaling, low, size, scratch):
    """Read what there is one of per element: 0 if absent. A masked element has weight 0."""
    old, advantages, reference, values, targets, old_values, flags, weights = streams
    offsets, scale, length, per_sequence = sequences
    subtracted, factor = scaling
    read_stream(old, low, size, scratch[OLD])
    read_stream(reference, low, size, scratch[REFERENCE])
    read_stream(values, low, size, scratch[VALUE])
    read_stream(targets, low, size, scratch[TARGET])
    read_stream(old_values, low, size, scratch[OLD_VALUE])
    read_weights(flags, weights, low, size, scratch[WEIGHT])
    if per_sequence or len(advantages) == 0:
        fill_zero(scratch[ADVANTAGE : ADVANTAGE + 1])
    else:
        given = advantages[low : low + size]
        for i in range(size):
            scratch[ADVANTAGE, i] = (given[i] - subtracted) * factor
    if per_sequence or len(scale):
        sequence = np.searchsorted(offsets, low, side="right") - 1 if len(offsets) else low // length
        for i in range(size):
            while low + i >= (offsets[sequence + 1] if len(offsets) else (sequence + 1) * length):
                sequence += 1
            if per_sequence:
                scratch[ADVANTAGE, i] = advantages[sequence]
            if len(scale):
                scratch[WEIGHT, i] *= scale[sequence]


def read_stream(stream, low, size, row):
    """Read one stream."""
    given = stream[low : low + size]
    for i in range(len(given)):
        row[i] = given[i]
    for i in range(len(given), size):
        row[i] = 0.0


def read_weights(flags, weights, low, size, row):
    """Read how much elements count."""
    for i in range(size):
        row[i] = 1.0
    for i in range(size if len(flags) + len(weights) else 0):
        row[i] = weight_of(flags, weights, low + i)


def evaluate_heads(network, old_network, actions, streams, sequences, scaling, first, count, scratch, state):
    """Log-probability, entropy and KL of each element, over distributions side by side."""
    columns = scratch[0]
    for tile in range(len(scratch)):
        low, size = first + tile * TILE, min(TILE, count - tile * TILE)
        read_streams(streams, sequences, scaling, low, size, scratch[tile])
        fill_zero(scratch[tile, LOG_PROB : KL + 1])
        for part in range(state.shape[1]):
            x, rows = network[0][part], state[tile, part]
            find_peaks(x, low, size, rows[PEAK])
            if HAS_OLD:
                find_peaks(old_network[0][part], low, size, rows[OLD_PEAK])
            fill_zero(rows[:PEAK])
            for j in range(x.shape[1]):
                read_columns(network, old_network, actions, part, low, size, j, columns)
                add_sums(size, columns, rows)
            add_readout(actions[low : low + size], part, x.shape[1], rows, scratch[tile])


def read_columns(network, old_network, actions, part, low, size, j, columns):
    """Read what a head takes, of one action or dimension: neighbouring elements then go into vectors."""
    read_column(network[0][part], low, size, j, columns[X])
    read_column(network[1], low, size, j, columns[Y])
    read_actions(actions[low : low + size], part, j, columns[ACTION])
    if HAS_OLD:
        read_column(old_network[0][part], low, size, j, columns[OLD_X])
        read_column(old_network[1], low, size, j, columns[OLD_Y])


def read_column(matrix, low, size, j, column):
    """Read a column of a matrix, which may have one row for all elements, or be absent."""
    if len(matrix) == 1:
        for i in range(size):
            column[i] = matrix[0, j]
    else:
        rows = matrix[low : low + size]
        for i in range(len(rows)):
            column[i] = rows[i, j]


def add_sums(size, columns, rows):
    """Add what a head sums over the actions."""
    for i in range(size):
        s = sums(columns[X, i], columns[Y, i], columns[ACTION, i], rows[PEAK, i])
        rows[0, i] += s[0]
        rows[1, i] += s[1]
        rows[2, i] += s[2]
        if HAS_OLD:
            x, y, old_x, old_y = columns[X, i], columns[Y, i], columns[OLD_X, i], columns[OLD_Y, i]
            s = kl_sums(x, y, old_x, old_y, rows[PEAK, i], rows[OLD_PEAK, i])
            rows[3, i] += s[0]
            rows[4, i] += s[1]


def add_readout(actions, part, width, rows, results):
    """Add what the sums give: log-probability, entropy and KL."""
    for i in range(len(actions)):
        total = rows[0, i], rows[1, i], rows[2, i]
        log_prob, entropy = readout(total)
        results[LOG_PROB, i] += log_prob if action_exists(actions, i, part, width) else np.nan
        results[ENTROPY, i] += entropy
        if HAS_OLD:
            results[KL, i] += kl(total, (rows[3, i], rows[4, i]))


def find_largest(x, low, size, peaks):
    """The largest number of each row."""
    rows = x[low : low + size]
    for i in range(size):
        peaks[i] = rows[i, 0]
    for j in range(1, x.shape[1]):
        for i in range(size):
            peaks[i] = max(peaks[i], rows[i, j])


def use_zero(x, low, size, peaks):
    """A zero for each row."""
    for i in range(size):
        peaks[i] = 0.0


def read_choices(actions, part, j, column):
    """Whether each action is this one."""
    for i in range(len(actions)):
        column[i] = 1.0 if actions[i, part] == j else 0.0


def is_in_range(actions, i, part, width):
    """Whether an action is one of those that there are."""
    return 0 <= actions[i, part] < width


def read_dimension(actions, part, j, column):
    """The actions in this dimension."""
    for i in range(len(actions)):
        column[i] = actions[i, j]


def is_any(actions, i, part, width):
    """An action that is no index always exists."""
    return True


def evaluate_terms(scratch, count, numbers, share, totals):
    """Terms of each element, added up, and derivatives of the loss."""
    coefficients = Coefficients(*numbers)
    zero = np.float64(0)
    policies = values = entropies = kls = approx_kls = approx_kls_k1 = clips = ratios = zero
    weights = targets = target_squares = errors = error_squares = zero
    for tile in range(len(scratch)):
        rows = scratch[tile]
        for i in range(min(TILE, count - tile * TILE)):
            weight = rows[WEIGHT, i]
            valid = weight != 0
            w = np.float64(weight)
            target = np.float64(rows[TARGET, i])
            error = target - np.float64(rows[VALUE, i])
            terms, by_policy, by_value = compute_terms(
                (rows[LOG_PROB, i], rows[ENTROPY, i], rows[KL, i]),
                rows[OLD, i],
                rows[ADVANTAGE, i],
                rows[REFERENCE, i],
                rows[VALUE, i],
                rows[TARGET, i],
                rows[OLD_VALUE, i],
                coefficients,
            )
            policy, value, entropy, kl, approx_kl, approx_kl_k1, clipped, ratio = terms
            policies += w * policy if valid else zero
            values += w * value if valid else zero
            entropies += w * entropy if valid else zero
            kls += w * kl if valid else zero
            approx_kls += w * approx_kl if valid else zero
            approx_kls_k1 += w * approx_kl_k1 if valid else zero
            clips += w * clipped if valid else zero
            ratios += w * ratio if valid else zero
            weights += w
            targets += w * target if valid else zero
            target_squares += w * target * target if valid else zero
            errors += w * error if valid else zero
            error_squares += w * error * error if valid else zero
            scale = weight * share
            by_log_prob, by_entropy, by_kl = by_policy
            rows[BY_LOG_PROB, i] = scale * by_log_prob if valid else 0.0
            rows[BY_ENTROPY, i] = scale * by_entropy if valid else 0.0
            rows[BY_KL, i] = scale * by_kl if valid else 0.0
            rows[BY_VALUE, i] = scale * by_value if valid else 0.0
            rows[RATIO, i] = ratio
    find_extremes(scratch, count, totals)
    averaged = policies, values, entropies, kls, approx_kls, approx_kls_k1, clips, ratios
    moments = targets, target_squares, errors, error_squares
    for i in range(len(averaged)):
        totals[i] = averaged[i]
    totals[WEIGHT_SUM] = weights
    for i in range(len(moments)):
        totals[MOMENTS + i] = moments[i]


def find_extremes(scratch, count, totals):
    """The least and the largest ratio of elements that count."""
    least, largest = np.inf, -np.inf
    for tile in range(len(scratch)):
        for i in range(min(TILE, count - tile * TILE)):
            if scratch[tile, WEIGHT, i] != 0:
                least = min(least, scratch[tile, RATIO, i])
                largest = max(largest, scratch[tile, RATIO, i])
    totals[LEAST], totals[LARGEST] = least, largest


def write_gradients(network, old_network, actions, first, count, scratch, state, gradients, sum_by_y):
    """Derivatives by the network outputs, 0 where masked; and those by y summed, where elements share it."""
    by_xs, by_y, by_values = gradients
    columns = scratch[0]
    for tile in range(len(scratch)):
        low, size = first + tile * TILE, min(TILE, count - tile * TILE)
        write_stream(scratch[tile, BY_VALUE], by_values, low, size)
        for part in range(state.shape[1]):
            for j in range(network[0][part].shape[1]):
                read_columns(network, old_network, actions, part, low, size, j, columns)
                find_slopes(size, scratch[tile], state[tile, part], columns)
                write_column(columns[BY_X], by_xs[part], low, size, j)
                write_column(columns[BY_Y], by_y, low, size, j)
                if len(sum_by_y):
                    sum_by_y[j] += add_column(columns[BY_Y], size)


def find_slopes(size, scratch, rows, columns):
    """Derivatives by the columns that were read."""
    for i in range(size):
        x, y, peak = columns[X, i], columns[Y, i], rows[PEAK, i]
        total = rows[0, i], rows[1, i], rows[2, i]
        by_x, by_y = slopes(x, y, columns[ACTION, i], peak, total, scratch[BY_LOG_PROB, i], scratch[BY_ENTROPY, i])
        if HAS_OLD:
            kl_total, by_kl = (rows[3, i], rows[4, i]), scratch[BY_KL, i]
            k = kl_slopes(x, y, columns[OLD_X, i], columns[OLD_Y, i], peak, rows[OLD_PEAK, i], total, kl_total)
            by_x, by_y = by_x + multiply_or_zero(by_kl, k[0]), by_y + multiply_or_zero(by_kl, k[1])
        valid = scratch[WEIGHT, i] != 0
        columns[BY_X, i] = by_x if valid else 0.0
        columns[BY_Y, i] = by_y if valid else 0.0


def write_column(column, matrix, low, size, j):
    """Write a column of a matrix, which may be absent."""
    rows = matrix[low : low + size]
    for i in range(len(rows)):
        rows[i, j] = column[i]


def write_stream(row, stream, low, size):
    """Write one stream, which may be absent."""
    taken = stream[low : low + size]
    for i in range(len(taken)):
        taken[i] = row[i]


def add_column(column, size):
    """The sum of a column."""
    total = np.float64(0)
    for i in range(size):
        total += column[i]
    return total
