"""Mutants of _internal/arguments/outputs.py."""

from mutation.mutant import Mutant

FILE = "_internal/arguments/outputs.py"

MUTANTS = [
    Mutant(
        "out: shifted views pass",
        "a.device == b.device",
        "a.data_ptr() == b.data_ptr()",
        tests="overlap_an_input_in_part",
    ),
]
