"""Mutants of _internal/moments/reference.py."""

from mutation.mutant import Mutant

FILE = "_internal/moments/reference.py"

MUTANTS = [
    Mutant(
        "normalisation: masked cells count",
        "merge_moments(valid.double(), x, torch.zeros_like(x))",
        "merge_moments(torch.ones_like(x), x, torch.zeros_like(x))",
        tests="normalization and test_the_equation",
    ),
]
