"""Mutants of _internal/launch/launcher.py."""

from mutation.mutant import Mutant

FILE = "_internal/launch/launcher.py"

MUTANTS = [
    Mutant(
        "launcher: no call is repeated",
        "get_device() != index",
        "True",
        tests="fast_path and repeated_calls and cuda",
    ),
    Mutant(
        "launcher: always the same stream",
        "return stream_of(index)",
        "return 0",
        tests="fast_path and stream",
    ),
]
