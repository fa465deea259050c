"""Ray writes below the home directory and its own: both are a directory that is gone afterwards."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def private():
    """Environment variables for Ray's processes."""
    home = tempfile.mkdtemp(prefix="rllib")  # short: Ray makes sockets below it
    yield {
        "HOME": home,
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),  # where compiled code is kept
        "RAY_TMPDIR": home,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters"), *filter(None, sys.path)]),
    }
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def private_ray(private):
    """They are set: Ray may start in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in private.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def small_ray(private_ray):
    from small import running_ray

    with running_ray(num_cpus=2):
        yield


@pytest.fixture(autouse=True)
def learners_end():
    """Threads of the learners that a test builds."""
    yield
    built = getattr(sys.modules.get("updates"), "LEARNERS", [])
    while built:
        built.pop().shutdown()
