"""Mutants of the self-test's command."""

from mutation.mutant import Mutant

FILE = "cli/selftest.py"

MUTANTS = [
    Mutant(
        "self-test: another case is repeated",
        "run_numbered_case(campaign, options.case)",
        "run_numbered_case(campaign, 0)",
        tests="a_wrong_result_is_found",
        function="run",
    ),
    Mutant(
        "self-test: wrong results leave the exit status 0",
        "int(bool(failures))",
        "0",
        tests="a_wrong_result_is_found",
    ),
]
