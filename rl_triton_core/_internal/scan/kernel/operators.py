"""Transitions A → α + β·A: how they are applied, folded, and scanned over the chunks of a tile.

A factor of 0 lets nothing through, NaN and overflow included. A transition of several steps is (α, β, rest): its factor
is β + rest, where rest is what rounding took from the product β.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_product(factor, state):
    """factor·state, where a 0 on either side is 0."""
    return tl.where((factor == 0) | (state == 0), 0, factor * state)


@triton.jit
def combine(alpha, beta, alpha_next, beta_next):
    """(α', β')∘(α, β) = (α' + β'·α, β'·β)."""
    return alpha_next + gated_product(beta_next, alpha), gated_product(beta_next, beta)


@triton.jit
def combine_exactly(alpha, beta, rest, alpha_next, beta_next, rest_next):
    """`combine` with factors β + rest: what rounding takes from a product is kept, and does not add up over steps."""
    product = gated_product(beta_next, beta)
    error = tl.fma(beta_next, beta, -product) + (beta_next * rest + rest_next * beta)
    through = gated_product(beta_next, alpha) + tl.where(rest_next == 0, 0, rest_next * alpha)
    return alpha_next + through, product, clear_error(product, error)


@triton.jit
def clear_error(product, error):
    """The rounding error of a product; none where it is 0 or overflowed."""
    return tl.where((product == 0) | (tl.abs(product) == float("inf")), 0, error)


@triton.jit
def advance_state(alpha, beta, state):
    """The state after one step."""
    return tl.where(beta == 0, alpha, alpha + beta * state)


@triton.jit
def apply_transition(alpha, beta, state):
    """α + β·A."""
    return alpha + gated_product(beta, state)


@triton.jit
def apply_exactly(alpha, beta, rest, state, DTYPE: tl.constexpr):
    """The state after a transition of several steps."""
    if DTYPE.is_floating():
        return apply_transition(alpha, beta, state) + tl.where(rest == 0, 0, rest * state)
    else:
        return apply_transition(alpha, beta, state)


@triton.jit
def fold_steps(alphas, betas, DTYPE: tl.constexpr):
    """The transition over all steps of each chunk."""
    alpha = alphas[0]  # [CHUNKS, BLOCK_LANES], as all of these
    beta = betas[0]
    rest = tl.zeros_like(beta)
    any_zero = beta == 0
    for i in tl.static_range(1, len(alphas)):
        alpha = advance_state(alphas[i], betas[i], alpha)
        any_zero = any_zero | (betas[i] == 0)
        product = betas[i] * beta
        if DTYPE.is_floating():
            rest = tl.fma(betas[i], rest, tl.fma(betas[i], beta, -product))
        beta = product
    beta = tl.where(any_zero, 0, beta)
    return alpha, beta, clear_error(beta, rest) if DTYPE.is_floating() else rest


@triton.jit
def take_last_chunk(chunks):
    """The element of each lane's last chunk, [1, BLOCK_LANES]."""
    CHUNKS: tl.constexpr = chunks.shape[0]
    if CHUNKS == 1:
        return chunks
    else:
        last = tl.arange(0, CHUNKS)[:, None] == CHUNKS - 1
        return tl.sum(tl.where(last, chunks, 0), axis=0)[None, :]


@triton.jit
def shift_operator(before, last, known, before_next, last_next, known_next):
    """Associative; an inclusive scan with it shifts a row by one: the last but one element of a run, and the last."""
    return tl.where(known_next != 0, before_next, last), last_next, known + (1 - known)


@triton.jit
def shift_chunks(chunks, entering, CONFIG: tl.constexpr):
    """The chunks' elements one chunk later, after the one that enters the first."""
    CHUNKS: tl.constexpr = chunks.shape[0]
    if CHUNKS == 1:
        return entering
    else:
        chunk = tl.arange(0, CHUNKS)[:, None]  # [CHUNKS, 1]
        if CONFIG.VECTOR and CHUNKS <= 32:  # they lie in one warp
            index = tl.broadcast_to(tl.maximum(chunk - 1, 0), [CHUNKS, chunks.shape[1]])
            before = tl.gather(chunks, index, 0)
        else:
            known = tl.zeros([CHUNKS, chunks.shape[1]], tl.int32)
            before, _, _ = tl.associative_scan((chunks, chunks, known), 0, shift_operator)
        return tl.where(chunk == 0, entering, before)


@triton.jit
def scan_chunks(alpha, beta, rest, DTYPE: tl.constexpr):
    """The transitions from the first chunk of each lane to the end of every chunk."""
    if alpha.shape[0] == 1:
        return alpha, beta, rest
    elif DTYPE.is_floating():
        return tl.associative_scan((alpha, beta, rest), 0, combine_exactly)
    else:
        alpha, beta = tl.associative_scan((alpha, beta), 0, combine)
        return alpha, beta, rest


@triton.jit
def combine_and_trail(
    alpha, beta, rest, _alpha, _beta, _rest, alpha_next, beta_next, rest_next, alpha_before, beta_before, rest_before
):
    """`combine_exactly` of two runs of chunks, and of all their chunks but the last."""
    whole = combine_exactly(alpha, beta, rest, alpha_next, beta_next, rest_next)
    before = combine_exactly(alpha, beta, rest, alpha_before, beta_before, rest_before)
    return whole[0], whole[1], whole[2], before[0], before[1], before[2]


@triton.jit
def enter_chunks(alpha, beta, rest, state, CONFIG: tl.constexpr):
    """The state that enters each chunk, from the chunks' transitions and the state that enters the first."""
    CHUNKS: tl.constexpr = alpha.shape[0]
    if CONFIG.EXCLUSIVE and not (CONFIG.VECTOR and CHUNKS <= 32):
        zero = tl.zeros_like(alpha)
        transitions = (alpha, beta, rest, zero, zero + 1, zero)
        _, _, _, alpha, beta, rest = tl.associative_scan(transitions, 0, combine_and_trail)
        return apply_exactly(alpha, beta, rest, state, CONFIG.DTYPE)
    else:
        alpha, beta, rest = scan_chunks(alpha, beta, rest, CONFIG.DTYPE)
        return shift_chunks(apply_exactly(alpha, beta, rest, state, CONFIG.DTYPE), state, CONFIG)


@triton.jit
def leave_chunks(alpha, beta, rest, state, DTYPE: tl.constexpr):
    """The state that leaves the last chunk."""
    alpha, beta, rest = scan_chunks(alpha, beta, rest, DTYPE)
    return apply_exactly(take_last_chunk(alpha), take_last_chunk(beta), take_last_chunk(rest), state, DTYPE)


@triton.jit
def append_chunks(alpha, beta, rest, alphas, betas, rests, DTYPE: tl.constexpr):
    """A transition, and after it those of all chunks."""
    alphas, betas, rests = scan_chunks(alphas, betas, rests, DTYPE)
    if DTYPE.is_floating():
        return combine_exactly(
            alpha, beta, rest, take_last_chunk(alphas), take_last_chunk(betas), take_last_chunk(rests)
        )
    else:
        alpha, beta = combine(alpha, beta, take_last_chunk(alphas), take_last_chunk(betas))
        return alpha, beta, rest
