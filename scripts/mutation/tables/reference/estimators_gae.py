"""Mutants of estimators/gae.py."""

from scripts.mutation.mutant import Mutant

FILE = "estimators/gae.py"

MUTANTS = [
    Mutant(
        "GAE: value not subtracted",
        "reward + step.gamma * step.next_value - value",
        "reward + step.gamma * step.next_value",
        tests="gae_known_answers",
    ),
    Mutant(
        "GAE: no discount",
        "step.gamma * step.next_value",
        "step.next_value",
        tests="gae_known_answers",
    ),
    Mutant(
        "GAE: λ dropped",
        "step.decay",
        "step.gamma",
        tests="gae_known_answers",
    ),
    Mutant(
        "GAE: reset dropped",
        "delta, select(step.continues, step.decay, 0)",
        "delta, step.decay + 0 * delta",
        tests="gae_known_answers",
    ),
    Mutant(
        "GAE: returns with the reward",
        "step.inputs[0]",
        "step.inputs[1]",
        tests="gae_known_answers",
    ),
]
