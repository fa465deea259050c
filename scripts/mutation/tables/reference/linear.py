"""Mutants of _internal/scan/linear.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/linear.py"

MUTANTS = [
    Mutant(
        "linear: α and β exchanged",
        "alpha, beta",
        "beta, alpha",
        tests="test_every_length and linear",
    ),
    Mutant(
        "linear: another state handed out",
        """
            def read_state(step: Step, state: Any, after: Any) -> tuple[Any, ...]:
                ...
                return (state,)
        """,
        """
            def read_state(step: Step, state: Any, after: Any) -> tuple[Any, ...]:
                ...
                return (after,)
        """,
        tests="test_every_length and linear",
    ),
]
