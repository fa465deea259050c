"""Mutants of _internal/scan/execution.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/execution.py"

MUTANTS = [
    Mutant(
        "nothing works",
        "chosen.run(problem)",
        "pass",
        tests="test_literal_numbers",
    ),
]
