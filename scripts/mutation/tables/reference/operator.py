"""Mutants of _internal/scan/operator.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/operator.py"

MUTANTS = [
    Mutant(
        "compiled: numbers are constants",
        "any(map(is_symbolic, numbers))",
        "False",
        tests="transforms and compile_once",
    ),
    Mutant(
        "compiled: λ and γ exchanged",
        "[problem.lambda_, *problem.params]",
        "[problem.params[0] if problem.params else problem.gamma, *problem.params]",
        tests="transforms and compile_once",
    ),
]
