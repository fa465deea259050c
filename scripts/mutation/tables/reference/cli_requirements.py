"""Mutants of what the metadata asks for."""

from mutation.mutant import Mutant

FILE = "cli/requirements.py"

MUTANTS = [
    Mutant(
        "doctor: the lower bound itself is too old",
        "parse_version(x.installed) < parse_version(x.lowest)",
        "parse_version(x.installed) <= parse_version(x.lowest)",
        tests="versions_of_frameworks",
        function="find_unmet",
    ),
    Mutant(
        "doctor: versions are compared as text",
        "return tuple(map(int, release[0].split('.'))) if release else ()",
        "return tuple(release[0].split('.')) if release else ()",
        tests="versions_of_frameworks",
        function="parse_version",
    ),
    Mutant(
        "doctor: the newest version that was tried is unknown",
        "parse_version(requirement.installed or '')[: len(tested)] > tested",
        "parse_version(requirement.installed or '')[: len(tested)] >= tested",
        tests="versions_of_frameworks",
        function="is_newer_than_tested",
    ),
]
