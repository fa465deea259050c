"""Mutants of _internal/loss/equations.py."""

from mutation.mutant import Mutant

FILE = "_internal/loss/equations.py"

MUTANTS = [
    Mutant(
        "exp(x) - 1 - x cancels near 0",
        "select(near == x, series, exp(x) - 1.0 - x)",
        "exp(x) - 1.0 - x",
        tests="test_kl_of_nearly",
        function="exp_remainder",
    ),
]
