"""Mutants of _internal/linear.py."""

from mutation.mutant import Mutant

FILE = "_internal/linear.py"

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
            def readout(step: Step, state: Any, after: Any) -> tuple[Any, ...]:
                ...
                return (state,)
        """,
        """
            def readout(step: Step, state: Any, after: Any) -> tuple[Any, ...]:
                ...
                return (after,)
        """,
        tests="test_every_length and linear",
    ),
]
