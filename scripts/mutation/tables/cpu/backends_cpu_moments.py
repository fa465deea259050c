"""Mutants of _internal/moments/cpu.py."""

from mutation.mutant import Mutant

FILE = "_internal/moments/cpu.py"

MUTANTS = [
    Mutant(
        "normalisation: parts as if of one mean",
        "part_m2 + deviation * deviation * count * share",
        "part_m2",
        tests="normalization and test_parts",
    ),
    Mutant(
        "normalisation: last span dropped",
        "range(0, size, SPAN)",
        "range(0, max(size - SPAN, 1), SPAN)",
        tests="normalization and test_large",
    ),
]
