"""Mutants of estimators/gae.py."""

from mutation.mutant import Mutant

FILE = "estimators/gae.py"

MUTANTS = [
    Mutant(
        "GAE: value not subtracted",
        "reward + step.gamma * step.next_value - value",
        "reward + step.gamma * step.next_value",
        tests="test_literal_numbers_of_gae",
    ),
    Mutant(
        "GAE: no discount",
        "step.gamma * step.next_value",
        "step.next_value",
        tests="test_literal_numbers_of_gae",
    ),
    Mutant(
        "GAE: λ dropped",
        "step.decay",
        "step.gamma",
        tests="test_literal_numbers_of_gae",
    ),
    Mutant(
        "GAE: reset dropped",
        "delta, select(step.continues, step.decay, 0)",
        "delta, step.decay + 0 * delta",
        tests="test_literal_numbers_of_gae",
    ),
    Mutant(
        "GAE: returns with the reward",
        "step.inputs[0]",
        "step.inputs[1]",
        tests="test_literal_numbers_of_gae",
    ),
]
