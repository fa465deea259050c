"""Mutants of _internal/kernels/scan.py."""

from mutation.mutant import Mutant

FILE = "_internal/kernels/scan.py"

MUTANTS = [
    Mutant(
        "combine: reset lets NaN through",
        "alpha_next + passed(beta_next, alpha)",
        "alpha_next + beta_next * alpha",
        tests="launches and leaks",
        function="combine",
    ),
    Mutant(
        "combine: reset lets NaN through, exactly",
        "passed(beta_next, alpha) + tl.where(rest_next == 0, 0, rest_next * alpha)",
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
            through = passed(beta_next, alpha) + tl.where(rest_next == 0, 0, rest_next * alpha)
            return alpha_next + through, product, where_rounded(product, error)
        """,
        """
            through = passed(beta_next, alpha) + tl.where(rest_next == 0, 0, rest_next * alpha)
            return alpha_next + through, beta_next, where_rounded(product, error)
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
        "passed(beta, carried)",
        "beta * carried",
        tests="launches and leaks",
        function="carry_on",
    ),
    Mutant(
        "step: gate multiplies",
        "tl.where(beta == 0, alpha, alpha + beta * state)",
        "alpha + beta * state",
        tests="launches and leaks",
    ),
    Mutant(
        "fold: a reset forgotten",
        "severed | (betas[i] == 0)",
        "severed",
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
        "carry dropped between tiles",
        "state = at_end(scanned)",
        "state = 0 * at_end(scanned)",
        tests="launches and gae",
    ),
    Mutant(
        "carry taken from the wrong end",
        "CHUNKS - 1",
        "0",
        tests="launches and gae",
        function="at_end",
    ),
    Mutant(
        "carry seeded",
        "load(initial, lanes_place, 0, exists, DTYPE)",
        "load(initial, lanes_place, 0, exists, DTYPE) + 1",
        tests="test_linear_recurrence",
    ),
    Mutant(
        "chunks enter with their own state",
        "chunk - 1",
        "chunk",
        tests="launches and gae",
        function="shifted",
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
        "segments: their folds are not used",
        "state = after_segments(folds, row, rows, exists, segment, state, SEGMENTS, IN_SCAN, DTYPE)",
        "_ = after_segments(folds, row, rows, exists, segment, state, SEGMENTS, IN_SCAN, DTYPE)",
        tests="launches and gae",
    ),
    Mutant(
        "segments: one too many",
        "earlier < segment",
        "earlier <= segment",
        tests="launches and gae",
        function="after_segments",
    ),
    Mutant(
        "segments: none of the serial ones",
        "tl.range(0, segment, loop_unroll_factor=8)",
        "tl.range(1, segment, loop_unroll_factor=8)",
        tests="launches and gae",
    ),
    Mutant(
        "segments: folds of the last tile",
        "combine_exactly(alpha, beta, rest, at_end(alphas), at_end(betas), at_end(rests))",
        "at_end(alphas), at_end(betas), at_end(rests)",
        tests="launches and gae",
    ),
    Mutant(
        "tile read ahead twice",
        "tl.minimum(tile + 1, tiles_end - 1)",
        "tl.minimum(tile, tiles_end - 1)",
        tests="launches and gae",
    ),
    Mutant(
        "chunk in the order of memory",
        "len(steps) - 1 - i if BACKWARD else i",
        "i",
        tests="test_literal_numbers",
    ),
    Mutant(
        "elements mixed up",
        "parts = even + odd",
        "parts = odd + even",
        tests="launches and gae",
        function="unpacked",
    ),
    Mutant(
        "neighbour's value of the chunk itself",
        "place.start + (1 << LOG_UNROLL)",
        "place.start + (1 << LOG_UNROLL) - 1",
        tests="launches and gae",
    ),
    Mutant(
        "mask ignored",
        "tl.where(valid[i], alpha, 0)",
        "tl.where(True, alpha, 0)",
        tests="gae and (test_every or test_literal)",
    ),
    Mutant(
        "masked cells not cleared",
        "tl.where(valid[i], results[i][k], 0)",
        "results[i][k]",
        tests="gae and (test_every or test_literal)",
    ),
    Mutant(
        "skip severs",
        "tl.where(valid[i], beta, 1)",
        "tl.where(valid[i], beta, 0)",
        tests="gae and (test_every or test_literal)",
    ),
    Mutant(
        "reset severs nothing",
        "severed = valid[i] == 0",
        "severed = severed & (valid[i] == 0)",
        tests="gae and (test_every or test_literal)",
    ),
    Mutant(
        "reset severs nothing between chunks",
        "flag(mask, place, t, there) == 0",
        "there == 0",
        tests="launches and gae",
    ),
    Mutant(
        "masked neighbours not passed over",
        "tl.where(valid[i], now[j][i], before[j + 1])",
        "now[j][i]",
        tests="gae and test_every",
    ),
    Mutant(
        "masked neighbours not passed over between chunks",
        "tl.where(valid[i], 0.0, missing)",
        "0.0 * missing",
        tests="launches and gae",
    ),
    Mutant(
        "neighbours not carried between tiles",
        """
            for j in tl.static_range(NUM_LOOKAHEAD + 1):
                last = last + (at_end(before[j]),)
            carried = last
        """,
        """
            for j in tl.static_range(NUM_LOOKAHEAD + 1):
                last = last + (at_end(before[j]),)
            carried = carried
        """,
        tests="launches and gae",
    ),
    Mutant(
        "truncated ignored",
        """
            done = given(done, place, tl.int1, LOG_UNROLL)
            cut = given(cut, place, tl.int1, LOG_UNROLL)
        """,
        """
            done = given(done, place, tl.int1, LOG_UNROLL)
            cut = given((), place, tl.int1, LOG_UNROLL)
        """,
        tests="gae and (test_every or test_literal)",
    ),
    Mutant(
        "bootstrap only at the end",
        "cut[i] | none_or_over",
        "none_or_over",
        tests="gae and (test_every or test_literal)",
    ),
    Mutant(
        "dense bootstrap of the neighbour",
        """
            if DENSE:
                value_at_cut = values_at_cut[i]
            elif ...:
                ...
        """,
        """
            if DENSE:
                value_at_cut = values_at_cut[max(i - 1, 0)]
            elif ...:
                ...
        """,
        tests="launches and gae",
    ),
    Mutant(
        "discount 0 does not end",
        "ended | (gamma_now == 0)",
        "ended",
        tests="test_a_zero_discount",
    ),
    Mutant(
        "lanes and steps swapped",
        "group, step, lane = strides_of(stream, place)",
        "group, lane, step = strides_of(stream, place)",
        tests="test_literal_numbers or test_layouts",
    ),
    Mutant(
        "all strides are the common ones",
        """
            if len(stream) == 1:
                return place.strides
            else:
                return (stream[1], stream[2], stream[3])
        """,
        """
            if len(stream) == 1:
                return place.strides
            else:
                return place.strides
        """,
        tests="test_layouts",
    ),
    Mutant(
        "first step dropped",
        "(t < place.end) & (place.lane < place.lanes)",
        "(t < place.end) & (place.lane < place.lanes) & (t > 0)",
        tests="gae and (test_every or test_literal)",
        function="inside",
    ),
    Mutant(
        "forward: own flag",
        "done[i] | cut[i]",
        "done[i - 1] | cut[i - 1]",
        tests="test_eligibility_traces",
    ),
    Mutant(
        "forward: flags between chunks forgotten",
        "over | edge[NUM_LOOKAHEAD]",
        "over",
        tests="launches and traces",
    ),
    Mutant(
        "forward: starts ignored",
        "starts | ended | cut[i]",
        "starts",
        tests="test_prefix_sums",
    ),
    Mutant(
        "forward: the window before forgotten",
        "flag(previous_done, lanes_place, 0, exists)",
        "flag(None, lanes_place, 0, exists)",
        tests="streaming",
    ),
    Mutant(
        "state after: of this step",
        """
            after = tl.where(continues, scanned, 0)
            scanned = advanced(alphas[i], betas[i], scanned)
        """,
        """
            scanned = advanced(alphas[i], betas[i], scanned)
            after = tl.where(continues, scanned, 0)
        """,
        tests="test_vtrace or test_retrace",
    ),
    Mutant(
        "expectation: of the first actions",
        "expected[2]",
        "BLOCK_ACTIONS",
        tests="any_number_of_actions",
        function="expectation",
    ),
    Mutant(
        "expectation: of the first few actions",
        "tl.static_range(0, ACTIONS, BLOCK_ACTIONS)",
        "tl.static_range(0, BLOCK_ACTIONS, BLOCK_ACTIONS)",
        tests="any_number_of_actions",
    ),
    Mutant(
        "expectation: past the last action",
        "start + BLOCK_ACTIONS",
        "start",
        tests="any_number_of_actions",
        function="expectation",
    ),
    Mutant(
        "expectation: probability 0 counts",
        "tl.where(prob == 0, 0, prob * value)",
        "prob * value",
        tests="launches and retrace",
        function="of_block",
    ),
    Mutant(
        "minimum is no bound",
        "tl.where(x > bound, bound, x)",
        "x",
        tests="test_vtrace",
    ),
    Mutant(
        "segments: valid steps are looked for nearby only",
        "missing & (nearest < 0) & ((t < place.end) if BACKWARD else (t >= first))",
        "missing & (t != t)",
        tests="launches and gaps",
    ),
    Mutant(
        "segments: nothing is carried over a gap",
        "tl.where(there, tl.where(over, 1.0, 0.0), carried[0])",
        "carried[0]",
        tests="launches and gaps",
    ),
    Mutant(
        "segments: the last tiles forgotten",
        "tl.cdiv(tiles, tl.num_programs(1))",
        "tiles // tl.num_programs(1)",
        tests="launches and gae",
    ),
    Mutant(
        "packed: sequences start at 0",
        "tl.load(offsets + lane, mask=exists, other=0).to(INDEX)",
        "0 * tl.load(offsets + lane, mask=exists, other=0).to(INDEX)",
        tests="test_every_sequence and prefix",
    ),
    Mutant(
        "packed: all end at the row's end",
        """
            end = tl.load(offsets + lane + 1, mask=exists, other=0).to(INDEX)
            rises = (0 <= first) & (first <= end) & (end <= steps)
        """,
        """
            end = 0 * tl.load(offsets + lane + 1, mask=exists, other=0).to(INDEX) + steps
            rises = (0 <= first) & (first <= end) & (end <= steps)
        """,
        tests="test_every_sequence and gae",
    ),
]
