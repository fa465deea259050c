"""Mutants of estimators/vtrace.py."""

from mutation.mutant import Mutant

FILE = "estimators/vtrace.py"

MUTANTS = [
    Mutant(
        "V-Trace: ρ not clipped",
        "minimum(ratio, rho_bar) * delta",
        "ratio * delta",
        tests="test_vtrace",
    ),
    Mutant(
        "V-Trace: c not clipped",
        "lambda_ * minimum(ratio, c_bar)",
        "lambda_ * ratio",
        tests="test_vtrace",
    ),
    Mutant(
        "V-Trace: λ dropped",
        "lambda_ * minimum(ratio, c_bar)",
        "minimum(ratio, c_bar)",
        tests="test_vtrace",
    ),
    Mutant(
        "V-Trace: c from ρ̄",
        """
            lambda_, rho_bar, c_bar, _ = step.params
            ...
            trace = lambda_ * minimum(ratio, c_bar)
        """,
        """
            lambda_, rho_bar, c_bar, _ = step.params
            ...
            trace = lambda_ * minimum(ratio, rho_bar)
        """,
        tests="test_vtrace",
    ),
    Mutant(
        "V-Trace: ratio inverted",
        "target - behaviour",
        "behaviour - target",
        tests="test_vtrace",
        function="coefficients",
    ),
    Mutant(
        "V-Trace: advantages from values",
        "step.next_value + after",
        "step.next_value",
        tests="test_vtrace",
    ),
    Mutant(
        "V-Trace: advantages clipped by ρ̄",
        "_, _, _, rho_bar_pg = step.params",
        "_, rho_bar_pg, _, _ = step.params",
        tests="test_vtrace",
    ),
]
