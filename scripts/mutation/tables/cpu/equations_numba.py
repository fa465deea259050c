"""Mutants of where compiled code is kept."""

from mutation.mutant import Mutant

FILE = "_internal/equations/numba.py"

MUTANTS = [
    Mutant(
        "compiled code is kept beside the source",
        "'InTree' in x.__name__",
        "0",
        tests="compiled_code_is_kept",
    ),
    Mutant(
        "compiled code is kept nowhere",
        "compiled._cache = UserCache(function)",
        "pass",
        tests="compiled_code_is_kept",
    ),
]
