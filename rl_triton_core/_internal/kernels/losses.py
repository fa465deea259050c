"""The losses, for Triton: one pass over the elements of a minibatch for values and gradients, and one over its sums.

A program walks over tiles of [BLOCK] elements, or of [BLOCK, WIDTH] numbers where a network gives several for each. It
sums in float64, and leaves its sums in `partials`, which `finish_sums` adds up in one order. Nothing is atomic.
Tensors that are absent are None, or, in a tuple, anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from rl_triton_core._internal.kernels.equations import exp, select
from rl_triton_core._internal.kernels.moments import compute_standardizer, merge_parts
from rl_triton_core._internal.loss_equations import Choices, bind_equations


@dataclass(frozen=True)
class LossConfig:
    """What is compiled into `compute_tiles`, beyond equations."""

    INDEXED: bool
    """Whether actions are indices."""
    HAS_ACTIONS: bool
    HAS_INPUTS: bool
    """Whether there is a policy."""
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
    """A bit for each number that is in memory."""
    HAS_DIVISOR: bool
    """Whether the loss is divided by a number that is given, not by the sum of the weights."""
    PARTS: int
    """Room for the moments that other launches left."""
    ONE_TILE: bool
    """Whether one tile has all elements."""
    WIDTH: int
    """Numbers of each element, as a power of two."""
    BLOCK: int
    """Elements of a tile."""


@triton.jit
def log(x):
    """The primitive of equations for numbers of at least 1, to one unit in the last place (Cephes, logf)."""
    bits = x.to(tl.int32, bitcast=True)
    above = ((bits & 0x7FFFFF) > 0x3504F3).to(tl.int32)  # the mantissa is more than √2
    n = ((bits >> 23) - 127 + above).to(tl.float32)
    f = ((bits & 0x7FFFFF) + ((127 - above) << 23)).to(tl.float32, bitcast=True) - 1.0
    p = tl.fma(f, 7.0376836292e-2, -1.1514610310e-1)
    p = tl.fma(p, f, 1.1676998740e-1)
    p = tl.fma(p, f, -1.2420140846e-1)
    p = tl.fma(p, f, 1.4249322787e-1)
    p = tl.fma(p, f, -1.6668057665e-1)
    p = tl.fma(p, f, 2.0000714765e-1)
    p = tl.fma(p, f, -2.4999993993e-1)
    p = tl.fma(p, f, 3.3333331174e-1)
    square = f * f
    result = f + (p * f * square + (n * -2.12194440e-4 - 0.5 * square)) + n * 0.693359375
    return tl.where(x < float("inf"), result, x)


def compile_equations(choices: Choices) -> dict[str, Any]:
    """The equations of a call as Triton functions.

    The interpreter looks for `tl` in their module, the compiler for the names in annotations.
    """
    names: Mapping[str, Any] = {"select": select, "exp": exp, "log": log, "tl": tl, "Any": tl.constexpr(Any)}
    return bind_equations(choices, names, triton.jit)


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
def expand_row(x, WIDTH: tl.constexpr):
    """What there is one of per element beside the numbers of each."""
    return x if WIDTH == 1 else tl.expand_dims(x, 1)


@triton.jit
def add_columns(x, where, WIDTH: tl.constexpr):
    """The sum of each element's numbers."""
    x = tl.where(where, x, 0.0)
    return x if WIDTH == 1 else tl.sum(x, 1)


@triton.jit
def read_matrix(matrix, stride, index, columns, where, other, WIDTH: tl.constexpr):
    """The numbers of each element."""
    offsets = index.to(tl.int64) * stride if WIDTH == 1 else tl.expand_dims(index.to(tl.int64) * stride, 1) + columns
    return tl.load(matrix + offsets, mask=where, other=other).to(tl.float32)


@triton.jit
def write_matrix(matrix, stride, index, columns, where, values, WIDTH: tl.constexpr):
    """The numbers of each element."""
    offsets = index.to(tl.int64) * stride if WIDTH == 1 else tl.expand_dims(index.to(tl.int64) * stride, 1) + columns
    tl.store(matrix + offsets, values, mask=where)


@triton.jit
def find_sequence(index, cu_seqlens, length, num_sequences, SEARCH: tl.constexpr):
    """The sequence of each element: by its length, or in 2**SEARCH steps at most through the offsets."""
    if cu_seqlens is None:
        return index // length
    else:
        low = index * 0
        high = low + num_sequences  # the last whose start is not behind the element lies in [low, high)
        for _ in tl.static_range(SEARCH):
            middle = (low + high) // 2
            before = tl.load(cu_seqlens + middle) <= index
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        return low


@triton.jit
def weigh_tile(x, weight):
    """Sum of the weights, and mean and M2 of a tile, in float64."""
    weight = weight.to(tl.float64)
    count = tl.sum(weight)
    pivot = tl.max(tl.where(weight != 0, x, float("-inf")))
    shifted = tl.where(weight != 0, x.to(tl.float64) - pivot.to(tl.float64), 0.0)
    shift = tl.sum(weight * shifted) / tl.where(count > 0, count, 1.0)
    deviation = shifted - shift
    m2 = tl.sum(tl.where(weight != 0, weight * deviation * deviation, 0.0))
    return count, tl.where(count > 0, pivot.to(tl.float64) + shift, 0.0), m2


@triton.jit(do_not_specialize=["size"])
def weigh_elements(advantages, mask, size, parts, BLOCK: tl.constexpr):
    """Sum of the weights, and mean and M2 of the advantages, of every program's tiles (Chan et al. 1979)."""
    count = tl.full([], 0, tl.float64)
    mean = tl.full([], 0, tl.float64)
    m2 = tl.full([], 0, tl.float64)
    tile = tl.program_id(0)
    while tile * BLOCK < size:
        index = tile * BLOCK + tl.arange(0, BLOCK)
        weight = read_weight(mask, index, index < size)
        tile_count, tile_mean, tile_m2 = weigh_tile(read_stream(advantages, index, weight != 0), weight)
        total = count + tile_count
        share = tile_count / tl.where(total > 0, total, 1.0)
        difference = tl.where(count > 0, tile_mean - mean, 0.0)
        m2 += tl.where(tile_count > 0, tile_m2 + difference * difference * count * share, 0.0)
        mean = tl.where(count > 0, mean + difference * share, tile_mean)
        count = total
        tile += tl.num_programs(0)
    part = parts + 3 * tl.program_id(0)
    tl.store(part, count)
    tl.store(part + 1, mean)
    tl.store(part + 2, m2)


@triton.jit
def read_numbers(x, x_stride, y, y_stride, index, columns, where, INDEXED: tl.constexpr, WIDTH: tl.constexpr):
    """What the network gives for each element. Beside the last action of a categorical are impossible ones."""
    first = read_matrix(x, x_stride, index, columns, where, float("-inf") if INDEXED else 0.0, WIDTH)
    if y is None:
        return first, first
    else:
        return first, read_matrix(y, y_stride, index, columns, where, 0.0, WIDTH)


@triton.jit
def read_action(
    actions, actions_stride, part, width, index, columns, valid, where, INDEXED: tl.constexpr, WIDTH: tl.constexpr
):
    """The action of each element, or which of its numbers that chose; and whether there is such an action."""
    if INDEXED:
        chosen = tl.load(actions + index.to(tl.int64) * actions_stride + part, mask=valid, other=0)
        return expand_row(chosen, WIDTH) == columns, (chosen >= 0) & (chosen < width)
    else:
        return read_matrix(actions, actions_stride, index, columns, where, 0, WIDTH), valid


@triton.jit
def find_peak(x, INDEXED: tl.constexpr, WIDTH: tl.constexpr):
    """The largest of each element's numbers, if that is asked for."""
    if INDEXED:
        return x if WIDTH == 1 else tl.expand_dims(tl.max(x, 1), 1)
    else:
        return 0.0


@triton.jit
def read_divisor(numbers, count, HAS_DIVISOR: tl.constexpr, POINTERS: tl.constexpr):
    """What the loss is divided by: a number, or the sum of the weights."""
    if HAS_DIVISOR:
        return read_number(numbers, 11, POINTERS) + count * 0.0
    else:
        return count


@triton.jit
def write_summary(sums, extremes, divisor, numbers, loss, statistics, SUMMARIZE: tl.constexpr, POINTERS: tl.constexpr):
    """The loss and the statistics, from sums over all elements."""
    terms = sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7]
    moments = sums[9], sums[10], sums[11], sums[12]
    weights = read_number(numbers, 3, POINTERS), read_number(numbers, 7, POINTERS), read_number(numbers, 8, POINTERS)
    summary = SUMMARIZE(terms, sums[8], moments, extremes, divisor, weights, float("nan"))
    tl.store(loss, summary[0])
    for i in tl.static_range(1, len(summary)):
        tl.store(statistics + i - 1, summary[i])


@triton.jit
def weigh_term(term, weight, valid):
    """A term times the weight, in float64; 0 where masked."""
    return tl.where(valid, weight.to(tl.float64) * (term + tl.zeros_like(weight)).to(tl.float64), 0.0)


@triton.jit
def standardize_elements(parts, num_parts, every, num_every, rule, CONFIG: tl.constexpr):
    """Sum of the weights, and what is subtracted from the advantages and multiplies them."""
    count = tl.full([], 0, tl.float64)
    subtracted = tl.full([], 0, tl.float64)
    factor = tl.full([], 1, tl.float64)
    if parts is not None:
        count, mean, m2 = merge_parts(parts, num_parts, CONFIG.PARTS)
        if CONFIG.NORMALIZE:
            every_count, mean, m2 = merge_parts(every, num_every, CONFIG.PARTS)
            subtracted, factor = compute_standardizer(every_count, mean, m2, rule[0], rule[1], rule[2], rule[3])
    return count, subtracted, factor


@triton.jit
def standardize_tile(advantage, weight, rule, CONFIG: tl.constexpr):
    """The same of the only tile."""
    subtracted = tl.full([], 0, tl.float64)
    factor = tl.full([], 1, tl.float64)
    count, mean, m2 = weigh_tile(advantage, weight)
    if CONFIG.NORMALIZE:
        subtracted, factor = compute_standardizer(count, mean, m2, rule[0], rule[1], rule[2], rule[3])
    return count, subtracted, factor


@triton.jit
def read_part(network, chosen, part: tl.constexpr, index, columns, valid, CONFIG: tl.constexpr):
    """What the networks give for one of the distributions side by side, and its actions."""
    xs, x_strides, y, y_stride = network
    actions, actions_stride, widths = chosen
    inside = expand_row(valid, CONFIG.WIDTH) & (columns < widths[part])
    x, own_y = read_numbers(
        xs[part], x_strides[part], y, y_stride, index, columns, inside, CONFIG.INDEXED, CONFIG.WIDTH
    )
    action, exists = x, valid
    if CONFIG.HAS_ACTIONS:
        action, exists = read_action(
            actions, actions_stride, part, widths[part], index, columns, valid, inside, CONFIG.INDEXED, CONFIG.WIDTH
        )
    return x, own_y, action, exists, inside


@triton.jit
def evaluate_parts(
    network,
    old_network,
    chosen,
    index,
    columns,
    valid,
    SUM_TERMS: tl.constexpr,
    READOUT: tl.constexpr,
    SUM_KL: tl.constexpr,
    READ_KL: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Log-probability, entropy and KL of each element; and of each distribution what its gradients need."""
    BLOCK: tl.constexpr = CONFIG.BLOCK
    WIDTH: tl.constexpr = CONFIG.WIDTH
    log_prob = tl.zeros([BLOCK], tl.float32)
    entropy = tl.zeros([BLOCK], tl.float32)
    kl = tl.zeros([BLOCK], tl.float32)
    heads = ()
    if CONFIG.HAS_INPUTS:
        for part in tl.static_range(len(network[0])):
            x, own_y, action, exists, inside = read_part(network, chosen, part, index, columns, valid, CONFIG)
            peak = find_peak(x, CONFIG.INDEXED, WIDTH)
            a, b, c = SUM_TERMS(x, own_y, action, peak)
            sums = add_columns(a, inside, WIDTH), add_columns(b, inside, WIDTH), add_columns(c, inside, WIDTH)
            part_log_prob, part_entropy = READOUT(sums)
            log_prob += tl.where(exists, part_log_prob, float("nan"))
            entropy += part_entropy
            old_x, own_old_y, old_peak, kl_sums = x, own_y, peak, (sums[0], sums[1])
            if CONFIG.HAS_OLD:
                old_xs, old_x_strides, old_y, old_y_stride = old_network
                old_x, own_old_y = read_numbers(
                    old_xs[part],
                    old_x_strides[part],
                    old_y,
                    old_y_stride,
                    index,
                    columns,
                    inside,
                    CONFIG.INDEXED,
                    WIDTH,
                )
                old_peak = find_peak(old_x, CONFIG.INDEXED, WIDTH)
                d, e = SUM_KL(x, own_y, old_x, own_old_y, peak, old_peak)
                kl_sums = add_columns(d, inside, WIDTH), add_columns(e, inside, WIDTH)
                kl += READ_KL(sums, kl_sums)
            heads = heads + ((x, own_y, action, peak, sums, old_x, own_old_y, old_peak, kl_sums),)
    return log_prob, entropy, kl, heads


@triton.jit
def start_sums(CONFIG: tl.constexpr):
    """Nothing yet: sums of terms, weights and moments, the extremes of the ratio, and gradients by what all share."""
    BLOCK: tl.constexpr = CONFIG.BLOCK
    WIDTH: tl.constexpr = CONFIG.WIDTH
    sums = ()
    for _ in tl.static_range(13):
        sums = sums + (tl.zeros([BLOCK], tl.float64),)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    return sums, least, largest, tl.zeros([WIDTH], tl.float64)


@triton.jit
def add_terms(sums, averaged, value, target, weight, valid):
    """Sums of terms, weights, and moments of targets and errors, with those of a tile."""
    error = target.to(tl.float64) - value.to(tl.float64)
    far = target.to(tl.float64)
    weighed = averaged + (1.0, far, far * far, error, error * error)
    result = ()
    for i in tl.static_range(13):
        result = result + (sums[i] + weigh_term(weighed[i], weight, valid),)
    return result


@triton.jit
def write_parts(
    heads,
    by_policy,
    gradients,
    widths,
    index,
    size,
    columns,
    valid,
    shared,
    SLOPES: tl.constexpr,
    KL_SLOPES: tl.constexpr,
    MULTIPLY: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Derivatives by what the network gave, from those by log-probability, entropy and KL; `shared` with their sums."""
    WIDTH: tl.constexpr = CONFIG.WIDTH
    by_xs, by_x_strides, by_y, by_shared = gradients
    where = expand_row(valid, WIDTH)
    by_log_prob, by_entropy, by_kl = by_policy
    for part in tl.static_range(len(heads)):
        x, own_y, action, peak, sums, old_x, own_old_y, old_peak, kl_sums = heads[part]
        total = expand_row(sums[0], WIDTH), expand_row(sums[1], WIDTH), expand_row(sums[2], WIDTH)
        by_x, by_own_y = SLOPES(x, own_y, action, peak, total, by_log_prob, by_entropy)
        if CONFIG.HAS_OLD:
            kl_total = expand_row(kl_sums[0], WIDTH), expand_row(kl_sums[1], WIDTH)
            kl_by_x, kl_by_y = KL_SLOPES(x, own_y, old_x, own_old_y, peak, old_peak, total, kl_total)
            by_x += MULTIPLY(by_kl, kl_by_x)
            by_own_y += MULTIPLY(by_kl, kl_by_y)
        inside = expand_row(index < size, WIDTH) & (columns < widths[part])
        if CONFIG.WANTED & (1 << part):
            by_x = tl.where(where, by_x, 0.0)
            write_matrix(by_xs[part], by_x_strides[part], index, columns, inside, by_x, WIDTH)
        if by_y is not None:
            by_own_y = tl.where(where, by_own_y, 0.0)
            write_matrix(by_y, widths[part], index, columns, inside, by_own_y, WIDTH)
        if by_shared is not None:
            shared += tl.sum(tl.where(where & (columns < widths[part]), by_own_y, 0.0).to(tl.float64), 0)
    return shared


@triton.jit
def leave_sums(results, least, largest, shared, partials, shared_partials, by_shared, width, WIDTH: tl.constexpr):
    """A program's sums, for `finish_sums`."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for i in tl.static_range(13):
        tl.store(partials + i * programs + program, results[i])
    tl.store(partials + 13 * programs + program, tl.min(least))
    tl.store(partials + 14 * programs + program, tl.max(largest))
    if by_shared is not None:
        column = tl.arange(0, WIDTH)
        tl.store(shared_partials + column * programs + program, shared, mask=column < width)


@triton.jit(do_not_specialize=["size", "num_parts", "num_every"])
def compute_tiles(
    xs, x_strides, y, y_stride, old_xs, old_x_strides, old_y, old_y_stride, widths, actions, actions_stride,
    old_log_probs, advantages, references, values, targets, old_values, mask, scale, cu_seqlens, length, num_sequences,
    by_xs, by_x_strides, by_y, by_values, by_shared, numbers, rule, parts, num_parts, every, num_every, size,
    partials, shared_partials, loss, statistics,
    SUM_TERMS: tl.constexpr, READOUT: tl.constexpr, SLOPES: tl.constexpr, SUM_KL: tl.constexpr, READ_KL: tl.constexpr,
    KL_SLOPES: tl.constexpr, COMPUTE_TERMS: tl.constexpr, MULTIPLY: tl.constexpr, INVERT: tl.constexpr,
    SUMMARIZE: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Values and gradients of every program's tiles, and their sums; with one tile, the loss as well.

    `parts` are the moments of this process's advantages, `every` those of all processes; None with one tile.
    """
    BLOCK: tl.constexpr = CONFIG.BLOCK
    WIDTH: tl.constexpr = CONFIG.WIDTH
    totals, least, largest, shared = start_sums(CONFIG)
    count, subtracted, factor = standardize_elements(parts, num_parts, every, num_every, rule, CONFIG)
    coefficients = ()
    for i in tl.static_range(11):
        coefficients = coefficients + (read_number(numbers, i, CONFIG.POINTERS),)
    divisor = read_divisor(numbers, count, CONFIG.HAS_DIVISOR, CONFIG.POINTERS)
    columns = tl.arange(0, WIDTH)[None, :] if WIDTH > 1 else 0
    for tile in tl.range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        index = tile * BLOCK + tl.arange(0, BLOCK)
        weight = read_weight(mask, index, index < size)
        sequence = index
        if (length is not None) or (cu_seqlens is not None):
            sequence = find_sequence(index, cu_seqlens, length, num_sequences, CONFIG.SEARCH)
        advantage = read_stream(advantages, sequence if CONFIG.PER_SEQUENCE else index, weight != 0)
        if CONFIG.ONE_TILE and parts is None:
            count, subtracted, factor = standardize_tile(advantage, weight, rule, CONFIG)
            divisor = read_divisor(numbers, count, CONFIG.HAS_DIVISOR, CONFIG.POINTERS)
        if CONFIG.NORMALIZE:
            advantage = ((advantage.to(tl.float64) - subtracted) * factor).to(tl.float32)
        if scale is not None:
            weight *= read_stream(scale, sequence, weight != 0)
        valid = weight != 0

        log_prob, entropy, kl, heads = evaluate_parts(
            (xs, x_strides, y, y_stride), (old_xs, old_x_strides, old_y, old_y_stride),
            (actions, actions_stride, widths), index, columns, valid, SUM_TERMS, READOUT, SUM_KL, READ_KL, CONFIG,
        )  # fmt: skip
        value = read_stream(values, index, valid)
        target = read_stream(targets, index, valid)
        averaged, slopes = COMPUTE_TERMS(
            (log_prob, entropy, kl),
            read_stream(old_log_probs, index, valid),
            advantage,
            read_stream(references, index, valid),
            value,
            target,
            read_stream(old_values, index, valid),
            coefficients,
        )
        totals = add_terms(totals, averaged, value, target, weight, valid)
        least = tl.minimum(least, tl.where(valid, averaged[7], float("inf")))
        largest = tl.maximum(largest, tl.where(valid, averaged[7], float("-inf")))

        share = weight * INVERT(divisor).to(tl.float32)
        if by_values is not None:
            tl.store(by_values + index, tl.where(valid, slopes[3] * share, 0.0), mask=index < size)
        by_policy = ()
        for i in tl.static_range(3):
            by_policy = by_policy + (expand_row(tl.where(valid, slopes[i] * share, 0.0), WIDTH),)
        shared = write_parts(
            heads, by_policy, (by_xs, by_x_strides, by_y, by_shared), widths, index, size, columns, valid, shared,
            SLOPES, KL_SLOPES, MULTIPLY, CONFIG,
        )  # fmt: skip

    results = ()
    for i in tl.static_range(13):
        results = results + (tl.sum(totals[i]),)
    if CONFIG.ONE_TILE:
        extremes = tl.min(least).to(tl.float64), tl.max(largest).to(tl.float64)
        write_summary(results, extremes, divisor, numbers, loss, statistics, SUMMARIZE, CONFIG.POINTERS)
        if by_shared is not None:
            column = tl.arange(0, WIDTH)
            tl.store(by_shared + column, shared.to(tl.float32), mask=column < widths[0])
    else:
        leave_sums(results, least, largest, shared, partials, shared_partials, by_shared, widths[0], WIDTH)


@triton.jit(do_not_specialize=["programs", "num_parts"])
def finish_sums(
    partials,
    shared_partials,
    programs,
    by_shared,
    numbers,
    parts,
    num_parts,
    loss,
    statistics,
    SUMMARIZE: tl.constexpr,
    POINTERS: tl.constexpr,
    HAS_DIVISOR: tl.constexpr,
    PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Add the sums of all programs: the first program here those of the terms, each other one those of one column."""
    program = tl.arange(0, PROGRAMS)
    inside = program < programs
    if tl.program_id(0) > 0:
        if by_shared is not None:
            column = tl.program_id(0) - 1
            total = tl.sum(tl.load(shared_partials + column * programs + program, mask=inside, other=0))
            tl.store(by_shared + column, total.to(tl.float32))
    else:
        count = tl.full([], 0, tl.float64)
        if parts is not None:
            count, _, _ = merge_parts(parts, num_parts, PARTS)
        sums = ()
        for i in tl.static_range(13):
            sums = sums + (tl.sum(tl.load(partials + i * programs + program, mask=inside, other=0)),)
        least = tl.load(partials + 13 * programs + program, mask=inside, other=float("inf"))
        largest = tl.load(partials + 14 * programs + program, mask=inside, other=float("-inf"))
        extremes = tl.min(least), tl.max(largest)
        divisor = read_divisor(numbers, count, HAS_DIVISOR, POINTERS)
        write_summary(sums, extremes, divisor, numbers, loss, statistics, SUMMARIZE, POINTERS)


@triton.jit
def scale_gradients(gradients, sizes, factor, BLOCK: tl.constexpr):
    """Multiply gradients by a number in place. Where that is 1 nothing is read."""
    number = tl.load(factor).to(tl.float32)
    if number != 1.0:
        for i in tl.static_range(len(gradients)):
            start = tl.program_id(0).to(tl.int64) * BLOCK
            while start < sizes[i]:
                offset = start + tl.arange(0, BLOCK)
                x = tl.load(gradients[i] + offset, mask=offset < sizes[i])
                tl.store(gradients[i] + offset, x.to(tl.float32) * number, mask=offset < sizes[i])
                start += tl.num_programs(0).to(tl.int64) * BLOCK
