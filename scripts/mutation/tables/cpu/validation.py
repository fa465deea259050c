"""Mutants of _internal/arguments/validation.py."""

from mutation.mutant import Mutant

FILE = "_internal/arguments/validation.py"

MUTANTS = [
    Mutant(
        "packed: falling offsets taken",
        "offsets[0] == 0 and offsets[-1] == num_steps and not falls.size",
        "offsets[0] == 0 and offsets[-1] == num_steps",
        tests="test_bad_cu_seqlens and gae",
    ),
]
