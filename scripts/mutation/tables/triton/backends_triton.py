"""Mutants of _internal/backends/triton.py."""

from mutation.mutant import Mutant

FILE = "_internal/backends/triton.py"

MUTANTS = [
    Mutant(
        "nothing works",
        "scan.scan[call.grid](*untrace(call.arguments), **call.options)",
        "None",
        tests="test_literal_numbers",
        function="run",
    ),
    Mutant(
        "alignment of the lanes assumed",
        "4 if math.gcd(4, *strides) == 4 else 1",
        "4",
        tests="matrix and gae",
    ),
]
