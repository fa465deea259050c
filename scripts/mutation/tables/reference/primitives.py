"""Mutants of _internal/primitives.py."""

from mutation.mutant import Mutant

FILE = "_internal/primitives.py"

MUTANTS = [
    Mutant(
        "gradient: of an infinite ratio",
        "torch.where(over, torch.inf, torch.exp(torch.where(over, 0, x)))",
        "torch.exp(x)",
        tests="overflows_and_is_clipped",
    ),
]
