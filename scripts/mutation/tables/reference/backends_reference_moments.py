"""Mutants of _internal/backends/reference_moments.py."""

from mutation.mutant import Mutant

FILE = "_internal/backends/reference_moments.py"

MUTANTS = [
    Mutant(
        "normalisation: masked cells count",
        "merged(valid.double(), x, torch.zeros_like(x))",
        "merged(torch.ones_like(x), x, torch.zeros_like(x))",
        tests="normalization and test_the_equation",
    ),
]
