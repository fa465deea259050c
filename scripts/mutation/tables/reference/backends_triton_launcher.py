"""Mutants of _internal/launch/launcher.py."""

from mutation.mutant import Mutant

FILE = "_internal/launch/launcher.py"

MUTANTS = [
    Mutant(
        "launcher: any will do",
        "len(calls) != 1 or not any(x is STREAM for x in calls[0])",
        "not calls",
        tests="fast_path and launcher_that",
    ),
    Mutant(
        "launcher: failures escape",
        "try: ...\nexcept Exception as error: ...",
        "try: ...\nexcept KeyError as error: ...",
        tests="fast_path and kernel_that",
        function="resolve_launch",
    ),
]
