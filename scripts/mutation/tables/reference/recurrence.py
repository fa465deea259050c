"""Mutants of _internal/scan/recurrence.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/recurrence.py"

MUTANTS = [
    Mutant(
        "gradient: none by a probability of 0",
        "(self.probs != 0) | self.values.isfinite()",
        "self.probs != 0",
        tests="probability_of_zero",
    ),
    Mutant(
        "gradient: an action value that is not read gives its own NaN",
        "multiply_tensors(probs, values) if differentiated else probs * values",
        "probs * values",
        tests="not_read",
    ),
]
