"""Mutants of the self-test."""

from mutation.mutant import Mutant

FILE = "_internal/selftest/campaign.py"

MUTANTS = [
    Mutant(
        "self-test: errors are swallowed",
        "error = f'{type(caught).__name__}: {caught}'",
        "error = ''",
        tests="a_wrong_result_is_found",
        function="run_numbered_case",
    ),
]
