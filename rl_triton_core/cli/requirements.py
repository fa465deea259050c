"""What this package's metadata asks for, beside what is installed."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from importlib import metadata
from typing import NamedTuple

DISTRIBUTION = "rl-triton-core"
TESTED = {
    "gymnasium": "1.2",
    "ray": "2.60",
    "rl-games": "1.6",
    "rsl-rl-lib": "5.5",
    "sb3-contrib": "2.9",
    "skrl": "2.1",
    "stable-baselines3": "2.9",
    "torchrl": "0.14",
    "verl": "0.9",
}
"""The newest versions of the frameworks that the tests have seen."""
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(\[.*?\])?\s*(>=(?P<lowest>[\d.]+))?[^;]*(;(?P<marker>.*))?")


class Requirement(NamedTuple):
    """A package and its lower bound."""

    name: str
    lowest: str
    installed: str | None

    def __str__(self) -> str:
        """Say what is there and what is needed."""
        return f"{self.name} {self.installed or 'is not installed'}, expected {self.lowest} or newer"


def read_requirements(extras: bool) -> list[Requirement]:
    """Read the requirements of the core, or those of its extras; each package once."""
    found = {}
    for text in find_requires(DISTRIBUTION):
        match = REQUIREMENT.fullmatch(text)
        marker = (match["marker"] if match else None) or ""
        is_elsewhere = "platform_system" in marker and platform.system() not in marker
        if match and match["lowest"] and extras == ("extra ==" in marker) and not is_elsewhere:
            found[match["name"]] = Requirement(match["name"], match["lowest"], find_version(match["name"]))
    return list(found.values())


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


def parse_version(text: str) -> tuple[int, ...]:
    """Turn the release of a version into numbers: 2.13.0+cpu is (2, 13, 0)."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()


def find_unmet(wanted: Iterable[Requirement]) -> list[Requirement]:
    """Return the requirements that are missing or too old."""
    return [x for x in wanted if x.installed is None or parse_version(x.installed) < parse_version(x.lowest)]


def is_newer_than_tested(requirement: Requirement) -> bool:
    """Whether a framework is newer than the versions that the tests have seen."""
    tested = parse_version(TESTED.get(requirement.name, ""))
    return bool(tested) and parse_version(requirement.installed or "")[: len(tested)] > tested


def quote_all(wanted: Iterable[Requirement]) -> str:
    """Quote requirements for a shell."""
    return " ".join(f'"{x.name}>={x.lowest}"' for x in wanted)


def find_triton_of_torch() -> str | None:
    """Find the version of Triton that the installed PyTorch asks for, as ``"==3.4.0"``."""
    for text in find_requires("torch"):
        match = re.match(r"(pytorch-)?triton(-rocm)?\s*\(?(==[\d.]+)", text)
        if match:
            return match[3]
    return None
