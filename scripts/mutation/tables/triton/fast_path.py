"""Mutants of _internal/fast_path.py."""

from mutation.mutant import Mutant

FILE = "_internal/fast_path.py"

MUTANTS = [
    Mutant(
        "fast path: no call is repeated",
        "f\"if knobs.launch_enter_hook{'.calls' if chained else ''} or device() != {index}: return SLOW_PATH\"",
        "f\"if knobs.launch_enter_hook{'.calls' if chained else ''} or True: return SLOW_PATH\"",
        tests="fast_path and like_calls",
    ),
    Mutant(
        "fast path: always the same stream",
        'f"stream = stream_of({index})"',
        'f"stream = 0"',
        tests="fast_path and stream",
    ),
]
