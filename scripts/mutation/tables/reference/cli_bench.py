"""Mutants of the comparison before a measurement."""

from mutation.mutant import Mutant

FILE = "cli/bench.py"

MUTANTS = [
    Mutant(
        "bench: wrong results are timed",
        "not error <= MAX_ERROR",
        "False",
        tests="what_is_wrong_is_not_timed",
        function="measure_provider",
    ),
]
