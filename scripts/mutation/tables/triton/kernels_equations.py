"""Mutants of _internal/equations/triton.py."""

from mutation.mutant import Mutant

FILE = "_internal/equations/triton.py"

MUTANTS = [
    Mutant(
        "minimum is no bound",
        "tl.where(x > bound, bound, x)",
        "x",
        tests="test_vtrace",
    ),
]
