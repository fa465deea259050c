"""Log-probabilities of tokens, for Triton: a program goes over the logits of a token, or over a part of them.

It takes them block by block. Each thread has a peak and sums of its own, so that none waits for others: the largest of
its logits first, whose shift takes one exponential, then one for each logit. At the end these are joined, and what
programs of one token leave `merge` joins. Nothing is atomic. Exponentials are powers of 2, as are the units of logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rl_triton_core._internal.equations.compile import compile_equation
from rl_triton_core._internal.equations.triton import BINARY_TRITON
from rl_triton_core._internal.tokens import equations

weigh_logit, shift_sums, read_sums, differentiate_logit = (
    compile_equation(x, BINARY_TRITON)
    for x in (equations.weigh_logit, equations.shift_sums, equations.read_sums, equations.differentiate_logit)
)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""A peak where there is no logit yet: finite, so that it has a difference to any."""


@triton.jit
def locate_row(place, columns, row_stride, column_stride):
    """How far from the first logit those of a token begin."""
    return (place // columns).to(tl.int64) * row_stride + (place % columns).to(tl.int64) * column_stride


@triton.jit
def read_token(tokens, mask, place):
    """A token, and whether it counts."""
    valid = place >= 0
    if mask is not None:
        valid = tl.load(mask + place) != 0
    return tl.load(tokens + place, mask=valid, other=0), valid


@triton.jit
def read_number(stream, place, valid):
    """A number of a token; 0 where that is masked, and where there is no such stream."""
    if stream is None:
        return 0.0
    else:
        return tl.load(stream + place, mask=valid, other=0.0)


@triton.jit
def sum_blocks(row, first, end, step, inverse, BLOCK: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr):
    """The peak and the sums of blocks from `first` on. A thread takes EACH logits of a block, WIDTH in one read."""
    peak = tl.full([BLOCK // EACH], LOWEST, tl.float32)
    total, moment = tl.zeros_like(peak), tl.zeros_like(peak)
    for start in tl.range(first, end, step):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row + column, mask=column < end, other=float("-inf")).to(tl.float32)
        x = tl.reshape(x, [EACH // WIDTH, BLOCK // EACH, WIDTH])
        largest = tl.maximum(peak, tl.max(tl.max(x, 0), 1))  # [threads]
        total, moment = shift_sums(total, moment, (peak - largest) * inverse)
        weight, weighted = weigh_logit((x - largest[None, :, None]) * inverse)
        total += tl.sum(tl.sum(weight, 2), 0)
        moment += tl.sum(tl.sum(weighted, 2), 0)
        peak = largest
    return join_sums(peak, total, moment, inverse)


@triton.jit
def join_sums(peak, total, moment, inverse):
    """The peak and the sums of parts that have their own."""
    largest = tl.max(peak, 0)
    total, moment = shift_sums(total, moment, (peak - largest) * inverse)
    return largest, tl.sum(total, 0), tl.sum(moment, 0)


@triton.jit
def write_token(x, sums, inverse, valid, place, log_probs, peaks, log_totals, entropy):
    """The results of a token, from its logit x and the peak and sums of all."""
    peak, total, moment = sums
    peak = tl.where(total == 0.0, float("-inf"), peak)
    log_prob, own_entropy, log_total = read_sums((x - peak) * inverse * LN_2, total, moment * LN_2)
    tl.store(log_probs + place, tl.where(valid, log_prob, 0.0))
    tl.store(peaks + place, tl.where(valid, peak, 0.0))
    tl.store(log_totals + place, tl.where(valid, log_total, 0.0))
    if entropy is not None:
        tl.store(entropy + place, tl.where(valid, own_entropy, 0.0))


@triton.jit
def evaluate(
    logits, row_stride, column_stride, columns, tokens, mask, size, temperature,
    log_probs, peaks, log_totals, entropy, partials,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The results of a token, or the peak and sums of a part of its logits, [num_tokens, SPLITS, 3]."""
    place, part = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    token, valid = read_token(tokens, mask, place)
    tl.device_assert((token >= 0) & (token < size), "tokens: expected 0 or more, and less than the vocabulary's size")
    row = logits + locate_row(place, columns, row_stride, column_stride)
    inverse = 1.0 / (temperature * LN_2)
    sums = sum_blocks(row, part * BLOCK, tl.where(valid, size, 0), SPLITS * BLOCK, inverse, BLOCK, EACH, WIDTH)
    if SPLITS == 1:
        x = tl.load(row + token, mask=valid & (token >= 0) & (token < size), other=0.0).to(tl.float32)
        write_token(x, sums, inverse, valid, place, log_probs, peaks, log_totals, entropy)
    else:
        own = partials + tl.program_id(0).to(tl.int64) * 3
        for i in tl.static_range(3):
            tl.store(own + i, sums[i])


@triton.jit
def merge(
    logits, row_stride, column_stride, columns, tokens, mask, size, temperature,
    log_probs, peaks, log_totals, entropy, partials, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The results of a token, from what `evaluate` left of SPLITS parts; BLOCK is room for these."""
    place = tl.program_id(0)
    token, valid = read_token(tokens, mask, place)
    row = logits + locate_row(place, columns, row_stride, column_stride)
    inverse = 1.0 / (temperature * LN_2)
    part = tl.arange(0, BLOCK)
    own = partials + (place.to(tl.int64) * SPLITS + part) * 3  # [BLOCK]
    peak = tl.load(own, mask=part < SPLITS, other=LOWEST)
    total = tl.load(own + 1, mask=part < SPLITS, other=0.0)
    moment = tl.load(own + 2, mask=part < SPLITS, other=0.0)
    sums = join_sums(peak, total, moment, inverse)
    x = tl.load(row + token, mask=valid & (token >= 0) & (token < size), other=0.0).to(tl.float32)
    write_token(x, sums, inverse, valid, place, log_probs, peaks, log_totals, entropy)


@triton.jit
def differentiate(
    logits, row_stride, column_stride, columns, tokens, mask, size, temperature,
    peaks, log_totals, entropy, by_log_probs, by_entropy, gradient, by_row_stride, by_column_stride,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Derivatives by every SPLITS-th block of a token's logits, perhaps in their memory.

    Where it is masked, all numbers are read as 0, and so is the derivative.
    """
    place, part = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    token, valid = read_token(tokens, mask, place)
    row = logits + locate_row(place, columns, row_stride, column_stride)
    own_gradient = gradient + locate_row(place, columns, by_row_stride, by_column_stride)
    inverse = 1.0 / (temperature * LN_2)
    peak, log_total = read_number(peaks, place, valid), read_number(log_totals, place, valid) / LN_2
    own_entropy = read_number(entropy, place, valid) / LN_2
    by_log_prob = read_number(by_log_probs, place, valid) / temperature
    by_own_entropy = read_number(by_entropy, place, valid) / temperature * LN_2
    end = tl.where(valid, size, 0)
    for start in tl.range(part * BLOCK, size, SPLITS * BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row + column, mask=column < end, other=0.0).to(tl.float32)  # [BLOCK]
        log_prob = (x - peak) * inverse - log_total
        slope = differentiate_logit(log_prob, column == token, own_entropy, by_log_prob, by_own_entropy)
        tl.store(own_gradient + column, slope, mask=column < size)
