"""Mutants of normalization.py."""

from mutation.mutant import Mutant

FILE = "normalization.py"

MUTANTS = [
    Mutant(
        "backends: a normalisation of one's own is ignored",
        "backend.normalize",
        "Backend.normalize",
        tests="test_a_backend_normalizes",
    ),
    Mutant(
        "normalisation: every rank by itself",
        "all_gather(every, own, group=group)",
        "every.copy_(own)",
        tests="normalization and test_two_processes and not compiled",
    ),
    Mutant(
        "normalisation: overlaps unseen",
        "None if same else advantages",
        "None",
        tests="normalization and test_bad_input",
    ),
]
