"""Mutants of the look at caches."""

from mutation.mutant import Mutant

FILE = "cli/caches.py"

MUTANTS = [
    Mutant(
        "doctor: a folder that cannot be written is fine",
        "return error.strerror or str(error)",
        "return None",
        tests="caches_that_can_be_written",
        function="try_to_write",
    ),
]
