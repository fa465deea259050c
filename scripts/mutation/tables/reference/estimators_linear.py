"""Mutants of estimators/linear.py."""

from mutation.mutant import Mutant

FILE = "estimators/linear.py"

MUTANTS = [
    Mutant(
        "linear: always in reverse",
        "LINEAR_BACKWARD if check_bool('reverse', reverse) else LINEAR_FORWARD",
        "LINEAR_BACKWARD",
        tests="test_an_initial_state_of_a_recurrence",
    ),
]
