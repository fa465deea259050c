"""Mutants of estimators/returns.py."""

from mutation.mutant import Mutant

FILE = "estimators/returns.py"

MUTANTS = [
    Mutant(
        "λ-returns: all of the next value",
        "step.gamma - beta",
        "step.gamma",
        tests="test_lambda_returns or test_discounted",
    ),
    Mutant(
        "λ-returns: none of it at cuts",
        "step.gamma - beta",
        "step.gamma - step.decay",
        tests="test_lambda_returns or test_discounted",
    ),
]
