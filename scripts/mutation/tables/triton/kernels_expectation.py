"""Mutants of _internal/scan/kernel/expectation.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/kernel/expectation.py"

MUTANTS = [
    Mutant(
        "expectation: of the first actions",
        "expected[2]",
        "BLOCK_ACTIONS",
        tests="any_number_of_actions",
        function="sum_actions",
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
        function="sum_actions",
    ),
    Mutant(
        "expectation: probability 0 counts",
        "tl.where(prob == 0, 0, prob * value)",
        "prob * value",
        tests="launches and retrace",
        function="sum_block",
    ),
]
