"""The losses, for Triton: one pass over the elements of a minibatch for values and gradients, and one over its sums.

A program walks over tiles of [BLOCK] elements. Where a network has several outputs for each, it reads them in chunks
of [BLOCK, CHUNK], which it adds up before it adds up their columns. It sums in float64, and leaves its sums in
`partials`, which `finish_sums` adds up in one order. Nothing is atomic. Tensors that are absent are None, or, in a
tuple, anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from rl_triton_core._internal.equations import primitives
from rl_triton_core._internal.equations.compile import compile_equation
from rl_triton_core._internal.equations.triton import TRITON
from rl_triton_core._internal.loss import equations
from rl_triton_core._internal.loss.equations import TERMS, Coefficients
from rl_triton_core._internal.moments.kernel import compute_standardizer, merge_moments, merge_parts

NUM_TERMS, RATIO = tl.constexpr(len(TERMS)), tl.constexpr(TERMS.index("ratio_mean"))
NUM_MOMENTS = tl.constexpr(4)
"""Of targets and errors."""
NUM_SUMS = tl.constexpr(len(TERMS) + 1 + 4)
"""Sums of the terms, of the weights and of the moments, in this order."""

helpers = primitives.multiply_or_zero, equations.invert_or_zero, equations.summarize_terms
multiply_or_zero, invert_or_zero, summarize_terms = (compile_equation(x, TRITON) for x in helpers)


@dataclass(frozen=True)
class LossConfig:
    """What is compiled into `compute_tiles`, beyond equations."""

    INDEXED: bool
    """Whether actions are indices."""
    HAS_ACTIONS: bool
    HAS_OLD: bool
    """Whether there is an old network."""
    WANTED: int
    """A bit for each distribution whose gradient by x is."""
    SEARCH: int
    """Steps that find an element's sequence among the offsets."""
    PER_SEQUENCE: bool
    """Whether advantages are."""
    NORMALIZE: bool
    """Whether advantages are normalised."""
    POINTERS: int
    """A bit for each of the numbers, coefficients and what the loss is divided by, that is in memory."""
    HAS_DIVISOR: bool
    """Whether the loss is divided by a number that is given, not by the sum of the weights."""
    PARTS: int
    """Room for the moments that other launches left."""
    ONE_TILE: bool
    """Whether one tile has all elements."""
    WIDTHS: tuple[int, ...]
    """Numbers of each element, by distribution."""
    STRIDES: tuple[tuple[int, ...], ...]
    """Distances between the numbers of elements: of each x, each old x and each gradient by x."""
    Y_STRIDES: tuple[int, ...]
    """The same of y and old y, 0 where elements share one, and of the actions."""
    CHUNK: int
    """Numbers of an element that are read at once, a power of two."""
    BLOCK: int
    """Elements of a tile."""


@triton.jit
def read_number(numbers, i: tl.constexpr, POINTERS: tl.constexpr):
    """A number, or the one that a pointer points to; POINTERS has a bit for each that does."""
    if POINTERS & (1 << i):
        return tl.load(numbers[i]).to(tl.float32)
    else:
        return numbers[i]


@triton.jit
def read_stream(stream, index, where):
    """One number per element, 0 elsewhere and where there is no stream."""
    if stream is None:
        return tl.where(where, 0.0, 0.0)
    else:
        return tl.load(stream + index, mask=where, other=0).to(tl.float32)


@triton.jit
def read_weight(mask, index, inside):
    """How much elements count: flags once, others as often as they say."""
    if mask is None:
        return tl.where(inside, 1.0, 0.0)
    else:
        weight = tl.load(mask + index, mask=inside, other=0)
        return weight.to(tl.float32) if weight.dtype.is_floating() else (weight != 0).to(tl.float32)


@triton.jit
def expand_row(x, CHUNK: tl.constexpr):
    """What there is one of per element beside the numbers of each."""
    return x if CHUNK == 1 else tl.expand_dims(x, 1)


@triton.jit
def locate_columns(chunk: tl.constexpr, CHUNK: tl.constexpr):
    """The columns of a chunk."""
    return chunk if CHUNK == 1 else chunk * CHUNK + tl.arange(0, CHUNK)[None, :]


@triton.jit
def keep_columns(x, chunk: tl.constexpr, width: tl.constexpr, other: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk, with another number in columns that are beside the last."""
    return x if (chunk + 1) * CHUNK <= width else tl.where(locate_columns(chunk, CHUNK) < width, x, other)


@triton.jit
def locate_numbers(rows, chunk: tl.constexpr, width: tl.constexpr, CHUNK: tl.constexpr):
    """Where in a chunk there are numbers of some elements."""
    return keep_columns(expand_row(rows, CHUNK), chunk, width, False, CHUNK)


@triton.jit
def add_columns(x, CHUNK: tl.constexpr):
    """The sum of each element's numbers."""
    return x if CHUNK == 1 else tl.sum(x, 1)


@triton.jit
def locate_matrix(matrix, stride: tl.constexpr, index, chunk: tl.constexpr, CHUNK: tl.constexpr):
    """Where a chunk is in memory."""
    return matrix + (expand_row(index.to(tl.int64) * stride, CHUNK) + locate_columns(chunk, CHUNK))


@triton.jit
def read_matrix(
    matrix, stride: tl.constexpr, index, chunk: tl.constexpr, where, other: tl.constexpr, CHUNK: tl.constexpr
):
    """A chunk of the numbers of each element."""
    return tl.load(locate_matrix(matrix, stride, index, chunk, CHUNK), mask=where, other=other).to(tl.float32)


@triton.jit
def find_sequence(index, cu_seqlens, length, num_sequences, SEARCH: tl.constexpr):
    """The sequence of each element: by its length, or in 2**SEARCH steps at most through the offsets."""
    if cu_seqlens is None:
        return index // length
    else:
        low = index * 0  # [BLOCK]
        high = low + num_sequences  # binary search: the last sequence that starts at or before `index`
        for _ in tl.static_range(SEARCH):
            middle = (low + high) // 2
            before = tl.load(cu_seqlens + middle) <= index
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        return low


@triton.jit
def read_network(network, part: tl.constexpr, index, valid, OLD: tl.constexpr, CONFIG: tl.constexpr):
    """The chunks of network outputs. Beside the last action of a categorical are impossible ones."""
    xs, y = network
    other: tl.constexpr = float("-inf") if CONFIG.INDEXED else 0.0
    chunks = ()
    for chunk in tl.static_range((CONFIG.WIDTHS[part] + CONFIG.CHUNK - 1) // CONFIG.CHUNK):
        where = locate_numbers(valid, chunk, CONFIG.WIDTHS[part], CONFIG.CHUNK)
        # [BLOCK, CHUNK], or [BLOCK] where a chunk is one number
        x = read_matrix(xs[part], CONFIG.STRIDES[OLD][part], index, chunk, where, other, CONFIG.CHUNK)
        own_y = x
        if y is not None:
            own_y = read_matrix(y, CONFIG.Y_STRIDES[OLD], index, chunk, where, 0.0, CONFIG.CHUNK)
        chunks = chunks + ((x, own_y),)
    return chunks


@triton.jit
def read_actions(actions, part: tl.constexpr, index, valid, chunks, CONFIG: tl.constexpr):
    """The chunks of each element's action, or which of its numbers that chose; and whether there is such an action."""
    result = ()
    exists = valid
    if CONFIG.HAS_ACTIONS:
        stride: tl.constexpr = CONFIG.Y_STRIDES[2]
        chosen = index
        if CONFIG.INDEXED:
            chosen = tl.load(actions + index.to(tl.int64) * stride + part, mask=valid, other=0)
            exists = (chosen >= 0) & (chosen < CONFIG.WIDTHS[part])
        for chunk in tl.static_range(len(chunks)):
            if CONFIG.INDEXED:
                result = result + (expand_row(chosen, CONFIG.CHUNK) == locate_columns(chunk, CONFIG.CHUNK),)
            else:
                where = locate_numbers(valid, chunk, CONFIG.WIDTHS[part], CONFIG.CHUNK)
                result = result + (read_matrix(actions, stride, index, chunk, where, 0.0, CONFIG.CHUNK),)
    else:
        for chunk in tl.static_range(len(chunks)):
            result = result + (chunks[chunk][0],)
    return result, exists


@triton.jit
def find_peak(chunks, INDEXED: tl.constexpr, CHUNK: tl.constexpr):
    """The largest of each element's numbers, if that is asked for."""
    if INDEXED:
        peak = chunks[0][0]
        for chunk in tl.static_range(1, len(chunks)):
            peak = tl.maximum(peak, chunks[chunk][0])
        return peak if CHUNK == 1 else tl.expand_dims(tl.max(peak, 1), 1)
    else:
        return 0.0


@triton.jit
def read_coefficients(numbers, POINTERS: tl.constexpr):
    """The coefficients of the loss, by name: all numbers but the last."""
    values = ()
    for i in tl.static_range(len(numbers) - 1):
        values = values + (read_number(numbers, i, POINTERS),)
    return Coefficients(*values)


@triton.jit
def read_divisor(numbers, count, HAS_DIVISOR: tl.constexpr, POINTERS: tl.constexpr):
    """What the loss is divided by: the last number, or the sum of the weights."""
    if HAS_DIVISOR:
        return read_number(numbers, len(numbers) - 1, POINTERS) + count * 0.0
    else:
        return count


@triton.jit
def write_summary(sums, extremes, divisor, numbers, loss, statistics, POINTERS: tl.constexpr):
    """The loss and the statistics, from sums over all elements."""
    terms = ()
    for i in tl.static_range(NUM_TERMS):
        terms = terms + (sums[i],)
    moments = ()
    for i in tl.static_range(NUM_MOMENTS):
        moments = moments + (sums[NUM_TERMS + 1 + i],)
    coefficients = read_coefficients(numbers, POINTERS)
    summary = summarize_terms(terms, sums[NUM_TERMS], moments, extremes, divisor, coefficients, float("nan"))
    tl.store(loss, summary[0])
    for i in tl.static_range(1, len(summary)):
        tl.store(statistics + i - 1, summary[i])


@triton.jit
def standardize_elements(own_moments, num_own, all_ranks_moments, num_ranks, rule, CONFIG: tl.constexpr):
    """Sum of the weights, and what is subtracted from the advantages and multiplies them."""
    count = tl.full([], 0, tl.float64)
    subtracted = tl.full([], 0, tl.float64)
    factor = tl.full([], 1, tl.float64)
    if own_moments is not None:
        count, mean, m2 = merge_parts(own_moments, num_own, CONFIG.PARTS)
        if CONFIG.NORMALIZE:
            all_count, mean, m2 = merge_parts(all_ranks_moments, num_ranks, CONFIG.PARTS)
            subtracted, factor = compute_standardizer(all_count, mean, m2, rule[0], rule[1], rule[2], rule[3])
    return count, subtracted, factor


@triton.jit
def standardize_tile(advantage, weight, rule, CONFIG: tl.constexpr):
    """The same of the only tile."""
    subtracted = tl.full([], 0, tl.float64)
    factor = tl.full([], 1, tl.float64)
    weight = weight.to(tl.float64)
    count, mean, m2 = merge_moments(weight, tl.where(weight != 0, advantage, 0.0).to(tl.float64), weight * 0.0)
    if CONFIG.NORMALIZE:
        subtracted, factor = compute_standardizer(count, mean, m2, rule[0], rule[1], rule[2], rule[3])
    return count, subtracted, factor


@triton.jit
def sum_terms(chunks, actions, peak, width: tl.constexpr, SUMS: tl.constexpr, CHUNK: tl.constexpr):
    """The sums that a distribution asks for over each element's numbers."""
    sums = (0.0, 0.0, 0.0)
    for chunk in tl.static_range(len(chunks)):
        a, b, c = SUMS(chunks[chunk][0], chunks[chunk][1], actions[chunk], peak)
        zero = tl.zeros_like(chunks[chunk][0])
        a = keep_columns(a + zero, chunk, width, 0.0, CHUNK)
        b = keep_columns(b + zero, chunk, width, 0.0, CHUNK)
        c = keep_columns(c + zero, chunk, width, 0.0, CHUNK)
        sums = sums[0] + a, sums[1] + b, sums[2] + c
    return add_columns(sums[0], CHUNK), add_columns(sums[1], CHUNK), add_columns(sums[2], CHUNK)


@triton.jit
def sum_kl(chunks, old_chunks, peaks, width: tl.constexpr, KL_SUMS: tl.constexpr, CHUNK: tl.constexpr):
    """The sums that the divergence from an old network's outputs asks for."""
    sums = (0.0, 0.0)
    for chunk in tl.static_range(len(chunks)):
        d, e = KL_SUMS(
            chunks[chunk][0], chunks[chunk][1], old_chunks[chunk][0], old_chunks[chunk][1], peaks[0], peaks[1]
        )
        zero = tl.zeros_like(chunks[chunk][0])
        d = keep_columns(d + zero, chunk, width, 0.0, CHUNK)
        e = keep_columns(e + zero, chunk, width, 0.0, CHUNK)
        sums = sums[0] + d, sums[1] + e
    return add_columns(sums[0], CHUNK), add_columns(sums[1], CHUNK)


@triton.jit
def evaluate_part(
    networks, actions, part: tl.constexpr, index, valid,
    SUMS: tl.constexpr, READOUT: tl.constexpr, KL_SUMS: tl.constexpr, KL: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Log-probability, entropy and KL by one of the distributions side by side, and what its gradients need."""
    width: tl.constexpr = CONFIG.WIDTHS[part]
    CHUNK: tl.constexpr = CONFIG.CHUNK
    chunks = read_network(networks[0], part, index, valid, 0, CONFIG)
    chosen, exists = read_actions(actions, part, index, valid, chunks, CONFIG)
    peak = find_peak(chunks, CONFIG.INDEXED, CHUNK)
    sums = sum_terms(chunks, chosen, peak, width, SUMS, CHUNK)
    log_prob, entropy = READOUT(sums)
    log_prob = tl.where(exists, log_prob, float("nan"))
    kl, old_chunks, old_peak, kl_sums = tl.zeros_like(log_prob), chunks, peak, (sums[0], sums[1])
    if CONFIG.HAS_OLD:
        old_chunks = read_network(networks[1], part, index, valid, 1, CONFIG)
        old_peak = find_peak(old_chunks, CONFIG.INDEXED, CHUNK)
        kl_sums = sum_kl(chunks, old_chunks, (peak, old_peak), width, KL_SUMS, CHUNK)
        kl = KL(sums, kl_sums)
    return log_prob, entropy, kl, (chunks, chosen, old_chunks, (peak, old_peak), sums, kl_sums)


@triton.jit
def evaluate_parts(
    networks, actions, index, valid,
    SUMS: tl.constexpr, READOUT: tl.constexpr, KL_SUMS: tl.constexpr, KL: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Log-probability, entropy and KL of each element; and of each distribution what its gradients need."""
    BLOCK: tl.constexpr = CONFIG.BLOCK
    log_prob = tl.zeros([BLOCK], tl.float32)
    entropy = tl.zeros([BLOCK], tl.float32)
    kl = tl.zeros([BLOCK], tl.float32)
    heads = ()
    for part in tl.static_range(len(CONFIG.WIDTHS)):
        own = evaluate_part(networks, actions, part, index, valid, SUMS, READOUT, KL_SUMS, KL, CONFIG)
        log_prob += own[0]
        entropy += own[1]
        kl += own[2]
        heads = heads + (own[3],)
    return log_prob, entropy, kl, heads


@triton.jit
def start_sums(CONFIG: tl.constexpr):
    """Nothing yet: sums of terms, weights and moments, the extremes of the ratio, and gradients by what all share."""
    BLOCK: tl.constexpr = CONFIG.BLOCK
    CHUNK: tl.constexpr = CONFIG.CHUNK
    sums = ()
    for _ in tl.static_range(NUM_SUMS):
        sums = sums + (tl.zeros([BLOCK], tl.float64),)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    shared = ()
    for _ in tl.static_range((CONFIG.WIDTHS[0] + CHUNK - 1) // CHUNK):
        shared = shared + (tl.zeros([CHUNK], tl.float64),)
    return sums, least, largest, shared


@triton.jit
def add_terms(sums, averaged, value, target, weight, valid):
    """Sums of terms, weights, and moments of targets and errors, with those of a tile."""
    error = target.to(tl.float64) - value.to(tl.float64)
    far = target.to(tl.float64)
    weighed = averaged + (1.0, far, far * far, error, error * error)
    result = ()
    for i in tl.static_range(NUM_SUMS):
        term = (weighed[i] + tl.zeros_like(weight)).to(tl.float64)
        result = result + (sums[i] + tl.where(valid, weight.to(tl.float64) * term, 0.0),)
    return result


@triton.jit
def differentiate_chunk(
    head, chunk: tl.constexpr, by_policy, SLOPES: tl.constexpr, KL_SLOPES: tl.constexpr, CONFIG: tl.constexpr
):
    """Derivatives by a chunk of x and y, from those by log-probability, entropy and KL."""
    chunks, chosen, old_chunks, peaks, sums, kl_sums = head
    by_log_prob, by_entropy, by_kl = by_policy
    CHUNK: tl.constexpr = CONFIG.CHUNK
    x, y = chunks[chunk]
    total = expand_row(sums[0], CHUNK), expand_row(sums[1], CHUNK), expand_row(sums[2], CHUNK)
    by_x, by_y = SLOPES(x, y, chosen[chunk], peaks[0], total, by_log_prob, by_entropy)
    if CONFIG.HAS_OLD:
        old_x, old_y = old_chunks[chunk]
        kl_total = expand_row(kl_sums[0], CHUNK), expand_row(kl_sums[1], CHUNK)
        kl_by_x, kl_by_y = KL_SLOPES(x, y, old_x, old_y, peaks[0], peaks[1], total, kl_total)
        by_x += multiply_or_zero(by_kl, kl_by_x)
        by_y += multiply_or_zero(by_kl, kl_by_y)
    return by_x, by_y


@triton.jit
def write_parts(
    heads, by_policy, gradients, index, size, valid, shared,
    SLOPES: tl.constexpr, KL_SLOPES: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Write derivatives by the network outputs; `shared` with the sums of those that elements share."""
    CHUNK: tl.constexpr = CONFIG.CHUNK
    by_xs, by_y, by_shared = gradients
    where = expand_row(valid, CHUNK)
    result = ()
    for part in tl.static_range(len(heads)):
        for chunk in tl.static_range(len(heads[part][0])):
            by_x, by_own_y = differentiate_chunk(heads[part], chunk, by_policy, SLOPES, KL_SLOPES, CONFIG)
            inside = locate_numbers(index < size, chunk, CONFIG.WIDTHS[part], CHUNK)
            if CONFIG.WANTED & (1 << part):
                places = locate_matrix(by_xs[part], CONFIG.STRIDES[2][part], index, chunk, CHUNK)
                tl.store(places, tl.where(where, by_x, 0.0), mask=inside)
            if by_y is not None:
                places = locate_matrix(by_y, CONFIG.WIDTHS[part], index, chunk, CHUNK)
                tl.store(places, tl.where(where, by_own_y, 0.0), mask=inside)
            if by_shared is not None:
                own = keep_columns(tl.where(where, by_own_y, 0.0), chunk, CONFIG.WIDTHS[part], 0.0, CHUNK)
                result = result + (shared[chunk] + tl.sum(own.to(tl.float64), 0),)
    return result if by_shared is not None else shared


@triton.jit
def leave_sums(results, least, largest, shared, partials, shared_partials, by_shared, CONFIG: tl.constexpr):
    """A program's sums, for `finish_sums`."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for i in tl.static_range(NUM_SUMS):
        tl.store(partials + i * programs + program, results[i])
    tl.store(partials + NUM_SUMS * programs + program, tl.min(least))
    tl.store(partials + (NUM_SUMS + 1) * programs + program, tl.max(largest))
    if by_shared is not None:
        for chunk in tl.static_range(len(shared)):
            column = chunk * CONFIG.CHUNK + tl.arange(0, CONFIG.CHUNK)
            place = shared_partials + column * programs + program
            tl.store(place, shared[chunk], mask=column < CONFIG.WIDTHS[0])


@triton.jit(do_not_specialize=["size", "num_own", "num_ranks"])
def compute_tiles(
    xs, y, old_xs, old_y, actions,
    old_log_probs, advantages, references, values, targets, old_values, mask, scale, cu_seqlens, length, num_sequences,
    by_xs, by_y, by_values, by_shared, numbers, rule, own_moments, num_own, all_ranks_moments, num_ranks, size,
    partials, shared_partials, loss, statistics,
    SUMS: tl.constexpr, READOUT: tl.constexpr, SLOPES: tl.constexpr, KL_SUMS: tl.constexpr, KL: tl.constexpr,
    KL_SLOPES: tl.constexpr, COMPUTE_TERMS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Values and gradients of every program's tiles, and their sums; with one tile, the loss as well.

    `own_moments` are those of this process's advantages, by program; None with one tile.
    """
    BLOCK: tl.constexpr = CONFIG.BLOCK
    POINTERS: tl.constexpr = CONFIG.POINTERS
    totals, least, largest, shared = start_sums(CONFIG)
    count, subtracted, factor = standardize_elements(own_moments, num_own, all_ranks_moments, num_ranks, rule, CONFIG)
    coefficients = read_coefficients(numbers, POINTERS)
    divisor = read_divisor(numbers, count, CONFIG.HAS_DIVISOR, POINTERS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        index = tile * BLOCK + tl.arange(0, BLOCK)  # [BLOCK], as all that there is one of per element
        weight = read_weight(mask, index, index < size)
        sequence = index
        if (length is not None) or (cu_seqlens is not None):
            sequence = find_sequence(index, cu_seqlens, length, num_sequences, CONFIG.SEARCH)
        advantage = read_stream(advantages, sequence if CONFIG.PER_SEQUENCE else index, weight != 0)
        if CONFIG.ONE_TILE and own_moments is None:
            count, subtracted, factor = standardize_tile(advantage, weight, rule, CONFIG)
            divisor = read_divisor(numbers, count, CONFIG.HAS_DIVISOR, POINTERS)
        if CONFIG.NORMALIZE:
            advantage = ((advantage.to(tl.float64) - subtracted) * factor).to(tl.float32)
        if scale is not None:
            weight *= read_stream(scale, sequence, weight != 0)
        valid = weight != 0

        log_prob, entropy, kl, heads = evaluate_parts(
            ((xs, y), (old_xs, old_y)), actions, index, valid, SUMS, READOUT, KL_SUMS, KL, CONFIG
        )
        value = read_stream(values, index, valid)
        target = read_stream(targets, index, valid)
        reference = read_stream(references, index, valid)
        old_log_prob, old_value = read_stream(old_log_probs, index, valid), read_stream(old_values, index, valid)
        averaged, slopes, value_slope = COMPUTE_TERMS(
            (log_prob, entropy, kl), old_log_prob, advantage, reference, value, target, old_value, coefficients
        )
        totals = add_terms(totals, averaged, value, target, weight, valid)
        least = tl.minimum(least, tl.where(valid, averaged[RATIO], float("inf")))
        largest = tl.maximum(largest, tl.where(valid, averaged[RATIO], float("-inf")))

        share = weight * invert_or_zero(divisor).to(tl.float32)
        if by_values is not None:
            tl.store(by_values + index, tl.where(share != 0, value_slope * share, 0.0), mask=index < size)
        by_policy = ()
        for i in tl.static_range(len(slopes)):
            by_policy = by_policy + (expand_row(tl.where(share != 0, slopes[i] * share, 0.0), CONFIG.CHUNK),)
        shared = write_parts(
            heads, by_policy, (by_xs, by_y, by_shared), index, size, valid, shared, SLOPES, KL_SLOPES, CONFIG
        )

    results = ()
    for i in tl.static_range(NUM_SUMS):
        results = results + (tl.sum(totals[i]),)
    if CONFIG.ONE_TILE:
        extremes = tl.min(least).to(tl.float64), tl.max(largest).to(tl.float64)
        write_summary(results, extremes, divisor, numbers, loss, statistics, POINTERS)
        if by_shared is not None:
            for chunk in tl.static_range(len(shared)):
                column = chunk * CONFIG.CHUNK + tl.arange(0, CONFIG.CHUNK)  # [CHUNK]
                tl.store(by_shared + column, shared[chunk].to(tl.float32), mask=column < CONFIG.WIDTHS[0])
    else:
        leave_sums(results, least, largest, shared, partials, shared_partials, by_shared, CONFIG)


@triton.jit(do_not_specialize=["programs", "num_own"])
def finish_sums(
    partials, shared_partials, programs, by_shared, numbers, own_moments, num_own, loss, statistics,
    POINTERS: tl.constexpr, HAS_DIVISOR: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Add the sums of all programs: the first program here those of the terms, each other one those of one column."""
    program = tl.arange(0, PROGRAMS)  # [PROGRAMS]
    inside = program < programs
    if tl.program_id(0) > 0:
        if by_shared is not None:
            column = tl.program_id(0) - 1
            total = tl.sum(tl.load(shared_partials + column * programs + program, mask=inside, other=0))
            tl.store(by_shared + column, total.to(tl.float32))
    else:
        count = tl.full([], 0, tl.float64)
        if own_moments is not None:
            count, _, _ = merge_parts(own_moments, num_own, PARTS)
        sums = ()
        for i in tl.static_range(NUM_SUMS):
            sums = sums + (tl.sum(tl.load(partials + i * programs + program, mask=inside, other=0)),)
        least = tl.load(partials + NUM_SUMS * programs + program, mask=inside, other=float("inf"))
        largest = tl.load(partials + (NUM_SUMS + 1) * programs + program, mask=inside, other=float("-inf"))
        extremes = tl.min(least), tl.max(largest)
        divisor = read_divisor(numbers, count, HAS_DIVISOR, POINTERS)
        write_summary(sums, extremes, divisor, numbers, loss, statistics, POINTERS)


@triton.jit
def scale_gradients(gradients, sizes, factor, BLOCK: tl.constexpr):
    """Multiply gradients by a number in place. Where that is 1 nothing is read."""
    number = tl.load(factor).to(tl.float32)
    if number != 1.0:
        for i in tl.static_range(len(gradients)):
            start = tl.program_id(0).to(tl.int64) * BLOCK
            while start < sizes[i]:
                offset = start + tl.arange(0, BLOCK)  # [BLOCK]
                x = tl.load(gradients[i] + offset, mask=offset < sizes[i])
                tl.store(gradients[i] + offset, x.to(tl.float32) * number, mask=offset < sizes[i])
                start += tl.num_programs(0).to(tl.int64) * BLOCK
