"""Mutants of estimators/nstep.py."""

from mutation.mutant import Mutant

FILE = "estimators/nstep.py"

MUTANTS = [
    Mutant(
        "n-step returns: cuts drop the bootstrap",
        "select(step.continues, reward, last)",
        "reward + 0 * last",
        tests="nstep and known_answers",
    ),
    Mutant(
        "n-step returns: episodes run on",
        "select(step.continues, step.gamma, 0)",
        "step.gamma",
        tests="nstep and known_answers",
    ),
]
