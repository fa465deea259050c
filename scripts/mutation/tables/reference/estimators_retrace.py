"""Mutants of estimators/retrace.py."""

from mutation.mutant import Mutant

FILE = "estimators/retrace.py"

MUTANTS = [
    Mutant(
        "Retrace: λ dropped",
        "lambda_ * minimum(exp(target_after - behaviour_after), c_bar)",
        "minimum(exp(target_after - behaviour_after), c_bar)",
        tests="test_retrace",
    ),
    Mutant(
        "Retrace: the trace of this action",
        """
            lambda_, c_bar, _ = step.params
            trace = lambda_ * minimum(exp(target_after - behaviour_after), c_bar)
        """,
        """
            lambda_, c_bar, _ = step.params
            trace = lambda_ * minimum(exp(step.inputs[1] - step.inputs[2]), c_bar)
        """,
        tests="test_retrace",
    ),
    Mutant(
        "Retrace: c not clipped",
        "minimum(exp(target_after - behaviour_after), c_bar)",
        "exp(target_after - behaviour_after)",
        tests="test_retrace or test_extreme",
        function="coefficients",
    ),
    Mutant(
        "Retrace: advantages without the target after",
        "step.next_inputs[0] + after",
        "step.next_inputs[0]",
        tests="test_retrace",
    ),
    Mutant(
        "Retrace: advantages drop the bootstrap",
        "step.next_value",
        "0",
        tests="test_retrace",
        function="readout",
    ),
    Mutant(
        "Retrace: advantages not weighted",
        "weight * (reward + step.gamma * ahead - q_value)",
        "reward + step.gamma * ahead - q_value",
        tests="test_retrace",
    ),
]
