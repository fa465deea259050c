"""What this package's metadata asks for, beside what is installed."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from rl_triton_core.system_info import TESTED, TRITON

DISTRIBUTION = "rl-triton-core"


def read_requirements(extras: bool) -> list[Requirement]:
    """Read what the core needs on this machine, or what its extras add to that; each package once."""
    wanted = list(map(Requirement, find_requires(DISTRIBUTION)))
    found = [x for x in wanted if applies(x, "")]
    if extras:
        names = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra", [])
        found = [x for x in wanted if x not in found and any(applies(x, name) for name in names)]
    return list({x.name: x for x in found}.values())


def applies(requirement: Requirement, extra: str) -> bool:
    """Whether a package is needed on this machine with an extra."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def find_requires(distribution: str) -> list[str]:
    """Read what a distribution requires; nothing if it is not installed."""
    try:
        return metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []


def find_version(name: str) -> str | None:
    """Find the installed version of a package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def parse_version(text: str) -> Version:
    """Read a version; what is none is older than all others."""
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def is_unmet(wanted: Requirement) -> bool:
    """Whether a package is missing or too old; a build ahead of a release counts as the release."""
    version = find_version(wanted.name)
    return version is None or parse_version(version).base_version not in wanted.specifier


def is_newer_than_tested(wanted: Requirement) -> bool:
    """Whether a package is newer than the versions that the tests have seen."""
    tested, version = parse_version(TESTED.get(wanted.name, "")), find_version(wanted.name)
    return wanted.name in TESTED and parse_version(version or "").release[: len(tested.release)] > tested.release


def find_triton_of_torch() -> str | None:
    """Find the version of Triton that the installed PyTorch asks for on this machine, as ``"==3.4.0"``."""
    wanted = (x for x in map(Requirement, find_requires("torch")) if x.name in TRITON and applies(x, ""))
    return next((str(x.specifier) for x in wanted), None)
