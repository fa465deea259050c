"""Mutants of boundaries.py."""

from mutation.mutant import Mutant

FILE = "boundaries.py"

MUTANTS = [
    Mutant(
        "rule: terminations bootstrap",
        "select(ended, 0.0, select(cut, bootstrap, next_value))",
        "select(cut, 0.0, select(cut, bootstrap, next_value))",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "rule: a cut does not end",
        "(ended | cut) == 0",
        "ended == 0",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "rule: a termination does not end",
        "(ended | cut) == 0",
        "cut == 0",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "rule: truncation wins",
        "terminated | (next_is_masked & (cut == 0))",
        "(terminated & (cut == 0)) | (next_is_masked & (cut == 0))",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "rule: truncations ignored",
        "cut = truncated | is_last",
        "cut = is_last",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "rule: the window's end is no cut",
        "cut = truncated | is_last",
        "cut = truncated",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "rule: cuts take the neighbour",
        """
            cut = truncated | is_last
            ...
            return select(ended, 0.0, select(cut, bootstrap, next_value)), (ended | cut) == 0
        """,
        """
            cut = truncated | is_last
            ...
            return select(ended, 0.0, select(is_last, bootstrap, next_value)), (ended | cut) == 0
        """,
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "rule: seals ignored",
        "terminated | (next_is_masked & (cut == 0))",
        "terminated",
        tests="gae and test_every_pattern",
    ),
    Mutant(
        "rule: seals beat truncations",
        "next_is_masked & (cut == 0)",
        "next_is_masked",
        tests="gae and test_every_pattern",
    ),
]
