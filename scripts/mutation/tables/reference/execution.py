"""Mutants of _internal/execution.py."""

from mutation.mutant import Mutant

FILE = "_internal/execution.py"

MUTANTS = [
    Mutant(
        "nothing works",
        "chosen.run(problem)",
        "pass",
        tests="test_literal_numbers",
    ),
]
