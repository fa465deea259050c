"""Mutants of _internal/kernels/equations.py."""

from mutation.mutant import Mutant

FILE = "_internal/kernels/equations.py"

MUTANTS = [
    Mutant(
        "minimum is no bound",
        "tl.where(x > bound, bound, x)",
        "x",
        tests="test_vtrace",
    ),
]
