"""Mutants of _internal/scan/kernel/steps.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/kernel/steps.py"

MUTANTS = [
    Mutant(
        "mask ignored",
        "tl.where(tile.valid[i], alpha, 0)",
        "tl.where(True, alpha, 0)",
        tests="gae and (test_every or test_literal)",
    ),
    Mutant(
        "skip severs",
        "tl.where(tile.valid[i], beta, 1)",
        "tl.where(tile.valid[i], beta, 0)",
        tests="gae and (test_every or test_literal)",
    ),
    Mutant(
        "reset severs nothing",
        "masked = valid == 0",
        "masked = masked & (valid == 0)",
        tests="gae and (test_every or test_literal)",
        function="pass_step",
    ),
    Mutant(
        "reset severs nothing between chunks",
        "load_flags(streams.mask, place, t, there) == 0",
        "there == 0",
        tests="launches and gae",
    ),
    Mutant(
        "masked neighbours not passed over",
        "tl.where(valid, tile.inputs[j][i], neighbor[j + 1])",
        "tile.inputs[j][i]",
        tests="gae and test_every",
    ),
    Mutant(
        "truncated ignored",
        "or_zeros(tile.truncated, place, tl.int1, CONFIG)",
        "or_zeros((), place, tl.int1, CONFIG)",
        tests="gae and (test_every or test_literal)",
    ),
    Mutant(
        "bootstrap only at the end",
        "tile.truncated[i] | is_last",
        "is_last",
        tests="gae and (test_every or test_literal)",
    ),
    Mutant(
        "dense bootstrap of the neighbour",
        "tile.bootstrap[i]",
        "tile.bootstrap[max(i - 1, 0)]",
        tests="launches and gae",
    ),
    Mutant(
        "discount 0 does not end",
        "terminated | (gamma == 0)",
        "terminated",
        tests="test_a_zero_discount",
    ),
    Mutant(
        "forward: own flag",
        "tile.terminated[i] | tile.truncated[i]",
        "tile.terminated[i - 1] | tile.truncated[i - 1]",
        tests="test_eligibility_traces",
        function="is_done",
    ),
    Mutant(
        "forward: flags between chunks forgotten",
        "cut | tile.neighbor_flags[0]",
        "cut",
        tests="launches and traces",
    ),
    Mutant(
        "forward: starts ignored",
        "starts | terminated | tile.truncated[i]",
        "starts",
        tests="test_prefix_sums",
    ),
]
