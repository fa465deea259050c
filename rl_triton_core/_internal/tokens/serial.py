"""Log-probabilities of tokens in loops that Numba compiles: rows of logits one after another, in blocks.

The logits of a row lie side by side at an address. A block is copied to scratch memory first, where −∞ fills it up:
its loops then go over vectors.
"""

from __future__ import annotations

import numpy as np

from rl_triton_core._internal.equations.compile import unbound

LOG_PROB, PEAK, LOG_TOTAL, ENTROPY, BY_LOG_PROB, BY_ENTROPY = range(6)
"""Rows of numbers, of which there is one for each token."""
BLOCK = 1024
"""Logits of a block."""

load = store = narrow = weigh_logit = shift_sums = read_sums = differentiate_logit = unbound


def narrow_to_float32(x):
    """A number in the type of the arithmetic. A type itself among bound names would keep code from being kept."""
    return np.float32(x)


def narrow_to_float64(x):
    """The same for float64."""
    return np.float64(x)


def evaluate_rows(address, stride, first, count, size, width, tokens, flags, inverse, numbers):
    """Log-probability, peak, log Σ exp and entropy of `count` rows, whose numbers begin at `first`."""
    block, largest = np.empty(width, numbers.dtype), np.empty(width, numbers.dtype)
    for r in range(count):
        place = first + r
        if len(flags) and flags[place] == 0:
            for k in range(4):
                numbers[k, place] = 0.0
            continue
        peak, total, moment = narrow(-np.inf), np.float64(0), np.float64(0)
        for start in range(0, size, width):
            read_block(address, r * stride + start, min(width, size - start), block)
            own = find_largest(block, largest)
            if own > peak:
                total, moment = shift_sums(narrow(total), narrow(moment), (peak - own) * inverse)
                peak = own
            own_total, own_moment = add_block(block, peak if peak > -np.inf else narrow(0), inverse)
            total, moment = total + own_total, moment + own_moment
        logit = (load(address, r * stride + tokens[place]) - peak) * inverse
        log_prob, entropy, log_total = read_sums(logit, narrow(total), narrow(moment))
        numbers[LOG_PROB, place] = log_prob
        numbers[PEAK, place] = peak if total == total else narrow(total)  # NaN, also where nothing else is there
        numbers[LOG_TOTAL, place] = log_total
        numbers[ENTROPY, place] = entropy


def read_block(address, start, count, block):
    """Copy logits."""
    for k in range(count):
        block[k] = load(address, start + k)
    for k in range(count, len(block)):
        block[k] = -np.inf


def find_largest(block, largest):
    """The largest number of a block, whose size is a power of two; NaN counts for nothing or is it."""
    for k in range(len(block)):
        largest[k] = block[k]
    half = len(block) // 2
    while half > 0:
        for k in range(half):
            other = largest[half + k]
            largest[k] = other if other > largest[k] else largest[k]
        half //= 2
    return largest[0]


def add_block(block, peak, inverse):
    """The sums over a block."""
    total, moment = narrow(0), narrow(0)
    for k in range(len(block)):
        weight, weighted = weigh_logit((block[k] - peak) * inverse)
        total += weight
        moment += weighted
    return total, moment


def differentiate_rows(
    address, stride, target, target_stride, first, count, size, width, tokens, flags, inverse, numbers
):
    """Write derivatives by the logits of `count` rows to a target, which may be their memory."""
    block = np.empty(width, numbers.dtype)
    for r in range(count):
        place = first + r
        if len(flags) and flags[place] == 0:
            for k in range(size):
                store(target, r * target_stride + k, narrow(0))
            continue
        peak, log_total, entropy = numbers[PEAK, place], numbers[LOG_TOTAL, place], numbers[ENTROPY, place]
        by_log_prob, by_entropy = inverse * numbers[BY_LOG_PROB, place], inverse * numbers[BY_ENTROPY, place]
        for start in range(0, size, width):
            count_block = min(width, size - start)
            read_block(address, r * stride + start, count_block, block)
            find_slopes(block, peak, log_total, tokens[place] - start, entropy, by_log_prob, by_entropy, inverse)
            for k in range(count_block):
                store(target, r * target_stride + start + k, block[k])


def find_slopes(block, peak, log_total, token, entropy, by_log_prob, by_entropy, inverse):
    """Derivatives in the place of the logits."""
    for k in range(len(block)):
        log_prob = (block[k] - peak) * inverse - log_total
        block[k] = differentiate_logit(log_prob, k == token, entropy, by_log_prob, by_entropy)
