"""Tests of Stable-Baselines3 itself, from its source distribution, with our buffers in the place of its own.

The files are fetched once, by pip, into `.cache/`. Where that is impossible the test fails, so that it cannot go
missing unnoticed; RL_TRITON_OFFLINE=1 says that no network is meant to be there, and only then it is skipped.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERSION = version("stable-baselines3")
CACHE = ROOT / ".cache" / f"stable_baselines3-{VERSION}"
FILES = ("test_gae.py", "test_buffers.py", "test_sde.py")


def download_upstream_tests() -> None:
    """Put the upstream test files into the cache: all of them or none."""
    CACHE.parent.mkdir(exist_ok=True)
    (CACHE.parent / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
        command += ["--no-deps", "--no-binary", "stable-baselines3", "--dest", folder, f"stable-baselines3=={VERSION}"]
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        archives = list(Path(folder).glob("*.tar.gz"))
        if result.returncode or not archives:
            pytest.fail(
                f"the source distribution of stable-baselines3 {VERSION} could not be fetched "
                f"(set RL_TRITON_OFFLINE=1 to skip this test on a machine without network):\n{result.stderr}",
                pytrace=False,
            )
        whole = Path(folder) / "files"
        whole.mkdir()
        with tarfile.open(archives[0]) as archive:
            for name in FILES:
                member = next(path for path in archive.getnames() if path.endswith(f"/tests/{name}"))
                source = archive.extractfile(member)
                assert source is not None
                (whole / name).write_bytes(source.read())
        shutil.rmtree(CACHE, ignore_errors=True)
        os.replace(whole, CACHE)


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A folder that holds nothing but the upstream tests."""
    if not all((CACHE / name).exists() for name in FILES):
        if os.environ.get("RL_TRITON_OFFLINE") == "1":
            pytest.skip(f"RL_TRITON_OFFLINE=1, and {CACHE.relative_to(ROOT)} holds no upstream tests yet")
        download_upstream_tests()
    for name in FILES:
        (tmp_path / name).write_bytes((CACHE / name).read_bytes())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


NO_ROLLOUTS = "not SAC and not TD3 and not DQN and not Replay"
"""Leaves out the tests of algorithms and buffers that keep no rollouts."""


def run_upstream(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = [str(ROOT), str(ROOT / "adapters"), str(HERE), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-p", "sb3_upstream.substitute", "-p", "no:cacheprovider", "-q"]
    command += ["--calls=calls.json", "--junit-xml=report.xml", *FILES, "-k", NO_ROLLOUTS]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_the_tests_of_stable_baselines3_pass_with_our_buffers(upstream):
    result = run_upstream(upstream)
    assert result.returncode == 0, result.stdout + result.stderr

    report = ET.parse(upstream / "report.xml").getroot().find("testsuite")
    assert report is not None
    cases = {case.attrib["name"]: case for case in report.iter("testcase")}
    skipped = {name for name, case in cases.items() if case.find("skipped") is not None}
    assert cases and all("cuda" in name for name in skipped), result.stdout

    trained = {name for name in cases if ("PPO" in name or "A2C" in name) and "False-A2C" not in name}
    computed = {name for name in cases if name.startswith("test_device_buffer[cpu")}
    calls = json.loads((upstream / "calls.json").read_text())
    untrained = {name for name in trained if calls.get(name, 0) < 2}
    assert trained and not untrained, "every upstream test that trains PPO or A2C must run our method"
    assert {"test_custom_rollout_buffer", *computed} <= cases.keys()
