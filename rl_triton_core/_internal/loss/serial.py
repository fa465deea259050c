"""The losses in loops that Numba compiles, in three steps for a span of elements.

`evaluate_heads` turns network outputs into log-probability, entropy and KL; `evaluate_terms` these into terms
and derivatives; `write_gradients` these into gradients. Between them, numbers are in scratch memory, a row for each
kind. The cpu backend binds the equations. Tensors are addresses in `memory`, 0 where one is absent, with the distance
between the numbers of neighbouring elements in `strides`.
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
FLAGS, WEIGHTS, SCALES, OFFSETS, ACTIONS, GIVEN_Y, GIVEN_OLD_Y, OUT_BY_Y, OUT_BY_VALUES = range(6, 15)
SHARED, LOSS, STATISTICS, PARTS = range(15, 19)
"""Places in `memory`, after those of the first six rows. From PARTS on, x, old x and by x of each distribution."""
PEAK, OLD_PEAK = 5, 6
"""Rows of a distribution's state, after its sums."""
INDEX_BYTES = 8
"""Of an action that is an index. There is one for each distribution; other actions have one distribution."""
TILE = 256
"""Elements of a row of scratch memory."""
HAS_OLD = False
"""Whether there is an old network."""
WEIGHT_SUM = len(TERMS)
MOMENTS = WEIGHT_SUM + 1
LEAST, LARGEST, TOTALS = range(MOMENTS + 4, MOMENTS + 7)
"""Of a span's results: sums of the terms come first, then of the weights and of four moments, then extremes."""

compute_terms = sums = readout = slopes = kl_sums = kl = kl_slopes = multiply_or_zero = unbound
read_actions = action_exists = find_peaks = load = load_integer = load_byte = store = unbound


def fill_zero(rows):
    """Fill rows with zeros."""
    for k in range(len(rows)):
        for i in range(rows.shape[1]):
            rows[k, i] = 0.0


def read_numbers(address, stride, low, size, j, row):
    """Read the number `j` of each element, 0 where there is none."""
    if address == 0:
        for i in range(size):
            row[i] = 0.0
    else:
        for i in range(size):
            row[i] = load(address, (low + i) * stride + j)


def write_numbers(row, address, stride, low, size, j):
    """Write the number `j` of each element, where there is memory for it."""
    if address != 0:
        for i in range(size):
            store(address, (low + i) * stride + j, row[i])


def read_streams(memory, strides, length, per_sequence, sequence, scaling, low, size, scratch):
    """Read what there is one of per element: 0 if absent, weight 0 if masked. Return the sequence of the last."""
    for k in (OLD, REFERENCE, VALUE, TARGET, OLD_VALUE):
        read_numbers(memory[k], strides[k], low, size, 0, scratch[k])
    read_weights(memory, low, size, scratch[WEIGHT])
    if not per_sequence and memory[ADVANTAGE] != 0:
        subtracted, factor = scaling
        for i in range(size):
            scratch[ADVANTAGE, i] = (load(memory[ADVANTAGE], (low + i) * strides[ADVANTAGE]) - subtracted) * factor
    else:
        fill_zero(scratch[ADVANTAGE : ADVANTAGE + 1])
    if per_sequence or memory[SCALES] != 0:
        offsets = memory[OFFSETS]
        for i in range(size):
            while low + i >= (load_integer(offsets, sequence + 1) if offsets != 0 else (sequence + 1) * length):
                sequence += 1
            if per_sequence:
                scratch[ADVANTAGE, i] = load(memory[ADVANTAGE], sequence)
            if memory[SCALES] != 0:
                scratch[WEIGHT, i] *= load(memory[SCALES], sequence)
    return sequence


def read_weights(memory, low, size, row):
    """Read how much elements count."""
    for i in range(size):
        row[i] = 1.0
    if memory[WEIGHTS] != 0:
        for i in range(size):
            row[i] = load(memory[WEIGHTS], low + i)
    if memory[FLAGS] != 0:
        for i in range(size):
            row[i] = 1.0 if load_byte(memory[FLAGS], low + i) != 0 else 0.0


def evaluate_heads(memory, strides, widths, sequences, per_sequence, scaling, first, count, scratch, state):
    """Log-probability, entropy and KL of each element, over distributions side by side."""
    columns = scratch[0]
    length, sequence = sequences
    for tile in range(len(scratch)):
        low, size = first + tile * TILE, min(TILE, count - tile * TILE)
        rows = scratch[tile]
        sequence = read_streams(memory, strides, length, per_sequence, sequence, scaling, low, size, rows)
        fill_zero(scratch[tile, LOG_PROB : KL + 1])
        for part in range(len(widths)):
            rows, x = state[tile, part], PARTS + 3 * part
            find_peaks(memory[x], strides[x], widths[part], low, size, rows[PEAK])
            if HAS_OLD:
                find_peaks(memory[x + 1], strides[x + 1], widths[part], low, size, rows[OLD_PEAK])
            fill_zero(rows[:PEAK])
            for j in range(widths[part]):
                read_columns(memory, strides, part, low, size, j, columns)
                add_sums(size, columns, rows)
            actions = memory[ACTIONS] + INDEX_BYTES * part
            add_readout(actions, strides[ACTIONS], widths[part], low, size, rows, scratch[tile])


def read_columns(memory, strides, part, low, size, j, columns):
    """Read what a head takes, of one action or dimension: neighbouring elements then go into vectors."""
    x = PARTS + 3 * part
    read_numbers(memory[x], strides[x], low, size, j, columns[X])
    read_numbers(memory[GIVEN_Y], strides[GIVEN_Y], low, size, j, columns[Y])
    read_actions(memory[ACTIONS] + INDEX_BYTES * part, strides[ACTIONS], low, size, j, columns[ACTION])
    if HAS_OLD:
        read_numbers(memory[x + 1], strides[x + 1], low, size, j, columns[OLD_X])
        read_numbers(memory[GIVEN_OLD_Y], strides[GIVEN_OLD_Y], low, size, j, columns[OLD_Y])


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


def add_readout(actions, stride, width, low, size, rows, results):
    """Add what the sums give: log-probability, entropy and KL."""
    for i in range(size):
        total = rows[0, i], rows[1, i], rows[2, i]
        log_prob, entropy = readout(total)
        results[LOG_PROB, i] += log_prob if action_exists(actions, (low + i) * stride, width) else np.nan
        results[ENTROPY, i] += entropy
        if HAS_OLD:
            results[KL, i] += kl(total, (rows[3, i], rows[4, i]))


def find_largest(x, stride, width, low, size, peaks):
    """The largest number of each row."""
    read_numbers(x, stride, low, size, 0, peaks)
    for j in range(1, width):
        for i in range(size):
            peaks[i] = max(peaks[i], load(x, (low + i) * stride + j))


def use_zero(x, stride, width, low, size, peaks):
    """A zero for each row."""
    for i in range(size):
        peaks[i] = 0.0


def read_choices(actions, stride, low, size, j, column):
    """Whether each action is this one."""
    for i in range(size):
        column[i] = 1.0 if load_integer(actions, (low + i) * stride) == j else 0.0


def is_in_range(actions, place, width):
    """Whether an action is one of those that there are."""
    return 0 <= load_integer(actions, place) < width


def is_any(actions, place, width):
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
            head, old, advantage = (rows[LOG_PROB, i], rows[ENTROPY, i], rows[KL, i]), rows[OLD, i], rows[ADVANTAGE, i]
            given = rows[VALUE, i], rows[TARGET, i], rows[OLD_VALUE, i]
            terms, by_policy, by_value = compute_terms(
                head, old, advantage, rows[REFERENCE, i], given[0], given[1], given[2], coefficients
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
            rows[BY_LOG_PROB, i] = scale * by_log_prob if scale != 0 else 0.0
            rows[BY_ENTROPY, i] = scale * by_entropy if scale != 0 else 0.0
            rows[BY_KL, i] = scale * by_kl if scale != 0 else 0.0
            rows[BY_VALUE, i] = scale * by_value if scale != 0 else 0.0
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


def write_gradients(memory, strides, widths, first, count, scratch, state, sum_by_y):
    """Derivatives by the network outputs, 0 where masked; and those by y summed, where elements share it."""
    columns = scratch[0]
    for tile in range(len(scratch)):
        low, size = first + tile * TILE, min(TILE, count - tile * TILE)
        write_numbers(scratch[tile, BY_VALUE], memory[OUT_BY_VALUES], strides[OUT_BY_VALUES], low, size, 0)
        for part in range(len(widths)):
            by_x = PARTS + 3 * part + 2
            for j in range(widths[part]):
                read_columns(memory, strides, part, low, size, j, columns)
                find_slopes(size, scratch[tile], state[tile, part], columns)
                write_numbers(columns[BY_X], memory[by_x], strides[by_x], low, size, j)
                write_numbers(columns[BY_Y], memory[OUT_BY_Y], strides[OUT_BY_Y], low, size, j)
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


def add_column(column, size):
    """The sum of a column."""
    total = np.float64(0)
    for i in range(size):
        total += column[i]
    return total
