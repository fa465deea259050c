"""Mutants of _internal/scan/kernel/masks.py."""

from mutation.mutant import Mutant

FILE = "_internal/scan/kernel/masks.py"

MUTANTS = [
    Mutant(
        "masked neighbours not passed over between chunks",
        "tl.where(valid[i], 0.0, missing)",
        "0.0 * missing",
        tests="launches and gae",
    ),
    Mutant(
        "segments: valid steps are looked for nearby only",
        "missing & (nearest < 0) & ((t < place.end) if CONFIG.BACKWARD else (t >= place.first))",
        "missing & (t != t)",
        tests="launches and gaps",
    ),
    Mutant(
        "segments: nothing is carried over a gap",
        "tl.where(there, tl.where(over, 1.0, 0.0), carried[0])",
        "carried[0]",
        tests="launches and gaps",
    ),
]
