"""What is installed is what constraints-frameworks.txt says was tested."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

CONSTRAINTS = (Path(__file__).parents[2] / "constraints-frameworks.txt").read_text().splitlines()


@pytest.mark.parametrize("pin", [line for line in CONSTRAINTS if "==" in line])
def test_the_version_is_the_tested_one(pin):
    package, tested = pin.split("==")
    try:
        assert version(package) == tested
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
