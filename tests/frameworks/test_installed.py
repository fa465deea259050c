"""What is installed is what constraints-frameworks.txt says was tested."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

CONSTRAINTS = Path(__file__).parents[2] / "constraints-frameworks.txt"


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("openrlhf", "openrlhf"),
        ("rl-games", "rl_games"),
        ("rlinf", "rlinf"),
        ("rsl-rl-lib", "rsl_rl"),
        ("skrl", "skrl"),
        ("skyrl", "skyrl"),
        ("trl", "trl"),
        ("verl", "verl"),
    ],
)
def test_the_version_is_the_tested_one(package, module):
    if find_spec(module) is None:
        pytest.skip(f"{package} is not installed")
    assert f"{package}=={version(package)}" in CONSTRAINTS.read_text().splitlines()
