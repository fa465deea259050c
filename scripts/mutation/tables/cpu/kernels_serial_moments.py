"""Mutants of _internal/moments/serial.py."""

from mutation.mutant import Mutant

FILE = "_internal/moments/serial.py"

MUTANTS = [
    Mutant(
        "normalisation: a large mean cancels",
        "find_first_valid(values, masked, valid, first, end)",
        "0.0",
        tests="normalization and test_a_large_mean",
    ),
    Mutant(
        "normalisation: masked cells count",
        "counts[j] != 0",
        "1",
        tests="normalization and test_the_equation",
    ),
    Mutant(
        "normalisation: masked cells in the sums",
        "not counts[j]",
        "False",
        tests="normalization and test_the_equation",
    ),
    Mutant(
        "normalisation: masked cells not cleared",
        "normalized if counts[j] else 0.0",
        "normalized",
        tests="normalization and test_the_equation",
    ),
]
