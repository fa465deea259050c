"""Mutants of what the metadata asks for."""

from mutation.mutant import Mutant

FILE = "cli/requirements.py"

MUTANTS = [
    Mutant(
        "doctor: builds ahead of a release are too old",
        "parse_version(version).base_version",
        "version",
        tests="versions_of_what_the_core_needs",
        function="is_unmet",
    ),
    Mutant(
        "doctor: the newest version that was tried is unknown",
        "parse_version(version or '').release[: len(tested.release)] > tested.release",
        "parse_version(version or '').release[: len(tested.release)] >= tested.release",
        tests="versions_of_frameworks",
        function="is_newer_than_tested",
    ),
    Mutant(
        "doctor: what other systems need is asked for",
        "requirement.marker is None or requirement.marker.evaluate({'extra': extra})",
        "True",
        tests="versions_of_what_the_core_needs or triton_of_pytorch",
        function="applies",
    ),
]
