"""Mutants of _internal/scan/reference.py, whose windows of n steps serve every backend."""

from mutation.mutant import Mutant

FILE = "_internal/scan/reference.py"
MUTANTS = [
    Mutant(
        "windows: powers of the discount in float32",
        "beta.double()",
        "beta",
        function="evaluate_windows",
        tests="test_powers_of_the_discount_in_float32",
    ),
]
