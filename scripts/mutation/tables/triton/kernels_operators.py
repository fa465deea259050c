"""Mutants of _internal/scan/kernel/operators.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/kernel/operators.py"

MUTANTS = [
    Mutant(
        "combine: reset lets NaN through",
        "alpha_next + gated_product(beta_next, alpha)",
        "alpha_next + beta_next * alpha",
        tests="launches and leaks",
        function="combine",
    ),
    Mutant(
        "combine: reset lets NaN through, exactly",
        "gated_product(beta_next, alpha) + tl.where(rest_next == 0, 0, rest_next * alpha)",
        "beta_next * alpha + tl.where(rest_next == 0, 0, rest_next * alpha)",
        tests="launches and leaks",
    ),
    Mutant(
        "combine: overflow poisons",
        "(factor == 0) | (state == 0)",
        "factor == 0",
        tests="launches and zeros",
    ),
    Mutant(
        "combine: β not multiplied",
        """
            through = gated_product(beta_next, alpha) + tl.where(rest_next == 0, 0, rest_next * alpha)
            return alpha_next + through, product, clear_error(product, error)
        """,
        """
            through = gated_product(beta_next, alpha) + tl.where(rest_next == 0, 0, rest_next * alpha)
            return alpha_next + through, beta_next, clear_error(product, error)
        """,
        tests="launches and gae",
    ),
    Mutant(
        "combine: rounding of products lost",
        'tl.where((product == 0) | (tl.abs(product) == float("inf")), 0, error)',
        'tl.where((product == 0) | (tl.abs(product) == float("inf")), 0, 0 * error)',
        tests="launches and exact",
    ),
    Mutant(
        "carry: gate multiplies",
        "gated_product(beta, carried)",
        "beta * carried",
        tests="launches and leaks",
        function="apply_transition",
    ),
    Mutant(
        "step: gate multiplies",
        "tl.where(beta == 0, alpha, alpha + beta * state)",
        "alpha + beta * state",
        tests="launches and leaks",
    ),
    Mutant(
        "fold: a reset forgotten",
        "any_zero | (betas[i] == 0)",
        "any_zero",
        tests="launches and (leaks or zeros)",
    ),
    Mutant(
        "fold: rounding of products lost",
        "tl.fma(betas[i], rest, tl.fma(betas[i], beta, -product))",
        "rest",
        tests="launches and exact",
    ),
    Mutant(
        "fold: first step dropped",
        """
            alpha = alphas[0]
            beta = betas[0]
        """,
        """
            alpha = 0 * alphas[0]
            beta = betas[0]
        """,
        tests="launches and gae",
    ),
    Mutant(
        "carry taken from the wrong end",
        "CHUNKS - 1",
        "0",
        tests="launches and gae",
        function="take_last_chunk",
    ),
    Mutant(
        "chunks enter with their own state",
        "chunk - 1",
        "chunk",
        tests="launches and gae",
        function="shift_chunks",
    ),
    Mutant(
        "chunks: nothing enters the first",
        "tl.where(chunk == 0, carried, before)",
        "tl.where(chunk == 0, 0, before)",
        tests="launches and gae",
    ),
    Mutant(
        "chunks of several warps are not moved",
        "tl.where(known_next != 0, before_next, last), last_next, known + (1 - known)",
        "tl.where(known_next != 0, before_next, last_next), last_next, known + (1 - known)",
        tests="launches and gae",
    ),
    Mutant(
        "chunks: one scan, which does not trail",
        "whole[0], whole[1], whole[2], before[0], before[1], before[2]",
        "whole[0], whole[1], whole[2], whole[0], whole[1], whole[2]",
        tests="launches and retrace",
    ),
    Mutant(
        "segments: folds of the last tile",
        "combine_exactly(alpha, beta, rest, take_last_chunk(alphas), take_last_chunk(betas), take_last_chunk(rests))",
        "take_last_chunk(alphas), take_last_chunk(betas), take_last_chunk(rests)",
        tests="launches and gae",
    ),
]
